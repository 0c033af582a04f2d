"""`LocalWorker`: a worker process on this machine, started by a pool or by hand."""

from __future__ import annotations

import asyncio
import marshal
import os
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from headgate._version import __version__
from headgate.context.variables import bare
from headgate.core.checks import checked_flag, checked_positive_seconds, named_options
from headgate.core.clock import clock
from headgate.errors import InvalidType, NoWorkersAvailable, WorkerStartFailed
from headgate.workers.model import (
    ENDLESS,
    UNLIMITED,
    BackpressureLike,
    Lifetime,
    Limits,
    WorkerMetadata,
    check_tags,
    checked_extra,
)
from headgate.workers.options import checked_credentials, checked_options
from headgate.workers.processes.keeper_client import KeeperClient
from headgate.workers.protocol.addresses import TcpAddress, checked_host, checked_port
from headgate.workers.server.event_loops import kind_of

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.options import ChannelOptions, WorkerOptions
    from headgate.workers.setup import Setup

_ANSWER = 5.0  # seconds a worker has to cancel what runs, to hear its clients, and to say that it did


class LocalWorker:
    """A worker process on this machine. A pool starts and stops its own; without a pool, use `start` and `stop`."""

    @named_options
    def __init__(
        self,
        *tags: str,
        credentials: WorkerCredentials | None = None,
        options: WorkerOptions | ChannelOptions | None = None,
        backpressure: BackpressureLike | None = None,
        host: str | None = None,
        port: int = 0,
        extra: Mapping[str, Any] | None = None,
        grace: float | None = None,
        insecure: bool = False,
        idle_timeout: float | None = None,
    ) -> None:
        check_tags(tags)
        self.credentials: WorkerCredentials | None = checked_credentials(credentials)
        self.options: WorkerOptions | None = checked_options(options)
        self.host: str | None = checked_host(host)
        """Where it listens for TCP connections; None: on a Unix socket, or where its pool says."""
        self.port: int = checked_port(port)
        self.insecure: bool = checked_flag("insecure", insecure)
        self.extra: dict[str, Any] = checked_extra(extra)
        self.idle_timeout: float | None = checked_positive_seconds("idle_timeout", idle_timeout)
        """Seconds without a call after which it ends; None: it does not. Not for workers of a pool."""
        self._grace = checked_positive_seconds("grace", grace)
        if backpressure is not None and not callable(backpressure):
            raise InvalidType(f"backpressure must be callable, got {type(backpressure).__name__}")
        self.uid: str = f"w-{clock.token()[:10]}"
        self.tags: frozenset[str] = frozenset(tags)
        self.backpressure: BackpressureLike | None = backpressure
        self.pid: int = 0
        self._spawner: KeeperClient | None = None
        self._address = ""
        self._ready: asyncio.Future[None] | None = None
        self._exited: asyncio.Future[None] | None = None
        self._failure = ""

    @property
    def metadata(self) -> WorkerMetadata | None:
        """The identity of the worker and how to reach it; None while it is not started."""
        return self.described() if self.pid else None

    def described(self) -> WorkerMetadata:
        """Return the identity of the worker and how to reach it, as far as they are known."""
        options = None if self.options is None else self.options.channel
        return WorkerMetadata(
            self.uid, self._address, self.pid, __version__, self.tags, self.credentials is not None, options, self.extra
        )

    def spawn(
        self,
        spawner: KeeperClient,
        limits: Limits = UNLIMITED,
        host: str | None = None,
        lifetime: Lifetime = ENDLESS,
        setup: Setup | None = None,
    ) -> None:
        """Have the keeper start the process. It ends itself when a limit is exceeded, so that it is replaced.

        It listens where it was told when it was made, else on `host`, else on a Unix socket. When its `lifetime` is
        over it says so, and goes on.
        """
        host = host if self.host is None else self.host
        self._address = spawner.address(self.uid) if host is None else ""  # the port is known when it listens
        config: dict[str, Any] = {"private": spawner.directory, "loop": kind_of(asyncio.get_running_loop())}
        config["address"] = self._address or str(TcpAddress(host or "", self.port))
        config["limits"] = tuple(limits)
        if lifetime != ENDLESS:
            config["lifetime"] = tuple(lifetime)
        config["insecure"] = self.insecure
        if self._grace is not None:
            config["drain"] = self._grace
        settings = self.backpressure, self.credentials, self.options, setup
        if any(setting is not None for setting in settings):
            config["settings"] = self._write_settings(spawner, settings)
        spawner.spawn(self.uid, config, logs_refusals=self.credentials is not None and host is not None)

    def listens(self, address: str) -> None:
        """Note where the worker listens, as it says itself."""
        self._address = address

    def _write_settings(self, spawner: KeeperClient, settings: tuple[object, ...]) -> str:
        """Write what only this user may read, and what cannot stand on a command line, into a file for the worker."""
        import cloudpickle

        try:
            with bare:
                data = cloudpickle.dumps(settings, 5)
        except Exception as error:
            raise InvalidType(f"backpressure cannot be pickled: {type(error).__name__}: {error}") from error
        path = self._settings_path(spawner)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        return path

    def clean_up(self, spawner: KeeperClient) -> None:
        """Remove the file that the worker was to read, because it ended before it did."""
        try:
            os.unlink(self._settings_path(spawner))
        except OSError:
            pass

    def _settings_path(self, spawner: KeeperClient) -> str:
        return f"{spawner.directory}/{self.uid}.settings"

    # -- alone --------------------------------------------------------------------------------------------------------

    async def start(self, *, timeout: float = 60.0) -> None:
        """Start the process, with a keeper of its own, and return when it takes calls.

        A worker that has ended, or that was stopped, can be started again.
        """
        if self._spawner is not None and self._exited is not None and self._exited.done():
            await self.stop()
        if self._spawner is not None or self.pid:
            raise RuntimeError("this worker was started already")
        loop = asyncio.get_running_loop()
        self._ready, self._exited, self._failure = loop.create_future(), loop.create_future(), ""
        spawner = KeeperClient(self._on_report)
        spawner.start()
        self._spawner = spawner
        try:
            self.spawn(spawner, lifetime=Lifetime(idle_timeout=self.idle_timeout))
            spawner.listen()
            async with asyncio.timeout(timeout):
                await self._ready
        except TimeoutError:
            await self._end(spawner)
            raise NoWorkersAvailable(f"the worker was not ready within {timeout:g} s") from None
        except BaseException:
            await self._end(spawner)
            raise

    async def _end(self, spawner: KeeperClient) -> None:
        """End the process and its keeper. The worker can be started again then."""
        try:
            await spawner.close()
        finally:
            if self._spawner is spawner:
                self._spawner, self.pid, self._address = None, 0, ""

    async def stop(self, timeout: float = 0) -> None:
        """End the process. A worker that is not started is left as it is.

        With a `timeout` of 0 what runs is cancelled; above 0 it may go on for so many seconds, and is then cancelled;
        below 0 it may go on until it ends.
        """
        spawner = self._spawner
        if spawner is None:
            return
        try:
            if self.pid and self._exited is not None and not self._exited.done():
                if not await stop_remotely(self._address, timeout, self.credentials):
                    self._stop_by_signal(spawner, timeout)
                await asyncio.wait((self._exited,), timeout=5.0)
        finally:
            await self._end(spawner)

    def _stop_by_signal(self, spawner: KeeperClient, timeout: float) -> None:
        """Stop a worker that cannot be asked to, because its certificates do not let anybody in."""
        for _ in range(2 if timeout == 0 else 1):  # the second one cancels what runs
            spawner.signal(self.uid, signal.SIGINT)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _on_report(self, report: Mapping[str, Any]) -> None:
        ready, exited = self._ready, self._exited
        assert ready is not None and exited is not None, "it was started"  # noqa: PT018
        if report["event"] == "started":
            self.pid = report["pid"]
        elif report["event"] == "said":
            said = marshal.loads(report["said"])
            if said.get("ready"):
                self.listens(said["address"])
                if not ready.done():
                    ready.set_result(None)
            else:
                self._failure = said["cause"]
        else:
            if not ready.done():
                ready.set_exception(start_failure(self._failure, report))
            if not exited.done():
                exited.set_result(None)


async def stop_remotely(address: str, timeout: float, credentials: WorkerCredentials | None = None) -> bool:
    """Ask a worker to stop; return when nothing runs on it, or when it is gone. False: it could not be asked."""
    from headgate.workers.protocol.transport import dial, grpc
    from headgate.workers.protocol.wire import STOP
    from headgate.workers.protocol.wire.wire_pb2 import StopRequest

    async with dial(address, session=False, credentials=credentials) as channel:
        try:
            request = StopRequest(timeout=timeout).SerializeToString()
            await channel.unary_unary(STOP)(request, timeout=None if timeout < 0 else timeout + _ANSWER)
        except grpc.aio.AioRpcError:
            return False  # it is gone, or stopped by a signal
    return True


def start_failure(cause: str, report: Mapping[str, Any], dumped: bytes = b"") -> WorkerStartFailed:
    """Make the error that says why a worker ended before it was ready, as far as that is known.

    `dumped` is the exception that was the cause, as the worker has pickled it.
    """
    text = report.get("errors", b"").decode(errors="replace").strip()
    how = exit_text(report.get("code", 0)) if report["event"] == "exited" else "its keeper is gone"
    if "unmade" in report:
        return WorkerStartFailed(f"the process of a worker could not be made: {report['unmade']}")
    what = cause or (text.splitlines()[-1] if text else "it said nothing")
    error = WorkerStartFailed(f"a worker ended before it was ready ({how}): {what}")
    if text:
        error.add_note(f"What it wrote to stderr:\n{text}")
    if dumped:
        from headgate.workers.serialization.pickling import load_exception

        error.__cause__ = load_exception(dumped)
    return error


def exit_text(code: int) -> str:
    """Describe how a process ended, in words for a person."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
