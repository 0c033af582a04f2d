"""How a pool learns which workers there are and where they listen.

`port.DiscoveryLike` is the port, `in_process.OwnDiscovery` its implementation for workers that this process started.
The package may import what `workers` may, and `workers` itself.
"""

from headgate.discovery.in_process import OwnDiscovery
from headgate.discovery.port import DiscoveryEvent, DiscoveryLike, DiscoveryPublisherLike

__all__ = ["DiscoveryEvent", "DiscoveryLike", "DiscoveryPublisherLike", "OwnDiscovery"]
