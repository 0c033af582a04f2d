"""The nouns of the room: a task, a worker, and how a function is known to both sides. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from headgate.errors import InvalidArgument, InvalidType

WorkerState = Literal["starting", "ready", "cooling", "blocked", "lost", "stopping"]
Report = Literal["accepted", "transient", "evicted"]

ENDED = 70
"""The exit code of a worker that ends itself because its loop is held for too long."""
ENDS_BECAUSE = "ends, to be replaced: "
"""What such a worker writes to stderr before the reason."""


@dataclass(frozen=True, slots=True)
class Task:
    """One call of a routine, as the worker that runs it sees it."""

    id: str
    caller: str | None
    """The id of the task that called it; None: it was called from outside of any."""
    tag: str
    """Which function: ``module.qualname:line``."""
    timeout: float | None = None
    """Seconds it may run."""
    tenant: str | None = None
    """For whom it runs: the fairness key of the task of a TaskPool that it belongs to."""


class TaskException(NamedTuple):
    """How a task failed, for events: the name of the exception's type, and its traceback as text."""

    type: str
    traceback: str


@dataclass(frozen=True, slots=True)
class WorkerMetadata:
    """What a worker says of itself: who it is and how to reach it."""

    uid: str
    address: str
    pid: int
    version: str
    tags: frozenset[str] = frozenset()
    secure: bool = False
    options: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker, as a balancer and `WorkerPool.workers()` see it at one moment."""

    metadata: WorkerMetadata
    state: WorkerState
    in_flight: int = 0
    """Calls of this event loop that it has and has not answered."""

    @property
    def uid(self) -> str:
        """Its name, unique."""
        return self.metadata.uid

    @property
    def pid(self) -> int:
        """Its process."""
        return self.metadata.pid

    @property
    def address(self) -> str:
        """Where its server listens."""
        return self.metadata.address

    @property
    def tags(self) -> frozenset[str]:
        """What it is marked with."""
        return self.metadata.tags

    def __repr__(self) -> str:
        return f"<worker {self.uid} pid {self.pid} {self.state}, {self.in_flight} in flight>"


class BackpressureContext(NamedTuple):
    """What a backpressure hook may look at."""

    active_task_count: int
    """Tasks that the worker is running."""
    task: Task
    """The one that asks to be let in."""


@runtime_checkable
class BackpressureLike(Protocol):
    """A hook of a worker: True refuses the task, and the caller's balancer goes on to the next worker."""

    def __call__(self, context: BackpressureContext, /) -> Any:
        """Sync or async; answers with a bool."""
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


class Limits(NamedTuple):
    """For how long routines may keep a worker from its work, in seconds, before it is replaced. None: for ever."""

    max_overdue: float | None = None
    """Holding its loop, the interpreter's lock or all its thread places, past their own timeout."""
    max_blocked: float | None = None
    """Holding its loop or the interpreter's lock, with or without a timeout."""


UNLIMITED = Limits()


def check_tags(tags: tuple[str, ...]) -> None:
    """Raise if a tag of a worker is not a string, or is blank."""
    for tag in tags:
        if not isinstance(tag, str):
            raise InvalidType(f"tags must be strings, got {type(tag).__name__}")
        if not tag.strip():
            raise InvalidArgument("tags must not be blank")


class RoutineOptions(NamedTuple):
    """What was said to the decorator."""

    timeout: float | None = None
    retries: int = 0
    thread: bool = False
    prefetch: int = 0


Function = Callable[..., Any]
