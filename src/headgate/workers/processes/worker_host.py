"""The host: a small program on a node of a cluster that has workers of one pool started there.

An engine (Ray, Dask) starts it through `host_process`, as a child of one of its own processes. It listens for the
placement of the pool with the pool's certificates (`host_link`), and a keeper beneath it starts the workers. So an
engine only says *where* workers run: it carries neither calls nor reports, and a routine that holds the interpreter's
lock holds up nobody.

Everything ends with it, and it ends when one of these happens:

- the process of the engine that started it is gone, which it sees by the end of the socket CONTROL,
- the placement says so,
- no placement was connected for `orphan_timeout` seconds, because the program of the pool is gone.

An engine's process that closes because *its* head is gone says so first (`STAY`). The host then stays for as long as
the placement is connected: calls do not depend on the engine's head.

Reports are numbered and kept, and a placement that connects again says which it has read. So none is lost when a
connection breaks.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.core.clock import clock
from headgate.errors import WorkerStartFailed
from headgate.workers.model import Lifetime, Limits
from headgate.workers.processes.host_process import STAY
from headgate.workers.processes.keepers import LocalKeepers
from headgate.workers.processes.local_worker import LocalWorker
from headgate.workers.processes.placement import Launch
from headgate.workers.protocol.addresses import TcpAddress
from headgate.workers.protocol.transport import EOF, bind, grpc, make_server
from headgate.workers.serialization.functions import MODULE_REMEDY
from headgate.workers.server.event_loops import new_loop

if TYPE_CHECKING:
    from headgate.workers.credentials import WorkerCredentials
    from headgate.workers.setup import Setup

KEEP = "/headgate.wire.v1.Host/Keep"
"""The stream between a placement and a host: commands one way, reports the other."""
_KEPT = 10_000  # reports, for a placement that connects again


class HostSettings(NamedTuple):
    """With what a host starts workers: what a launch says, as far as it can travel."""

    credentials: WorkerCredentials
    orphan_timeout: float
    limits: Limits
    lifetime: Lifetime
    setup: Setup | None
    loop: str
    """The kind of event loop that workers use."""
    module_remedy: str
    """How workers get modules that they lack."""


class WorkerHost(grpc.GenericRpcHandler):  # type: ignore[misc] # it has no types
    """Starts workers for the placement that is connected, and reports what becomes of them."""

    def __init__(self, settings: HostSettings, ip: str) -> None:
        self._settings = settings
        self._ip = ip
        self.id: str = clock.token()
        """Another in each process: by it a placement knows whether a host is the one that it knew."""
        self.over: asyncio.Event = asyncio.Event()
        """Set when the host is to end."""
        self._keepers = LocalKeepers()
        self._spawned: set[str] = set()
        self._reports: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self._number = 0
        self._news = asyncio.Event()
        self._client: object = None
        self._orphaned: asyncio.TimerHandle | None = None
        self._server: grpc.aio.Server

    async def start(self) -> str:
        """Listen on this node; return the address."""
        settings = self._settings
        launch = Launch(
            workers=None,
            tags=(),
            limits=settings.limits,
            stop_timeout=None,
            on_change=_ignore,
            on_ended=_ignore,
            on_trouble=_ignore,
            credentials=settings.credentials,
            host=self._ip,
            lifetime=settings.lifetime,
            setup=settings.setup,
        )
        self._keepers.open(launch, self._report)
        self._server = make_server(self)
        address = bind(self._server, str(TcpAddress(self._ip, 0)), credentials=settings.credentials)
        await self._server.start()
        self._await_placement()
        return address

    async def close(self) -> None:
        """End all workers, then the server, so that a placement hears of their ends."""
        await self._keepers.close()
        await self._server.stop(0.1)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a gRPC method; None: it is unknown."""
        if handler_call_details.method == KEEP:
            return grpc.stream_stream_rpc_method_handler(self._keep)
        return None

    # -- the placement -------------------------------------------------------------------------------------------------

    async def _keep(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Serve one connection of the placement. A newer one takes the place of an older one."""
        hello = await context.read()
        if hello is EOF:
            return
        self._client = us = object()
        self._news.set()  # an older connection sees that it is not wanted any more
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None
        await context.write(_packed(event="host", id=self.id, pid=os.getpid(), uids=sorted(self._spawned)))
        writing = asyncio.ensure_future(self._write(context, us, pickle.loads(hello)["seen"].get(self.id, 0)))
        try:
            while self._client is us and (data := await context.read()) is not EOF:
                self._obey(pickle.loads(data))
        finally:
            writing.cancel()
            if self._client is us:
                self._client = None
                self._await_placement()

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any], us: object, seen: int) -> None:
        while self._client is us:
            self._news.clear()
            for number, report in [one for one in self._reports if one[0] > seen]:
                await context.write(report)
                seen = number
            if self._number == seen:
                await self._news.wait()

    def _await_placement(self) -> None:
        """End everything if no placement connects for so long: its program is gone."""
        if not self.over.is_set():
            self._orphaned = asyncio.get_running_loop().call_later(self._settings.orphan_timeout, self.over.set)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _obey(self, command: Mapping[str, Any]) -> None:
        if command["do"] == "end":
            self.over.set()
        elif command["do"] == "signal":
            self._keepers.signal(command["uid"], command["signal"])
        elif command["do"] == "spawn" and command["uid"] not in self._spawned:  # it may be said again
            self._spawn(command["uid"])

    def _spawn(self, uid: str) -> None:
        self._spawned.add(uid)
        worker = LocalWorker(credentials=self._settings.credentials)
        worker.uid = uid
        try:
            self._keepers.spawn(worker)
        except WorkerStartFailed as error:
            self._report({"event": "exited", "uid": uid, "pid": 0, "code": 1, "unmade": error.message})

    def _report(self, report: Mapping[str, Any]) -> None:
        """Keep a report for the placement. What a worker said is unmarshalled here, where its interpreter is known."""
        told = dict(report)
        if told["event"] == "said":
            told["said"] = marshal.loads(told["said"])
        self._number += 1
        self._reports.append((self._number, _packed(number=self._number, **told)))
        self._news.set()


def _packed(**message: object) -> bytes:
    return pickle.dumps(message, 5)


def _ignore(*_: object) -> None:
    pass


async def _serve(control: socket.socket, settings: HostSettings, ip: str) -> None:
    loop, host = asyncio.get_running_loop(), WorkerHost(settings, ip)
    address = await host.start()

    async def watch_engine() -> None:
        said = b""
        try:
            await loop.sock_sendall(control, pickle.dumps({"address": address, "id": host.id, "pid": os.getpid()}))
            while data := await loop.sock_recv(control, 1):
                said = data
        except OSError:  # it was killed
            pass
        if said != STAY:
            host.over.set()

    watching = asyncio.ensure_future(watch_engine())
    await host.over.wait()
    watching.cancel()
    await host.close()


def main() -> None:
    """Run a host as a program: settings come by the socket, whose number and whose address are arguments."""
    control, ip = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    with control.makefile("rb") as file:
        settings = pickle.loads(file.read(int.from_bytes(file.read(4), "big")))
    control.setblocking(False)
    os.environ[MODULE_REMEDY] = settings.module_remedy
    # Not asyncio.run, which would cancel what is left of gRPC's own tasks, and they would print that.
    new_loop(settings.loop).run_until_complete(_serve(control, settings, ip))
    os._exit(0)
