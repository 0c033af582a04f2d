"""The task loop of a worker: an event loop in a thread of its own, on which routines run and nothing else does.

The server's loop hands calls over in bursts: it appends them to a deque and wakes this loop once; results go back the
same way. While a routine computes and holds this loop, the server's goes on answering, and its thread can take back
what is still in the deque, and calls whose Tasks were made and had no turn: nothing of them has begun.

A routine's exception is its outcome, whatever it is: SystemExit and KeyboardInterrupt too, caught inside its coroutine,
because asyncio lets those two end a loop. Its caller gets them as RoutineExited, for the same reason.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from headgate.context.chains import VALUES
from headgate.context.travel import Elsewhere, Exchange
from headgate.core.cancellation import primed
from headgate.core.clock import clock
from headgate.core.redaction import log_exception, redact
from headgate.core.threads import current_frames
from headgate.errors import RemoteError, RoutineTimeout
from headgate.workers.model import BackpressureContext, Task
from headgate.workers.protocol.bulk import Parcel
from headgate.workers.protocol.messages import Begun, Kind, Stepped
from headgate.workers.routines import CALLER, limit_dispatch
from headgate.workers.serialization import context_frames
from headgate.workers.serialization.dynamic_classes import Scope
from headgate.workers.serialization.functions import missing_module
from headgate.workers.serialization.pickling import dump_exception, dumps, load_arguments
from headgate.workers.server.admission import Ask
from headgate.workers.server.event_loops import end_loop
from headgate.workers.server.generators import Order, Orders, advance
from headgate.workers.server.reserved_calls import REFUSED, Room
from headgate.workers.server.thread_places import Aside, Places

THREADS = 32
"""Routines that run in threads at the same time, those that wait for others apart: the rest stand in line. With one
thread for each of a thousand calls that compute, all of them would crawl, and the loop with them."""
EXECUTING = 1000
"""Routines that execute at the same time, those that wait for routines they called apart, and generators between two
steps: the rest stand in line, and have not begun."""
FIRST, SLICE = 32, 512
"""Calls that are begun in one turn of the loop: at first, and at most, when they prove to be short."""
FORGOTTEN = 5.0
"""Seconds between two steps after which a worker that stops does not wait for a generator any longer."""
HELD_PLACES = b"its thread places are held by calls that timed out or were cancelled"
"""Why a call was refused that needs a thread."""
FAREWELL = 1.5
"""Seconds that tasks and generators which routines left on the loop have to end, when the worker stops."""
TURN = 0.005
"""Seconds that a turn should take, and that an outcome may wait for others to share a message with."""

_log = logging.getLogger("headgate.workers")


class Running:
    """A call that was handed over."""

    # What most calls never change is kept by the class: thousands of them are made in a second.
    task: asyncio.Task[None] | None = None
    cancels: int = 0
    seated: bool = False
    """Does it take one of the threads?"""
    forsaken: bool = False
    """Does it take one although nobody waits for it any more?"""
    due: float | None = None
    """When its timeout is over; None: it has none, or waits for its turn, or for an order."""
    admitted: bool = False
    """Has it passed the backpressure hook?"""
    stopped: bool = False
    """Was it cancelled because the worker stops?"""
    gone: bool = False
    """Is there nobody any more who waits for it?"""
    executes: bool = False
    """Is it one of those that execute?"""
    paused: float | None = None
    """Of a generator between two steps: since when."""
    waits: int = 0
    """Routines it called and waits for."""
    orders: Orders | None = None
    """Of a generator: what it is to do."""
    exchange: Exchange | None = None
    """What its caller knows of the values that are set in its Context."""

    def __init__(self, tasks: TaskLoop, session: Any, client: str, begun: Begun) -> None:
        self.tasks: TaskLoop = tasks
        self.session: Any = session
        self.client: str = client
        self.begun: Begun = begun
        self.scope: Scope = {}
        """The classes it sees that travel by value: its own copies."""

    @property
    def id(self) -> str:
        """The id of the task."""
        return f"{self.client}/{self.begun.task}"

    @property
    def caller(self) -> str:
        """The id of the task that called it."""
        return self.begun.caller

    @property
    def rests(self) -> bool:
        """Is it a generator between two steps?"""
        return self.paused is not None

    @property
    def pool(self) -> Any:
        """Where routines go that it calls itself."""
        return self.session.nested

    def begins_to_wait(self) -> None:
        """It calls a routine: while it waits for one it does not count as executing."""
        self.waits += 1
        self.tasks.count(self)

    def waits_no_more(self) -> None:
        """One of them has ended."""
        self.waits -= 1
        self.tasks.count(self)

    def describe(self) -> Task:
        """It, as routines and hooks see it."""
        begun = self.begun
        tenant = begun.tenant or None
        return Task(self.id, begun.caller or None, begun.function.tag, begun.timeout or None, tenant)


Outcome = tuple[Any, int, Kind | None, bytes | Parcel, bool, int, bytes]
"""On its way to the server's loop: the conversation; the number of the call; how it ended (None: it has not, it has
begun, and its caller wants to know); with what; whether it was cancelled, and ended otherwise; of a generator, how many
steps other than "next" it had taken; and what has changed in its Context."""


class TaskLoop:
    """Runs calls. `deliver` is called on the server's loop, with a burst of outcomes."""

    def __init__(
        self,
        where: str,
        server: asyncio.AbstractEventLoop,
        deliver: Callable[[list[Outcome]], None],
        backpressure: Callable[[BackpressureContext], Any] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        on_room: Callable[[list[Ask], bool], None] | None = None,
        on_threads: Callable[[bool], None] | None = None,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = loop or asyncio.new_event_loop()
        self.asked: float | None = None
        """Since when a sign of life is asked for and none has come; None: none is owed."""
        self.running: dict[tuple[Any, int], Running] = {}
        self.room: Room = Room(self.running, server, on_room or (lambda granted, closed: None), self._wake)
        self._where = where
        self._server = server
        self._deliver = deliver
        self._backpressure = backpressure
        self._incoming: deque[Running] = deque()
        self._unbegun: dict[Running, bool] = {}  # they have Tasks and no step was taken; who takes one out has it
        self._cancels: deque[tuple[Any, int]] = deque()
        self._steps: deque[tuple[Any, Stepped]] = deque()
        self._abandoned: deque[tuple[Any, int]] = deque()
        self._executing = 0
        self._clean = contextvars.Context()  # where calls begin: nothing of one may be seen by the next
        self._awake = False
        self._slice = FIRST  # how many calls to begin in one turn
        self._began = 0
        self._began_at = 0.0
        self._admitted = 0
        self._outcomes: list[Outcome] = []
        self._first_at = 0.0
        self._threads: ThreadPoolExecutor | None = None
        self.places: Places = Places(THREADS, self._tell_places)
        self._on_threads = on_threads
        self._stopping = False
        self._closings: set[concurrent.futures.Future[Any]] = set()  # of what clients had here
        self._thread = threading.Thread(target=self._run, name="headgate tasks", daemon=True)

    def start(self) -> None:
        """Begin to run calls."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop and its thread. Whatever still runs on it is cancelled, and what routines left there ended."""
        concurrent.futures.wait(self._closings, timeout=FAREWELL / 3)
        self._stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=FAREWELL)

    # -- called on the server's thread --------------------------------------------------------------------------------

    def hand_over(self, session: Any, client: str, begun: list[Begun], cancels: list[int]) -> None:
        """Run these, and cancel those."""
        for call in begun:
            self._incoming.append(Running(self, session, client, call))
        for number in cancels:
            self._cancels.append((session, number))
        self._wake()

    def step(self, session: Any, step: Stepped) -> None:
        """Have a generator go on."""
        self._steps.append((session, step))
        self._wake()

    def abandon(self, session: Any, numbers: list[int]) -> None:
        """Nobody waits for these any more."""
        self._abandoned += [(session, number) for number in numbers]
        self._wake()

    def stop_all(self) -> None:
        """Cancel whatever runs: the worker stops."""
        self.loop.call_soon_threadsafe(self._stop_all)

    def leave(self, closing: Callable[[], Any]) -> None:
        """A client is gone: close on the task loop what it had there."""
        try:
            future = asyncio.run_coroutine_threadsafe(closing(), self.loop)
        except RuntimeError:
            return
        self._closings.add(future)
        future.add_done_callback(self._closings.discard)

    def take_back(self) -> list[Running]:
        """Calls that were handed over and have not begun: they will not."""
        taken = [running for running in list(self._unbegun) if self._unbegun.pop(running, False)]
        with suppress(IndexError):
            while True:
                taken.append(self._incoming.popleft())
        return taken

    @property
    def busy(self) -> bool:
        """Is there anything it runs or should?"""
        return bool(self.running or self._incoming)

    def is_waited_for(self, now: float, *, forsaken: bool = True) -> bool:
        """Is there anything that a worker which is to stop should wait for? A generator that nobody has asked for an
        item in a while is not, nor, unless `forsaken`, a thread that nobody waits for."""
        recent = (
            (one.paused is None or now - one.paused < FORGOTTEN) and (forsaken or not one.forsaken)
            for one in list(self.running.values())
        )
        return bool(self._incoming) or any(recent)

    def timed(self, now: float) -> list[tuple[Running, float]]:
        """Calls with a timeout that have begun, and the seconds that each may still run."""
        return [(one, due - now) for one in list(self.running.values()) if (due := one.due) is not None]

    def loop_overdue(self, now: float) -> tuple[Running | None, float]:
        """Of a loop that is held: by which call, and for how many seconds that call has been past its timeout.

        What holds it may be a task that a call started: it is one of theirs if all calls there are past their timeout.
        """
        held = self.held_by()
        if held is not None:
            return held, now - held.due if held.due is not None else 0.0
        there = [one for one in list(self.running.values()) if not one.seated and one.paused is None]
        if not there or any(one.due is None for one in there):
            return None, 0.0
        return None, min(now - one.due for one in there if one.due is not None)

    def places_overdue(self, now: float) -> float:
        """For how many seconds every thread place has been held by a call that is past its timeout."""
        if not self.places.are_held:
            return 0.0
        late = [now - one.due for one in list(self.running.values()) if one.forsaken and one.due is not None]
        return min(late) if len(late) >= self.places.total else 0.0

    def ask(self, now: float) -> None:
        """Ask for a sign of life, if none is owed."""
        if self.asked is None:
            self.asked = now
            self.loop.call_soon_threadsafe(self._tick)

    def held_by(self) -> Running | None:
        """The call whose code is being run at this moment, as far as that can be told from outside."""
        try:
            task = asyncio.current_task(self.loop)
        except RuntimeError:
            return None
        return next((running for running in list(self.running.values()) if running.task is task), None)

    def stack(self) -> str:
        """Where its thread is at this moment."""
        frame = current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(no frame)"

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self.loop.call_soon_threadsafe(self._drain, context=self._clean)

    # -- called on its own thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            try:
                self.loop.run_forever()
            except BaseException as error:  # a task that a routine left behind raised SystemExit
                _log.warning("something a routine started raised %s; the worker goes on", redact(repr(error)))
        end_loop(self.loop, FAREWELL - 0.2)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _tick(self) -> None:
        self.asked = None

    def _drain(self) -> None:
        """Begin what was handed over, as much as a turn may take: the rest may still go elsewhere meanwhile."""
        self._awake = False
        now = clock.now()
        if self._began:
            took = (now - self._began_at) / self._began  # seconds a call, in the turn before
            self._slice = max(1, min(4 * self._slice, int(TURN / took) if took > 0 else SLICE, SLICE))
        else:
            self._slice = FIRST
        self._began, self._began_at = 0, now
        incoming, loop, room = self._incoming, self.loop, self.room
        room.hear()
        while self._steps:
            session, step = self._steps.popleft()
            stepping = self.running.get((session, step.number))
            if stepping is not None and stepping.orders is not None:
                stepping.orders.put(step)
                if step.advance == "close" and stepping.paused is None and stepping.task is not None:
                    stepping.task.cancel()  # it is ahead of its consumer, who does not wait for that
        while self._began < self._slice and self._executing < EXECUTING:
            try:
                running = incoming.popleft()
            except IndexError:
                break
            limited = running.begun.reservation or room.active
            if limited and not room.admits(running):
                self._send((running.session, running.begun.number, "reserved", REFUSED, False, 0, b""))
                continue
            self.running[running.session, running.begun.number] = running
            if limited:
                room.began()
            running.executes = True
            self._executing += 1
            if running.begun.function.generator:
                running.orders = Orders(running.begun.prefetch, running.scope)
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
        if incoming and self._executing < EXECUTING:
            self._awake = True
            loop.call_soon(self._drain, context=self._clean)
        else:
            self._began = 0  # what comes next may be quite another thing

    def _cancel_asked(self) -> None:
        while self._cancels:
            session, number = self._cancels.popleft()
            if (session, number) in self.running:
                self._cancel(session, number)
            elif self._withdraw(session, number):
                self._send((session, number, "cancelled", b"", False, 0, b""))
        while self._abandoned:
            session, number = self._abandoned.popleft()
            running = self.running.get((session, number))
            if running is not None:
                running.gone = True
                self._cancel(session, number)
            else:
                self._withdraw(session, number)

    def _withdraw(self, session: Any, number: int) -> bool:
        """Take out a call that has not begun. False: there is none, or the server's thread has just taken it back."""
        for waiting in list(self._incoming):
            if waiting.session is session and waiting.begun.number == number:
                try:
                    self._incoming.remove(waiting)
                except ValueError:
                    return False
                return True
        return False

    def _stop_all(self) -> None:
        for running in list(self.running.values()):
            if running.task is not None:
                running.stopped = True
                running.task.cancel()

    def _cancel(self, session: Any, number: int) -> None:
        running = self.running.get((session, number))
        if running is not None and running.task is not None:
            running.cancels += 1
            running.task.cancel()

    async def _drive(self, running: Running) -> None:
        """Run one call to its outcome, whatever it is."""
        kind: Kind
        begun = running.begun
        try:
            await primed()
            if not self._unbegun.pop(running, False):  # the server's thread took it back: this goes to nobody
                self._end(running, "not_started", b"")
                return
            CALLER.set(running)
            if begun.dispatch_timeout:
                limit_dispatch(begun.dispatch_timeout)
            if begun.timeout:
                running.due = clock.now() + begun.timeout
            if begun.context:
                context_frames.arrived(running, begun.context)
            if self._backpressure is not None and (refusal := await self._refusal(running)) is not None:
                self._end(running, *refusal)
                return
            if begun.function.thread:
                running.due = None  # to stand in line is not to run
                if not await self.places.take():
                    self._end(running, "no_thread", HELD_PLACES)
                    return
                running.seated = True
            if begun.timeout:
                running.due = clock.now() + begun.timeout
            if begun.tell_start:  # not with others: it may hold the loop from its first line on
                self._hand_back([(running.session, begun.number, None, b"", False, 0, b"")])
            fn = begun.function.load(running.scope)
            assert isinstance(begun.arguments, (bytes, Parcel)), "they were read"
            try:
                args, kwargs = load_arguments(begun.arguments, running.scope)
            except ModuleNotFoundError as error:
                raise missing_module(begun.function.tag, error) from error
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                raise RemoteError(
                    f"the arguments of {begun.function.tag} could not be read on the worker: "
                    f"{type(error).__name__}: {error}",
                    remedy="Their classes must be importable there, and what they pickle must unpickle.",
                ) from error
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
            kind, payload = "returned", self._dump(running, result)
        except asyncio.CancelledError as error:
            kind = "stopped" if running.stopped and not running.cancels else "cancelled"
            payload = dump_exception(error, self._where) if error.args else b""
        except BaseException as error:
            kind, payload = "raised", dump_exception(error, self._where)
            limit = running.session.session.max_payload
            if limit and len(payload) > limit:
                what = f"the routine raised {type(error).__qualname__}, which takes {len(payload):,} bytes"
                remedy = "Raise one that holds less, or open the pool with a higher `max_payload`."
                too_long = RemoteError(f"{what}, and max_payload is {limit:,}", remedy=remedy)
                payload = dump_exception(too_long, self._where)
        self._end(running, kind, payload, b"" if context_frames.nothing() else context_frames.ended(running))

    def _dump(self, running: Running, result: Any) -> bytes | Parcel:
        try:
            payload = dumps(result)
        except BaseException as error:
            what = f"what {running.begun.function.tag} {'returned' if running.orders is None else 'yielded'}"
            remedy = "Return something that can be copied to another process."
            if inspect.iscoroutine(result):
                result.close()
                remedy = "Await it in the routine, and return what it gives."
            raise RemoteError(
                f"{what}, a {type(result).__qualname__}, cannot be pickled: {type(error).__name__}: {error}",
                remedy=remedy,
            ) from error
        limit = running.session.session.max_payload
        if limit and len(payload) > limit:
            what = f"what {running.begun.function.tag} {'returned' if running.orders is None else 'yielded'}"
            raise RemoteError(
                f"{what} takes {len(payload):,} bytes, and max_payload is {limit:,}",
                remedy="Yield it in parts from a generator, or open the pool with a higher `max_payload`.",
            )
        return payload

    # -- generators ---------------------------------------------------------------------------------------------------

    async def _pull(self, running: Running, orders: Orders, generator: Any) -> None:
        """Drive a generator from its first step to its end."""
        order: Order | None = ("next", None)
        since = clock.now()
        try:
            while order is not None:
                if running.begun.timeout:
                    running.due = clock.now() + running.begun.timeout
                while orders.contexts:
                    context_frames.arrived(running, orders.contexts.pop(0))
                step = advance(generator, order)
                try:
                    item = await (self._within(running.begun, step) if running.begun.timeout else step)
                except StopAsyncIteration:
                    return
                payload = self._dump(running, item)
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

    def _yielded(self, running: Running, payload: bytes | Parcel) -> None:
        swallowed = running.cancels > 0
        running.cancels = 0
        while running.task is not None and running.task.cancelling():
            running.task.uncancel()
        steps = running.orders.steps if running.orders is not None else 0
        context = context_frames.changed(running)
        self._send((running.session, running.begun.number, "yielded", payload, swallowed, steps, context))

    async def _rest(self, running: Running, orders: Orders, order: Order | None) -> Order:
        """Between two steps: until there is an order. A cancellation that comes now is raised in the generator, as it
        would be in one that is local; if nobody waits for it any more, or the worker stops, it is closed."""
        running.paused = clock.now()
        running.due = None
        self.count(running)
        if not (self._executing or self._incoming):
            self._flush()
        try:
            if order is not None:
                await asyncio.sleep(0)
            while order is None and (order := orders.next()) is None:
                await orders.wait()
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

    async def _within(self, begun: Begun, call: Any) -> Any:
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

    async def _call(self, running: Running, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not running.begun.function.thread:
            return await fn(*args, **kwargs)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1000, thread_name_prefix="headgate routine")
        aside, elsewhere = Aside(fn, args, kwargs), Elsewhere()
        future = self.loop.run_in_executor(self._threads, elsewhere.context.run, aside)
        stopped: asyncio.CancelledError | None = None
        while not future.done():  # a thread cannot be interrupted, so neither can this wait
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError as error:
                stopped = error
                aside.cancel()
                if running.seated and not running.forsaken:
                    running.forsaken = True
                    self.places.forsake()
        elsewhere.bring_back()
        if stopped is not None and aside.loop is None and not future.cancelled():
            future.exception()
            raise stopped
        return future.result()

    async def _refusal(self, running: Running) -> tuple[Kind, bytes] | None:
        """What the backpressure hook says; None: it may run."""
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

    def count(self, running: Running) -> None:
        """Does it execute? If not, another may; if so, it does whoever else does: what has begun goes on."""
        there = (running.session, running.begun.number) in self.running
        executes = there and running.paused is None and running.waits == 0
        if executes == running.executes:
            return
        running.executes = executes
        if executes:
            self._executing += 1
        else:
            self._free()

    def _free(self) -> None:
        """One fewer executes: another may."""
        self._executing -= 1
        if self.room.active:
            self.room.look()
        if self._incoming and not self._awake:
            self._awake = True
            self.loop.call_soon(self._drain, context=self._clean)

    def unseat(self, running: Running) -> None:
        """It needs no thread to itself any more: it has ended, or waits for others."""
        if running.seated:
            running.seated = False
            forsaken, running.forsaken = running.forsaken, False
            self.places.give_back(forsaken=forsaken)

    def _tell_places(self, free: bool) -> None:
        """Calls that need a thread can begin, or cannot."""
        if self._on_threads is not None:
            with suppress(RuntimeError):  # the server is gone
                self._server.call_soon_threadsafe(self._on_threads, free)

    def _end(self, running: Running, kind: Kind, payload: bytes | Parcel, context: bytes = b"") -> None:
        self.running.pop((running.session, running.begun.number), None)
        self._unbegun.pop(running, None)
        running.task = None  # its Context holds this, and it holds its Context
        if self.room.active:
            self.room.ended(running)
        self._admitted -= running.admitted
        if running.executes:
            running.executes = False
            self._free()
        if running.seated:
            self.unseat(running)
        swallowed = running.cancels > 0 and kind != "cancelled"
        steps = running.orders.steps if running.orders is not None else 0
        outcome = running.session, running.begun.number, kind, payload, swallowed, steps, context
        if self._executing or self._incoming or self._outcomes:
            self._send(outcome)
        else:
            self._hand_back([outcome])  # nothing is under way that it could share a message with

    def _send(self, outcome: Outcome) -> None:
        if not self._outcomes:
            self._first_at = clock.now()
            self.loop.call_soon(self._flush)
        self._outcomes.append(outcome)

    def _flush(self) -> None:
        if self._incoming and clock.now() - self._first_at < TURN:
            self.loop.call_soon(self._flush)  # more is being begun, and its outcomes may share the message
            return
        outcomes, self._outcomes = self._outcomes, []
        if outcomes:
            self._hand_back(outcomes)

    def _hand_back(self, outcomes: list[Outcome]) -> None:
        with suppress(RuntimeError):  # the server is gone: so is whoever waited
            self._server.call_soon_threadsafe(self._deliver, outcomes)
