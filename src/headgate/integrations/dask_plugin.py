"""What Dask's workers run for a `DaskPlacement`: a plugin that keeps a host beside each. Imports `distributed`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distributed import Status, WorkerPlugin
from distributed.comm.addressing import get_address_host

from headgate.workers.processes.host_process import HostProcess

if TYPE_CHECKING:
    from distributed import Worker

_PAUSE = 0.02  # seconds between two looks whether a Dask worker runs


class HostPlugin(WorkerPlugin):
    """Starts a host with a Dask worker, announces it on a topic, and ends it with the Dask worker."""

    def __init__(self, name: str, settings: bytes) -> None:
        self.name = name
        """The name of the plugin, and of the topic."""
        self._settings = settings
        self._host: HostProcess | None = None
        self._announcing: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return HostPlugin, (self.name, self._settings)

    def setup(self, worker: Worker) -> None:
        """Begin to start the host. It is not waited for: Dask would hold up the worker."""
        self._host = HostProcess(self._settings, get_address_host(worker.address))
        self._announcing = asyncio.ensure_future(self._announce(worker, self._host))

    async def _announce(self, worker: Worker, host: HostProcess) -> None:
        try:
            where = await asyncio.to_thread(host.where)
            told = {"key": worker.address, "address": where["address"]}
        except Exception as error:
            told = {"key": worker.address, "trouble": f"{type(error).__name__}: {error}"}
        while worker.status == Status.init:  # noqa: ASYNC110 - it tells nobody when it runs, and logs nothing before
            await asyncio.sleep(_PAUSE)
        worker.log_event(self.name, told)

    async def where(self) -> str:
        """Return the address of the host, which is started again if it has ended."""
        assert self._host is not None, "it was set up"
        found = await asyncio.to_thread(self._host.where)
        return str(found["address"])

    async def teardown(self, worker: Worker) -> None:
        """End the host too. If the Dask worker closes because its scheduler is gone, the host stays for its pool."""
        stream = worker.batched_stream
        lost_scheduler = stream is None or bool(stream.closed())
        if self._announcing is not None:
            self._announcing.cancel()
        if self._host is not None:
            await asyncio.to_thread(self._host.end, stay=lost_scheduler)


async def where_is_host(name: str, dask_worker: Worker) -> str | None:
    """Return the address of the host beside a Dask worker; None: it has no such plugin. For `Client.run`."""
    plugin = dask_worker.plugins.get(name)
    return await plugin.where() if isinstance(plugin, HostPlugin) else None
