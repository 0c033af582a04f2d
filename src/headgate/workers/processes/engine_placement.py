"""`EnginePlacement`: the workers of a pool on the nodes of a cluster, where an engine such as Ray or Dask runs them.

Calls go over TCP with mutual TLS. If the pool was given no certificates, they are made for it alone, and travel with
the launch: whoever holds them may run code on its workers, and no other pool does.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING

from headgate.core.checks import checked_optional_count, checked_positive_seconds
from headgate.core.clock import clock
from headgate.errors import InvalidArgument
from headgate.workers.processes.engine_keepers import EngineKeepers
from headgate.workers.processes.kept_placement import KeptPlacement
from headgate.workers.processes.kept_workers import KeptWorkers

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.processes.engine_keepers import Engine
    from headgate.workers.processes.placement import Launch

ORPHAN_TIMEOUT = 10.0
"""Seconds after which the workers of a program that is gone end, unless a placement says otherwise."""


class EnginePlacement(KeptPlacement):
    """Has the hosts of an engine start workers, and restarts those that end."""

    def __init__(self, engine: Engine, num_workers: int | None, orphan_timeout: float = ORPHAN_TIMEOUT) -> None:
        checked_optional_count("num_workers", num_workers, 1)
        seconds = checked_positive_seconds("orphan_timeout", orphan_timeout)
        if seconds is None:
            raise InvalidArgument("orphan_timeout must be a number of seconds, got None")
        self._engine = engine
        self._orphan_timeout: float = seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keepers = EngineKeepers(engine)
        super().__init__(KeptWorkers(self._keepers), num_workers)

    async def open(self, launch: Launch) -> None:
        """Connect to the engine, and have it provide places for the workers."""
        if self._loop is not None:
            raise RuntimeError("a placement is opened once: make a new one for each pool")
        self._loop = asyncio.get_running_loop()
        credentials = launch.credentials if launch.credentials is not None else await pool_credentials()
        launch = replace(launch, credentials=credentials)
        settings = self._settings(launch, credentials)
        found = await self._engine.open(settings, self._keepers.on_place, self._keepers.on_trouble)
        workers = next(count for count in (launch.workers, self._num_workers, found) if count is not None)
        self._num_workers, self._credentials = workers, credentials
        self._workers.open(launch, workers)

    def _settings(self, launch: Launch, credentials: WorkerCredentials) -> bytes:
        from headgate.workers.processes.worker_host import HostSettings
        from headgate.workers.server.event_loops import kind_of

        settings = HostSettings(
            credentials=credentials,
            orphan_timeout=self._orphan_timeout,
            limits=launch.limits,
            lifetime=launch.lifetime,
            setup=launch.setup,
            loop=kind_of(asyncio.get_running_loop()),
            module_remedy=self._engine.module_remedy,
        )
        return pickle.dumps(settings, 5)

    async def close(self, drained: Awaitable[object]) -> None:
        """Stop the workers when what they run has ended, then the hosts, and leave the engine."""
        try:
            await self._workers.close(drained)
        finally:
            if self._loop is None or self._loop is asyncio.get_running_loop():
                await self._engine.close()
            else:
                self._engine.abandon()


async def pool_credentials() -> WorkerCredentials:
    """Make certificates for one pool. ImportError: the package that makes them is missing."""
    from headgate.certs import pool_certificates
    from headgate.workers.credentials import WorkerCredentials

    name = f"pool-{clock.token()[:16]}.headgate"
    ca_cert, key, cert = await asyncio.to_thread(pool_certificates, name)
    return WorkerCredentials(ca_cert, key, cert, identity=name)
