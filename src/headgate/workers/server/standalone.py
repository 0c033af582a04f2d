"""`WorkerProcess`: makes this process a worker, which others find through a discovery or by its address.

It belongs to no pool. It serves until it is told to stop by a signal or by a client, or until a limit of its `lifetime`
is reached. Then it tells its discovery, finishes what runs, and returns; whoever started the process starts it again.
systemd is told when it takes calls, and when it stops.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from socket import AF_UNIX, SOCK_DGRAM
from socket import socket as Socket  # noqa: N812 - `socket` is an argument here
from typing import TYPE_CHECKING, Any

from headgate._version import __version__
from headgate.core.checks import (
    checked_flag,
    checked_memory,
    checked_optional_count,
    checked_positive_seconds,
    named_options,
)
from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import DiscoveryTimeout, InvalidArgument, InvalidType
from headgate.workers.model import BackpressureLike, Lifetime, WorkerMetadata, check_tags
from headgate.workers.options import ChannelOptions, WorkerOptions, checked_options
from headgate.workers.protocol.grpc_environment import grpc_variables
from headgate.workers.server.lifetime import LifetimeWatch, memory_of_process

if TYPE_CHECKING:
    from headgate.discovery.port import DiscoveryLike, DiscoveryPublisherLike
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.server.service import Service

_log = logging.getLogger("headgate.workers")

LOOPBACK = "127.0.0.1"
_WILDCARDS = {"0.0.0.0": LOOPBACK, "::": "::1"}  # and how this machine itself reaches who listens there
ANNOUNCING = 5.0
"""Seconds that a discovery has to take an announcement."""


class WorkerProcess:
    """A worker in this very process. ``await WorkerProcess("gpu").serve()`` returns when it has stopped."""

    @named_options
    def __init__(
        self,
        *tags: str,
        host: str | None = None,
        port: int = 0,
        socket: str | os.PathLike[str] | None = None,
        credentials: WorkerCredentials | None = None,
        options: WorkerOptions | ChannelOptions | None = None,
        backpressure: BackpressureLike | None = None,
        extra: Mapping[str, Any] | None = None,
        discovery: DiscoveryLike | None = None,
        grace: float | None = None,
        insecure: bool = False,
        concurrency: int | None = None,
        max_tasks: int | None = None,
        max_memory: float | str | None = None,
        orphan_timeout: float | None = None,
    ) -> None:
        """Check the arguments; nothing is started before `serve`.

        `host` and `port`, or `socket`, say where it listens. Without them it listens where its discovery wants it; with
        credentials on loopback; else on a Unix socket in a private directory. `grace` is how many seconds running calls
        have to end when it stops; None: as long as they take. See `Lifetime` for the last three.
        """
        check_tags(tags)
        _check_place(host, port, socket, credentials)
        if backpressure is not None and not callable(backpressure):
            raise InvalidType(f"backpressure must be callable, got {type(backpressure).__name__}")
        checked_optional_count("concurrency", concurrency, 1)
        checked_optional_count("max_tasks", max_tasks, 1)
        self.uid: str = f"w-{clock.token()[:10]}"
        self.tags: frozenset[str] = frozenset(tags)
        self.lifetime: Lifetime = Lifetime(
            max_tasks,
            checked_memory("max_memory", max_memory),
            checked_positive_seconds("orphan_timeout", orphan_timeout),
        )
        self.metadata: WorkerMetadata | None = None
        """The identity of the worker and how to reach it; None while it does not listen."""
        self.cancelled: int = 0
        """Calls that were cancelled when it stopped: `grace` was over, or it was told to stop twice."""
        self.signal: int = 0
        """The first signal that told it to stop; 0: none did."""
        self.extra: dict[str, Any] = dict(extra or {})
        """What it announces of itself besides. Changes count until it serves."""
        self._host, self._port, self._socket = host, port, None if socket is None else os.fspath(socket)
        self._credentials = credentials
        self._options = checked_options(options)
        self._backpressure = backpressure
        self._discovery = discovery
        self._insecure = checked_flag("insecure", insecure)
        self._grace = checked_positive_seconds("grace", grace)
        self._concurrency = concurrency
        self._service: Service | None = None
        self._publisher: DiscoveryPublisherLike | None = None
        self._watch: LifetimeWatch | None = None
        self._told_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    # -- serving ------------------------------------------------------------------------------------------------------

    async def serve(self, ready: Callable[[WorkerMetadata], None] | None = None) -> None:
        """Serve until the worker is stopped; `ready` is called when it takes calls and its discovery knows it.

        In the main thread the first SIGTERM or SIGINT lets running calls finish, and the second one cancels them.
        """
        from headgate.workers.server.signals import handled

        if self._service is not None:
            raise RuntimeError("this worker serves, or has served: make another WorkerProcess")
        handlers = {number: self._handler(number) for number in (signal.SIGTERM, signal.SIGINT)}
        async with AsyncExitStack() as stack:
            self._service = service = await self._listen(stack)
            stack.enter_context(handled(asyncio.get_running_loop(), handlers))
            if self._discovery is not None:
                await self._announce(stack, self._discovery)
            stack.push_async_callback(self._end, service)
            self._watch = LifetimeWatch(service, self.lifetime, self._retire)
            service.on_change = self._changed
            assert self.metadata is not None, "it listens"
            _log.info("worker %s (pid %d) listens on %s", self.uid, os.getpid(), self.metadata.address)
            _tell_service_manager("READY=1")
            if ready is not None:
                ready(self.metadata)
            self._changed()
            await service.stopped.wait()
            _log.info("worker %s has stopped after %d tasks", self.uid, service.finished)

    def stop(self) -> None:
        """Take no new calls, and return from `serve` when the running ones have ended. Again: cancel them."""
        service = self._service
        if service is None:
            raise RuntimeError("this worker does not serve")
        if service.stopping:
            _log.warning("worker %s cancels %d calls", self.uid, service.tasks.open_calls)
            service.cut_short()
        else:
            self._start(service.stop(-1.0 if self._grace is None else self._grace))

    @property
    def takes_calls(self) -> bool:
        """Does the worker listen, and is it not stopping?"""
        return self.metadata is not None and self._service is not None and not self._service.stopping

    def load(self) -> dict[str, float]:
        """Return what the worker does now, for metrics: calls that run and have ended, clients, bytes of memory, and
        when its certificate expires, if it has one. From any thread but that of the loop: it may block for a moment."""
        service, expires = self._service, None if self._credentials is None else self._credentials.expires_at()
        return {
            **({} if expires is None else {"certificate_expiry": expires}),
            "running": 0 if service is None else service.tasks.open_calls,
            "finished": 0 if service is None else service.finished,
            "clients": 0 if service is None else service.clients,
            "memory": memory_of_process(),
        }

    async def _listen(self, stack: AsyncExitStack) -> Service:
        if self._credentials is not None:
            os.environ.update(grpc_variables(os.environ, logs_refusals=True))  # in time if gRPC is not imported yet
        from headgate.workers.server.serve import start

        config: dict[str, Any] = {"uid": self.uid, "address": self._address(stack), "insecure": self._insecure}
        if self._concurrency is not None:
            config["concurrency"] = self._concurrency
        started = await start(config, hook=self._backpressure, credentials=self._credentials, options=self._options)
        stack.callback(started.service.tasks.close)
        stack.callback(started.service.end)
        stack.push_async_callback(started.server.stop, 0.02)  # what there was to say has been said
        self.metadata = WorkerMetadata(
            self.uid,
            self._advertised(started.address),
            os.getpid(),
            __version__,
            self.tags,
            secure=self._credentials is not None,
            options=None if self._options is None else self._options.channel,
            extra=self.extra,
        )
        started.service.metadata = self.metadata
        return started.service

    async def _end(self, service: Service) -> None:
        """Clean up after the worker has stopped, or when `serve` was cancelled or failed."""
        if not service.stopped.is_set():
            await service.stop(0)
        service.on_change = None
        if self._watch is not None:
            self._watch.close()
        await asyncio.gather(*self._tasks)
        self.cancelled = service.cancelled

    # -- stopping -----------------------------------------------------------------------------------------------------

    def _handler(self, number: int) -> Callable[[], None]:
        def handle() -> None:
            name = signal.Signals(number).name
            if not self.signal:
                self.signal = number
                count = self._service.tasks.open_calls if self._service is not None else 0
                _log.info("worker %s got %s: it finishes %d calls; a second one cancels them", self.uid, name, count)
            self.stop()

        return handle

    def _retire(self, reason: str) -> None:
        assert self._service is not None, "it is watched"
        if not self._service.stopping:
            _log.info("worker %s ends: %s", self.uid, reason)
            self.stop()

    def _changed(self) -> None:
        service = self._service
        assert service is not None, "it tells of changes"
        if service.stopping:
            if not self._told_stopping:
                self._told_stopping = True
                _tell_service_manager("STOPPING=1")
            publisher = self._publisher
            if publisher is not None:
                self._publisher = None
                self._start(self._withdraw(publisher))
        elif self._watch is not None:
            self._watch.changed()

    async def _withdraw(self, publisher: DiscoveryPublisherLike) -> None:
        """Tell the discovery that the worker goes. Its end must not depend on that."""
        assert self.metadata is not None, "it was announced"
        try:
            async with asyncio.timeout(ANNOUNCING):
                await publisher.publish("worker-dropped", self.metadata)
        except Exception as error:
            why = redact(f"{type(error).__name__}: {error}")
            _log.warning("worker %s could not tell its discovery that it stops: %s", self.uid, why)

    async def _announce(self, stack: AsyncExitStack, discovery: DiscoveryLike) -> None:
        """Tell the discovery that the worker is there. DiscoveryTimeout: it does not take that."""
        assert self.metadata is not None, "it listens"
        context = discovery.publisher
        try:
            async with asyncio.timeout(ANNOUNCING):
                publisher: DiscoveryPublisherLike = await context.__aenter__()
                stack.push_async_callback(self._leave, context)
                await publisher.publish("worker-added", self.metadata)
        except DiscoveryTimeout:
            raise
        except TimeoutError:
            raise DiscoveryTimeout(f"{discovery!r} did not take an announcement within {ANNOUNCING:g} s") from None
        self._publisher = publisher

    async def _leave(self, context: Any) -> None:
        """Leave the publisher of the discovery. The end of the worker must not depend on that."""
        try:
            async with asyncio.timeout(ANNOUNCING):
                await context.__aexit__(None, None, None)
        except Exception as error:
            why = redact(f"{type(error).__name__}: {error}")
            _log.warning("worker %s could not leave its discovery: %s", self.uid, why)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- where it listens ---------------------------------------------------------------------------------------------

    def _address(self, stack: AsyncExitStack) -> str:
        if self._socket is not None:
            return f"unix:{os.path.abspath(self._socket)}"
        host = self._host
        if host is None:
            wanted = getattr(self._discovery, "bind_host", None) or LOOPBACK
            if wanted == LOOPBACK and self._credentials is None and not self._port:
                return f"unix:{_private_directory(stack)}/{self.uid}"
            host = str(wanted)
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    def _advertised(self, address: str) -> str:
        """The address that others are told."""
        advertised = getattr(self._discovery, "advertised", None)  # of a discovery that leaves this machine
        if advertised is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its publisher says it too
                return str(advertised(address))
        host, _, port = address.rpartition(":")
        here = _WILDCARDS.get(host.strip("[]"))
        if here is None or self._discovery is None:
            return address
        return f"[{here}]:{port}" if ":" in here else f"{here}:{port}"


def _tell_service_manager(state: str) -> None:
    """Tell systemd how this process is (`Type=notify`, sd_notify(3)). Without NOTIFY_SOCKET nobody wants to know."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    try:
        with Socket(AF_UNIX, SOCK_DGRAM) as sender:
            sender.settimeout(1.0)
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
    except OSError as error:
        _log.warning("%s could not be sent to the service manager at %s: %s", state, address, error)


def _check_place(host: object, port: object, socket: object, credentials: object) -> None:
    if host is not None and (not isinstance(host, str) or not host.strip()):
        raise InvalidArgument(f"host must be a name or an address, got {host!r}")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise InvalidArgument(f"port must be a whole number from 0 to 65535, got {port!r}")
    if socket is None:
        return
    if host is not None or port:
        raise InvalidArgument("socket= and host= or port= cannot be given together", remedy="Choose one place.")
    if credentials is not None:
        raise InvalidArgument(
            "socket= and credentials= cannot be given together: a Unix socket has no TLS",
            remedy="Give host= and port= instead, or leave the credentials out: its directory protects the socket.",
        )


def _private_directory(stack: AsyncExitStack) -> str:
    from headgate.workers.processes.keeper_client import make_directory

    directory, lock = make_directory()
    stack.callback(os.close, lock)
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    return directory
