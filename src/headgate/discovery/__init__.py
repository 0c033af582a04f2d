"""How a pool learns which workers there are and where they listen.

`port.DiscoveryLike` is the port. `local.LocalDiscovery` finds workers on this machine, `lan.LanDiscovery` in the local
network, `static.StaticDiscovery` takes a list and `dns.DnsDiscovery` a host name with many addresses.
`in_process.OwnDiscovery` is for workers that this process started. The package may import what `workers` may, and
`workers` itself. Names are loaded when they are first used.
"""

from headgate.core.lazy import lazy

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from headgate.discovery.dns import DnsDiscovery
    from headgate.discovery.in_process import OwnDiscovery
    from headgate.discovery.lan import LanDiscovery
    from headgate.discovery.local import LocalDiscovery
    from headgate.discovery.port import DiscoveryEvent, DiscoveryLike, DiscoveryPublisherLike
    from headgate.discovery.static import StaticDiscovery

__all__ = [
    "DiscoveryEvent",
    "DiscoveryLike",
    "DiscoveryPublisherLike",
    "DnsDiscovery",
    "LanDiscovery",
    "LocalDiscovery",
    "OwnDiscovery",
    "StaticDiscovery",
]

_MODULES = {
    "headgate.discovery.dns": ("DnsDiscovery",),
    "headgate.discovery.in_process": ("OwnDiscovery",),
    "headgate.discovery.lan": ("LanDiscovery",),
    "headgate.discovery.local": ("LocalDiscovery",),
    "headgate.discovery.port": ("DiscoveryEvent", "DiscoveryLike", "DiscoveryPublisherLike"),
    "headgate.discovery.static": ("StaticDiscovery",),
}

if not TYPE_CHECKING:  # a checker that sees this believes in every name
    __getattr__ = lazy(globals(), _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
