"""The values that client, worker and pool share: tasks, workers, functions, options and limits. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from headgate.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    from headgate.calls.retrying import Backoff, RetryOn
    from headgate.workers.options import ChannelOptions

WorkerState = Literal["starting", "ready", "cooling", "blocked", "lost", "stopping"]
Report = Literal["accepted", "transient", "evicted"]

ENDED = 70
"""The exit code of a worker that ends itself because its loop is held for too long."""
ENDS_BECAUSE = "ends, to be replaced: "
"""What a worker that ends itself writes to stderr before the reason."""


@dataclass(frozen=True, slots=True)
class Task:
    """One call of a routine, as the worker that runs it sees it."""

    id: str
    caller: str | None
    """The id of the task that called this one; None: no task did."""
    tag: str
    """Which function it runs, as ``module.qualname:line``."""
    timeout: float | None = None
    """Seconds that it may run; None: no limit."""
    tenant: str | None = None
    """The tenant for whom it runs: the fairness key of the task of a TaskPool that it belongs to."""
    granted: int | None = None
    """The number of the grant of a shared budget with which it runs; None: it has none."""

    @property
    def fence(self) -> int:
        """The number of the grant with which this task runs: it grows with every grant of the shared budget.

        InvalidArgument without `TaskPool(fencing=True)`, and on a worker: pass it there as an argument.
        """
        if self.granted is None:
            raise InvalidArgument(
                f"{self.id} has no fence: only tasks that run in the process of a TaskPool with fencing=True have one",
                remedy="Make the pool with fencing=True, and pass the number to a worker as an argument.",
            )
        return self.granted


class TaskException(NamedTuple):
    """How a task failed, for events: the name of the exception's type, and its traceback as text."""

    type: str
    traceback: str


@dataclass(frozen=True, slots=True)
class WorkerMetadata:
    """The identity of a worker, and how to reach it."""

    uid: str
    address: str
    pid: int
    version: str
    tags: frozenset[str] = frozenset()
    secure: bool = False
    options: ChannelOptions | None = None
    """How clients are to connect; None: as they like."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the worker says of itself: values that JSON knows."""

    def __hash__(self) -> int:
        return hash(self.uid)  # `extra` has no hash


METRICS_PORT = "metrics_port"
"""What `WorkerMetadata.extra` calls the port on the worker's host where its metrics are."""


def metrics_port_of(metadata: WorkerMetadata) -> int | None:
    """Return the port on which a worker says that it has metrics; None: it says nothing, or no port."""
    port = metadata.extra.get(METRICS_PORT)
    return port if isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536 else None


class ReportedProcess(NamedTuple):
    """The process of a worker, as the worker tells it when a session with it is open."""

    host: str = ""
    """The name of its machine; empty: not known."""
    pid: int = 0
    """0: not known."""
    memory: int | None = None
    """Bytes of resident memory: when the session began, or when it last had calls. None: not known."""


UNREPORTED = ReportedProcess()


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The state of a worker at one moment, for load balancers and `WorkerPool.workers()`."""

    metadata: WorkerMetadata
    state: WorkerState
    in_flight: int = 0
    """Calls that the worker has not answered yet: of this event loop for a balancer, of all for `workers()`."""
    replaced_because: str = ""
    """Why another worker takes its place as soon as that is ready; empty: none does."""
    process: ReportedProcess = UNREPORTED
    """What the worker tells of its process."""

    @property
    def uid(self) -> str:
        """The unique name of the worker."""
        return self.metadata.uid

    @property
    def pid(self) -> int:
        """The process id of the worker; 0 while its process is being started, or is not reached."""
        return self.metadata.pid or self.process.pid

    @property
    def address(self) -> str:
        """The address on which its server listens."""
        return self.metadata.address

    @property
    def tags(self) -> frozenset[str]:
        """The tags that the worker was given."""
        return self.metadata.tags

    def __repr__(self) -> str:
        replaced = f", is replaced: {self.replaced_because}" if self.replaced_because else ""
        return f"<worker {self.uid} pid {self.pid} {self.state}, {self.in_flight} in flight{replaced}>"


class Follower(Protocol):
    """Is told when the workers of a pool come or go."""

    def look(self) -> None:
        """Look at the workers again. May be called on any event loop."""


class BackpressureContext(NamedTuple):
    """What a backpressure hook is told before it decides."""

    active_task_count: int
    """How many tasks the worker is running."""
    task: Task
    """The task that the hook may refuse."""


@runtime_checkable
class BackpressureLike(Protocol):
    """A hook of a worker that may refuse tasks: the balancer of the caller then asks the next worker."""

    def __call__(self, context: BackpressureContext, /) -> Any:
        """Return True to refuse the task, or an awaitable that does."""
        ...


class FunctionForm(NamedTuple):
    """A function as it travels: by reference (`module` and `qualname`) or by value. Two that are equal are one."""

    tag: str
    module: str = ""
    qualname: str = ""
    digest: bytes = b""
    python: str = ""
    value: bytes = b""
    fresh: bool = False
    thread: bool = False
    file: str = ""
    generator: bool = False
    member: int = 0
    """The value is a group of several: which of its functions this one is, counted from 1. 0: the value is the function
    alone; of a function by reference it has only classes, which arguments name."""
    reusable: bool = False
    """A call could set attributes of what is in the group: the worker uses one copy for one call at a time."""


class Limits(NamedTuple):
    """For how many seconds routines may keep a worker from its work before it is replaced. None: no limit."""

    max_overdue: float | None = None
    """Holding its loop, the interpreter's lock or all its thread places, past their own timeout."""
    max_blocked: float | None = None
    """Holding its loop or the interpreter's lock, with or without a timeout."""


UNLIMITED = Limits()


class Lifetime(NamedTuple):
    """Limits of the life of a worker. None: no limit."""

    max_tasks: int | None = None
    """Tasks that it executes, however they end."""
    max_memory: int | None = None
    """Bytes of memory that its process may have (resident: what `ps` shows as RSS)."""
    orphan_timeout: float | None = None
    """Seconds that it waits for a client, from its start or since the last one went."""
    idle_timeout: float | None = None
    """Seconds that it waits for a call, from its start or since the last one ended."""


ENDLESS = Lifetime()


def check_tags(tags: tuple[str, ...]) -> None:
    """Raise if a tag of a worker is not a string, or is blank."""
    for tag in tags:
        if not isinstance(tag, str):
            raise InvalidType(f"tags must be strings, got {type(tag).__name__}")
        if not tag.strip():
            raise InvalidArgument("tags must not be blank")


def checked_extra(extra: object) -> dict[str, Any]:
    """Return what a worker says of itself besides; InvalidArgument if it cannot be announced."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise InvalidType(f"extra must be a mapping, got {type(extra).__name__}")
    try:
        announced = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"extra must hold values that JSON knows: {error}", remedy="Use strings, numbers, lists and dicts."
        ) from None
    if announced != dict(extra):
        raise InvalidArgument(
            "extra must come out of JSON as it was", remedy="Use strings as keys, and lists instead of tuples."
        )
    return dict(extra)


class RoutineOptions(NamedTuple):
    """The options that a routine was declared with."""

    timeout: float | None = None
    retries: int = 0
    thread: bool = False
    prefetch: int = 0
    backoff: Backoff | None = None
    retry_on: RetryOn | None = None
    """Which errors are tried again; None: a lost worker alone."""


Function = Callable[..., Any]
