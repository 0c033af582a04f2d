"""`Sampler`: looks at all pools of this process, every second, from a thread of its own.

It is there only while somebody looks on: a page, a terminal or a metrics server. Pools keep what it reads anyway, so
they pay for a look and not for each task. What belongs to an event loop is read on that loop, in one callback for each
pool. What these cost makes the next looks rarer, so that looking costs at most a hundredth of a loop's time, and a
quarter of a second at once: who asks more often gets what was seen last. A loop that does not answer in time is shown
as held, with what was seen last.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any, Final

from headgate import registry
from headgate._version import __version__
from headgate.core.clock import clock
from headgate.core.redaction import log_exception, redact
from headgate.core.views import PoolLook, Unread
from headgate.observe.feed import Feed
from headgate.observe.history import PoolHistory
from headgate.registry import LivePool
from headgate.tasks.runtime.view import Ended, endings, shown

PERIOD: Final = 1.0
ROWS: Final = 200
"""Tenants, resources and workers that a look lists of each pool."""
PATIENCE: Final = 0.3
"""Seconds that a loop has to answer."""
LONGEST: Final = 1.0
"""More seconds for a loop that has begun to answer: a look at very many pools, or tasks, takes its time."""
SHARE: Final = 0.01
"""Of a loop's time that looking may cost."""
AT_ONCE: Final = 0.25
"""Seconds that looks may cost a loop beyond its share before they wait: several people may ask within a second."""

Listener = Callable[[dict[str, Any]], object]


class Sampler:
    """What is seen of this process, now and lately. Its attributes may be read from any thread."""

    def __init__(self) -> None:
        self.feed: Feed = Feed()
        self.history: dict[int, PoolHistory] = {}
        """By the number of the pool's entry in the registry."""
        self._costs: dict[int, float] = {}  # seconds that were spent since the last look, by the id of the loop
        self._cost = 0.0  # of the last looks, on the loop that they cost most
        self._excess, self._excess_at = 0.0, clock.now()  # what looks cost beyond the share, and when that was so
        self.latest: dict[str, Any] = self._snapshot([])
        """The last look, as values that JSON knows."""
        self.pools: list[PoolLook] = []
        """The pools that it saw."""
        self._views: dict[int, PoolLook] = {}
        self._held: dict[int, float] = {}  # since when a loop does not answer
        self._listeners: list[Listener] = []
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._looking = threading.RLock()
        self._is_looking = False  # the collector may run a destructor that asks, in the middle of a look

    # -- beginning and ending ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look."""
        self.feed.start()
        self._thread = threading.Thread(target=self._run, name="headgate observe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking, and wait for the thread."""
        self._end.set()
        self.feed.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: there is no thread that looks, also if it had begun to, and nobody to tell."""
        self._thread, self._looking, self._is_looking = None, threading.RLock(), False
        self.feed.abandon()
        self.stop()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call this after each look with what was seen, in the thread of the sampler. Returns ``stop``."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def _run(self) -> None:
        while not self._end.wait(self._pause()):
            try:
                self.look()
            except Exception:
                log_exception("headgate.observe", "looking at the pools failed")

    # -- looking -------------------------------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """Look at all pools now, and tell the listeners; or return what was seen last, if looks have cost too much.

        From any thread. An event loop that calls it is held meanwhile.
        """
        with self._looking:
            if self._is_looking or self._excess_now() > AT_ONCE:
                return self.latest
            self._is_looking = True
            try:
                self.latest = latest = self._snapshot(self._look_at_all())
            finally:
                self._is_looking = False
        for listener in list(self._listeners):
            try:
                listener(latest)
            except Exception:
                log_exception("headgate.observe", "telling what was seen failed")
        return latest

    def _look_at_all(self) -> list[dict[str, Any]]:
        """Look at all pools, count what has ended, and make a point of each."""
        self.feed.renew_budget()
        entries = registry.pools()
        asked = [(entry, _begin_look(entry, self._history(entry).seen, self._costs)) for entry in entries]
        _wait(asked)
        self._add_costs()
        now, wall = clock.now(), clock.wall()
        pools = [look for entry, future in asked if (look := self._look_of(entry, future, now)) is not None]
        seen = []
        for look in pools:
            seen.append({**look.to_dict(), "held": look.held})
            if look.held is None:  # else it is the last one, and says nothing of now
                point = self.history[look.number].note(look.state, now, wall)
                seen[-1] |= {} if point is None else {"point": point}
        self._drop_gone({entry.number for entry in entries})
        self.pools = pools
        return seen

    def _add_costs(self) -> None:
        """Add up what the callbacks cost, also late ones of earlier looks."""
        spent = max([self._costs.pop(loop, 0.0) for loop in list(self._costs)], default=0.0)
        self._excess, self._excess_at = self._excess_now() + spent, clock.now()
        self._cost = max(0.5 * self._cost, spent)

    def _excess_now(self) -> float:
        return max(0.0, self._excess - SHARE * (clock.now() - self._excess_at))

    def _pause(self) -> float:
        """Seconds until the next look."""
        return max(PERIOD, self._excess_now() / SHARE)

    def _history(self, entry: LivePool) -> PoolHistory:
        return self.history.setdefault(entry.number, PoolHistory(entry.kind))

    def _look_of(self, entry: LivePool, future: Future[_Seen], now: float) -> PoolLook | None:
        """Return how a pool is, and count what has ended; if its loop does not answer, how it was."""
        number = entry.number
        if not future.done() or future.exception() is not None:
            future.cancel()  # else the callbacks of many looks would wait for a loop that is held
            since = self._held.setdefault(number, now - PATIENCE)
            last = self._views.get(number) or PoolLook(entry.kind, entry.name, number, Unread())
            return replace(last, held=round(now - since, 1))
        self._held.pop(number, None)
        seen = future.result()
        if seen.look is None:
            return None
        if seen.ended is not None:  # only what is counted was seen: the tasks of a late answer come again
            self._count(self.history[number], seen.ended)
            self.history[number].seen = seen.ended.total
        self._views[number] = look = replace(seen.look, name=shown(seen.look.name))
        return look

    def _count(self, history: PoolHistory, ended: Ended) -> None:
        names: dict[Any, str | None] = {None: None}
        told = []
        for partition, status, submitted, started, finished in ended.tasks:
            if partition not in names:
                names[partition] = shown(partition)
            waited = None if started is None else started.now - submitted.now
            ran = None if started is None or finished is None else finished.now - started.now
            told.append((names[partition], status, waited, ran))
        history.count(told, ended.new)

    def _drop_gone(self, numbers: set[int]) -> None:
        by_number: tuple[dict[int, Any], ...] = (self.history, self._views, self._held)
        for known in by_number:
            for number in [number for number in known if number not in numbers]:
                known.pop(number, None)

    def _snapshot(self, pools: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "schema": registry.SCHEMA,
            "version": __version__,
            "pid": os.getpid(),
            "program": redact(program_name()),
            "started_at": registry.STARTED_AT,
            "at": clock.wall(),
            "cost": round(self._cost, 5),
            "pause": round(self._pause(), 1),
            "pools": pools,
        }


class _Seen:
    """What one callback on the loop of a pool has read."""

    __slots__ = ("ended", "look")

    def __init__(self) -> None:
        self.look: PoolLook | None = None
        self.ended: Ended | None = None


def _begin_look(entry: LivePool, counted: int, costs: dict[int, float]) -> Future[_Seen]:
    """Have a pool looked at, on its event loop if it has one that runs. `counted`: its tasks that ended before."""
    future: Future[_Seen] = Future()
    loop = entry.loop

    def look() -> None:
        if not future.set_running_or_notify_cancel():
            return
        began = clock.now()
        try:
            seen = _read(entry, counted)
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):  # Ctrl-C is meant for the program, not for who looks at it
                raise
            log_exception("headgate.observe", "looking at a pool failed")
        else:
            costs[id(loop)] = costs.get(id(loop), 0.0) + clock.now() - began
            future.set_result(seen)

    if loop is not None and loop.is_running() and loop is not asyncio._get_running_loop():
        try:
            loop.call_soon_threadsafe(look)
            return future
        except RuntimeError:  # it was closed just now
            pass
    look()
    return future


def _wait(asked: list[tuple[LivePool, Future[_Seen]]]) -> None:
    """Wait for the loops, and somewhat longer for those that have begun."""
    wait_for([future for _, future in asked], timeout=PATIENCE)
    begun = {entry.loop for entry, future in asked if future.done() or future.running()}
    wait_for([future for entry, future in asked if entry.loop in begun], timeout=LONGEST)


def _read(entry: LivePool, counted: int) -> _Seen:
    seen = _Seen()
    seen.look = entry.view(ROWS)
    pool = entry.pool
    if entry.kind == "tasks" and pool is not None and hasattr(pool, "__executor__"):
        try:
            seen.ended = endings(pool.__executor__(), counted)
        except RuntimeError:  # it changed while another thread looked at it: the next look counts them
            pass
    return seen


def program_name() -> str:
    """Return how a person would call this program: its script or module."""
    name = sys.argv[0] if sys.argv and sys.argv[0] else "python"
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "builtins"):
        return f"python -m {str(spec.name).removesuffix('.__main__')}"
    return os.path.basename(name) if name not in ("-c", "-") else "python"


_lock = threading.RLock()  # the collector may run a destructor that releases, in the middle of `acquire`
_shared: Sampler | None = None
_users = 0


def acquire() -> Sampler:
    """Return the sampler of this process, which looks until each who acquired it has released it."""
    global _shared, _users
    with _lock:
        if _shared is None:
            made = Sampler()
            made.start()
            _shared = made
        _users += 1
        return _shared


def release(sampler: Sampler | None = None) -> None:
    """Need the sampler no more. One that a forked child has inherited is nobody's there, and is left alone."""
    global _shared, _users
    with _lock:
        if not _users or sampler not in (None, _shared):
            return
        _users -= 1
        last, _shared = (_shared, None) if not _users else (None, _shared)
    if last is not None:
        last.stop()


def _forked() -> None:
    global _shared, _users, _lock
    parents, _shared, _users, _lock = _shared, None, 0, threading.RLock()
    if parents is not None:
        parents.abandon()


os.register_at_fork(after_in_child=_forked)
