"""`DaskPlacement`: the workers of a pool beside the workers of a Dask cluster (extra `dask`).

A plugin of each Dask worker keeps a host there (`headgate.workers.processes.worker_host`), which starts our workers as
processes of their own. Dask restarts its workers, and the plugin with them. Calls do not go through its scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from headgate.core.checks import named_options
from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.core.threads import Threads
from headgate.errors import InvalidType, WorkerStartFailed
from headgate.workers.processes.engine_placement import ORPHAN_TIMEOUT, EnginePlacement

if TYPE_CHECKING:
    from distributed import Client

    from headgate.workers.processes.engine_keepers import OnPlace, OnTrouble

_log = logging.getLogger("headgate.workers")
_PATIENCE = 5.0  # for a scheduler that may be gone, when a placement closes
_PAUSE = 0.5  # seconds before a Dask worker is asked for its host
_NO_WORKERS = "the Dask cluster has no workers: start some, or scale it up"


class DaskPlacement(EnginePlacement):
    """Starts the workers of a pool beside those of a Dask cluster: ``WorkerPool(placement=DaskPlacement(client))``.

    `client` is a `distributed.Client`, asynchronous or not. There is one worker for each Dask worker unless
    `num_workers` says how many. When this program is killed, its workers end after `orphan_timeout` seconds.
    """

    @named_options
    def __init__(
        self, client: Client, num_workers: int | None = None, *, orphan_timeout: float = ORPHAN_TIMEOUT
    ) -> None:
        if not hasattr(client, "register_plugin"):
            raise InvalidType(
                f"client must be a distributed.Client, got {type(client).__name__}",
                remedy="Pass distributed.Client(...), or a LocalCluster's get_client(). pip install 'headgate[dask]'",
            )
        super().__init__(_Dask(client), num_workers, orphan_timeout)


class _Dask:
    """A Dask cluster as an engine: each Dask worker is a place, known by its address."""

    module_remedy = (
        "Add it to the image of Dask's workers, or upload it with client.upload_file or a PipInstall plugin; or send a "
        "module by value: cloudpickle.register_pickle_by_value(module)."
    )
    keeps_places = False

    def __init__(self, client: Client) -> None:
        self._client = client
        self._name = f"headgate-{clock.token()[:12]}"
        self._registered = False
        self._keys: list[str] = []
        self._loop: asyncio.AbstractEventLoop
        self._on_place: OnPlace
        self._on_trouble: OnTrouble
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = Threads("headgate asks Dask")  # nobody waits for them at the end: Dask has long time limits

    async def open(self, settings: bytes, on_place: OnPlace, on_trouble: OnTrouble) -> int:
        """Have each Dask worker start a host, those of later too; return how many Dask workers there are."""
        from headgate.integrations.dask_plugin import HostPlugin

        self._loop, self._on_place, self._on_trouble = asyncio.get_running_loop(), on_place, on_trouble
        try:
            self._client.subscribe_topic(self._name, self._heard)
            self._registered = True
            await self._call(self._client.register_plugin, HostPlugin(self._name, settings))
            self._keys = list(await self._call(self._client.nthreads))
            for event in await self._call(self._client.get_events, self._name):
                self._heard(event)  # what was told before the scheduler knew that somebody listens
        except Exception as error:
            raise WorkerStartFailed(
                f"the workers of the Dask cluster could not be asked to start ours: {type(error).__name__}: {error}",
                remedy="Check that the client is connected, and that headgate is installed where Dask's workers run.",
            ) from error
        if not self._keys:
            self._loop.call_soon(on_trouble, _NO_WORKERS)
        return max(1, len(self._keys))

    def want(self, workers: int) -> Collection[str]:
        """Return the Dask workers that there were at first: Dask says how many there are, not we."""
        keys, self._keys = self._keys, []
        return keys

    def _heard(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Pass on what a plugin says. Called in the thread of the client."""
        told = event[1]
        try:
            if "address" in told:
                self._loop.call_soon_threadsafe(self._on_place, told["key"], told["address"])
            elif "trouble" in told:
                text = f"the Dask worker {told['key']} could not start a host: {told['trouble']}"
                self._loop.call_soon_threadsafe(self._on_trouble, text)
        except RuntimeError:  # the loop is closed: nobody wants to know
            pass

    def look(self, key: str) -> None:
        """Ask the Dask worker, whose host may have ended alone. If it is gone too, another will announce itself."""
        task = self._loop.create_task(self._ask(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, key: str) -> None:
        from headgate.integrations.dask_plugin import where_is_host

        await asyncio.sleep(_PAUSE)  # a Dask worker that is gone is known by then, and is not asked in vain
        try:
            if key not in await self._call(self._client.nthreads):
                return
            found = await self._call(self._client.run, where_is_host, self._name, workers=[key], on_error="ignore")
        except Exception as error:
            _log.debug("the Dask worker %s cannot be asked for its host: %s", key, redact(repr(error)))
            return
        if address := found.get(key):
            self._on_place(key, address)

    def drop(self, key: str) -> None:
        """Leave the Dask worker as it is."""

    async def close(self) -> None:
        """Have the plugins end their hosts. If the scheduler is gone, hosts end when the placement leaves them."""
        for task in self._tasks:
            task.cancel()
        if self._registered:
            try:
                async with asyncio.timeout(_PATIENCE):
                    await self._call(self._leave)
            except Exception as error:
                _log.warning("the plugin could not be taken from Dask's workers: %s", redact(repr(error)))
        self._threads.shutdown(wait=False)

    def _leave(self) -> Any:
        self._client.unsubscribe_topic(self._name)
        return self._client.unregister_worker_plugin(self._name)

    def abandon(self) -> None:
        """Have the plugins end their hosts, if the client can be asked from any thread."""
        if self._registered and not self._client.asynchronous:
            thread = threading.Thread(target=self._leave, name="headgate leaves Dask", daemon=True)
            thread.start()
            thread.join(_PATIENCE)

    async def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a method of the client: it gives an awaitable if the client is asynchronous, and blocks if not."""
        if self._client.asynchronous:
            return await method(*args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(method, *args, **options))
