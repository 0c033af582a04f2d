"""An event loop on which nothing sleeps.

How the loop jumps
==================
An asyncio loop turns like this: run what is ready; ask the selector for I/O, waiting until the next timer is due at the
most; move due timers to what is ready; again. A `VirtualLoop` changes two answers in that turn and leaves the rest of
asyncio alone. ``time()`` returns a number kept here, and the selector, where the turn would wait, does not. Asked to
wait, it knows that nothing is ready, and the first of these that applies decides:

1. Real I/O has come, or another thread has called in: take it, time stands.
2. Somebody awaits `settle`: wake them, time stands.
3. Work runs *outside*: a job in an executor, or a block of `VirtualLoop.outside`. Wait for it really. On virtual time
   it takes no time at all, so no timer may overtake it.
4. A timer is set: time *becomes* its ``when()``.
5. Sockets are registered, or other threads live, and might still call in: wait for them really.
6. Nothing can ever happen again: `Hang`.

Real waits (3 and 5) end after `patience` real seconds, with a `Hang` too: a test that stands still for ever is worse
than one that must say ``patience=60``.

Exact time
----------
Time is never added up. A jump copies the timer's own float, so ``loop.time() == when`` holds inside its callback.
asyncio also fires what is due within the clock's resolution, about a nanosecond; here the resolution is the distance to
the next float, so timers at 0.3 and at 0.1 + 0.2 fire one after the other, each at its own time. Timers of the same
time fire in the order in which they were set, which asyncio's heap alone does not promise.

Threads
-------
`VirtualLoop.sleep` stands in for ``time.sleep``. In the loop's own thread it moves time: the thread blocks, timers come
late, as in life. In an executor's thread it sets a timer and takes the job off the list of what runs outside until that
timer fires: ten threads that sleep five seconds take five seconds together.

The price
---------
The turn itself is asyncio's, and so `_ready`, `_scheduled` and `_clock_resolution` are read or set here although their
names are private. They have not changed from 3.4 to 3.14. And a peer in another process cannot know that time jumps:
guard a real socket with a timer, and the timer wins (use ``with loop.outside("the peer"):`` around the wait).
"""

from __future__ import annotations

import asyncio
import collections
import functools
import heapq
import itertools
import math
import selectors
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent import futures
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

from headgate.core.pool_executor import PoolExecutor
from headgate.core.threads import Threads, living_threads
from headgate.errors import InvalidArgument
from headgate.testing.waiting import Hang, describe_all

__all__ = ["VirtualLoop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Ready = list[tuple[selectors.SelectorKey, int]]

_FURNITURE: weakref.WeakSet[threading.Thread] = weakref.WeakSet(threading.enumerate())
"""Threads older than this module: a test runner's, a debugger's. They never call in, and must not delay a `Hang`."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer. `headgate.testing.run` is the usual way to one.

    `start` is its first time, `limit` how many virtual seconds may pass, `patience` how many real seconds it waits for
    threads and sockets before it calls them a hang.
    """

    _ready: collections.deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float
    _default_executor: futures.Executor | None
    _closed = True  # until asyncio's __init__ says otherwise: else __del__ trips over a loop that refused its arguments

    if TYPE_CHECKING:

        def _check_closed(self) -> None: ...
        def _check_thread(self) -> None: ...

    def __init__(self, *, start: float = 0.0, limit: float = 1e7, patience: float = 5.0) -> None:
        if not math.isfinite(start):
            raise InvalidArgument(f"start must be a finite number, got {start!r}")
        if not limit > 0 or not patience > 0:
            raise InvalidArgument(f"limit and patience must be > 0, got {limit!r} and {patience!r}")
        self._real = _Selector(self._polled, self._idle)
        super().__init__(self._real)
        self._own_files = len(self._real.get_map())  # the self-pipe: no stranger can write to it unseen
        self._limit, self._patience = limit, patience
        self._last = start + limit
        self._turns = itertools.count()
        self._settlers: list[_Settler] = []
        self._outside: dict[object, str] = {}
        self._jobs: dict[object, _Job] = {}
        self._crew: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._here = threading.local()
        self._dozing: set[threading.Event] = set()
        self._set(start)

    # -- time ----------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Block this thread for so many virtual seconds: ``time.sleep`` on this loop's time."""
        if not seconds >= 0:
            raise InvalidArgument(f"a sleep must be >= 0 seconds, got {seconds!r}")
        if not self.is_running() or asyncio._get_running_loop() is self:
            self._move(self._now + seconds)
        else:
            self._doze(self._now + seconds)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Set a timer as asyncio does; timers of the same time fire in the order in which they were set."""
        self._check_closed()
        if self.get_debug():
            self._check_thread()
        timer = _Timer(when, callback, args, self, context)
        timer.join(self._scheduled, next(self._turns))
        return timer

    def _set(self, now: float) -> None:
        self._now = now
        # asyncio fires timers *below* now + resolution, and this sum is exactly the next float after now.
        self._clock_resolution = math.nextafter(now, math.inf) - now

    def _move(self, when: float) -> None:
        if when > self._last or not math.isfinite(when):
            raise self._hang(f"time ran past {self._limit:g} virtual seconds", "Pass limit= if it may take longer.")
        self._set(when)

    def _next(self) -> float | None:
        """When the first timer is due. One at infinity never is, and neither is one at nan."""
        when = self._scheduled[0].when() if self._scheduled else math.inf
        return when if when < math.inf else None

    # -- the selector's two questions ----------------------------------------------------------------------------------

    def _polled(self) -> None:
        """A turn has something to do. Whoever waits for the loop to settle waits one turn more, but not for ever."""
        for settler in self._settlers:
            settler.turns -= 1
            if settler.turns < 0:
                settler.give_up()
        self._settlers = [settler for settler in self._settlers if not settler.future.done()]

    def _idle(self) -> Ready:
        """A turn has nothing to do, and would wait."""
        if self._ready:  # another thread called in since the turn began; its wake-up may still be on the way
            return []
        if self._settlers:
            settlers, self._settlers = self._settlers, []
            for settler in settlers:
                settler.wake()
            return []
        if any(map(self._can_end, self._outside)):
            return self._wait("work outside the loop did not end: " + ", ".join(self._outside.values()))
        when = self._next()
        if when is not None:
            self._move(when)
            return []
        strangers = self._strangers()
        if strangers:
            return self._wait(f"nothing came from {strangers}")
        raise self._hang("nothing is ready, no timer is set, and nobody else can wake the loop")

    def _wait(self, failure: str) -> Ready:
        ready = self._real.wait(self._patience)
        if ready or self._ready:
            return ready
        raise self._hang(f"{failure} (waited {self._patience:g} real seconds)", "Pass patience= if it takes longer.")

    def _strangers(self) -> str:
        files = len(self._real.get_map()) - self._own_files
        me, known = threading.current_thread(), (_FURNITURE, self._crew)
        threads = [t.name for t in living_threads() if t is not me and not any(t in group for group in known)]
        found = [f"{files} registered file{'s' * (files > 1)}"] if files else []
        return " and ".join(found + ([f"threads {', '.join(threads)}"] if threads else []))

    def _hang(self, why: str, remedy: str = "") -> Hang:
        tasks = asyncio.all_tasks(self)
        who = f"Who waits:\n{describe_all(tasks)}" if tasks else "No task is pending."
        return Hang(f"at {self._now:.12g} s {why}. {remedy}{' ' if remedy else ''}{who}")

    # -- settling ------------------------------------------------------------------------------------------------------

    async def settled(self, turns: int = 1000) -> None:
        """Return when nothing is ready any more, with time where it was."""
        settler = _Settler(self.create_future(), turns)
        self._settlers.append(settler)
        await settler.future

    # -- what runs outside ---------------------------------------------------------------------------------------------

    @contextmanager
    def outside(self, what: str) -> Generator[None, None, None]:
        """Inside the block time does not jump: something real, named `what`, is being waited for."""
        ticket = object()
        self._outside[ticket] = what
        try:
            yield
        finally:
            del self._outside[ticket]

    def run_in_executor(
        self, executor: futures.Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a job as asyncio does; virtual time stands until the job has ended and its result has arrived."""
        self._check_closed()
        pool = executor if executor is not None else self._default()
        ticket = object()
        # Only plain threads run a closure; a pool of processes would have to pickle it.
        threaded = type(pool) in (futures.ThreadPoolExecutor, Threads)
        call: Callable[..., T] = functools.partial(self._work, ticket, func) if threaded else func
        self._outside[ticket] = _label(func)
        try:
            job = pool.submit(call, *args)
        except BaseException:
            del self._outside[ticket]
            raise
        future: asyncio.Future[T] = asyncio.wrap_future(job, loop=self)
        if isinstance(pool, PoolExecutor) and pool.runs_on(self):
            del self._outside[ticket]  # it is inside: time passes for it as for everything on this loop
            return future
        self._jobs[ticket] = _Job(pool, job, future, over=self.create_future())
        # Both must be over: a cancelled future leaves its thread at work, and a thread that is done may be ahead of its
        # result. Each of the two tells when it ends, and whoever comes second closes the ticket.
        future.add_done_callback(lambda _: self._close_ticket(ticket))
        job.add_done_callback(lambda _: self._from_thread(self._close_ticket, ticket))
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """As asyncio's. Its timeout counts only what the jobs sleep: virtual time does not pass while they work."""
        # First on jumping time, for a job may be inside `sleep`; then on standing time, for the join is real.
        await asyncio.gather(*[job.over for job in self._jobs.values() if job.pool is self._default_executor])
        with self.outside("the shutdown of the default executor"):
            if sys.version_info >= (3, 12):
                await super().shutdown_default_executor(timeout)
            else:
                await super().shutdown_default_executor()

    def close(self) -> None:
        """Close the loop as asyncio does, and wake the threads that sleep on its virtual time."""
        super().close()
        for alarm in list(self._dozing):
            alarm.set()

    def _default(self) -> futures.Executor:
        if self._default_executor is None:
            self.set_default_executor(futures.ThreadPoolExecutor(thread_name_prefix="asyncio"))
        assert self._default_executor is not None
        return self._default_executor

    def _work(self, ticket: object, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """A job, in its thread: known by its ticket while it runs, and as idle crew afterwards."""
        self._crew.add(threading.current_thread())
        self._here.ticket = ticket
        try:
            return func(*args)
        finally:
            self._here.ticket = None

    def _can_end(self, ticket: object) -> bool:
        """Whether a job goes on in real time; not if it queues behind threads that all sleep on virtual time."""
        job = self._jobs.get(ticket)
        if job is None or job.work.running() or job.work.done():
            return True
        dozing = sum(other.pool is job.pool and key not in self._outside for key, other in self._jobs.items())
        return dozing < getattr(job.pool, "_max_workers", math.inf)

    def _close_ticket(self, ticket: object) -> None:
        job = self._jobs.get(ticket)
        if job is not None and job.work.done() and job.arrival.done():
            del self._jobs[ticket]
            self._outside.pop(ticket, None)
            if not job.over.done():
                job.over.set_result(None)

    def _from_thread(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self.call_soon_threadsafe(callback, *args)

    # -- threads that sleep --------------------------------------------------------------------------------------------

    def _doze(self, until: float) -> None:
        alarm = threading.Event()
        self._dozing.add(alarm)
        try:
            self.call_soon_threadsafe(self._tuck_in, getattr(self._here, "ticket", None), until, alarm)
            alarm.wait()
        except RuntimeError:
            return  # the loop is closed, and its time is over; had it closed a moment later, it had set the alarm
        finally:
            self._dozing.discard(alarm)

    def _tuck_in(self, ticket: object, until: float, alarm: threading.Event) -> None:
        label = self._outside.pop(ticket, None)

        def rouse() -> None:
            if label is not None:
                self._outside[ticket] = label
            alarm.set()

        self.call_at(until, rouse)


@dataclass(frozen=True, slots=True)
class _Job:
    """A call in an executor: the work as its thread sees it, its arrival as the loop sees it, and both over."""

    pool: futures.Executor
    work: futures.Future[Any]
    arrival: asyncio.Future[Any]
    over: asyncio.Future[None]


class _Selector(selectors.DefaultSelector):
    """A real selector that asks its loop what to do instead of waiting."""

    def __init__(self, polled: Callable[[], None], idle: Callable[[], Ready]) -> None:
        super().__init__()
        self._polled, self._idle = polled, idle

    def select(self, timeout: float | None = None) -> Ready:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            self._polled()
            return ready
        return self._idle()

    def wait(self, seconds: float) -> Ready:
        """Wait in real time for files that are ready, at most so many seconds."""
        return super().select(seconds)


class _Timer(asyncio.TimerHandle):
    __slots__ = ("turn",)

    turn: int
    _scheduled: bool

    def join(self, timers: list[asyncio.TimerHandle], turn: int) -> None:
        self.turn = turn
        heapq.heappush(timers, self)
        self._scheduled = True  # so that cancel() tells the loop, which sweeps when many are cancelled

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        if isinstance(other, _Timer) and self.when() == other.when():
            return self.turn < other.turn
        return self.when() < other.when()


class _Settler:
    """A call of `settle` that waits until the loop has nothing to do."""

    def __init__(self, future: asyncio.Future[None], turns: int) -> None:
        self.future, self.allowed, self.turns = future, turns, turns

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def give_up(self) -> None:
        if not self.future.done():
            self.future.set_exception(
                Hang(f"the loop did not settle within {self.allowed} turns: its callbacks keep making new ones")
            )


def _label(func: Callable[..., object]) -> str:
    """What a job is called: its function's name, found behind ``partial`` and behind the context of ``to_thread``."""
    while isinstance(func, functools.partial):
        in_context = isinstance(getattr(func.func, "__self__", None), Context) and func.args
        func = func.args[0] if in_context else func.func
    return f"{getattr(func, '__qualname__', type(func).__qualname__)}()"
