"""The task loop of a worker: an event loop in a thread of its own, on which only routines run.

The server's loop submits calls in batches: it appends them to a deque and wakes this loop once. Outcomes go back the
same way. While a routine computes and holds this loop, the server's loop still answers. The server's thread can take
back calls that are still in the deque, and calls whose Tasks have not had a turn yet: nothing of them has begun.

Every exception of a routine is its outcome, also SystemExit and KeyboardInterrupt. Those two are caught inside the
coroutine of the call, because asyncio lets them end a loop. For the same reason the caller gets them as RoutineExited.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from headgate.context.chains import VALUES
from headgate.context.travel import Elsewhere
from headgate.core.cancellation import PRIMED
from headgate.core.clock import clock
from headgate.core.imports import ImportNeeded
from headgate.core.redaction import log_exception, redact
from headgate.core.threads import current_frames, outlast_cancellation, stacks
from headgate.errors import RemoteError, RoutineTimeout
from headgate.workers.hooks import RUNNING
from headgate.workers.model import BackpressureContext
from headgate.workers.protocol.bulk import BulkPayload
from headgate.workers.protocol.messages import CONFIRMATION, Begun, Kind, Stepped
from headgate.workers.routines import CALLER, limit_dispatch
from headgate.workers.serialization import context_frames
from headgate.workers.serialization.functions import missing_module
from headgate.workers.serialization.pickling import dump_exception, load_arguments
from headgate.workers.server.admission import Ask
from headgate.workers.server.event_loops import end_loop
from headgate.workers.server.generators import Order, Orders, advance
from headgate.workers.server.imports import Imports
from headgate.workers.server.outcomes import TURN, Outcome, Outcomes, dump_raised, dump_result
from headgate.workers.server.reserved_calls import REFUSED, ReservedCalls
from headgate.workers.server.running_call import RunningCall
from headgate.workers.server.thread_places import Places, ThreadCall
from headgate.workers.server.turns import Turns

if TYPE_CHECKING:
    from headgate.workers.server.client_stream import ClientStream

THREADS = 32
"""Number of routines that run in threads at the same time, not counting those that wait for others. With one thread for
each of a thousand calls that compute, all of them would be slow, and the loop too."""
EXECUTING = 1000
"""Number of routines that execute at the same time. Routines that wait for others, and generators between two steps, do
not count. Calls above this number wait, and have not begun."""
FIRST, SLICE = 32, 512
"""Number of calls that are begun in one turn of the loop: at first, and at most, if they prove to be short."""
FORGOTTEN = 5.0
"""Seconds between two steps after which a worker that stops does not wait for a generator any longer."""
IMPORT_PATIENCE: Final = CONFIRMATION - 2.0
"""Seconds after its timeout for which a call may wait for an import. Its caller is more patient, so it hears from the
worker that the call does not begin: if it gave up by itself, the call might begin until the worker knows of that."""
STOPS = b"the worker is stopping"
"""Reason of a refusal: the call would begin when the others were cancelled."""
HELD_PLACES = b"its thread places are held by calls that timed out or were cancelled"
"""Reason of a refusal: the call needs a thread, and there is none."""
ENDING_SECONDS = 1.5
"""Seconds that tasks and generators which routines left on the loop have to end, when the worker stops."""
_IMPORTLIB = "<frozen importlib._bootstrap>"
_log = logging.getLogger("headgate.workers")


class TaskLoop:
    """Runs calls on its own thread. `deliver` is called on the server's loop with a list of outcomes."""

    def __init__(
        self,
        where: str,
        server: asyncio.AbstractEventLoop,
        deliver: Callable[[list[Outcome]], None],
        backpressure: Callable[[BackpressureContext], Any] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        on_reservations: Callable[[list[Ask], bool], None] | None = None,
        on_threads: Callable[[bool], None] | None = None,
        per_client: int | None = None,
        total: int | None = None,
        behind: Callable[[], float] | None = None,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = loop or asyncio.new_event_loop()
        self.asked: float | None = None
        """When the loop was asked for a turn that it has not had yet; None: it has had it."""
        self.running: dict[tuple[ClientStream, int], RunningCall] = {}
        self.reserved_calls: ReservedCalls = ReservedCalls(
            self.running, server, on_reservations or (lambda granted, closed: None), self._wake
        )
        self._where = where
        self._server = server
        self._backpressure = backpressure
        self._incoming: deque[RunningCall] = deque()
        self._outcomes = Outcomes(self.loop, server, deliver, self._incoming)
        self._unbegun: dict[RunningCall, bool] = {}  # their Tasks had no turn; whoever removes a call decides about it
        self._cancels: deque[tuple[ClientStream, int]] = deque()
        self._steps: deque[tuple[ClientStream, Stepped]] = deque()
        self._abandoned: deque[tuple[ClientStream, int]] = deque()
        self._executing = 0
        self._turns: Turns | None = None
        if per_client is not None or total is not None:
            self._turns = Turns(self.loop, per_client, total, self._unbegun, self._wake_here)
        self.clean: contextvars.Context = contextvars.Context()
        """The Context in which calls begin: nothing of one may be seen by the next."""
        self._awake = False
        self._behind = behind  # for how many seconds the server still reads what came while it had no turn
        self._catching_up = False
        self._slice = FIRST  # how many calls to begin in one turn
        self._began = 0
        self._began_at = 0.0
        self._admitted = 0
        self._threads: ThreadPoolExecutor | None = None
        self.places: Places = Places(THREADS, self._tell_places)
        self.imports: Imports = Imports(self.loop)
        self._on_threads = on_threads
        self._stopping = False
        self._closings: set[concurrent.futures.Future[Any]] = set()  # closing what clients had here
        self._thread = threading.Thread(target=self._run, name="headgate tasks", daemon=True)

    def start(self) -> None:
        """Start the thread on which calls run."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop and its thread. Calls that run, and tasks that routines left there, are cancelled."""
        concurrent.futures.wait(self._closings, timeout=ENDING_SECONDS / 3)
        self._stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=ENDING_SECONDS)

    def close(self) -> None:
        """Free what the loop has open, after `stop`, in a process that goes on. A thread that continues keeps it."""
        if not self._thread.is_alive():
            self.loop.close()

    # -- called on the server's thread --------------------------------------------------------------------------------

    def submit(self, stream: ClientStream, client: str, begun: list[Begun], cancels: list[int]) -> None:
        """Run the calls of a client, and cancel those with these numbers."""
        for call in begun:
            self._incoming.append(RunningCall(self, stream, client, call))
        for number in cancels:
            self._cancels.append((stream, number))
        self._wake()

    def step(self, stream: ClientStream, step: Stepped) -> None:
        """Tell a generator what to do next."""
        self._steps.append((stream, step))
        self._wake()

    def abandon(self, stream: ClientStream, numbers: list[int]) -> None:
        """Cancel these calls: nobody waits for them any more."""
        self._abandoned += [(stream, number) for number in numbers]
        self._wake()

    def stop_all(self) -> None:
        """Cancel every call, because the worker stops."""
        self.loop.call_soon_threadsafe(self._stop_all)

    def leave(self, closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine function on the task loop that closes what a client had there."""
        try:
            future = asyncio.run_coroutine_threadsafe(closing(), self.loop)
        except RuntimeError:
            return
        self._closings.add(future)
        future.add_done_callback(self._closings.discard)

    def take_back(self) -> list[RunningCall]:
        """Remove and return the calls that have not begun: they never will here."""
        taken = [running for running in list(self._unbegun) if self._unbegun.pop(running, False)]
        if self._turns is not None:
            self._turns.took_back(taken)
            self._wake()
        with suppress(IndexError):
            while True:
                taken.append(self._incoming.popleft())
        return taken

    @property
    def busy(self) -> bool:
        """Are there calls that run, or that wait to begin?"""
        return bool(self.running or self._is_waiting)

    @property
    def _is_waiting(self) -> bool:
        """Are there calls that wait to begin?"""
        return bool(self._incoming or (self._turns is not None and self._turns.waiting))

    @property
    def open_calls(self) -> int:
        """Number of calls that run, or that wait to begin."""
        # Between the two are those that wait for their turn: they are no Tasks yet.
        return len(self.running) + sum(one.task is None for one in list(self._unbegun)) + len(self._incoming)

    def is_waited_for(self, now: float, *, abandoned: bool = True, forgets: bool = True) -> bool:
        """Is there a call that a stopping worker should wait for?

        Generators that nobody has advanced for a while do not count if it `forgets`. Calls in threads that nobody waits
        for count only with `abandoned`.
        """
        recent = (
            (not forgets or one.paused is None or now - one.paused < FORGOTTEN) and (abandoned or not one.abandoned)
            for one in list(self.running.values())
        )
        return self._is_waiting or any(recent)

    def ask(self, now: float) -> None:
        """Ask the loop for a turn, unless it was asked already."""
        if self.asked is None:
            self.asked = now
            try:
                self.loop.call_soon_threadsafe(self._tick)
            except RuntimeError:  # it is closed: the worker ends, and a thread that nothing can interrupt goes on
                pass

    def held_by(self) -> RunningCall | None:
        """Return the call whose code runs at this moment, as far as another thread can tell."""
        try:
            task = asyncio.current_task(self.loop)
        except RuntimeError:
            return None
        return next((running for running in list(self.running.values()) if running.task is task), None)

    def stack(self) -> str:
        """Return the stack of the loop's thread as text."""
        return stacks().get(self._thread.ident or 0, "(no frame)")

    def imports_on_loop(self) -> str | None:
        """Return the module that code on the loop is importing at this moment, or None."""
        frame = current_frames().get(self._thread.ident or 0)
        found: str | None = None
        while frame is not None:
            if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename == _IMPORTLIB:
                found = frame.f_locals.get("name")  # the last one found is the first in line: it imports the others
            frame = frame.f_back
        return found

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self.loop.call_soon_threadsafe(self._drain, context=self.clean)

    # -- called on its own thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            try:
                self.loop.run_forever()
            except BaseException as error:  # a task that a routine left behind raised SystemExit
                _log.warning("something a routine started raised %s; the worker goes on", redact(repr(error)))
        end_loop(self.loop, ENDING_SECONDS - 0.2)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _tick(self) -> None:
        self.asked = None

    def _drain(self, *, caught_up: bool = False) -> None:
        """Begin submitted calls, as many as fit into a turn of the loop. The others can still be taken back."""
        self._awake = False
        may_begin = caught_up or not self._waits_for_server()
        now = clock.now()
        if self._began:
            took = (now - self._began_at) / self._began  # seconds a call, in the turn before
            self._slice = max(1, min(4 * self._slice, int(TURN / took) if took > 0 else SLICE, SLICE))
        else:
            self._slice = FIRST
        self._began, self._began_at = 0, now
        incoming, loop, reserved = self._incoming, self.loop, self.reserved_calls
        reserved.process_requests()
        while self._steps:
            stream, step = self._steps.popleft()
            stepping = self.running.get((stream, step.number))
            if stepping is not None and stepping.orders is not None:
                stepping.orders.put(step)
                if step.advance == "close" and stepping.paused is None and stepping.task is not None:
                    stepping.task.cancel()  # it is ahead of its consumer, who does not wait for that
        turns = self._turns
        if turns is not None:
            turns.queue(incoming)
        while may_begin and self._began < self._slice and self._executing < EXECUTING:
            try:
                running = incoming.popleft() if turns is None else turns.pop()
            except IndexError:
                break
            limited = running.begun.reservation or reserved.active
            if limited and not reserved.admits(running):
                self._refuse(running)
                continue
            self.running[running.stream, running.begun.number] = running
            if limited:
                reserved.began()
            running.executes = True
            self._executing += 1
            if running.begun.function.generator:
                running.orders = Orders(running.begun.prefetch, running.scope)
            if turns is None:  # else it is there already
                self._unbegun[running] = True
            body = self._drive(running)
            body.send(None)
            try:
                running.task = loop.create_task(body)
            except BaseException as error:  # a task factory that a routine has set
                body.close()
                self._end(running, "raised", dump_exception(error, self._where))
            self._began += 1
        if self._cancels or self._abandoned:
            self._cancel_asked()
        if may_begin and (incoming or (turns is not None and turns.ready)) and self._executing < EXECUTING:
            self._wake_here()
        else:
            self._began = 0  # the calls that come next may be quite different

    def _waits_for_server(self) -> bool:
        """Whether no call may begin yet, because its cancellation may be in a message that is still to be read."""
        if not self._catching_up and self._behind is not None and (behind := self._behind()) > 0.0:
            self._catching_up = True
            self.loop.call_later(behind, self._caught_up, context=self.clean)
        return self._catching_up

    def _caught_up(self) -> None:
        # Without another look: if the server has no turn again and again, calls must begin all the same.
        self._catching_up = False
        self._drain(caught_up=True)

    def _wake_here(self) -> None:
        if not self._awake:
            self._awake = True
            self.loop.call_soon(self._drain, context=self.clean)

    def _refuse(self, running: RunningCall) -> None:
        """Send a call elsewhere, because one that is to have few neighbours runs here, or waits."""
        if self._turns is not None:
            self._turns.count(running)
            if not self._unbegun.pop(running, False):
                return  # the server's thread has just taken it back
        self._outcomes.send((running.stream, running.begun.number, "reserved", REFUSED, False, 0, b"", ()))

    def _cancel_asked(self) -> None:
        while self._cancels:
            stream, number = self._cancels.popleft()
            if (stream, number) in self.running:
                self._cancel(stream, number)
            elif self._withdraw(stream, number):
                self._outcomes.send((stream, number, "cancelled", b"", False, 0, b"", ()))
        while self._abandoned:
            stream, number = self._abandoned.popleft()
            running = self.running.get((stream, number))
            if running is not None:
                running.gone = True
                self._cancel(stream, number)
            else:
                self._withdraw(stream, number)

    def _withdraw(self, stream: ClientStream, number: int) -> bool:
        """Take out a call that has not begun. False: there is none, or the server's thread has just taken it back."""
        if self._turns is not None and self._turns.withdraw(stream, number) is not None:
            return True
        for waiting in list(self._incoming):
            if waiting.stream is stream and waiting.begun.number == number:
                try:
                    self._incoming.remove(waiting)
                except ValueError:
                    return False
                return True
        return False

    def _stop_all(self) -> None:
        for waiting in [] if self._turns is None else self._turns.withdraw_all():
            self._outcomes.send((waiting.stream, waiting.begun.number, "unavailable", STOPS, False, 0, b"", ()))
        for running in list(self.running.values()):
            if running.task is not None:
                running.stopped = True
                running.task.cancel()

    def _cancel(self, stream: ClientStream, number: int) -> None:
        running = self.running.get((stream, number))
        if running is not None and running.task is not None:
            running.cancels += 1
            running.task.cancel()

    async def _drive(self, running: RunningCall) -> None:
        """Run one call and send its outcome, which may be any exception."""
        kind: Kind
        begun = running.begun
        try:
            await PRIMED
            if not self._unbegun.pop(running, False):  # the server's thread took it back: this goes to nobody
                self._end(running, "not_started", b"")
                return
            CALLER.set(running)
            if begun.dispatch_timeout:
                limit_dispatch(begun.dispatch_timeout)
            if begun.timeout:
                running.due = clock.now() + begun.timeout
            while begun.context:
                try:
                    if begun.function.has_group:
                        running.load()  # values of the Context are of the same classes as the function knows
                    context_frames.receive(running, begun.context, running.require)
                except ImportNeeded as needed:
                    await self._import(running, needed.module)
                else:
                    break
            if RUNNING:
                running.watchers = [watcher for hook in RUNNING if (watcher := hook(running)) is not None]
            if self._backpressure is not None and (refusal := await self._refusal(running)) is not None:
                self._end(running, *refusal)
                return
            tell_start, call = begun.tell_start, None
            while call is None:
                if begun.function.thread:
                    running.due = None  # waiting for a thread place does not count
                    if not await self.places.take():
                        self._end(running, "no_thread", HELD_PLACES)
                        return
                    running.has_thread_place = True
                if begun.timeout:
                    running.due = clock.now() + begun.timeout
                if tell_start:  # not with others: it may hold the loop from its first line on
                    tell_start = False
                    self._outcomes.give_back([(running.stream, begun.number, None, b"", False, 0, b"", ())])
                try:
                    call = running.load(), *_arguments(running)
                except ImportNeeded as needed:
                    self.free_thread_place(running)  # calls that need no import may have it
                    await self._import(running, needed.module)
            fn, args, kwargs = call
            if running.orders is not None:
                await self._pull(running, running.orders, fn(*args, **kwargs))
                self._end(running, "returned", b"", context_frames.ended(running))
                return
            if begun.timeout:
                result = await self._within(begun, self._call(running, fn, args, kwargs))
            elif begun.function.thread:
                result = await self._call(running, fn, args, kwargs)
            else:
                result = await fn(*args, **kwargs)
            kind, payload = "returned", dump_result(running, result)
        except asyncio.CancelledError as error:
            kind = "stopped" if running.stopped and not running.cancels else "cancelled"
            payload = dump_exception(error, self._where) if error.args else b""
        except BaseException as error:
            kind, payload = "raised", dump_raised(running, error, self._where)
            if running.watchers:
                running.tell_end(kind, error)  # here: to keep it until `_end` would make a cycle with this frame
        self._end(running, kind, payload, b"" if context_frames.nothing() else context_frames.ended(running))

    async def _import(self, running: RunningCall, module: str) -> None:
        """Wait until a module is imported that a call needs. A timeout of the call has begun, and begins again after
        that: the time that imports take is not its own, but a caller does not wait for one that hangs."""
        until = None if running.due is None else running.due + IMPORT_PATIENCE
        limit = asyncio.timeout(None if until is None else max(0.0, until - clock.now()))
        with suppress(TimeoutError):  # it comes from the limit alone: what an import raises is returned
            async with limit:
                running.imports = {**running.imports, module: await self.imports.wait(module)}
        # The clock too: if the loop was held meanwhile, the end of the import may come before that of the limit.
        if limit.expired() or (until is not None and clock.now() > until):
            raise RoutineTimeout(
                f"{running.begun.function.tag} did not begin: importing {module} took longer than its timeout of "
                f"{running.begun.timeout:g} s and {IMPORT_PATIENCE:g} s more",
                remedy=f"Import {module} before the first call, in setup=, or give the routine a longer timeout.",
            )

    # -- generators ---------------------------------------------------------------------------------------------------

    async def _pull(self, running: RunningCall, orders: Orders, generator: AsyncGenerator[Any, Any]) -> None:
        """Run a generator from its first step to its end."""
        order: Order | None = ("next", None)
        since = clock.now()
        try:
            while order is not None:
                if running.begun.timeout:
                    running.due = clock.now() + running.begun.timeout
                while orders.contexts:
                    context_frames.receive(running, orders.contexts.pop(0))
                step = advance(generator, order)
                try:
                    item = await (self._within(running.begun, step) if running.begun.timeout else step)
                except StopAsyncIteration:
                    return
                payload = dump_result(running, item)
                self._yielded(running, payload)
                if running.gone or running.stopped:
                    raise asyncio.CancelledError  # it caught that before, and went on for nobody
                orders.made(len(payload))
                order = orders.next()
                now = clock.now()
                if order is None or now - since > TURN:
                    order = await self._rest(running, orders, order)
                    since = clock.now()
        finally:
            with suppress(Exception):  # what it raises now is not why it ends
                await generator.aclose()

    def _yielded(self, running: RunningCall, payload: bytes | BulkPayload) -> None:
        swallowed = running.cancels > 0
        running.cancels = 0
        while running.task is not None and running.task.cancelling():
            running.task.uncancel()
        steps = running.orders.steps if running.orders is not None else 0
        context = context_frames.changed(running)
        number, lessons = running.begun.number, running.take_lessons()
        self._outcomes.send((running.stream, number, "yielded", payload, swallowed, steps, context, lessons))

    async def _rest(self, running: RunningCall, orders: Orders, order: Order | None) -> Order:
        """Between two steps: until there is an order. A cancellation that comes now is raised in the generator, as it
        would be in one that is local; if nobody waits for it any more, or the worker stops, it is closed."""
        running.paused = clock.now()
        running.due = None
        self.count(running)
        if not (self._executing or self._incoming):
            self._outcomes.flush()
        try:
            if order is not None:
                await asyncio.sleep(0)
            while order is None and (order := orders.next()) is None:
                await orders.wait()
            if self._turns is not None and order[0] in ("next", "send"):  # what ends it does not wait
                await self._turns.step(running)
        except asyncio.CancelledError as error:
            if running.gone or running.stopped:
                raise
            order = order or orders.next()
            if order is None:
                return "throw", error
            if running.task is not None:
                running.task.cancel()  # it was meant for the step that has just been ordered
        finally:
            running.paused = None
            self.count(running)
        return order

    async def _within(self, begun: Begun, call: Awaitable[Any]) -> Any:
        limit = asyncio.timeout(begun.timeout)
        due = clock.now() + begun.timeout
        try:
            async with limit:
                result = await call
        except TimeoutError:
            if not limit.expired():
                raise
            raise RoutineTimeout(
                f"{begun.function.tag} ran longer than its timeout of {begun.timeout:g} s and was cancelled"
            ) from None
        if clock.now() > due and not limit.expired() and not begun.function.thread:
            raise RoutineTimeout(
                f"{begun.function.tag} ran longer than its timeout of {begun.timeout:g} s, without an await at which "
                "it could be cancelled"
            )
        return result

    async def _call(
        self, running: RunningCall, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not running.begun.function.thread:
            return await fn(*args, **kwargs)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1000, thread_name_prefix="headgate routine")
        call, elsewhere = ThreadCall(fn, args, kwargs), Elsewhere()
        future = self.loop.run_in_executor(self._threads, elsewhere.context.run, call)

        def cancelled() -> None:
            call.cancel()
            if running.has_thread_place and not running.abandoned:
                running.abandoned = True
                self.places.abandon()
                if self._turns is not None:
                    self._turns.count(running)

        stopped = await outlast_cancellation(future, cancelled)
        elsewhere.bring_back()
        if stopped is not None and call.loop is None and not future.cancelled():
            future.exception()
            raise stopped
        return future.result()

    async def _refusal(self, running: RunningCall) -> tuple[Kind, bytes] | None:
        """Ask the backpressure hook; returns a refusal, or None if the call may run."""
        assert self._backpressure is not None, "asked for"
        context = BackpressureContext(self._admitted, running.describe())
        before = VALUES.get()
        try:
            refused = self._backpressure(context)
            if inspect.isawaitable(refused):
                running.due = None
                refused = await refused
            refused = bool(refused)
        except BaseException as error:
            if running.cancels or running.stopped:
                raise
            log_exception("headgate.workers", "the backpressure hook raised; %s is refused", running.begun.function.tag)
            return "exhausted", f"its backpressure hook raised {type(error).__name__}: {error}".encode()
        finally:
            VALUES.set(before)  # it sees what its caller has set, and is no part of the call
        if refused:
            return "exhausted", b"its backpressure hook refused the task"
        running.admitted = True
        self._admitted += 1
        return None

    def count(self, running: RunningCall) -> None:
        """Update whether a call counts as executing. When it does not, another may begin."""
        there = (running.stream, running.begun.number) in self.running
        executes = there and running.paused is None and running.waits == 0
        if executes == running.executes:
            return
        running.executes = executes
        if executes:
            self._executing += 1
        else:
            self._free()
        if self._turns is not None:
            self._turns.count(running)

    def _free(self) -> None:
        """Note that one call fewer executes, and begin another."""
        self._executing -= 1
        if self.reserved_calls.active:
            self.reserved_calls.update()
        if self._incoming or (self._turns is not None and self._turns.ready):
            self._wake_here()

    def free_thread_place(self, running: RunningCall) -> None:
        """Give back the thread place of a call that has ended or waits for others."""
        if running.has_thread_place:
            running.has_thread_place = False
            abandoned, running.abandoned = running.abandoned, False
            self.places.give_back(abandoned=abandoned)

    def _tell_places(self, free: bool) -> None:
        """Tell the server whether calls that need a thread can begin."""
        if self._on_threads is not None:
            with suppress(RuntimeError):  # the server is gone
                self._server.call_soon_threadsafe(self._on_threads, free)

    def _end(self, running: RunningCall, kind: Kind, payload: bytes | BulkPayload, context: bytes = b"") -> None:
        self.running.pop((running.stream, running.begun.number), None)
        self._unbegun.pop(running, None)
        running.task = None  # its Context holds this, and it holds its Context
        if running.watchers:
            running.tell_end(kind)
        if self.reserved_calls.active:
            self.reserved_calls.ended(running)
        self._admitted -= running.admitted
        if running.executes:
            running.executes = False
            self._free()
        if running.has_turn and self._turns is not None:
            self._turns.count(running)
        if running.has_thread_place:
            self.free_thread_place(running)
        if running.loaded is not None:
            running.begun.function.close(running.loaded.copy)
        swallowed = running.cancels > 0 and kind != "cancelled"
        steps = running.orders.steps if running.orders is not None else 0
        number, lessons = running.begun.number, running.take_lessons() if running.lessons else ()
        outcome = running.stream, number, kind, payload, swallowed, steps, context, lessons
        if self._executing or self._incoming or self._outcomes.pending:
            self._outcomes.send(outcome)
        else:
            self._outcomes.give_back([outcome])  # there is nothing that it could share a message with


def _arguments(running: RunningCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Load the arguments of a call. RemoteError says why they cannot be; ImportNeeded: not yet."""
    begun = running.begun
    assert isinstance(begun.arguments, (bytes, BulkPayload)), "they were read"
    try:
        return load_arguments(begun.arguments, running.scope, running.require)
    except ModuleNotFoundError as error:
        raise missing_module(begun.function.tag, error) from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise RemoteError(
            f"the arguments of {begun.function.tag} could not be read on the worker: {type(error).__name__}: {error}",
            remedy="Their classes must be importable there, and what they pickle must unpickle.",
        ) from error
