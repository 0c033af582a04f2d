"""A generator on a worker, as its consumer holds it: one step is one round trip, or none if the item is here already.

The consumer sees a real async generator (see `routines`), which has Python's own ways of being advanced, closed and
abandoned. This is what it asks for each step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from headgate.context.travel import Exchange
from headgate.errors import InvalidArgument, PoolClosed, WorkerLost
from headgate.workers.client.failures import raise_answer, refuse_long, unreadable
from headgate.workers.protocol.bulk import BulkPayload
from headgate.workers.protocol.messages import Advance, Answer, Request
from headgate.workers.routines import END
from headgate.workers.serialization import context_frames
from headgate.workers.serialization.dynamic_classes import loads
from headgate.workers.serialization.pickling import dump_sent, dump_thrown

if TYPE_CHECKING:
    from headgate.workers.client.dispatcher import Dispatcher
    from headgate.workers.client.routine_call import RoutineCall
    from headgate.workers.routines import Routine
    from headgate.workers.server.running_call import RunningCall


class Stream:
    """A generator that runs on a worker, or will from its first step."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        routine: Routine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        limit: float | None,
        caller: str,
        running: RunningCall | None = None,
        request: Request | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._routine = routine
        self._called = (args, kwargs, limit, caller)
        self._running = running
        self._request = request
        self._prefetch = routine.options.prefetch
        self._backlog: deque[Answer] = deque()
        self._call: RoutineCall | None = None
        self._sent = 0  # steps other than "next"
        self._taken = 0  # items that the worker was not told to replace
        self._over = False
        self._exchange = Exchange("consumer")

    async def advance(self, what: Advance, value: Any = None) -> Any:
        """Return the next item, or `END`; raises what the generator raises."""
        if asyncio.get_running_loop() is not self._dispatcher.loop:
            if not self._dispatcher.loop.is_closed():
                self._dispatcher.loop.call_soon_threadsafe(
                    self._leave_for, RuntimeError("it was taken to another loop")
                )
            raise RuntimeError(
                f"a generator of {self._routine.tag} was begun on another event loop: it can only be used there"
            )
        try:
            return await self._advance(what, value)
        except (PoolClosed, WorkerLost):
            if isinstance(value, (GeneratorExit, asyncio.CancelledError)):
                raise value from None  # it was to end, and it has
            raise
        except BaseException as error:
            if not self._over:  # the step was not made: its consumer cannot go on, and so neither need it
                self._abort(error)
            raise

    async def _advance(self, what: Advance, value: Any) -> Any:
        if self._over:
            return END
        if self._call is None:
            dispatcher, (args, kwargs, limit, caller) = self._dispatcher, self._called
            running, self._called = self._running, ((), {}, None, "")
            try:
                call = dispatcher.prepare(
                    self._routine, args, kwargs, limit, caller, running, self._request, self._exchange
                )
                del args, kwargs
                call.backlog = self._backlog
                self._call, answer = await dispatcher.place(call, running)
            except BaseException:
                self._over = True
                raise
        else:
            answer = await self._step(self._call, what, value)
        return self._read(self._call, answer, value if what == "throw" else None)

    async def _step(self, call: RoutineCall, what: Advance, value: Any) -> Answer:
        if what == "next":
            if self._backlog:
                self._take()
                return self._backlog.popleft()
            self._taken += 1
            self._grant(call)
        else:
            if what == "send" and self._prefetch:
                raise InvalidArgument(
                    f"{self._routine.tag} runs ahead (prefetch={self._prefetch}): what is sent would come too late",
                    remedy="Leave `prefetch` out of a generator that takes values.",
                )
            payload: bytes | BulkPayload = b""
            if self._prefetch and isinstance(value, GeneratorExit):
                what = "close"  # which also ends a step that its consumer did not ask for
            else:
                payload = dump_sent(self._routine.tag, value) if what == "send" else dump_thrown(value)
            refuse_long(self._routine, payload, self._dispatcher.max_payload)
            self._sent += 1
            self._taken = 0
            ends = isinstance(value, (GeneratorExit, asyncio.CancelledError))
            call.connection.step(call, what, payload, context=self._context(lenient=ends))
        answer = await self._answer(call)
        while answer.kind == "yielded" and answer.steps < self._sent:
            context_frames.came_back(call, answer, self._running, skipped=True)
            self._dispatcher.learned(call, answer.lessons, self._running)
            answer = await self._answer(call)  # fetched in advance, before the step that was taken where the worker is
        ahead = answer.kind in ("returned", "raised", "cancelled") and answer.steps < self._sent
        if (what == "throw" and ahead) or (what == "close" and (ahead or answer.kind in ("returned", "cancelled"))):
            context_frames.came_back(call, answer, self._running)
            self._dispatcher.learned(call, answer.lessons, self._running)
            self._read_end(call, answer)  # it had ended before, ahead of its consumer: nobody is there to catch it
            raise value
        return answer

    def _take(self) -> None:
        """Take one of the items that are here: the worker may make another, and is told so for several at once."""
        if not self._prefetch:
            return  # it came without being asked for
        self._taken += 1
        if self._call is not None and (self._taken * 2 > self._prefetch or self._taken >= len(self._backlog)):
            self._grant(self._call)

    def _grant(self, call: RoutineCall) -> None:
        taken, self._taken = self._taken, 0
        call.connection.step(call, "next", count=taken, context=self._context())

    def _context(self, *, lenient: bool = False) -> bytes:
        most, limit, call = self._dispatcher.max_payload, "max_payload", self._call
        if call is not None and (extra := call.connection.session.lengths.extra) and not 0 < most <= extra:
            most, limit = extra, "the room for them in a message"
        return context_frames.sent(self._routine.tag, most, self._exchange, lenient=lenient, limit=limit)

    async def _answer(self, call: RoutineCall) -> Answer:
        """Wait for the next answer of the worker."""
        dispatcher = self._dispatcher
        connection = call.connection
        if self._backlog:  # it has come in the meantime, or had before
            return self._backlog.popleft()
        if connection.session.state == "over" and not connection.reads(call):
            return Answer(call, "lost")
        waiter = call.waiter = dispatcher.loop.create_future()
        dispatcher.waits_for(call)
        if self._running is not None:
            self._running.begins_to_wait()
        try:
            await waiter
            answer = call.take_answer()
            if call.timeout:
                dispatcher.check_time(call, answer)
        except asyncio.CancelledError as error:
            try:
                answer = await dispatcher.cancelled(call, error)
            except BaseException as end:
                self._end(end)
                raise
        finally:
            dispatcher.waits_no_more_for(call)
            if self._running is not None:
                self._running.waits_no_more()
        return answer

    def _read(self, call: RoutineCall, answer: Answer, thrown: BaseException | None) -> Any:
        """Return or raise what an answer means for the consumer."""
        dispatcher, routine = self._dispatcher, self._routine
        scope = None if self._running is None else self._running.scope
        failures = context_frames.came_back(call, answer, self._running)
        dispatcher.learned(call, answer.lessons, self._running)
        if answer.kind == "yielded":
            try:
                item = loads(answer.payload, scope)
            except BaseException as error:
                raise unreadable(routine, error) from error
            if failures:
                context_frames.tell(routine.tag, failures)
            return item
        self._read_end(call, answer)
        if answer.kind not in ("returned", "raised", "cancelled"):
            dispatcher.raise_gone(call, answer)
        if answer.kind == "returned":
            if failures:
                context_frames.tell(routine.tag, failures)
            return END
        return raise_answer(call, answer, scope, failures, thrown)

    def _read_end(self, call: RoutineCall, answer: Answer) -> None:
        self._over = True
        if answer.kind in ("returned", "raised", "cancelled"):
            self._dispatcher.served(call, answer)

    def _abort(self, error: BaseException) -> None:
        """End the generator on its worker, because its consumer cannot go on."""
        if self._call is not None and not self._over:
            self._call.connection.give_up(self._call)
        self._end(error)

    def _leave_for(self, error: BaseException) -> None:
        if not self._over:
            self._abort(error)

    def _end(self, error: BaseException) -> None:
        """Note that it is over here, whatever becomes of it on its worker."""
        self._over = True
        if self._call is not None:
            self._dispatcher.ended(self._call, error)
