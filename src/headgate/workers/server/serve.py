"""Run the gRPC server of a worker on the main thread's loop, until it is stopped by a request or a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.workers.model import BackpressureContext, Limits
from headgate.workers.protocol.transport import bind, grpc, make_server
from headgate.workers.serialization.dynamic_classes import loads
from headgate.workers.server.event_loops import new_loop
from headgate.workers.server.service import Service
from headgate.workers.server.signals import handle

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.options import WorkerOptions

_log = logging.getLogger("headgate.workers")


class Started(NamedTuple):
    """A worker that listens."""

    service: Service
    server: grpc.aio.Server
    address: str
    """Where it listens, with its real port."""


async def start(
    config: Mapping[str, Any],
    *,
    hook: Callable[[BackpressureContext], Any] | None = None,
    credentials: WorkerCredentials | None = None,
    options: WorkerOptions | None = None,
) -> Started:
    """Make a worker and let it listen."""
    uid, limits = config["uid"], Limits(*config.get("limits", ()))
    where = f"worker {uid}, pid {os.getpid()}"
    loop, concurrency = new_loop(config.get("loop", "")), config.get("concurrency")
    service = Service(uid, where, hook, loop, limits, options, concurrency, credentials)
    server = make_server(service, options)
    address = bind(server, config["address"], credentials=credentials, insecure=config.get("insecure", False))
    service.tasks.start()
    await server.start()
    return Started(service, server, address)


async def serve(config: dict[str, Any], ready: Callable[[str], None], failed: Callable[[BaseException], None]) -> None:
    """Run a worker's server until it is stopped.

    `ready` is called with its address when it has started, or `failed` when it cannot.
    """
    try:
        hook, credentials, options = _settings(config.get("settings"))
        service, server, address = await start(config, hook=hook, credentials=credentials, options=options)
    except BaseException as error:
        failed(error)
        raise
    _listen_to_signals(service, config.get("drain", -1.0))
    ready(address)
    await service.stopped.wait()
    await server.stop(0.02)  # what there was to say has been said
    service.tasks.stop()


def _settings(path: str | None) -> Any:
    """Read the backpressure hook, the credentials and the options of this worker from the file that holds them."""
    if path is None:
        return None, None, None
    with open(path, "rb") as file:
        data = file.read()
    os.unlink(path)
    return loads(data)


def _listen_to_signals(service: Service, drain: float) -> None:
    """Stop after SIGTERM or SIGINT when the running calls have finished; cancel them after a second SIGINT."""
    loop = asyncio.get_running_loop()
    stops: list[asyncio.Task[None]] = []

    def stop() -> None:
        if stops:
            service.cut_short()
        else:
            stops.append(loop.create_task(service.stop(drain)))

    def terminate() -> None:
        if not stops:
            stop()

    handle(loop, {signal.SIGINT: stop, signal.SIGTERM: terminate})
