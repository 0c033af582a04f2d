"""The server of a worker: conversations, health, and stopping. Runs on the main thread's loop; no user code does.

While routines run it watches the task loop (`Watch`): a loop that had no turn for a second is held by a routine. Its
callers are told, it is named in the log with its stack, and what it keeps waiting goes elsewhere. If even this thread
cannot run, because that routine holds the interpreter's lock, faulthandler writes the stacks by itself.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from headgate._version import __version__
from headgate.core.clock import clock
from headgate.errors import HeadgateError
from headgate.workers.execution import Outcome, Running, TaskLoop
from headgate.workers.functions import Arrived
from headgate.workers.model import BackpressureContext, WorkerMetadata
from headgate.workers.routines import CALLER
from headgate.workers.rpc import EOF, grpc
from headgate.workers.session import HELD, PULSE, WorkerSession
from headgate.workers.wire import CONVERSE, STOP
from headgate.workers.wire.wire_pb2 import StopReply, StopRequest, ToWorker

HEALTH = "/grpc.health.v1.Health/"

_BEAT = 0.25
_MUTE = 1.75  # as long as this thread is not heard, faulthandler speaks
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # grpc.health.v1.HealthCheckResponse

_log = logging.getLogger("headgate.workers")

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # and no pings: a client that is stopped for a while (Ctrl-Z) comes back
)


class Nested:
    """A pool, as routines that run for it use it: a proxy on the task loop, made at the first call.

    One for each pool, whoever called: with one for each conversation, every level of nesting would double the streams.
    """

    def __init__(self, pool: str, tasks: TaskLoop) -> None:
        self.peers: list[tuple[str, str]] = []
        """The workers of the pool, as a client last said."""
        self._pool = pool
        self._tasks = tasks
        self._loop = tasks.loop
        self._made: Any = None

    def _proxy(self) -> Any:
        """What calls: the proxy, or for a routine in a thread, whose loop is another, a way to it."""
        return self if asyncio.get_running_loop() is not self._loop else self._current()

    def _current(self) -> Any:
        if self._made is None:
            from headgate.workers.balancing import RoundRobinLoadBalancer
            from headgate.workers.proxy import Proxy

            self._made = Proxy(RoundRobinLoadBalancer(), pool=self._pool)
        peers = self.peers
        if self._made.seen is not peers:
            self._made.seen = peers
            self._made.set_members([WorkerMetadata(uid, address, 0, __version__) for uid, address in peers])
        return self._made

    async def call(self, routine: Any, args: Any, kwargs: Any, limit: float | None, caller: str) -> Any:
        """`Proxy.call`, from another loop than the proxy's."""
        running = CALLER.get()
        scope = running.scope

        async def call() -> Any:
            self._tasks.unseat(running)  # while it waits, and from then on, others may have its thread's place
            return await self._current().call(routine, args, kwargs, limit, caller, scope)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._loop))

    async def close(self) -> None:
        """On the task loop: end its conversations."""
        made, self._made = self._made, None
        if made is not None:
            await made.close("the client left")


class Conversation:
    """One stream: a session, and what moves its messages."""

    def __init__(self, uid: str, context: Any, nested: Nested) -> None:
        self.nested: Nested = nested
        self.session: WorkerSession = WorkerSession(uid, __version__, Arrived)
        self.writing: bool = False
        self._context = context
        self._work = asyncio.Event()

    def flush(self) -> None:
        """There is something to send."""
        self._work.set()

    async def write(self) -> None:
        """Send what there is, for ever. Nothing but the end of the stream cancels this."""
        while True:
            message = self.session.take()
            if message is None:
                self._work.clear()
                await self._work.wait()
            else:
                self.writing = True
                await self._context.write(message.SerializeToString())
                self.writing = False


class Service(grpc.GenericRpcHandler):  # type: ignore[misc] # it has no types
    """The server's side of every call."""

    def __init__(self, uid: str, where: str, backpressure: Callable[[BackpressureContext], Any] | None = None) -> None:
        self.uid: str = uid
        self.tasks: TaskLoop = TaskLoop(where, asyncio.get_running_loop(), self._deliver, backpressure)
        self.stopped: asyncio.Event = asyncio.Event()
        self.stopping: bool = False
        self._conversations: dict[Conversation, None] = {}
        self._nested: dict[str, Nested] = {}
        self._idle = asyncio.Event()
        self._cut = asyncio.Event()  # do not wait any longer
        self._health = asyncio.Event()
        self._watch = Watch(self)

    # -- gRPC ---------------------------------------------------------------------------------------------------------

    def service(self, handler_call_details: Any) -> Any:
        """Which method is it?"""
        method = handler_call_details.method
        if method == CONVERSE:
            return grpc.stream_stream_rpc_method_handler(self._converse)
        if method == STOP:
            return grpc.unary_unary_rpc_method_handler(self._stop)
        if method == HEALTH + "Check":
            return grpc.unary_unary_rpc_method_handler(self._check)
        if method == HEALTH + "Watch":
            return grpc.unary_stream_rpc_method_handler(self._watch_health)
        return None

    async def _converse(self, _: Any, context: Any) -> None:
        conversation = Conversation(self.uid, context, Nested("", self.tasks))
        session = conversation.session
        writer: asyncio.Task[None] | None = None
        try:
            data = await context.read()
            if data is EOF:
                return
            if not session.greet(_parsed(data), stopping=self.stopping):
                reply = session.take()
                assert reply is not None, "it was refused with a reason"
                await context.write(reply.SerializeToString())
                return
            self._conversations[conversation] = None
            writer = asyncio.create_task(conversation.write())
            while True:
                data = await context.read()
                if data is EOF:
                    return
                self._hear(conversation, _parsed(data))
        except HeadgateError as error:
            _log.warning("a conversation with %s ended: %s", session.client or "an unknown client", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except asyncio.CancelledError:
            pass  # the client went without a word; gRPC would print this
        finally:
            self._conversations.pop(conversation, None)
            left = session.broken()
            if left:
                self.tasks.cancel_all(conversation, left)
            self._leave(conversation)
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    def _hear(self, conversation: Conversation, message: ToWorker) -> None:
        session = conversation.session
        begun, cancels = session.receive(message)
        if message.HasField("peers") and session.peers is not None:
            pool, peers = session.peers
            conversation.nested = self._nested.setdefault(pool, Nested(pool, self.tasks))
            conversation.nested.peers = peers
        if self.stopping and begun:
            for call in begun:
                session.answer(call.number, "unavailable", b"the worker is stopping")
            begun = []
            conversation.flush()
        if begun or cancels:
            self._idle.clear()
            self.tasks.hand_over(conversation, session.client, begun, cancels)
            self._watch.begin()

    def _leave(self, conversation: Conversation) -> None:
        """The last conversation of a pool takes the pool's own ones with it."""
        nested = conversation.nested
        if not any(other.nested is nested for other in self._conversations):
            for pool in [pool for pool, known in self._nested.items() if known is nested]:
                del self._nested[pool]
            self.tasks.leave(nested.close)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """A burst of ends, from the task loop."""
        touched = None
        for outcome in outcomes:
            conversation = outcome.session
            if outcome.kind is None:
                conversation.session.started(outcome.number)
            else:
                conversation.session.answer(outcome.number, outcome.kind, outcome.payload, swallowed=outcome.swallowed)
            if conversation is not touched:
                touched = conversation
                conversation.flush()
        if not self.tasks.busy:
            self._idle.set()

    def beat(self, age: float) -> None:
        """Tell every client that waits how the task loop is."""
        held = self.tasks.held_by() if age > HELD else None
        number, tag = (held.begun.number, held.begun.function.tag) if held is not None else (0, "")
        for conversation in self._conversations:
            if conversation.session.open:
                conversation.session.beat(age, number, tag)
                conversation.flush()

    def give_back(self) -> None:
        """The task loop is held: what has not begun goes back to its callers."""
        for running in self.tasks.take_back():
            running.session.session.answer(running.begun.number, "not_started", b"its task loop is held")
            running.session.flush()

    # -- health -------------------------------------------------------------------------------------------------------

    async def _check(self, request: bytes, context: Any) -> bytes:
        if not _known_service(request):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _NOT_SERVING if self.stopping else _SERVING

    async def _watch_health(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        if not _known_service(request):
            yield b"\x08\x03"  # SERVICE_UNKNOWN
            return
        if not self.stopping:
            yield _SERVING
            await self._health.wait()
        yield _NOT_SERVING
        await self.stopped.wait()

    # -- stopping -----------------------------------------------------------------------------------------------------

    async def _stop(self, request: bytes, context: Any) -> bytes:
        await self.stop(StopRequest.FromString(request).timeout)
        return bytes(StopReply().SerializeToString())

    def cut_short(self) -> None:
        """Do not wait any longer for what runs."""
        self._cut.set()

    async def stop(self, timeout: float) -> None:
        """Refuse new work, let go on what runs (0: not at all, below: for ever), cancel the rest."""
        if not self.stopping:
            self.stopping = True
            self._health.set()
            for conversation in self._conversations:
                conversation.session.stopping()
                conversation.flush()
        if timeout == 0:
            self._cut.set()
        await self._drained(None if timeout < 0 else timeout)
        if self.tasks.busy:
            self.tasks.stop_all()
            self._cut.clear()
            await self._drained(2.0)
        deadline = clock.now() + 2.0
        while any(map(_has_more, self._conversations)) and clock.now() < deadline:  # noqa: ASYNC110 - the last answers
            await asyncio.sleep(0.005)
        self.stopped.set()

    async def _drained(self, timeout: float | None) -> None:
        deadline = None if timeout is None else clock.now() + timeout
        while self.tasks.busy and not self._cut.is_set():
            left = 0.05 if deadline is None else min(0.05, deadline - clock.now())
            if left <= 0:
                return
            waits = [asyncio.ensure_future(self._cut.wait()), asyncio.ensure_future(self._idle.wait())]
            await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()


class Watch:
    """Looks after the task loop, while it has something to do."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._timer: asyncio.TimerHandle | None = None
        self._suspect: object = None  # what held the loop at the last look
        self._named: object = None  # what was last named as holding the loop
        self._told = 0.0
        self._looked = 0.0

    def begin(self) -> None:
        """There is something to look after."""
        if self._timer is None:
            self._told = self._looked = clock.now()
            self._look()

    def _look(self) -> None:
        tasks = self._service.tasks
        if not tasks.busy:
            self._timer = None
            self._named = self._suspect = None
            if _SPEAKS:
                faulthandler.cancel_dump_traceback_later()
            return
        now = clock.now()
        if tasks.asked is not None and now - self._looked > 2 * _BEAT:
            tasks.asked = now  # this thread had no turn itself: that says nothing about the other
        self._looked = now
        age = 0.0 if tasks.asked is None else now - tasks.asked
        tasks.ask(now)
        if _SPEAKS:
            faulthandler.dump_traceback_later(_MUTE, file=2)
        if age > HELD - _BEAT:
            self._name(age)
        if age > HELD:
            self._service.give_back()
        else:
            self._named = self._suspect = None
        if now - self._told >= PULSE or (age > HELD and now - self._told >= _BEAT):
            self._told = now
            self._service.beat(age)
        self._timer = asyncio.get_running_loop().call_later(_BEAT, self._look)

    def _name(self, age: float) -> None:
        held = self._service.tasks.held_by() or self
        suspect, self._suspect = self._suspect, held
        if held is self._named or held is not suspect:  # only one that is there at two looks holds the loop
            return
        self._named = held
        what = "something a routine started"
        if isinstance(held, Running):
            what = f"{held.begun.function.tag} (task {held.id})"
        _log.warning(
            "%s holds the loop of worker %s for %.1f s; it answers, and takes no new calls until the loop is free. "
            "Await in it, or use @routine(thread=True).\n%s",
            what,
            self._service.uid,
            age,
            self._service.tasks.stack(),
        )


_SPEAKS = hasattr(faulthandler, "dump_traceback_later")


def _has_more(conversation: Conversation) -> bool:
    return conversation.writing or conversation.session.has_more


def _parsed(data: bytes) -> ToWorker:
    try:
        message: ToWorker = ToWorker.FromString(data)
    except Exception as error:
        raise HeadgateError(f"a message could not be read: {error}") from error
    return message


def _known_service(request: bytes) -> bool:
    """Of a HealthCheckRequest: field 1 is the name of the service; empty means the whole server."""
    return request in (b"", b"\x0a\x00") or request[2:] == b"headgate.wire.v1.Worker"
