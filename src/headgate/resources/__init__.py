"""Resource pools: which key, proxy or GPU a call uses, and what the call teaches about its health.

May import `headgate.core` and `headgate.errors`. Entry point: `ResourcePool` in `pool`; `Pool` is the same class by its
name in rotapool. A pool owns an `engine`, which runs calls; the engine owns a `rotation`, which decides and is pure.
`allocator` lets a TaskPool take resources. Names are loaded when they are first used, because `workers` needs the
rotation only.
"""

from headgate.core.lazy import lazy

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from headgate.core.checks import Affinity
    from headgate.core.views import AdaptiveStats
    from headgate.errors import PoolExhausted, UnknownResource
    from headgate.gate.adaptive import Adaptive
    from headgate.resources.costs import Cost
    from headgate.resources.events import (
        HealthShared,
        HealthUnshared,
        ResourceAcquired,
        ResourceAdded,
        ResourceCooled,
        ResourceDisabled,
        ResourceEnabled,
        ResourceEvent,
        ResourceLimitChanged,
        ResourcePaused,
        ResourceRecovered,
        ResourceReleased,
        ResourceRemoved,
        ResourceResumed,
        RunFinished,
        SiblingCancelled,
        TokensUsed,
    )
    from headgate.resources.members import Member
    from headgate.resources.model import (
        Attempt,
        PoolStats,
        QuotaSnapshot,
        Resource,
        ResourceSnapshot,
        ResourceStats,
        ResourceStatus,
        Usage,
        WindowSnapshot,
    )
    from headgate.resources.pickers import GuidedPicker, Learner, Occasion, Picker
    from headgate.resources.pool import Pool, ResourcePool
    from headgate.resources.quota import Quota
    from headgate.resources.run_options import LeaseOptions, RunOptions, StreamOptions, SyncOptions, UseOptions
    from headgate.resources.signals import CooldownResource, DisableResource, RetryOperation, Signal, parse_retry_after
    from headgate.resources.strategies import Strategy, least_latency, primary_backup, round_robin, sticky, weighted

__all__ = [
    "Adaptive",
    "AdaptiveStats",
    "Affinity",
    "Attempt",
    "CooldownResource",
    "Cost",
    "DisableResource",
    "GuidedPicker",
    "HealthShared",
    "HealthUnshared",
    "Learner",
    "LeaseOptions",
    "Member",
    "Occasion",
    "Picker",
    "Pool",
    "PoolExhausted",
    "PoolStats",
    "Quota",
    "QuotaSnapshot",
    "Resource",
    "ResourceAcquired",
    "ResourceAdded",
    "ResourceCooled",
    "ResourceDisabled",
    "ResourceEnabled",
    "ResourceEvent",
    "ResourceLimitChanged",
    "ResourcePaused",
    "ResourcePool",
    "ResourceRecovered",
    "ResourceReleased",
    "ResourceRemoved",
    "ResourceResumed",
    "ResourceSnapshot",
    "ResourceStats",
    "ResourceStatus",
    "RetryOperation",
    "RunFinished",
    "RunOptions",
    "SiblingCancelled",
    "Signal",
    "Strategy",
    "StreamOptions",
    "SyncOptions",
    "TokensUsed",
    "UnknownResource",
    "Usage",
    "UseOptions",
    "WindowSnapshot",
    "least_latency",
    "parse_retry_after",
    "primary_backup",
    "round_robin",
    "sticky",
    "weighted",
]

_MODULES = {
    "headgate.errors": ("PoolExhausted", "UnknownResource"),
    "headgate.resources.events": (
        "HealthShared",
        "HealthUnshared",
        "ResourceAcquired",
        "ResourceAdded",
        "ResourceCooled",
        "ResourceDisabled",
        "ResourceEnabled",
        "ResourceEvent",
        "ResourceLimitChanged",
        "ResourcePaused",
        "ResourceRecovered",
        "ResourceReleased",
        "ResourceRemoved",
        "ResourceResumed",
        "RunFinished",
        "SiblingCancelled",
        "TokensUsed",
    ),
    "headgate.core.checks": ("Affinity",),
    "headgate.gate.adaptive": ("Adaptive",),
    "headgate.core.views": ("AdaptiveStats",),
    "headgate.resources.model": (
        "Attempt",
        "PoolStats",
        "QuotaSnapshot",
        "Resource",
        "ResourceSnapshot",
        "ResourceStats",
        "ResourceStatus",
        "Usage",
        "WindowSnapshot",
    ),
    "headgate.resources.run_options": ("LeaseOptions", "RunOptions", "StreamOptions", "SyncOptions", "UseOptions"),
    "headgate.resources.costs": ("Cost",),
    "headgate.resources.quota": ("Quota",),
    "headgate.resources.pool": ("Pool", "ResourcePool"),
    "headgate.resources.members": ("Member",),
    "headgate.resources.signals": (
        "CooldownResource",
        "DisableResource",
        "RetryOperation",
        "Signal",
        "parse_retry_after",
    ),
    "headgate.resources.pickers": ("GuidedPicker", "Learner", "Occasion", "Picker"),
    "headgate.resources.strategies": (
        "Strategy",
        "least_latency",
        "primary_backup",
        "round_robin",
        "sticky",
        "weighted",
    ),
}

if not TYPE_CHECKING:  # a checker that sees this believes in every name
    __getattr__ = lazy(globals(), _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
