"""Queue strategies: who goes next? Small frozen values that validate themselves and make queues."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headgate.core.checks import is_finite, respell
from headgate.errors import InvalidArgument, InvalidType
from headgate.tasks.scheduling.queues.by_key import KeyedQueue
from headgate.tasks.scheduling.queues.by_requirement import ClassedQueue
from headgate.tasks.scheduling.queues.fair import FairQueue, ShareQueue
from headgate.tasks.scheduling.queues.simple import FifoQueue, LifoQueue, PriorityQueue, Queue

KEY = "key"
"""The submit option that names a task's partition, unless the strategy names another."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """An order of the queue. `kind` is its name."""

    kind: ClassVar[str] = ""

    key: str = field(default=KEY, kw_only=True)
    """The submit option that says which partition a task belongs to."""

    def queue(self, *, parkable: bool = False) -> Queue:
        """Make an empty queue in this order; with `parkable`, one that can pass over tenants."""
        raise NotImplementedError

    def classed_queue(self, unserved: Collection[Hashable], *, parkable: bool = False) -> ClassedQueue:
        """Make a queue for tasks of several requirements, which passes over those in `unserved`."""
        return ClassedQueue(self.kind, unserved, by_key=parkable)

    @property
    def plain(self) -> bool:
        """Has every task the same cost, and every tenant the same weight?"""
        return True

    def cost_of(self, args: tuple[Any, ...]) -> float | None:
        """What a task with these arguments costs, if the strategy says."""
        return None

    def check_partition(self, partition: Hashable) -> None:
        """Refuse a tenant that this strategy cannot serve."""

    def descriptor(self) -> dict[str, Any]:
        """Describe the strategy in values that JSON knows."""
        return {"kind": self.kind}


@dataclass(frozen=True, slots=True)
class Fifo(Strategy):
    """Oldest first; priority is ignored."""

    kind: ClassVar[str] = "fifo"

    def queue(self, *, parkable: bool = False) -> Queue:
        """Make a queue in which the oldest task is first."""
        return KeyedQueue("fifo") if parkable else FifoQueue()


@dataclass(frozen=True, slots=True)
class Lifo(Strategy):
    """Newest first; priority is ignored."""

    kind: ClassVar[str] = "lifo"

    def queue(self, *, parkable: bool = False) -> Queue:
        """Make a queue in which the newest task is first."""
        return KeyedQueue("lifo") if parkable else LifoQueue()


@dataclass(frozen=True, slots=True)
class Priority(Strategy):
    """Highest priority first, oldest first among equals."""

    kind: ClassVar[str] = "priority"

    def queue(self, *, parkable: bool = False) -> Queue:
        """Make a queue in which the highest priority is first."""
        return KeyedQueue("priority") if parkable else PriorityQueue()


@dataclass(frozen=True, slots=True)
class FairRoundRobin(Strategy):
    """A strategy by which tenants take turns."""

    kind: ClassVar[str] = "fair_round_robin"

    def queue(self, *, parkable: bool = False) -> Queue:
        """Make a queue with a ring of tenants."""
        return FairQueue()

    def descriptor(self) -> dict[str, Any]:
        """Describe the strategy in values that JSON knows."""
        return {"kind": self.kind, "key": self.key}


Weights = Mapping[Any, float] | Callable[[Any], float]
TaskCost = float | Callable[..., float]


@dataclass(frozen=True, slots=True)
class FairShare(Strategy):
    """A strategy by which tenants share by weight, and pay by cost."""

    kind: ClassVar[str] = "fair_share"

    weights: Weights | None = None
    cost: TaskCost = 1.0

    def queue(self, *, parkable: bool = False) -> Queue:
        """Make a queue with a heap of tenants."""
        return ShareQueue(self._weight_or_one)

    def classed_queue(self, unserved: Collection[Hashable], *, parkable: bool = False) -> ClassedQueue:
        """Make a queue with a heap of tenants for each requirement."""
        return ClassedQueue(self.kind, unserved, weight=self._weight_or_one)

    @property
    def plain(self) -> bool:
        """Are there neither weights nor a cost?"""
        return self.weights is None and self.cost == 1.0

    def weight_of(self, partition: Hashable) -> float:
        """The weight of a tenant: 1 unless `weights` says otherwise."""
        if self.weights is None:
            return 1.0
        weight = self.weights(partition) if callable(self.weights) else self.weights.get(partition, 1.0)
        return _positive(f"the weight of {partition!r}", weight)

    def cost_of(self, args: tuple[Any, ...]) -> float | None:
        """What `cost` says of these arguments."""
        return _positive("cost", self.cost(*args)) if callable(self.cost) else self.cost

    def check_partition(self, partition: Hashable) -> None:
        """Refuse a tenant whose weight is no positive number."""
        self.weight_of(partition)

    def _weight_or_one(self, partition: Hashable) -> float:
        # Asked again when the task enters the queue. It was good when the task was submitted; that it is bad now must
        # not lose the task.
        try:
            return self.weight_of(partition)
        except Exception:
            return 1.0

    def descriptor(self) -> dict[str, Any]:
        """Describe the strategy in values that JSON knows."""
        weights = dict(self.weights) if isinstance(self.weights, Mapping) else self.weights and _name(self.weights)
        return {
            "kind": self.kind,
            "key": self.key,
            "weights": weights,
            "cost": _name(self.cost) if callable(self.cost) else self.cost,
        }


def fifo() -> Strategy:
    """Oldest queued task first, whatever its priority."""
    return Fifo()


def lifo() -> Strategy:
    """Run the newest queued task first."""
    return Lifo()


def priority() -> Strategy:
    """Highest priority first; equal ones in the order they came. The default."""
    return Priority()


def fair_round_robin(key: str = KEY) -> Strategy:
    """Tasks are partitioned by the submit option `key`; partitions take turns, oldest first inside each."""
    return FairRoundRobin(key=_checked_key(key))


def fair_share(key: str = KEY, *, weights: Weights | None = None, cost: TaskCost = 1.0) -> Strategy:
    """Partitions share what is run, in proportion to their `weights` and measured by `cost`.

    `weights` is a mapping or a function of the partition's key, 1 where it says nothing; `cost` a number for every task
    or a function of the task's arguments. ``submit(..., cost=n)`` says it for one task.
    """
    if weights is not None and not callable(weights):
        if not isinstance(weights, Mapping):
            raise InvalidType(
                f"weights must be a mapping or a function, got {type(weights).__name__}",
                remedy='Pass something like {"acme": 3.0}.',
            )
        weights = {partition: _positive(f"the weight of {partition!r}", n) for partition, n in weights.items()}
    if not callable(cost):
        cost = _positive("cost", cost)
    return FairShare(key=_checked_key(key), weights=weights, cost=cost)


class QueueStrategy:
    """The strategies under one name, called or not: ``QueueStrategy().fifo()``, ``QueueStrategy.fifo()``."""

    fifo: Callable[[], Strategy] = staticmethod(fifo)
    lifo: Callable[[], Strategy] = staticmethod(lifo)
    priority: Callable[[], Strategy] = staticmethod(priority)
    fair_round_robin: Callable[..., Strategy] = staticmethod(fair_round_robin)
    fair_share: Callable[..., Strategy] = staticmethod(fair_share)


_FACTORIES: dict[str, Callable[..., Strategy]] = {
    factory.__name__: factory for factory in (fifo, priority, lifo, fair_round_robin, fair_share)
}


def strategy_of(queue: object) -> Strategy:
    """Make a strategy of what was given: a strategy, its name, its descriptor, or its factory."""
    if isinstance(queue, Strategy):
        return queue
    given = queue
    if queue in _FACTORIES.values():
        queue = queue.__name__  # type: ignore[attr-defined]
    if isinstance(queue, str):
        queue = {"kind": queue}
    if isinstance(queue, Mapping):
        options = {name: value for name, value in queue.items() if value is not None and name != "_type"}
        respell("queue", options, "kind", "strategy")
        respell("queue", options, "key", "key_field")
        factory = _FACTORIES.get(str(options.pop("kind", "")))
        if factory is not None:
            try:
                return factory(**options)
            except TypeError:
                raise InvalidArgument(
                    f"queue {factory.__name__!r} does not take {', '.join(options)}",
                    remedy=f"See `{factory.__name__}`.",
                ) from None
    shown = repr(given) if isinstance(given, (str, Mapping)) else type(given).__name__
    raise InvalidArgument(
        f"queue must be one of {', '.join(_FACTORIES)}, got {shown}",
        remedy="Pass a strategy such as `fifo()`, or its name.",
    )


OPTIONS = (
    "priority",
    "key",
    "idempotency_key",
    "window",
    "timeout",
    "ttl",
    "deadline",
    "retries",
    "delay",
    "wait_timeout",
    "cost",
    "labels",
    "payload_id",
    "detached",
)
"""The keywords of `submit` besides the fairness key."""


def _checked_key(key: object) -> str:
    if not isinstance(key, str) or not key.isidentifier():
        raise InvalidArgument(
            f"key must be the name of a submit option, got {key!r}",
            remedy='Name it as you will write it in submit(): fair_round_robin("tenant_id").',
        )
    if key != KEY and key in OPTIONS:
        raise InvalidArgument(
            f"key cannot be {key!r}: that is an option of submit() with a meaning of its own",
            remedy='Use "key", or a name of yours such as "tenant_id".',
        )
    return key


def _positive(what: str, number: object) -> float:
    if not is_finite(number) or number <= 0:
        raise InvalidArgument(f"{what} must be a number > 0, got {number!r}")
    return float(number)


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
