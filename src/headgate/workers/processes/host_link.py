"""`HostLink`: the connection of a placement to one host, made again for as long as it breaks."""

from __future__ import annotations

import asyncio
import logging
import marshal
import pickle
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from headgate.core.redaction import redact
from headgate.workers.processes.worker_host import KEEP
from headgate.workers.protocol.transport import EOF, dial, grpc

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials

_log = logging.getLogger("headgate.workers")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds between two tries to connect."""

OnReport = Callable[[dict[str, Any]], None]


class HostLink:
    """Sends commands to the host at one address and passes on its reports, each of them once.

    `on_up` is called when a connection is made, with the id of the host and the uids of the workers that it was told to
    start; `on_down` when a connection that was there has ended, or none could be made.
    """

    def __init__(
        self,
        address: str,
        credentials: WorkerCredentials,
        *,
        on_up: Callable[[str, Collection[str]], None],
        on_down: Callable[[str], None],
        on_report: OnReport,
        seen: dict[str, int],
    ) -> None:
        self.address: str = address
        self.is_up: bool = False
        """Is a host connected?"""
        self._credentials = credentials
        self._on_up, self._on_down, self._on_report = on_up, on_down, on_report
        self._seen = seen  # by the id of a host: the number of the last report that was read
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, **command: object) -> None:
        """Send a command to the host. One that is not sent when the connection breaks is lost."""
        self._outbox.put_nowait(pickle.dumps(command, 5))

    async def close(self, patience: float = 0.0) -> None:
        """End the connection, when the host has done so itself or after so many seconds."""
        if patience:
            await asyncio.wait((self._task,), timeout=patience)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def stop_trying(self) -> None:
        """Do not connect again when the connection ends."""
        self._pause = -1.0

    _pause = FIRST_PAUSE

    async def _run(self) -> None:
        while self._pause >= 0:
            try:
                async with dial(self.address, credentials=self._credentials) as channel:
                    await self._converse(channel)
                    reason = "it ended the connection"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except Exception as error:  # what a host of another release says, and we do not understand
                reason = f"{type(error).__name__}: {error}"
            was_up, self.is_up = self.is_up, False
            if was_up:
                self._pause = min(self._pause, FIRST_PAUSE)
            self._on_down(reason)
            if self._pause >= 0:
                await asyncio.sleep(self._pause)
                self._pause = min(self._pause * 2, LONGEST_PAUSE) if self._pause >= 0 else self._pause

    async def _converse(self, channel: grpc.aio.Channel) -> None:
        stream: Any = channel.stream_stream(KEEP)()
        await stream.write(pickle.dumps({"do": "hello", "seen": self._seen}, 5))
        host = ""
        writing: asyncio.Task[None] | None = None
        try:
            while (data := await stream.read()) is not EOF:
                report = pickle.loads(data)
                if report["event"] == "host":
                    host, self.is_up, self._outbox = report["id"], True, asyncio.Queue()
                    writing = asyncio.ensure_future(self._write(stream))
                    self._on_up(host, report["uids"])
                    continue
                self._seen[host] = report.pop("number")
                if report["event"] == "said":
                    report["said"] = marshal.dumps(report["said"])  # as a keeper of this machine says it
                self._on_report(report)
        finally:
            if writing is not None:
                writing.cancel()
        await stream.done_writing()
        if await stream.code() is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                await stream.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await stream.details()
            )

    async def _write(self, stream: Any) -> None:
        outbox = self._outbox
        try:
            while True:
                await stream.write(await outbox.get())
        except Exception as error:  # the connection has ended, which the reader sees too
            _log.debug("a command to the host at %s was not sent: %s", self.address, redact(repr(error)))
