"""Finding workers: the port, and the list a pool keeps of its own."""

from headgate.discovery.in_process import OwnDiscovery
from headgate.discovery.port import DiscoveryEvent, DiscoveryLike, DiscoveryPublisherLike

__all__ = ["DiscoveryEvent", "DiscoveryLike", "DiscoveryPublisherLike", "OwnDiscovery"]
