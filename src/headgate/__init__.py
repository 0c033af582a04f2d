"""headgate runs async Python work under scarcity.

A `TaskPool` decides which task is next, a `ResourcePool` with which key, proxy or GPU it runs, a `WorkerPool` on which
worker process. Importing this package is quick: the package of a name is loaded when the name is first used.
"""

from importlib import import_module
from os import environ

from headgate._version import __version__
from headgate.core.lazy import lazy
from headgate.core.topics import subscribe
from headgate.errors import (
    ContextVarCollision,
    DiscoveryFailed,
    DiscoveryTimeout,
    DispatchTimeout,
    DuplicatePool,
    HeadgateError,
    IdempotencyConflict,
    InvalidArgument,
    InvalidType,
    LeaseLost,
    NoActivePool,
    NoWorkersAvailable,
    PipelineIdMissing,
    PoolBusy,
    PoolClosed,
    PoolExhausted,
    QueueFull,
    RemoteError,
    RoutineExited,
    RoutineTimeout,
    RpcError,
    ScopeNeedsStore,
    StoreFormatTooNew,
    StoreLocked,
    StoreUnreachable,
    StoreWriteFailed,
    SubmitTimeout,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskRejected,
    TaskStale,
    TransientRpcError,
    UnknownResource,
    UnknownWorker,
    WaitCycle,
    WorkerLost,
    WorkerStartFailed,
)
from headgate.observe import logging as _logging

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from headgate.combined.pool import TaskPool, pool_create
    from headgate.context import (
        Context,
        ContextDecodeWarning,
        ContextVar,
        Token,
        copy_context,
        create_task,
        current_context,
        install_task_factory,
    )
    from headgate.integrations.http_errors import http_errors
    from headgate.resources import CooldownResource, DisableResource, Resource, ResourcePool, RetryOperation
    from headgate.stores.shared.postgres import PostgresStore
    from headgate.stores.shared.sqlite import SqliteStore
    from headgate.tasks import (
        Backpressure,
        QueueStrategy,
        TaskHandle,
        backpressure_queue,
        fail_fast,
        fair_round_robin,
        fair_share,
        fifo,
        lifo,
        pending,
        pipeline_scope,
        pool_get,
        pool_list,
        pool_wait,
        priority,
        ring_buffer,
        spawn_to_pool,
        wait_agent,
    )
    from headgate.workers import (
        BackpressureContext,
        BackpressureLike,
        ChannelOptions,
        DiscoveryEvent,
        DiscoveryLike,
        DnsDiscovery,
        LanDiscovery,
        LeastLoadedLoadBalancer,
        LoadBalancerLike,
        LocalDiscovery,
        LocalWorker,
        RoundRobinLoadBalancer,
        RuntimeContext,
        StaticDiscovery,
        Task,
        WorkerCredentials,
        WorkerMetadata,
        WorkerOptions,
        WorkerPool,
        WorkerProcess,
        current_task,
        do_dispatch,
        routine,
        setup_result,
    )
    from headgate.workers import (
        map as map,  # noqa: A004 - as headgate.map; not in __all__, and public all the same
    )

# `from headgate import *` gives these. Not `map`: it would shadow the builtin. `headgate.map` is public all the same.
__all__ = [
    "Backpressure",
    "BackpressureContext",
    "BackpressureLike",
    "ChannelOptions",
    "Context",
    "ContextDecodeWarning",
    "ContextVar",
    "ContextVarCollision",
    "CooldownResource",
    "DisableResource",
    "DiscoveryEvent",
    "DiscoveryFailed",
    "DiscoveryLike",
    "DiscoveryTimeout",
    "DispatchTimeout",
    "DnsDiscovery",
    "DuplicatePool",
    "HeadgateError",
    "IdempotencyConflict",
    "InvalidArgument",
    "InvalidType",
    "LanDiscovery",
    "LeaseLost",
    "LeastLoadedLoadBalancer",
    "LoadBalancerLike",
    "LocalDiscovery",
    "LocalWorker",
    "NoActivePool",
    "NoWorkersAvailable",
    "PipelineIdMissing",
    "PoolBusy",
    "PoolClosed",
    "PoolExhausted",
    "PostgresStore",
    "QueueFull",
    "QueueStrategy",
    "RemoteError",
    "Resource",
    "ResourcePool",
    "RetryOperation",
    "RoundRobinLoadBalancer",
    "RoutineExited",
    "RoutineTimeout",
    "RpcError",
    "RuntimeContext",
    "ScopeNeedsStore",
    "SqliteStore",
    "StaticDiscovery",
    "StoreFormatTooNew",
    "StoreLocked",
    "StoreUnreachable",
    "StoreWriteFailed",
    "SubmitTimeout",
    "Task",
    "TaskCancelled",
    "TaskExpired",
    "TaskFailed",
    "TaskHandle",
    "TaskPool",
    "TaskRejected",
    "TaskStale",
    "Token",
    "TransientRpcError",
    "UnknownResource",
    "UnknownWorker",
    "WaitCycle",
    "WorkerCredentials",
    "WorkerLost",
    "WorkerMetadata",
    "WorkerOptions",
    "WorkerPool",
    "WorkerProcess",
    "WorkerStartFailed",
    "__version__",
    "backpressure_queue",
    "copy_context",
    "create_task",
    "current_context",
    "current_task",
    "do_dispatch",
    "fail_fast",
    "fair_round_robin",
    "fair_share",
    "fifo",
    "http_errors",
    "install_task_factory",
    "lifo",
    "pending",
    "pipeline_scope",
    "pool_create",
    "pool_get",
    "pool_list",
    "pool_wait",
    "priority",
    "ring_buffer",
    "routine",
    "setup_result",
    "spawn_to_pool",
    "subscribe",
    "wait_agent",
]

_PACKAGES = {
    "headgate.context": (
        "Context",
        "ContextDecodeWarning",
        "ContextVar",
        "Token",
        "copy_context",
        "create_task",
        "current_context",
        "install_task_factory",
    ),
    "headgate.combined.pool": ("TaskPool", "pool_create"),
    "headgate.integrations.http_errors": ("http_errors",),
    "headgate.resources": ("CooldownResource", "DisableResource", "Resource", "ResourcePool", "RetryOperation"),
    "headgate.stores.shared.postgres": ("PostgresStore",),
    "headgate.stores.shared.sqlite": ("SqliteStore",),
    "headgate.tasks": (
        "Backpressure",
        "QueueStrategy",
        "TaskHandle",
        "backpressure_queue",
        "fail_fast",
        "fair_round_robin",
        "fair_share",
        "fifo",
        "lifo",
        "pending",
        "pipeline_scope",
        "pool_get",
        "pool_list",
        "pool_wait",
        "priority",
        "ring_buffer",
        "spawn_to_pool",
        "wait_agent",
    ),
    "headgate.workers": (
        "BackpressureContext",
        "BackpressureLike",
        "ChannelOptions",
        "DiscoveryEvent",
        "DiscoveryLike",
        "DnsDiscovery",
        "LanDiscovery",
        "LeastLoadedLoadBalancer",
        "LoadBalancerLike",
        "LocalDiscovery",
        "LocalWorker",
        "RoundRobinLoadBalancer",
        "RuntimeContext",
        "StaticDiscovery",
        "Task",
        "WorkerCredentials",
        "WorkerMetadata",
        "WorkerOptions",
        "WorkerPool",
        "WorkerProcess",
        "current_task",
        "do_dispatch",
        "map",
        "routine",
        "setup_result",
    ),
}
_SUBMODULES = (
    *("certs", "combined", "dashboard", "discovery", "integrations", "observe", "registry", "resources", "stores"),
    *("tasks", "testing", "workers"),
)
_named = lazy(globals(), _PACKAGES)

_logging.install()

if environ.get("HEADGATE_OBSERVE", "0") not in ("", "0"):  # show this program as soon as it has a pool
    from headgate.observe.starting import publish_soon as _publish_soon

    _publish_soon()


if not TYPE_CHECKING:  # a checker that sees this believes in every name

    def __getattr__(name):
        return import_module(f"headgate.{name}") if name in _SUBMODULES else _named(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "map"})
