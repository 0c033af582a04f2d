"""What is shown of pools: a frozen type for each kind of pool, and one for each kind of row in it. Pure.

`registry.snapshot()`, the page, `headgate top` and metrics read these. A new column is a field here, what fills it
(`tasks/runtime/view.py`, `resources/stats.py`, `workers/view.py`), and what shows it. `plain` makes values of them that
JSON knows. Fields have defaults, so that a test names what it is about.

They stand in one module of `core` because a terminal that looks at another program needs them without the pools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

Kind = Literal["resources", "tasks", "workers"]
"""What a pool is a pool of."""

_LEAVES: Final = frozenset({str, int, float, bool, type(None)})
_READERS: Final[dict[type[Any], Callable[[Any], tuple[Any, ...]]]] = {}
"""What reads all fields of a row, by its type: most of what makes JSON of a look is this."""


def plain(value: Any) -> Any:
    """Return a view as values that JSON knows: each row, a dataclass, becomes a dict of its fields."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if not hasattr(kind, "__dataclass_fields__"):
        return value
    read = _READERS.get(kind)
    if read is None:
        read = _READERS[kind] = attrgetter(*(one.name for one in fields(kind)))
    return dict(zip(kind.__dataclass_fields__, map(plain, read(value)), strict=True))


# -- task pools --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TenantRow:
    """A tenant of a task pool."""

    tenant: str | None = None
    queued: int = 0
    active: int = 0
    lag: float = 0.0
    """How long its oldest task is queued."""
    started: int = 0
    """Of the last tasks that started, how many were its own."""
    p50: float = 0.0
    p99: float = 0.0
    """Percentiles of their waits."""
    paused: bool = False


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task that runs or is queued."""

    id: str = ""
    number: int = 0
    tenant: str | None = None
    what: str = ""
    status: str = ""
    seconds: float = 0.0
    """Since its last start, or since it joined the queue."""
    attempt: int = 0
    resource: str | None = None
    worker: str | None = None


@dataclass(frozen=True, slots=True)
class EndedRow:
    """A task that ended badly."""

    id: str = ""
    number: int = 0
    tenant: str | None = None
    status: str = ""
    why: str = ""
    attempt: int = 0
    ended_at: float | None = None
    can_retry: bool = False
    retried_as: int | None = None


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A pool of this or another process that shares a budget."""

    id: str = ""
    host: str = ""
    pid: int = 0
    active: int = 0
    queued: int = 0


@dataclass(frozen=True, slots=True)
class BudgetView:
    """The sum of a shared budget, and its members: this one comes first, and is always listed."""

    member: str = ""
    active: int = 0
    queued: int = 0
    reachable: bool = True
    as_of: float | None = None
    member_count: int = 0
    members: Sequence[MemberRow] = ()


@dataclass(frozen=True, slots=True)
class TaskPoolView:
    """A task pool: counts of all its tasks, its tenants, and the tasks that matter most."""

    id: str = ""
    state: str = "open"
    paused: bool = False
    max_concurrent: int = 0
    active: int = 0
    waiting: int = 0
    queued: int = 0
    completed: int = 0
    failed: int = 0
    rejected: int = 0
    cancelled: int = 0
    expired: int = 0
    stale: int = 0
    blocked_submitters: int = 0
    queue: str = ""
    max_queued: int | None = None
    waiting_for: dict[str, Any] | None = None
    jain: float = 1.0
    lag: float = 0.0
    tenant_count: int = 0
    tenants: Sequence[TenantRow] = ()
    """Those that wait longest come first."""
    running: Sequence[TaskRow] = ()
    oldest: Sequence[TaskRow] = ()
    failures: Sequence[EndedRow] = ()
    shared: BudgetView | None = None

    @property
    def dropped(self) -> int:
        """How many tasks were taken out of the queue: no failure of what they run."""
        return self.rejected + self.expired + self.stale


# -- resource pools ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdaptiveStats:
    """The bounds of an adaptive `max_in_flight`, and how it was cut last."""

    least: int
    most: int
    cuts: int
    """How often it was cut because the provider refused a call."""
    seconds_since_cut: float | None = None
    """Since the last cut; None: there was none."""
    refused_at: int | None = None
    """How many calls were in flight then; None: there was no cut."""

    def __str__(self) -> str:
        bounds = f"between {self.least} and {self.most}"
        if self.refused_at is None:
            return f"{bounds}, never refused"
        return f"{bounds}, refused at {self.refused_at} {self.seconds_since_cut:.1f} s ago"


@dataclass(frozen=True, slots=True)
class ResourceRow:
    """A resource of a pool. Its counters begin at 0 when it is added."""

    id: str = ""
    position: int = 0
    """In the order of the pool."""
    status: Literal["healthy", "cooling_down", "disabled"] = "healthy"
    in_flight: int = 0
    max_in_flight: int | None = None
    cooldown: float = 0.0
    """Seconds that it has left."""
    consecutive_cooldown: int = 0
    acquires: int = 0
    successes: int = 0
    cooldowns: int = 0
    disables: int = 0
    refusals: int = 0
    sibling_cancels: int = 0
    paused: bool = False
    adaptive: AdaptiveStats | None = None
    quota: Mapping[str, Any] | None = None
    """What is left of its quota: a `headgate.resources.QuotaSnapshot`."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Tokens that calls have reported for a resource, or for a tenant."""

    name: str = ""
    """"(other)" for all that have no count of their own."""
    input: float = 0.0
    output: float = 0.0
    unsplit: float = 0.0
    """Tokens that were reported as a total alone."""


@dataclass(frozen=True, slots=True)
class ResourcePoolView:
    """A resource pool: counts of all its resources, and the resources."""

    in_flight: int = 0
    eligible: int = 0
    saturated: int = 0
    waiting: int = 0
    healthy: int = 0
    cooling_down: int = 0
    disabled: int = 0
    paused: int = 0
    attempts: int = 0
    successes: int = 0
    cooldowns: int = 0
    disables: int = 0
    refusals: int = 0
    retries: int = 0
    sibling_cancels: int = 0
    runs_ok: int = 0
    runs_exhausted: int = 0
    runs_error: int = 0
    runs_cancelled: int = 0
    resource_count: int = 0
    resources: Sequence[ResourceRow] = ()
    tokens: Sequence[TokenRow] = ()
    tenant_tokens: Sequence[TokenRow] = ()


# -- worker pools ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker of a pool."""

    uid: str = ""
    pid: int = 0
    address: str = ""
    host: str = ""
    state: str = "ready"
    in_flight: int = 0
    most: int | None = None
    """Calls that it takes at a time; None if it has no limit, or has not told it."""
    memory: int | None = None
    tags: Sequence[str] = ()
    version: str = ""
    replaced_because: str = ""


@dataclass(frozen=True, slots=True)
class WorkerPoolView:
    """A worker pool: how many workers are in which state, and each of them."""

    state: str = "open"
    size: int = 0
    """How many it starts itself."""
    expected: int = 0
    """How many it should have, with those that it discovers."""
    worker_count: int = 0
    in_flight: int = 0
    memory: int = 0
    losses: int = 0
    starting: int = 0
    ready: int = 0
    cooling: int = 0
    blocked: int = 0
    lost: int = 0
    stopping: int = 0
    workers: Sequence[WorkerRow] = ()


# -- one look ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unread:
    """In place of the state of a pool that could not be read. What is None is not shown."""

    id: str | None = None
    state: str | None = None
    """"loading": it is still being opened."""
    changing: bool | None = None
    """True: it changed too fast for another thread."""
    broken: str | None = None
    """The type of the error that kept it from being read."""


PoolView: TypeAlias = TaskPoolView | ResourcePoolView | WorkerPoolView


@dataclass(frozen=True, slots=True)
class PoolLook:
    """How one pool was when somebody looked."""

    kind: Kind
    name: str
    number: int
    """Of its entry: see `LivePool.number`."""
    state: PoolView | Unread
    held: float | None = None
    """Seconds for which its loop has given no answer, so that this is how it was before."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows, the state among them. Without `held`."""
        state = plain(self.state)
        if isinstance(self.state, Unread):
            state = {name: value for name, value in state.items() if value is not None}
        return {"kind": self.kind, "name": self.name, "number": self.number, **state}


_VIEWS: Final[dict[str, type[PoolView]]] = {
    "tasks": TaskPoolView,
    "resources": ResourcePoolView,
    "workers": WorkerPoolView,
}
_ROWS: Final[dict[str, type[Any]]] = {
    "tenants": TenantRow,
    "running": TaskRow,
    "oldest": TaskRow,
    "failures": EndedRow,
    "resources": ResourceRow,
    "workers": WorkerRow,
    "tokens": TokenRow,
    "tenant_tokens": TokenRow,
    "adaptive": AdaptiveStats,
    "shared": BudgetView,
    "members": MemberRow,
}
"""What stands in fields of these names."""


def look_of(told: Mapping[str, Any]) -> PoolLook:
    """Return what another program has told of a pool. Fields that this release does not know are passed over."""
    kind = told["kind"]
    unread = told.get("broken") or told.get("changing") or not told.keys() & {"active", "in_flight"}
    state = _row(Unread if unread else _VIEWS[kind], told)
    return PoolLook(kind, told["name"], told.get("number", 0), state, told.get("held"))


def _row(kind: type[Any], told: Mapping[str, Any]) -> Any:
    return kind(**{one.name: _value(one.name, told[one.name]) for one in fields(kind) if one.name in told})


def _value(name: str, told: Any) -> Any:
    kind = _ROWS.get(name)
    if kind is None or told is None:
        return told
    return [_row(kind, one) for one in told] if isinstance(told, list) else _row(kind, told)
