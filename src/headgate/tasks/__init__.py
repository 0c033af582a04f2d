"""Task pools: which task goes next, in which slot, and what became of it.

`scheduling` decides, `runtime` does what was decided, and the modules beside them are what users see: the pool,
handles, options, strategies, snapshots and events. `attempts` joins tasks with resources and workers. Begin with
`pool.TaskPool`.
"""

from headgate.tasks.admission import Backpressure, Policy, backpressure_queue, fail_fast, ring_buffer
from headgate.tasks.creating import pool_create
from headgate.tasks.events import (
    PoolAuditFailed,
    PoolAuditLost,
    PoolDequeue,
    PoolDrop,
    PoolEvent,
    PoolFinish,
    PoolPaused,
    PoolRequeue,
    PoolResumed,
    PoolSubmit,
    PoolUnsaved,
    PoolUnseen,
)
from headgate.tasks.fairness import KeyAge, PoolStats
from headgate.tasks.handle import TaskHandle
from headgate.tasks.model import PoolSnapshot, Scope, TaskSnapshot, TaskStatus
from headgate.tasks.names import pending, pool_get, pool_list
from headgate.tasks.pool import TaskPool
from headgate.tasks.runtime.nested_waits import pool_wait, wait_agent
from headgate.tasks.runtime.ports import Runner
from headgate.tasks.scopes import pipeline_scope
from headgate.tasks.strategies import (
    QueueStrategy,
    Strategy,
    fair_round_robin,
    fair_share,
    fifo,
    lifo,
    priority,
)
from headgate.tasks.tenants import current_tenant, tenant_scope
from headgate.tasks.triggers import SpawnToPool, spawn_to_pool

__all__ = [
    "Backpressure",
    "KeyAge",
    "Policy",
    "PoolAuditFailed",
    "PoolAuditLost",
    "PoolDequeue",
    "PoolDrop",
    "PoolEvent",
    "PoolFinish",
    "PoolPaused",
    "PoolRequeue",
    "PoolResumed",
    "PoolSnapshot",
    "PoolStats",
    "PoolSubmit",
    "PoolUnsaved",
    "PoolUnseen",
    "QueueStrategy",
    "Runner",
    "Scope",
    "SpawnToPool",
    "Strategy",
    "TaskHandle",
    "TaskPool",
    "TaskSnapshot",
    "TaskStatus",
    "backpressure_queue",
    "current_tenant",
    "fail_fast",
    "fair_round_robin",
    "fair_share",
    "fifo",
    "lifo",
    "pending",
    "pipeline_scope",
    "pool_create",
    "pool_get",
    "pool_list",
    "pool_wait",
    "priority",
    "ring_buffer",
    "spawn_to_pool",
    "tenant_scope",
    "wait_agent",
]
