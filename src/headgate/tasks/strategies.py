"""Queue strategies: who goes next? Small frozen values that validate themselves and name an order of the queue."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headgate.core.checks import is_finite, respell
from headgate.errors import InvalidArgument, InvalidType
from headgate.gate.queue import Order

KEY = "key"
"""The submit option that names a task's partition, unless the strategy names another."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """An order of the queue. `kind` is its name."""

    kind: ClassVar[str] = ""

    key: str = field(default=KEY, kw_only=True)
    """The submit option that says which partition a task belongs to."""

    @property
    def order(self) -> Order:
        """Which task is next."""
        raise NotImplementedError

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

    @property
    def order(self) -> Order:
        """Which task is next."""
        return Order()


@dataclass(frozen=True, slots=True)
class Lifo(Strategy):
    """Newest first; priority is ignored."""

    kind: ClassVar[str] = "lifo"

    @property
    def order(self) -> Order:
        """Which task is next."""
        return Order(newest_first=True)


@dataclass(frozen=True, slots=True)
class Priority(Strategy):
    """Highest priority first, oldest first among equals."""

    kind: ClassVar[str] = "priority"

    @property
    def order(self) -> Order:
        """Which task is next."""
        return Order(levels=True)


@dataclass(frozen=True, slots=True)
class FairRoundRobin(Strategy):
    """A strategy by which tenants take turns."""

    kind: ClassVar[str] = "fair_round_robin"

    levels: bool = field(default=False, kw_only=True)
    """Does a task with a higher priority start before every task with a lower one?"""

    @property
    def order(self) -> Order:
        """Which task is next."""
        return Order("turns", levels=self.levels)

    def descriptor(self) -> dict[str, Any]:
        """Describe the strategy in values that JSON knows."""
        return {"kind": self.kind, "key": self.key, **_levels(self.levels)}


Weights = Mapping[Any, float] | Callable[[Any], float]
TaskCost = float | Callable[..., float]


@dataclass(frozen=True, slots=True)
class FairShare(Strategy):
    """A strategy by which tenants share by weight, and pay by cost."""

    kind: ClassVar[str] = "fair_share"

    levels: bool = field(default=False, kw_only=True)
    """Does a task with a higher priority start before every task with a lower one?"""
    weights: Weights | None = None
    cost: TaskCost = 1.0

    @property
    def order(self) -> Order:
        """Which task is next."""
        return Order("shares", levels=self.levels, weight=None if self.weights is None else self._weight_or_one)

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
            **_levels(self.levels),
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


def fair_round_robin(key: str = KEY, *, levels: bool = False) -> Strategy:
    """Tasks are partitioned by the submit option `key`; partitions take turns, oldest first inside each.

    With `levels`, a task with a higher `priority` starts before every task with a lower one, and partitions take turns
    inside each level. A low level may starve. Without it, priority is ignored.
    """
    return FairRoundRobin(key=_checked_key(key), levels=_checked_levels(levels))


def fair_share(
    key: str = KEY, *, weights: Weights | None = None, cost: TaskCost = 1.0, levels: bool = False
) -> Strategy:
    """Partitions share what is run, in proportion to their `weights` and measured by `cost`.

    `weights` is a mapping or a function of the partition's key, 1 where it says nothing; `cost` a number for every task
    or a function of the task's arguments. ``submit(..., cost=n)`` says it for one task. With `levels`, a task with a
    higher `priority` starts before every task with a lower one, and partitions share inside each level.
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
    return FairShare(key=_checked_key(key), weights=weights, cost=cost, levels=_checked_levels(levels))


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
    "backoff",
    "retry_on",
    "delay",
    "wait_timeout",
    "cost",
    "slots",
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


def _checked_levels(levels: object) -> bool:
    if not isinstance(levels, bool):
        raise InvalidArgument(
            f"levels must be True or False, got {levels!r}",
            remedy="Pass levels=True to start tasks of a higher priority before all others.",
        )
    return levels


def _levels(levels: bool) -> dict[str, bool]:
    return {"levels": True} if levels else {}


def _positive(what: str, number: object) -> float:
    if not is_finite(number) or number <= 0:
        raise InvalidArgument(f"{what} must be a number > 0, got {number!r}")
    return float(number)


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
