"""Run the gRPC server of a worker on the main thread's loop, until it is stopped by a request or a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from headgate.workers.model import Limits
from headgate.workers.protocol.transport import bind, make_server
from headgate.workers.serialization.dynamic_classes import loads
from headgate.workers.server.event_loops import new_loop
from headgate.workers.server.service import Service

_log = logging.getLogger("headgate.workers")


async def serve(config: dict[str, Any], ready: Callable[[str], None], failed: Callable[[BaseException], None]) -> None:
    """Run a worker's server until it is stopped.

    `ready` is called with its address when it has started, or `failed` when it cannot.
    """
    uid = config["uid"]
    try:
        where = f"worker {uid}, pid {os.getpid()}"
        hook, credentials, options = _settings(config.get("settings"))
        loop, limits = new_loop(config.get("loop", "")), Limits(*config.get("limits", ()))
        service = Service(uid, where, hook, loop, limits, credentials)
        server = make_server(service, options)
        address = bind(server, config["address"], credentials=credentials, insecure=config.get("insecure", False))
        service.tasks.start()
        await server.start()
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

    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGTERM, terminate)
    os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_signals)


class _Held(threading.local):
    mask: set[signal.Signals | int] | None = None


_held = _Held()


def _hold_signals() -> None:
    """Block signals before a routine forks, until the new process has handlers of its own."""
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def _release_signals() -> None:
    if _held.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _forget_signals() -> None:
    """Remove the handlers of the worker in a process that a routine forked.

    With them a signal to that process would not end it, and would be reported to the worker's loop through a descriptor
    that both have.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_signals()
