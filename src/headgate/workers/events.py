"""What happens to workers and to calls, as events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headgate.core.events import Event
from headgate.core.topics import Topic, topic_named
from headgate.workers.model import TaskException

WORKERS: Topic = topic_named("workers.lifecycle")
TASKS: Topic = topic_named("workers.tasks")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent(Event):
    """Base of the events about one worker."""

    topic: ClassVar[str] = "workers.lifecycle"

    uid: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(WorkerEvent):
    """The process of a worker was started. It does not take calls yet."""

    name: ClassVar[str] = "worker_started"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(WorkerEvent):
    """A worker takes calls from now on."""

    name: ClassVar[str] = "worker_ready"

    failed_tries: int = 0
    """Tries to start a worker that failed in a row before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNotStarted(WorkerEvent):
    """A worker could not be started, or ended before it was ready. Where there was none, uid is "" and pid 0."""

    name: ClassVar[str] = "worker_not_started"

    reason: str
    failed_tries: int
    """Tries in a row that failed, with this one."""
    retry_in: float | None
    """Seconds until the next try; None: there is none, the pool is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLostEvent(WorkerEvent):
    """A worker ended without being told to, or cannot be reached any more."""

    name: ClassVar[str] = "worker_lost"

    reason: str
    restarted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReplaced(WorkerEvent):
    """A worker is being replaced: it gets no new calls, finishes those it has, and another takes its place."""

    name: ClassVar[str] = "worker_replaced"

    reason: str
    planned: bool = False
    """True: it has reached a limit of its life, and the other one is ready. False: something is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(WorkerEvent):
    """A worker ended because it was told to."""

    name: ClassVar[str] = "worker_stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBlocked(WorkerEvent):
    """A routine holds its loop: it gets no new calls until the loop is free."""

    name: ClassVar[str] = "worker_blocked"

    tag: str | None
    """Which routine, if that could be told."""
    threads: bool = False
    """True: its loop is free; its thread places are all held by calls that timed out or were cancelled and go on. It
    gets no new calls that need a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUnblocked(WorkerEvent):
    """Its loop is free again, or one of its thread places."""

    name: ClassVar[str] = "worker_unblocked"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDispatched(Event):
    """A call was given to a worker."""

    name: ClassVar[str] = "task_dispatched"
    topic: ClassVar[str] = "workers.tasks"

    task: str
    tag: str
    uid: str
    request_id: str | None = None
    """The id of the task of a TaskPool that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFinished(Event):
    """A call has its outcome."""

    name: ClassVar[str] = "task_finished"
    topic: ClassVar[str] = "workers.tasks"

    task: str
    tag: str
    uid: str
    outcome: str
    """returned, raised, cancelled or lost."""
    exception: TaskException | None
    request_id: str | None = None
    """The id of the task of a TaskPool that it belongs to."""
