"""Resource pools: which key, proxy or GPU? `ResourcePool` is also `Pool`, the name in the package it succeeds."""

from headgate.errors import PoolExhausted, UnknownResource
from headgate.resources.events import (
    ResourceAcquired,
    ResourceAdded,
    ResourceCooled,
    ResourceDisabled,
    ResourceEnabled,
    ResourceEvent,
    ResourceRecovered,
    ResourceReleased,
    ResourceRemoved,
    RunFinished,
    SiblingCancelled,
)
from headgate.resources.model import (
    Attempt,
    PoolStats,
    Resource,
    ResourceSnapshot,
    ResourceStats,
    ResourceStatus,
    Usage,
)
from headgate.resources.plan import LeaseOptions, RunOptions, StreamOptions, SyncOptions, UseOptions
from headgate.resources.pool import ResourcePool
from headgate.resources.seats import Seat
from headgate.resources.signals import CooldownResource, DisableResource, RetryOperation, Signal, parse_retry_after
from headgate.resources.strategies import Picker, Strategy, primary_backup, round_robin, weighted

Pool = ResourcePool

__all__ = [
    "Attempt",
    "CooldownResource",
    "DisableResource",
    "LeaseOptions",
    "Picker",
    "Pool",
    "PoolExhausted",
    "PoolStats",
    "Resource",
    "ResourceAcquired",
    "ResourceAdded",
    "ResourceCooled",
    "ResourceDisabled",
    "ResourceEnabled",
    "ResourceEvent",
    "ResourcePool",
    "ResourceRecovered",
    "ResourceReleased",
    "ResourceRemoved",
    "ResourceSnapshot",
    "ResourceStats",
    "ResourceStatus",
    "RetryOperation",
    "RunFinished",
    "RunOptions",
    "Seat",
    "SiblingCancelled",
    "Signal",
    "Strategy",
    "StreamOptions",
    "SyncOptions",
    "UnknownResource",
    "Usage",
    "UseOptions",
    "parse_retry_after",
    "primary_backup",
    "round_robin",
    "weighted",
]
