"""Routines on worker processes: `pool.WorkerPool`, the decorator `routines.routine`, and `map`.

`client` makes calls, `server` runs them, `protocol` is what lies between them, `serialization` makes objects bytes, and
`processes` starts workers. The package may import `context`, `discovery`, `resources`, `registry`, `core` and `errors`.
Names are loaded when they are first used, because a worker process needs few of them.
"""

from headgate.core.lazy import lazy

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from headgate.discovery.dns import DnsDiscovery
    from headgate.discovery.lan import LanDiscovery
    from headgate.discovery.local import LocalDiscovery
    from headgate.discovery.port import DiscoveryEvent, DiscoveryLike
    from headgate.discovery.static import StaticDiscovery
    from headgate.workers.client.balancing import LeastLoadedLoadBalancer, LoadBalancerLike, RoundRobinLoadBalancer
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.mapping import map  # noqa: A004 - as headgate.map
    from headgate.workers.model import (
        BackpressureContext,
        BackpressureLike,
        Task,
        TaskException,
        WorkerMetadata,
        WorkerView,
    )
    from headgate.workers.options import ChannelOptions, WorkerOptions
    from headgate.workers.pool import WorkerPool
    from headgate.workers.processes.local_placement import LocalPlacement
    from headgate.workers.processes.local_worker import LocalWorker
    from headgate.workers.processes.placement import Launch, Placement
    from headgate.workers.routines import RuntimeContext, current_task, do_dispatch, routine
    from headgate.workers.server.standalone import WorkerProcess
    from headgate.workers.setup import setup_result

__all__ = [
    "BackpressureContext",
    "BackpressureLike",
    "ChannelOptions",
    "DiscoveryEvent",
    "DiscoveryLike",
    "DnsDiscovery",
    "LanDiscovery",
    "Launch",
    "LeastLoadedLoadBalancer",
    "LoadBalancerLike",
    "LocalDiscovery",
    "LocalPlacement",
    "LocalWorker",
    "Placement",
    "RoundRobinLoadBalancer",
    "RuntimeContext",
    "StaticDiscovery",
    "Task",
    "TaskException",
    "WorkerCredentials",
    "WorkerMetadata",
    "WorkerOptions",
    "WorkerPool",
    "WorkerProcess",
    "WorkerView",
    "current_task",
    "do_dispatch",
    "map",
    "routine",
    "setup_result",
]

_MODULES = {
    "headgate.discovery.dns": ("DnsDiscovery",),
    "headgate.discovery.lan": ("LanDiscovery",),
    "headgate.discovery.local": ("LocalDiscovery",),
    "headgate.discovery.port": ("DiscoveryEvent", "DiscoveryLike"),
    "headgate.discovery.static": ("StaticDiscovery",),
    "headgate.workers.client.balancing": ("LeastLoadedLoadBalancer", "LoadBalancerLike", "RoundRobinLoadBalancer"),
    "headgate.workers.processes.local_placement": ("LocalPlacement",),
    "headgate.workers.processes.local_worker": ("LocalWorker",),
    "headgate.workers.processes.placement": ("Launch", "Placement"),
    "headgate.workers.credentials": ("WorkerCredentials",),
    "headgate.workers.mapping": ("map",),
    "headgate.workers.model": (
        "BackpressureContext",
        "BackpressureLike",
        "Task",
        "TaskException",
        "WorkerMetadata",
        "WorkerView",
    ),
    "headgate.workers.options": ("ChannelOptions", "WorkerOptions"),
    "headgate.workers.pool": ("WorkerPool",),
    "headgate.workers.routines": ("RuntimeContext", "current_task", "do_dispatch", "routine"),
    "headgate.workers.server.standalone": ("WorkerProcess",),
    "headgate.workers.setup": ("setup_result",),
}

if not TYPE_CHECKING:  # a checker that sees this believes in every name
    __getattr__ = lazy(globals(), _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
