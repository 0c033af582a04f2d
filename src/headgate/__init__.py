"""headgate runs async Python work under scarcity.

A `ResourcePool` decides with which key, proxy or GPU. (A TaskPool that decides who goes next, and a WorkerPool that
decides where, are on their way.)

Importing this package is quick: a name is loaded with its room when it is first used.
"""

from importlib import import_module

from headgate._version import __version__
from headgate.core.topics import subscribe
from headgate.errors import (
    ContextVarCollision,
    DuplicatePool,
    HeadgateError,
    IdempotencyConflict,
    InvalidArgument,
    InvalidType,
    NoActivePool,
    NoWorkersAvailable,
    PipelineIdMissing,
    PoolBusy,
    PoolClosed,
    PoolExhausted,
    QueueFull,
    RemoteError,
    RoutineTimeout,
    RpcError,
    ScopeNeedsStore,
    StoreFormatTooNew,
    StoreLocked,
    StoreWriteFailed,
    SubmitTimeout,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskRejected,
    TaskStale,
    TransientRpcError,
    UnknownResource,
    WaitCycle,
    WorkerLost,
    WorkerStartFailed,
)
from headgate.observe import logging as _logging

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from headgate.resources import CooldownResource, DisableResource, Resource, ResourcePool, RetryOperation

__all__ = [
    "ContextVarCollision",
    "CooldownResource",
    "DisableResource",
    "DuplicatePool",
    "HeadgateError",
    "IdempotencyConflict",
    "InvalidArgument",
    "InvalidType",
    "NoActivePool",
    "NoWorkersAvailable",
    "PipelineIdMissing",
    "PoolBusy",
    "PoolClosed",
    "PoolExhausted",
    "QueueFull",
    "RemoteError",
    "Resource",
    "ResourcePool",
    "RetryOperation",
    "RoutineTimeout",
    "RpcError",
    "ScopeNeedsStore",
    "StoreFormatTooNew",
    "StoreLocked",
    "StoreWriteFailed",
    "SubmitTimeout",
    "TaskCancelled",
    "TaskExpired",
    "TaskFailed",
    "TaskRejected",
    "TaskStale",
    "TransientRpcError",
    "UnknownResource",
    "WaitCycle",
    "WorkerLost",
    "WorkerStartFailed",
    "__version__",
    "subscribe",
]

_ROOMS = {
    "headgate.resources": ("CooldownResource", "DisableResource", "Resource", "ResourcePool", "RetryOperation"),
}
_SUBMODULES = ("resources", "testing")
_LAZY = {name: room for room, names in _ROOMS.items() for name in names}

_logging.install()


if not TYPE_CHECKING:  # a checker that sees this believes in every name

    def __getattr__(name):
        if name in _SUBMODULES:
            return import_module(f"headgate.{name}")
        if name not in _LAZY:
            raise AttributeError(f"module 'headgate' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
