"""The task loop of a worker: an event loop in a thread of its own, on which routines run and nothing else does.

The server's loop hands calls over in bursts: it appends them to a deque and wakes this loop once; results go back the
same way. While a routine computes and holds this loop, the server's goes on answering, and what is still in the deque
can be taken out again by the server's thread: nothing of it has begun.

A routine's exception is its outcome, whatever it is: SystemExit and KeyboardInterrupt too, caught inside its coroutine,
because asyncio lets those two end a loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headgate.core.cancellation import primed
from headgate.core.clock import clock
from headgate.core.threads import call_in_thread, current_frames
from headgate.errors import RemoteError, RoutineTimeout
from headgate.workers.arrivals import Scope
from headgate.workers.codec import dump_exception, dumps, load_arguments
from headgate.workers.functions import missing_module
from headgate.workers.model import BackpressureContext, Task
from headgate.workers.routines import CALLER
from headgate.workers.session import Begun, Kind

THREADS = 32
"""Routines that run in threads at the same time, those that wait for others apart: the rest stand in line. With one
thread for each of a thousand calls that compute, all of them would crawl, and the loop with them."""
FIRST, SLICE = 32, 512
"""Calls that are begun in one turn of the loop: at first, and at most, when they prove to be short."""
TURN = 0.005
"""Seconds that a turn should take, and that an outcome may wait for others to share a message with."""

_log = logging.getLogger("headgate.workers")


class Running:
    """A call that was handed over."""

    __slots__ = ("admitted", "begun", "cancels", "client", "scope", "seated", "session", "stopped", "task")

    def __init__(self, session: Any, client: str, begun: Begun) -> None:
        self.session: Any = session
        self.client: str = client
        self.begun: Begun = begun
        self.task: asyncio.Task[None] | None = None
        self.scope: Scope = {}
        """The classes it sees that travel by value: its own copies."""
        self.cancels: int = 0
        self.seated: bool = False
        """Does it take one of the threads?"""
        self.admitted: bool = False
        """Has it passed the backpressure hook?"""
        self.stopped: bool = False
        """Was it cancelled because the worker stops?"""

    @property
    def id(self) -> str:
        """The id of the task."""
        return f"{self.client}/{self.begun.task}"

    @property
    def pool(self) -> Any:
        """Where routines go that it calls itself."""
        return self.session.nested

    def describe(self) -> Task:
        """It, as routines and hooks see it."""
        begun = self.begun
        return Task(self.id, begun.caller or None, begun.function.tag, begun.timeout or None)


class Outcome:
    """An end on its way to the server's loop."""

    __slots__ = ("kind", "number", "payload", "session", "swallowed")

    def __init__(self, session: Any, number: int, kind: Kind | None, payload: bytes, swallowed: bool = False) -> None:
        self.session: Any = session
        self.number: int = number
        self.kind: Kind | None = kind
        """None: it has not ended, it has begun, and its caller wants to know."""
        self.payload: bytes = payload
        self.swallowed: bool = swallowed
        """It was cancelled, and ended otherwise."""


class TaskLoop:
    """Runs calls. `deliver` is called on the server's loop, with a burst of outcomes."""

    def __init__(
        self,
        where: str,
        server: asyncio.AbstractEventLoop,
        deliver: Callable[[list[Outcome]], None],
        backpressure: Callable[[BackpressureContext], Any] | None = None,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.asked: float | None = None
        """Since when a sign of life is asked for and none has come; None: none is owed."""
        self.running: dict[tuple[Any, int], Running] = {}
        self._where = where
        self._server = server
        self._deliver = deliver
        self._backpressure = backpressure
        self._incoming: deque[Running] = deque()
        self._cancels: deque[tuple[Any, int]] = deque()
        self._awake = False
        self._slice = FIRST  # how many calls to begin in one turn
        self._began = 0
        self._began_at = 0.0
        self._admitted = 0
        self._outcomes: list[Outcome] = []
        self._first_at = 0.0
        self._threads: ThreadPoolExecutor | None = None
        self._threads_free = asyncio.Semaphore(THREADS)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="headgate tasks", daemon=True)

    def start(self) -> None:
        """Begin to run calls."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop and its thread. Whatever still runs on it is cancelled."""
        self._stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=1.0)

    # -- called on the server's thread --------------------------------------------------------------------------------

    def hand_over(self, session: Any, client: str, begun: list[Begun], cancels: list[int]) -> None:
        """Run these, and cancel those."""
        for call in begun:
            self._incoming.append(Running(session, client, call))
        for number in cancels:
            self._cancels.append((session, number))
        self._wake()

    def cancel_all(self, session: Any, numbers: list[int]) -> None:
        """Nobody waits for these any more."""
        self.hand_over(session, "", [], numbers)

    def stop_all(self) -> None:
        """Cancel whatever runs: the worker stops."""
        self.loop.call_soon_threadsafe(self._stop_all)

    def leave(self, closing: Callable[[], Any]) -> None:
        """A client is gone: close on the task loop what it had there."""
        try:
            asyncio.run_coroutine_threadsafe(closing(), self.loop)
        except RuntimeError:
            pass

    def take_back(self) -> list[Running]:
        """Calls that were handed over and have not begun: they will not."""
        taken: list[Running] = []
        while True:
            try:
                taken.append(self._incoming.popleft())
            except IndexError:
                return taken

    @property
    def busy(self) -> bool:
        """Is there anything it runs or should?"""
        return bool(self.running or self._incoming)

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
            self.loop.call_soon_threadsafe(self._drain)

    # -- called on its own thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            try:
                self.loop.run_forever()
            except BaseException as error:  # a task that a routine left behind raised SystemExit
                _log.warning("something a routine started raised %r; the worker goes on", error)
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
        incoming, loop = self._incoming, self.loop
        while self._began < self._slice:
            try:
                running = incoming.popleft()
            except IndexError:
                break
            self.running[running.session, running.begun.number] = running
            body = self._drive(running)
            body.send(None)
            try:
                running.task = loop.create_task(body)
            except BaseException as error:  # a task factory that a routine has set
                body.close()
                self._end(running, "raised", dump_exception(error, self._where))
            self._began += 1
        if self._cancels:
            self._cancel_asked()
        if incoming:
            self._awake = True
            loop.call_soon(self._drain)
        else:
            self._began = 0  # what comes next may be quite another thing

    def _cancel_asked(self) -> None:
        while self._cancels:
            session, number = self._cancels.popleft()
            if (session, number) in self.running:
                self._cancel(session, number)
                continue
            for waiting in list(self._incoming):
                if waiting.session is session and waiting.begun.number == number:
                    try:
                        self._incoming.remove(waiting)
                    except ValueError:  # the server's thread has just taken it back
                        break
                    self._send(Outcome(session, number, "cancelled", b""))
                    break

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
            CALLER.set(running)
            if self._backpressure is not None and (refusal := await self._refusal(running)) is not None:
                self._end(running, *refusal)
                return
            if begun.function.thread:
                await self._threads_free.acquire()
                running.seated = True
            if begun.tell_start:
                self._send(Outcome(running.session, begun.number, None, b""))
            fn = begun.function.load(running.scope)
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
            if begun.timeout:
                result = await self._within(begun, self._call(running, fn, args, kwargs))
            elif begun.function.thread:
                result = await self._call(running, fn, args, kwargs)
            else:
                result = await fn(*args, **kwargs)
            kind, payload = "returned", self._dump(begun, result)
        except asyncio.CancelledError as error:
            kind = "stopped" if running.stopped and not running.cancels else "cancelled"
            payload = dump_exception(error, self._where) if error.args else b""
        except BaseException as error:
            kind, payload = "raised", dump_exception(error, self._where)
        self._end(running, kind, payload)

    def _dump(self, begun: Begun, result: Any) -> bytes:
        try:
            return dumps(result)
        except BaseException as error:
            remedy = "Return something that can be copied to another process."
            if inspect.iscoroutine(result):
                result.close()
                remedy = "Await it in the routine, and return what it gives."
            raise RemoteError(
                f"the result of {begun.function.tag}, a {type(result).__qualname__}, cannot be pickled: "
                f"{type(error).__name__}: {error}",
                remedy=remedy,
            ) from error

    async def _within(self, begun: Begun, call: Any) -> Any:
        limit = asyncio.timeout(begun.timeout)
        try:
            async with limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            raise RoutineTimeout(
                f"{begun.function.tag} ran longer than its timeout of {begun.timeout:g} s and was cancelled"
            ) from None

    async def _call(self, running: Running, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not running.begun.function.thread:
            return await fn(*args, **kwargs)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1000, thread_name_prefix="headgate routine")
        aside = _Aside(fn, args, kwargs)
        future = self.loop.run_in_executor(self._threads, contextvars.copy_context().run, aside)
        stopped: asyncio.CancelledError | None = None
        while not future.done():  # a thread cannot be interrupted, so neither can this wait
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError as error:
                stopped = error
                aside.cancel()
        if stopped is not None and aside.loop is None and not future.cancelled():
            future.exception()
            raise stopped
        return future.result()

    async def _refusal(self, running: Running) -> tuple[Kind, bytes] | None:
        """What the backpressure hook says; None: it may run."""
        assert self._backpressure is not None, "asked for"
        context = BackpressureContext(self._admitted, running.describe())
        try:
            refused = self._backpressure(context)
            if inspect.isawaitable(refused):
                refused = await refused
            refused = bool(refused)
        except BaseException as error:
            if running.cancels or running.stopped:
                raise
            _log.exception("the backpressure hook raised; %s is refused", running.begun.function.tag)
            return "exhausted", f"its backpressure hook raised {type(error).__name__}: {error}".encode()
        if refused:
            return "exhausted", b"its backpressure hook refused the task"
        running.admitted = True
        self._admitted += 1
        return None

    def unseat(self, running: Running) -> None:
        """It needs no thread to itself any more: it has ended, or waits for others."""
        if running.seated:
            running.seated = False
            self._threads_free.release()

    def _end(self, running: Running, kind: Kind, payload: bytes) -> None:
        self.running.pop((running.session, running.begun.number), None)
        self._admitted -= running.admitted
        self.unseat(running)
        swallowed = running.cancels > 0 and kind != "cancelled"
        self._send(Outcome(running.session, running.begun.number, kind, payload, swallowed))

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
        try:
            self._server.call_soon_threadsafe(self._deliver, outcomes)
        except RuntimeError:  # the server is gone: so is whoever waited
            pass


class _Aside:
    """A call in a thread: a plain function, or an async one on a loop of its own."""

    def __init__(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn: Any = fn
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs
        self.loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def __call__(self) -> Any:
        result = call_in_thread(self.fn, self.args, self.kwargs)
        if not inspect.iscoroutine(result):
            return result
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            return runner.run(self._follow(result))

    async def _follow(self, coroutine: Any) -> Any:
        self._task = asyncio.current_task()
        if self._cancelled and self._task is not None:
            self._task.cancel()
        return await coroutine

    def cancel(self) -> None:
        """From the task loop: cancel it if it can be."""
        self._cancelled = True
        if self.loop is not None and self._task is not None:
            try:
                self.loop.call_soon_threadsafe(self._task.cancel)
            except RuntimeError:  # it has just ended
                pass
