"""Run the gRPC server of a worker on the main thread's loop, until it is stopped by a request or a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headgate.errors import WorkerStartFailed
from headgate.workers.model import ENDLESS, BackpressureContext, Lifetime, Limits
from headgate.workers.protocol.transport import bind, grpc, make_server
from headgate.workers.serialization.dynamic_classes import loads
from headgate.workers.server.event_loops import new_loop
from headgate.workers.server.lifetime import LifetimeWatch, memory_of_process
from headgate.workers.server.service import Service
from headgate.workers.server.setup_task import SetupTask
from headgate.workers.server.signals import handle

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.options import WorkerOptions
    from headgate.workers.setup import Setup

_log = logging.getLogger("headgate.workers")


class Started(NamedTuple):
    """A worker that listens."""

    service: Service
    server: grpc.aio.Server
    address: str
    """Where it listens, with its real port."""
    setup: SetupTask | None = None
    """What ran its setup, and runs its teardown."""


class StatusLike(Protocol):
    """Who is told how a worker of a pool is."""

    def ready(self, address: str, *, last: bool) -> None:
        """Take note that it takes calls, at this address; `last`: there will be no further word."""

    def expired(self, reason: str) -> None:
        """Take note that another worker should take its place. It goes on until it is told to stop."""


async def start(
    config: Mapping[str, Any],
    *,
    hook: Callable[[BackpressureContext], Any] | None = None,
    credentials: WorkerCredentials | None = None,
    options: WorkerOptions | None = None,
    setup: Setup | None = None,
) -> Started:
    """Make a worker, run its setup, and let it listen."""
    uid, limits = config["uid"], Limits(*config.get("limits", ()))
    where = f"worker {uid}, pid {os.getpid()}"
    loop, concurrency = new_loop(config.get("loop", "")), config.get("concurrency")
    service = Service(uid, where, hook, loop, limits, options, concurrency, credentials)
    server = make_server(service, options)
    address = bind(server, config["address"], credentials=credentials, insecure=config.get("insecure", False))
    service.tasks.start()
    setup_task = None
    if setup is not None:
        setup_task = SetupTask(service.tasks, setup)
        await setup_task.begin()
    await server.start()
    return Started(service, server, address, setup_task)


async def serve(config: dict[str, Any], status: StatusLike) -> None:
    """Run the server of a worker that belongs to a pool or to a LocalWorker, until it is stopped."""
    hook, credentials, options, setup = _settings(config.get("settings"))
    started = await start(config, hook=hook, credentials=credentials, options=options, setup=setup)
    try:
        await _work(config, started, status)
    finally:
        if started.setup is not None:
            await started.setup.end()
    await started.server.stop(0.02)  # what there was to say has been said
    started.service.end()


async def _work(config: dict[str, Any], started: Started, status: StatusLike) -> None:
    """Let a worker take calls until it is stopped, and watch whether its lifetime is over."""
    service, lifetime = started.service, Lifetime(*config.get("lifetime", ()))
    if lifetime.max_memory is not None:
        _check_memory(lifetime.max_memory)
    stop = _listen_to_signals(service, config.get("drain", -1.0))
    status.ready(started.address, last=lifetime == ENDLESS)

    def end(reason: str) -> None:
        if lifetime.idle_timeout is not None:  # it belongs to no pool, which would want another in its place
            _log.info("worker %s ends: %s", service.uid, reason)
            stop()
        else:
            service.patient = True
            status.expired(reason)

    if lifetime == ENDLESS:
        await service.stopped.wait()
    else:
        watch = LifetimeWatch(service, lifetime, end)
        service.on_change = watch.changed
        await service.stopped.wait()
        watch.close()


def _check_memory(most: int) -> None:
    """Raise if this worker has used up its memory before its first call: so would all that replace it."""
    used = memory_of_process()
    if used > most:
        raise WorkerStartFailed(
            f"a worker needs {used / 2**20:.0f} MB of memory before its first call, and max_memory_per_worker is "
            f"{most / 2**20:.0f} MB"
        )


def _settings(path: str | None) -> Any:
    """Read the backpressure hook, the credentials, the options and the setup of this worker from their file."""
    if path is None:
        return None, None, None, None
    with open(path, "rb") as file:
        data = file.read()
    os.unlink(path)
    return loads(data)


def _listen_to_signals(service: Service, drain: float) -> Callable[[], None]:
    """Stop after SIGTERM or SIGINT when the running calls have finished; cancel them after a second SIGINT.

    Returns what stops the worker as SIGTERM does.
    """
    loop = asyncio.get_running_loop()
    stops: list[asyncio.Task[None]] = []

    def stop() -> None:
        if stops:
            service.cut_short()
        else:
            stops.append(loop.create_task(service.stop(-1.0 if service.patient else drain)))

    def terminate() -> None:
        if not stops:
            stop()

    handle(loop, {signal.SIGINT: stop, signal.SIGTERM: terminate})
    return terminate
