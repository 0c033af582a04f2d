"""`Sampler`: looks at all pools of this process, every second, from a thread of its own.

It is there only while somebody looks on: a page, a terminal or a metrics server. Pools keep what it reads anyway, so
they pay for a look and not for each task. What belongs to an event loop is read on that loop: a look is one callback,
and one that takes long makes the next ones rarer, so that looking costs at most a hundredth of the loop's time. A loop
that does not answer in time is shown as held, with what was seen last.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Final

from headgate import registry
from headgate._version import __version__
from headgate.core.clock import clock
from headgate.core.redaction import log_exception, redact
from headgate.core.topics import subscribe
from headgate.observe.feed import Feed
from headgate.observe.history import PoolHistory
from headgate.registry import LivePool
from headgate.tasks.runtime.view import Ended, endings, shown

PERIOD: Final = 1.0
ROWS: Final = 200
"""Tenants, resources and workers that a look lists of each pool."""
PATIENCE: Final = 0.3
"""Seconds that a loop has to answer."""
SHARE: Final = 0.01
"""Of a loop's time that looking may cost."""

Listener = Callable[[dict[str, Any]], object]


class Sampler:
    """What is seen of this process, now and lately. Its attributes may be read from any thread."""

    def __init__(self) -> None:
        self.feed: Feed = Feed()
        self.history: dict[int, PoolHistory] = {}
        """By the number of the pool's entry in the registry."""
        self._dearest = 0.0
        self.latest: dict[str, Any] = self._whole([])
        self._uids: dict[int, set[str]] = {}  # the workers that were seen lately, by the number of their pool
        self._losses: dict[int, int] = {}
        self._views: dict[int, dict[str, Any]] = {}
        self._held: dict[int, float] = {}  # since when a loop does not answer
        self._listeners: list[Listener] = []
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._looking = threading.Lock()
        self._stop_workers: Callable[[], None] | None = None

    # -- beginning and ending ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look."""
        self.feed.start()
        self._stop_workers = subscribe(self._on_worker, "workers.lifecycle")
        self._thread = threading.Thread(target=self._run, name="headgate observe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking, and wait for the thread."""
        self._end.set()
        self.feed.stop()
        if self._stop_workers is not None:
            self._stop_workers()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: there is no thread that looks, and nobody to tell."""
        self._thread = None
        self.feed.abandon()
        self.stop()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call this after each look with what was seen, in the thread of the sampler. Returns ``stop``."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def _run(self) -> None:
        while not self._end.wait(max(PERIOD, self._dearest / SHARE)):
            try:
                self.look()
            except Exception:
                log_exception("headgate.observe", "looking at the pools failed")

    # -- looking -------------------------------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """Look at all pools now, and tell the listeners. From any thread; an event loop that calls it is held."""
        with self._looking:
            self.feed.refill()
            entries = registry.pools()
            asked = [(entry, _asked(entry, self._history(entry))) for entry in entries]
            wait_for([future for _, future in asked], timeout=PATIENCE)
            now, wall = clock.now(), clock.wall()
            seen = [view for entry, future in asked if (view := self._taken(entry, future, now)) is not None]
            for view in seen:
                if view["held"] is None:  # else it is the last one, and says nothing of now
                    view["point"] = self.history[view["number"]].note(view, now, wall)
            self._forget({entry.number for entry in entries})
            self.latest = latest = self._whole(seen)
        for listener in list(self._listeners):
            try:
                listener(latest)
            except Exception:
                log_exception("headgate.observe", "telling what was seen failed")
        return latest

    def _history(self, entry: LivePool) -> PoolHistory:
        return self.history.setdefault(entry.number, PoolHistory(entry.kind))

    def _taken(self, entry: LivePool, future: Future[_Seen], now: float) -> dict[str, Any] | None:
        """Return the view of a pool, with what was counted; if its loop does not answer, the last one."""
        number = entry.number
        if not future.done():
            since = self._held.setdefault(number, now - PATIENCE)
            last = self._views.get(number) or {"kind": entry.kind, "name": entry.name, "number": number}
            return {**{name: value for name, value in last.items() if name != "point"}, "held": round(now - since, 1)}
        self._held.pop(number, None)
        seen = future.result()
        if seen.view is None:
            return None
        self._dearest = max(0.5 * self._dearest, seen.cost)
        if seen.ended is not None:
            self._count(self.history[number], seen.ended)
        view = {**seen.view, "name": shown(seen.view["name"]), "held": None}
        if entry.kind == "workers":
            view["memory"] = sum(one["memory"] or 0 for one in view.get("workers", ()))
            view["losses"] = self._losses.get(number, 0)
            before = {one["uid"] for one in self._views.get(number, {}).get("workers", ())}
            self._uids[number] = before | {one["uid"] for one in view.get("workers", ())}
        self._views[number] = view
        return view

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

    def _on_worker(self, event: Any) -> None:
        """Count a worker that was lost, for the pool in which it was seen."""
        if event.name == "worker_lost":
            for number, uids in list(self._uids.items()):
                if event.uid in uids:
                    self._losses[number] = self._losses.get(number, 0) + 1

    def _forget(self, numbers: set[int]) -> None:
        by_number: tuple[dict[int, Any], ...] = (self.history, self._views, self._held, self._uids, self._losses)
        for known in by_number:
            for number in [number for number in known if number not in numbers]:
                known.pop(number, None)

    def _whole(self, pools: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "schema": registry.SCHEMA,
            "version": __version__,
            "pid": os.getpid(),
            "program": redact(program_name()),
            "started_at": registry.STARTED_AT,
            "at": clock.wall(),
            "cost": round(self._dearest, 5),
            "pools": pools,
        }


class _Seen:
    """What one callback on the loop of a pool has read."""

    __slots__ = ("cost", "ended", "view")

    def __init__(self) -> None:
        self.view: dict[str, Any] | None = None
        self.ended: Ended | None = None
        self.cost = 0.0


def _asked(entry: LivePool, history: PoolHistory) -> Future[_Seen]:
    """Have a pool looked at, on its event loop if it has one that runs."""
    future: Future[_Seen] = Future()

    def look() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(_looked(entry, history))
            except BaseException as error:
                future.set_exception(error)

    loop = entry.loop
    if loop is not None and loop.is_running() and loop is not asyncio._get_running_loop():
        try:
            loop.call_soon_threadsafe(look)
            return future
        except RuntimeError:  # it was closed just now
            pass
    look()
    return future


def _looked(entry: LivePool, history: PoolHistory) -> _Seen:
    began, seen = clock.now(), _Seen()
    seen.view = entry.view(ROWS)
    pool = entry.pool
    if entry.kind == "tasks" and pool is not None and hasattr(pool, "__executor__"):
        seen.ended = endings(pool.__executor__(), history.seen)
        history.seen = seen.ended.total
    seen.cost = clock.now() - began
    return seen


def program_name() -> str:
    """Return how a person would call this program: its script or module."""
    name = sys.argv[0] if sys.argv and sys.argv[0] else "python"
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "builtins"):
        return f"python -m {str(spec.name).removesuffix('.__main__')}"
    return os.path.basename(name) if name not in ("-c", "-") else "python"


_lock = threading.Lock()
_shared: Sampler | None = None
_users = 0


def acquire() -> Sampler:
    """Return the sampler of this process, which looks until each who acquired it has released it."""
    global _shared, _users
    with _lock:
        if _shared is None:
            _shared = Sampler()
            _shared.start()
        _users += 1
        return _shared


def release() -> None:
    """Need the sampler no more."""
    global _shared, _users
    with _lock:
        _users -= 1
        last, _shared = (_shared, None) if not _users else (None, _shared)
    if last is not None:
        last.stop()


def _forked() -> None:
    global _shared, _users, _lock
    parents, _shared, _users, _lock = _shared, None, 0, threading.Lock()
    if parents is not None:
        parents.abandon()


os.register_at_fork(after_in_child=_forked)
