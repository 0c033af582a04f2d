"""What a task pool reports, on the topic "lifecycle.pool.audit"."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from headgate.core.events import Event
from headgate.core.topics import topic_named
from headgate.tasks.model import TaskStatus

AUDIT = topic_named("lifecycle.pool.audit")
POOLS = topic_named("tasks.pools")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent(Event):
    """Something that happened to a task."""

    topic: ClassVar[str] = AUDIT.name

    pool_id: str
    pool: str
    """The name of the pool."""
    task_id: str

    @property
    def request_id(self) -> str:
        """The id of the handle: it stands in all events of one task, whichever package emits them."""
        return self.task_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSubmit(PoolEvent):
    """A pool has accepted a task."""

    name: ClassVar[str] = "pool_submit"

    key: Hashable = None
    partition: Hashable = None
    """The value of the option that the queue's strategy shares by; the same as `key` unless it names another."""
    priority: int = 0
    idempotency_key: str | None = None
    submitted_by: str | None = None
    """The id of the task that submitted it; None if no task did."""
    queue_depth: int
    """How many tasks are queued, this one too if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDequeue(PoolEvent):
    """A task has its slot and starts."""

    name: ClassVar[str] = "pool_dequeue"

    queued_for: float
    """How many seconds the task was queued."""
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequeue(PoolEvent):
    """An attempt has ended and the task has not: it is queued again, first of its partition."""

    name: ClassVar[str] = "pool_requeue"

    reason: str
    """What ended the attempt: what a signal said, or the type of an exception."""
    attempt: int
    spent: bool
    """Does the attempt count as one of the task's attempts?"""
    resource_id: str | None = None
    """The resource with which the attempt ran, if it had one."""
    pause: float = 0.0
    """Seconds that pass before it may start again: its `backoff`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDrop(PoolEvent):
    """A task was rejected by the pool's policy."""

    name: ClassVar[str] = "pool_drop"

    replacement_id: str | None
    """The task that took its place; None when the newcomer itself was dropped."""
    reason: str
    policy: str
    queue_depth: int
    max_depth: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFinish(PoolEvent):
    """A task reached its terminal state."""

    name: ClassVar[str] = "pool_finish"

    status: TaskStatus
    attempt: int
    ran_for: float | None
    """Seconds since its last start; None when it never started."""
    error: str | None = None
    """The type of its exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUnseen(Event):
    """A pool was closed, and tasks of it had failed that nobody ever awaited."""

    name: ClassVar[str] = "pool_unseen_failures"
    topic: ClassVar[str] = POOLS.name

    pool_id: str
    pool: str
    count: int
    first: str
    """The first of them and its exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUnsaved(Event):
    """The end of a task could not be written to the store; it is tried again with the next write."""

    name: ClassVar[str] = "pool_unsaved"
    topic: ClassVar[str] = POOLS.name

    pool_id: str
    pool: str
    task_id: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAuditFailed(Event):
    """The audit file of a pool could not be written, for the first time. The pool goes on without it."""

    name: ClassVar[str] = "pool_audit_failed"
    topic: ClassVar[str] = POOLS.name

    pool_id: str
    pool: str
    path: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAuditLost(Event):
    """A pool has closed its audit file, and some events are not in it."""

    name: ClassVar[str] = "pool_audit_lost"
    topic: ClassVar[str] = POOLS.name

    pool_id: str
    pool: str
    path: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettingsDiffer(Event):
    """A pool joined a shared budget whose members have other settings. Those of the members stand."""

    name: ClassVar[str] = "pool_settings_differ"
    topic: ClassVar[str] = POOLS.name

    pool_id: str
    pool: str
    own: Mapping[str, Any]
    shared: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLeaseLost(Event):
    """A pool could not renew its lease: the slots that it held of a shared budget belong to others."""

    name: ClassVar[str] = "pool_lease_lost"
    topic: ClassVar[str] = POOLS.name

    pool_id: str
    pool: str
    running: int
    """How many tasks were running. Nobody counts them any more."""
    action: str
    """What becomes of them: "finish" or "cancel"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPaused(Event):
    """A pool or a tenant of it was paused: what runs continues, what is queued does not start."""

    name: ClassVar[str] = "pool_paused"
    topic: ClassVar[str] = POOLS.name

    pool_id: str
    pool: str
    tenant: Hashable = None
    """None: the whole pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolResumed(Event):
    """A pool or a tenant of it was resumed: what is queued starts again."""

    name: ClassVar[str] = "pool_resumed"
    topic: ClassVar[str] = POOLS.name

    pool_id: str
    pool: str
    tenant: Hashable = None
    """None: the whole pool."""
    before: str | None = None
    """What could not end otherwise, such as "drain()"; None if somebody resumed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStoreTrouble(Event):
    """The store of a shared budget does not answer, or cannot write. No task starts until it does."""

    name: ClassVar[str] = "pool_store_trouble"
    topic: ClassVar[str] = POOLS.name

    pool_id: str
    pool: str
    error: str
