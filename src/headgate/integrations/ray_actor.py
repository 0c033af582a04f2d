"""What Ray runs for a `RayPlacement`: an actor that keeps a host beside it. Imports `ray`."""

from __future__ import annotations

import ray.util

from headgate.workers.processes.host_process import HostProcess


class HostActor:
    """Starts a host on the node where Ray has put this actor. The host ends with the process of the actor."""

    def __init__(self, settings: bytes) -> None:
        self._host = HostProcess(settings, ray.util.get_node_ip_address())

    def where(self) -> str:
        """Return the address of the host, which is started, also again if it has ended."""
        return str(self._host.where()["address"])
