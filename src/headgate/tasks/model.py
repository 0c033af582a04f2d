"""The values of this package: a task, when things happened to it, and what a pool tells about them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast, get_args
from weakref import ref

from headgate.core.current_task import Standing
from headgate.core.key_windows import Window
from headgate.core.redaction import redact
from headgate.resources.costs import AnyCost

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from contextvars import Context
    from types import TracebackType

    from headgate.calls.retry_budget import RetryBudget
    from headgate.calls.retrying import Backoff, RetryOn
    from headgate.tasks.scheduling.slots import Slot, Waits

TaskStatus = Literal["queued", "running", "completed", "failed", "cancelled", "rejected", "expired", "stale"]
Scope = Literal["session", "pipeline", "tenant", "org"]

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)


class Moment(NamedTuple):
    """One point in time, on both clocks. Tasks of the same tenth of a millisecond share one (a float is 24 bytes)."""

    now: float
    """Monotonic seconds: what is decided, is decided by this."""
    wall: float
    """Unix seconds: what people read."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of a submit that most tasks leave alone; those that do share one object."""

    idempotency_key: str | None = None
    window: Window = "until_success"
    timeout: float | None = None
    expires_at: float | None = None
    """By when it must have started, on the monotonic clock: the earlier of `ttl` and `deadline`."""
    deadline: float | None = None
    """By when it must have ended."""
    retries: int = 0
    backoff: Backoff | None = None
    """The pauses before another attempt; None: it is queued again at once."""
    retry_on: RetryOn | None = None
    """Which errors are tried again; None: all."""
    due: float | None = None
    """When it may start at the earliest, on the monotonic clock."""
    wait_timeout: float | None = None
    cost: AnyCost | None = None
    slots: int = 1
    """How many slots it takes while it runs."""
    labels: Mapping[str, Any] | None = None
    need: Hashable = None
    """What its runner must have for it. Tasks that need the same are served alike; opaque here."""
    wish: Any = None
    """What else its runner was told; opaque here."""
    payload_id: str | None = None
    """What is compared when its idempotency key is used again, instead of its function and arguments."""
    detached: bool = False
    """Does it outlive the task that submits it, whatever becomes of that?"""


PLAIN: Final = Terms()
IMPLIED: Final = "implied"  # compared by identity


class Mark(NamedTuple):
    """One thing that happened to a task, for its story."""

    kind: Literal["began", "ended", "waits"]
    """An attempt began, an attempt ended that was not the last, or the task began to wait for something."""
    wall: float
    """When it happened, in Unix seconds."""
    text: str
    """With what the attempt runs, why it ended, or what the task waits for."""
    attempt: int = 0
    """The number of the attempt."""
    again: bool = False
    """Was the task queued again after it?"""
    pause: float = 0.0
    """For how many seconds it was set aside before that."""


class Cancellable(Protocol):
    """A started attempt, as a Task of asyncio is one."""

    def cancel(self, msg: str | None = None) -> bool:
        """Ask the attempt to stop."""
        ...


class Owner(Protocol):
    """What a task knows of its pool: the executor that runs it."""

    name: str
    id: str
    keyed: bool
    """Does the pool know tenants by their `key`?"""
    loop: asyncio.AbstractEventLoop | None
    scheduler: Any
    """Its `Scheduler`, which imports this module; so do the others that are Any here."""
    states: Any
    launcher: Any
    explainer: Any
    lending: Any
    pace: Any
    ending: Any
    pauses: Any
    shortages: Any
    unseen: Any
    timers: Any
    retry_budget: RetryBudget | None
    """Bounds the retries of the pool; None: nothing does."""

    def asked(self, task: TaskRecord) -> str | None:
        """Why the running task was told to stop, "cancel" or "timeout"; None if it was not."""
        ...

    def cancel(self, task: TaskRecord, reason: str | None = None) -> bool:
        """Cancel a task."""
        ...

    def change_terms(self, task: TaskRecord, terms: Terms) -> None:
        """Give an unfinished task other terms."""

    def resume_at(self, task: TaskRecord, at: float) -> None:
        """Queue a task that was set aside, at this time or at once: it is first of its partition."""

    def pump(self) -> None:
        """Give every free slot to whoever is next."""


class Rare:
    """What most tasks do not have. A task is given one when it first needs it, so the others do not pay for it."""

    __slots__ = ("dependents", "further_attempts", "key", "parent", "since", "trail", "waits")

    def __init__(self, parent: TaskRecord | None = None, key: Hashable = IMPLIED) -> None:
        self.parent: TaskRecord | None = parent
        self.key: Hashable = key
        """IMPLIED: what the strategy of its pool makes of its tenant."""
        self.since: Moment | None = None
        """When it was queued again."""
        self.further_attempts: int = 0
        """How many attempts have begun after the first, less those that do not count."""
        self.dependents: dict[TaskRecord, Terms] | None = None
        self.waits: Waits | None = None
        self.trail: list[Mark] | None = None

    @property
    def has_ties(self) -> bool:
        """Is there another task that hears of the end of this one?"""
        return self.parent is not None or self.dependents is not None or self.waits is not None


class TaskRecord:
    """One task, as its pool keeps it. Read its fields if you must; only the pool writes them.

    One object from submit to the end, linked into its queue by `before` and `after`: a queued task is this, its
    arguments and its context, and nothing else. Two things keep it small (benchmarks/tasks.py): what few tasks have is
    in `rare`, and `turn`, `task` and `ended` are all `stage`, because a task has one of them at a time.
    """

    __slots__ = (
        "__weakref__",
        "after",
        "args",
        "before",
        "context",
        "fn",
        "moment",
        "number",
        "outcome",
        "owner",
        "partition",
        "permit",
        "priority",
        "rare",
        "slot",
        "stage",
        "started",
        "status",
        "terms",
        "waiters",
    )

    if TYPE_CHECKING:
        turn: int
        """Its turn in the queue, which the queue sets; 0 before that. Another name of `stage`, see below."""

    def __init__(
        self,
        owner: Owner,
        number: int,
        fn: Callable[..., Any] | None,
        args: tuple[Any, ...],
        context: Context | None,
        moment: Moment,
        parent: TaskRecord | None = None,
        priority: int = 0,
        key: Hashable = None,
        partition: Hashable = None,
        terms: Terms = PLAIN,
    ) -> None:
        """`key` is None where the strategy of the pool takes it for the tenant."""
        self.owner: Owner = owner
        self.number: int = number
        self.fn: Callable[..., Any] | None = fn
        self.args: tuple[Any, ...] = args
        self.context: Context | None = context
        self.moment: Moment = moment
        self.priority: int = priority
        self.partition: Hashable = partition
        self.terms: Terms = terms
        self.rare: Rare | None = None
        if parent is not None or key is not None:
            self.rare = Rare(parent, IMPLIED if key is None else key)
        self.status: TaskStatus = "queued"
        self.slot: Slot | None = None
        self.stage: int | Cancellable | Moment | None = 0
        """In the queue its `turn`, while it runs its `task`, and at last when it ended."""
        self.waiters: Any = None
        self.started: Moment | None = None
        self.outcome: Any = None
        self.permit: Any = None
        """What its allocator reserved for this attempt, and what remains of that (`RanWith`) when the task has ended.

        None: nothing, or the attempt is over.
        """
        self.before: TaskRecord | None = None
        self.after: TaskRecord | None = None

    @property
    def finished(self) -> bool:
        """Has the task reached its terminal state?"""
        return self.status not in UNFINISHED

    @property
    def task(self) -> Cancellable | None:
        """What runs it; None before that, and when its body is done."""
        stage = self.stage
        return None if stage is None or isinstance(stage, (int, Moment)) else stage

    @property
    def ended(self) -> Moment | None:
        """When it ended."""
        stage = self.stage
        return stage if isinstance(stage, Moment) else None

    @ended.setter
    def ended(self, moment: Moment | None) -> None:
        self.stage = moment

    @property
    def key(self) -> Hashable:
        """The `key` of its submit, or its tenant if its pool knows tenants by that name."""
        rare = self.rare
        if rare is not None and rare.key is not IMPLIED:
            return rare.key
        return self.partition if self.partition is not None and self.owner.keyed else None

    @property
    def attempt(self) -> int:
        """How many attempts have begun."""
        first = 0 if self.started is None else 1
        return first if self.rare is None else first + self.rare.further_attempts

    @attempt.setter
    def attempt(self, number: int) -> None:
        self._made_rare().further_attempts = number - (0 if self.started is None else 1)

    @property
    def since(self) -> Moment:
        """When it joined the queue: submitted, or queued again."""
        return self.moment if self.rare is None else self.rare.since or self.moment

    @since.setter
    def since(self, moment: Moment) -> None:
        self._made_rare().since = moment

    @property
    def parent(self) -> TaskRecord | None:
        """The task that submitted it. A finished one is replaced by its own parent."""
        return None if self.rare is None else self.rare.parent

    @parent.setter
    def parent(self, parent: TaskRecord | None) -> None:
        self._made_rare().parent = parent

    @property
    def dependents(self) -> dict[TaskRecord, Terms] | None:
        """Unfinished tasks that end with an attempt of this one, and the terms that they asked for."""
        return None if self.rare is None else self.rare.dependents

    @dependents.setter
    def dependents(self, dependents: dict[TaskRecord, Terms] | None) -> None:
        if dependents is not None or self.rare is not None:
            self._made_rare().dependents = dependents

    @property
    def waits(self) -> Waits | None:
        """The waits of this task for others, and of others for it."""
        return None if self.rare is None else self.rare.waits

    @waits.setter
    def waits(self, waits: Waits) -> None:
        self._made_rare().waits = waits

    @property
    def trail(self) -> list[Mark] | None:
        """What happened on its way, for its story; None: nothing worth telling besides the fields."""
        return None if self.rare is None else self.rare.trail

    @trail.setter
    def trail(self, trail: list[Mark]) -> None:
        self._made_rare().trail = trail

    def _made_rare(self) -> Rare:
        if self.rare is None:
            self.rare = Rare()
        return self.rare

    @property
    def standing(self) -> Standing:
        """Its priority if its pool's queue goes by that, and its tenant if tenants take turns there."""
        by_priority = self.owner.scheduler.strategy.order.levels
        return Standing(self.priority if by_priority else 0, self.partition)

    @property
    def label(self) -> str:
        """The name of the task in messages: pool and number."""
        return f"{self.owner.name}#{self.number}"


if not TYPE_CHECKING:
    TaskRecord.turn = TaskRecord.stage


def leave_parent(task: TaskRecord) -> None:
    """Forget the family of a task that has ended, or was never accepted."""
    parent = task.parent
    if parent is not None and parent.dependents is not None:
        parent.dependents.pop(task, None)
    while task.parent is not None and task.parent.finished:
        task.parent = task.parent.parent  # its handle may live long, and need not hold the results of those before


UNFINISHED: Final[frozenset[TaskStatus]] = frozenset({"queued", "running"})
TERMINAL: Final[frozenset[TaskStatus]] = frozenset(get_args(TaskStatus)) - UNFINISHED


class Dropped(NamedTuple):
    """The outcome of a rejected task."""

    reason: str
    policy: str
    retry_after: float | None = None
    """In how many seconds such a task would have started, by the estimate of that moment."""


class Expired(NamedTuple):
    """The outcome of a task that expired while it waited for something besides a slot."""

    reason: str


class Cancelled(NamedTuple):
    """The outcome of a task that was cancelled because of another one."""

    reason: str


class RanWith(NamedTuple):
    """What remains of a permit when its task has ended."""

    resource_id: str | None
    worker: str | None


def remains_of(permit: object) -> RanWith:
    """Return what is kept of a permit when its task has ended."""
    if isinstance(permit, RanWith):
        return permit
    return ran_with(getattr(permit, "resource_id", None), getattr(permit, "worker", None))


@lru_cache(1024)
def ran_with(resource_id: str | None, worker: str | None) -> RanWith:
    """What remains of a permit with these: tasks share it, for there are many more of them (benchmarks/combined.py)."""
    return RanWith(resource_id, worker)


class Told(NamedTuple):
    """What is kept of an exception when nobody can ask for it any more: text, without the values of resources."""

    kind: str
    text: str
    frames: tuple[Any, ...] = ()
    """Where it came from, the outermost first: code and line number by turns, flat, to make few objects."""
    cause: Told | None = None

    @property
    def line(self) -> str:
        """All of it in one line, for people."""
        text = self.text.partition("\n")[0]
        text = text if len(text) <= _LINE else f"{text[:_LINE]}..."
        return f"{self.kind}: {text}" if text else self.kind

    def traceback(self) -> str:
        """The traceback, as text. Lines of source are read now, if they can be."""
        from traceback import StackSummary

        causes = f"{self.cause.traceback()}\n\nThis led to:\n\n" if self.cause is not None else ""
        steps = zip(self.frames[::2], self.frames[1::2], strict=True)
        frames = "".join(StackSummary.from_list([(c.co_filename, line, c.co_name, None) for c, line in steps]).format())
        head = "Traceback (most recent call last):\n" if frames else ""
        return f"{causes}{head}{frames}{self.kind}: {self.text}"


_LINE = 200  # characters of a text that is one line of another
_TEXT = 20_000
_FRAMES = 50
_CAUSES = 5


def told_of(error: BaseException, traceback: TracebackType | None, causes: int = _CAUSES) -> Told:
    """What is kept of this exception. Refers to no frame and no object of it."""
    try:
        text = redact(str(error))
        text = text if len(text) <= _TEXT else text[:_TEXT]
    except Exception:  # it runs code of users
        text = "(it cannot be shown)"
    frames: list[Any] = []
    while traceback is not None:
        frames += traceback.tb_frame.f_code, traceback.tb_lineno
        traceback = traceback.tb_next
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = None if cause is None or not causes else told_of(cause, cause.__traceback__, causes - 1)
    return Told(type(error).__qualname__, text, tuple(frames[-2 * _FRAMES :]), before)


class Failure(NamedTuple):
    """The outcome of a failed task: its exception, and the traceback as it was before anybody raised it again."""

    error: BaseException
    traceback: TracebackType | None
    told: Told


def failure(error: BaseException) -> Failure:
    """The outcome of a task that raised this."""
    return Failure(error, error.__traceback__, told_of(error, error.__traceback__))


class Remains(NamedTuple):
    """What a pool remembers of a finished task: all but its result, its exception and its function.

    As long as somebody holds the handle, `task` gives it.
    """

    task: ref[TaskRecord]
    number: int
    status: TaskStatus
    key: Hashable
    partition: Hashable
    priority: int
    terms: Terms
    attempt: int
    moment: Moment
    started: Moment | None
    ended: Moment | None
    outcome: Told | Dropped | Cancelled | None
    ran_with: RanWith | None
    trail: list[Mark] | None


Completed: TypeAlias = "tuple[ref[TaskRecord], int, Hashable, int, Moment, Moment | None, Moment, Any]"
"""What is remembered of a task that completed, was submitted without options, and has nothing rare.

The task, its number, tenant and priority; when it was submitted, started and ended; and what remains of its permit. The
rest of its `Remains` is the same for all of them.
"""


def remains_of_completed(kept: Completed, *, keyed: bool) -> Remains:
    """The `Remains` of such a task. `keyed` says whether its pool knows tenants by their `key`."""
    task, number, partition, priority, moment, started, ended, ran_with = kept
    key = partition if keyed else None
    return Remains(
        *(task, number, "completed", key, partition, priority, PLAIN, 1, moment, started, ended, None, ran_with, None)
    )


def ended_so(task: TaskRecord) -> Told | Dropped | Cancelled | None:
    """What is remembered of the outcome of a finished task."""
    outcome = task.outcome
    if task.status == "failed" and outcome is not None:
        told: Told = outcome.told
        return told
    return outcome if task.status in ("rejected", "cancelled") else None


class View(Mapping[str, Any]):
    """A frozen mapping that also answers as attributes: ``snapshot["status"]`` is ``snapshot.status``."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getitem__(self, name: str) -> Any:
        values: dict[str, Any] = object.__getattribute__(self, "_values")
        return values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(object.__getattribute__(self, "_values"))

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_values"))

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = object.__getattribute__(self, "_values")
        try:
            return values[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}: it has {', '.join(values)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a {type(self).__name__} is frozen: it tells how things were")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a {type(self).__name__} is frozen: it tells how things were")

    def __dir__(self) -> list[str]:
        return sorted({*(name for name in super().__dir__() if not name.startswith("_")), *self})

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.items())
        return redact(f"{type(self).__name__}({fields})")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class TaskSnapshot(View):
    """Snapshot of a task: status, times, result or error.

    Its `result` and its `error` are there as long as somebody holds the handle, or the task holds an idempotency key.
    In the snapshot of a pool they are gone after that: `result` is None, and `error` a TaskFailed with the text.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _type: Literal["pool_task"]
        id: str
        pool: str
        pool_id: str
        status: TaskStatus
        key: Hashable
        partition: Hashable
        priority: int
        idempotency_key: str | None
        labels: Mapping[str, Any]
        attempt: int
        submitted_at: float
        started_at: float | None
        finished_at: float | None
        result: Any
        error: BaseException | None
        rejection_reason: str | None
        rejection_policy: str | None


def task_snapshot(task: TaskRecord | Remains, pool: Owner, result: object, error: BaseException | None) -> TaskSnapshot:
    """Make the snapshot of a task of this pool, from its record or from what remains of it."""
    terms: Terms = task.terms
    # Not by isinstance: a result may lie about its class.
    dropped = cast("Dropped | None", task.outcome if task.status == "rejected" else None)
    return TaskSnapshot(
        {
            "_type": "pool_task",
            "id": f"{pool.id}/{task.number}",
            "pool": str(pool.name),
            "pool_id": str(pool.id),
            "status": task.status,
            "key": task.key,
            "partition": task.partition,
            "priority": task.priority,
            "idempotency_key": terms.idempotency_key,
            "labels": terms.labels or {},
            "attempt": task.attempt,
            "submitted_at": task.moment.wall,
            "started_at": task.started and task.started.wall,
            "finished_at": task.ended and task.ended.wall,
            "result": result,
            "error": error,
            "rejection_reason": dropped and dropped.reason,
            "rejection_policy": dropped and dropped.policy,
        }
    )


class PoolSnapshot(View):
    """Snapshot of a task pool: counters, configuration and the newest tasks."""

    __slots__ = ()

    if TYPE_CHECKING:
        _type: Literal["pool"]
        id: str
        name: str
        scope: Scope
        scope_id: str | None
        durable: bool
        created_at: float
        max_concurrent: int
        active: int
        waiting: int
        queued: int
        completed: int
        failed: int
        rejected: int
        cancelled: int
        expired: int
        stale: int
        blocked_submitters: int
        total: int
        queue: Mapping[str, Any]
        backpressure: Mapping[str, Any]
        config: Mapping[str, Any]
        waiting_for: Mapping[str, Any] | None
        shared: Mapping[str, Any]
        """Only of a pool whose budget processes share: all members, and what they hold and have queued."""
        tasks: tuple[TaskSnapshot, ...]
