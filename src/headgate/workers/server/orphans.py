"""Reaping, in a worker, what the children of routines left behind.

A worker is a child subreaper: a process whose parent ends becomes a child of the worker, so that it ends with it. When
such an orphan ends, nobody waits for it, and it would stay a zombie for as long as the worker lives. So the worker
reaps it. It must never reap a process that a routine started itself: its exit status belongs to whoever waits for it
(subprocess, asyncio, multiprocessing, `os.waitpid`).

How to tell them apart: Linux keeps the children of each thread apart. A process that a routine starts is a child of the
thread that started it, and no routine runs on the main thread; an orphan is given to the main thread. There is one way
for a process of a routine to come to the main thread: the thread that started it ended before it. So a child of the
main thread is left alone, whatever became of it, if

- it was seen as the child of another thread, or was there before the first routine, or
- it was made by `os.fork` (noted at once, by a hook), or
- a `subprocess.Popen` or a `multiprocessing.Process` that was not waited for stands for it.

What is left, and has been a zombie at two looks, is reaped. Not known in that way is only a process that C code started
in a thread which ended within a second, and that was not waited for within a second of its own end.

The worker looks each second while it has calls, and each five as long as it has children after that. (Not by SIGCHLD:
its handler may be somebody else's, such as uvloop's, and a look costs a microsecond while there are no children.)
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

BUSY, IDLE = 1.0, 5.0
"""Seconds between two looks: while there are calls, and while there are only children."""

_live: weakref.WeakSet[Orphans] = weakref.WeakSet()


class Adopted:
    """Decides which children are orphans that nobody waits for. Pure."""

    def __init__(self, own: Iterable[int] = ()) -> None:
        self.own: set[int] = set(own)
        """Children that this process started itself, and that were not waited for yet."""
        self.ended: set[int] = set()
        """Children that were zombies at the last look and will be reaped at the next."""

    def due(
        self,
        of_main: Iterable[int],
        of_others: Iterable[int],
        state: Callable[[int], str],
        claimed: Callable[[], Iterable[int]],
    ) -> list[int]:
        """Which to reap: children of the main thread that are no own ones and had ended at the last look already.

        `state` tells of a pid whether it "lives", has "ended", or is "gone" (no child any more); `claimed` which
        children somebody is known to wait for, and is asked only when there is something to reap.
        """
        self.own.update(of_others)
        self.own = {pid for pid in self.own if state(pid) != "gone"}
        ended = {pid for pid in of_main if pid not in self.own and state(pid) == "ended"}
        found = ended & self.ended
        if found:
            self.own.update(found.intersection(claimed()))
            found -= self.own
        self.ended = ended - found - self.own
        return sorted(found)


class Orphans:
    """Looks after the children of this process, on the running loop, for as long as there is reason to."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._timer: asyncio.TimerHandle | None = None
        self._pause = BUSY
        self._pid = os.getpid()
        self._works = sys.platform == "linux" and os.path.exists(f"/proc/self/task/{self._pid}/children")
        self._adopted = Adopted(_children(self._pid) if self._works else ())
        _live.add(self)

    def begin(self) -> None:
        """There may be children from now on."""
        if self._works and (self._timer is None or self._pause != BUSY):
            self._look_in(BUSY)

    def _look_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._pause = seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        busy = self._busy()
        if self.reap() or busy:
            self._look_in(BUSY if busy or self._adopted.ended else IDLE)

    def reap(self) -> bool:
        """Reap the orphans that ended. False: there are no children, and so no descendants."""
        if _state(None) == "gone":
            return False
        others: list[int] = []
        try:
            for thread in map(int, os.listdir("/proc/self/task")):
                others += _children(thread) if thread != self._pid else ()
        except OSError:  # no descriptors now: the next look will do
            return True
        for pid in self._adopted.due(_children(self._pid), others, _state, _claimed):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
        return True

    def forked(self) -> None:
        """In the thread that called `os.fork`: note its child."""
        if os.getpid() == self._pid:
            self._adopted.own.update(_children("thread-self"))


def _children(thread: int | str) -> list[int]:
    """The children of one thread of this process; none, if it has ended or cannot be looked at."""
    path = "/proc/thread-self/children" if thread == "thread-self" else f"/proc/self/task/{thread}/children"
    try:
        with open(path, "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _state(pid: int | None) -> str:
    """How this child is, without reaping it; None: whether there is any."""
    kind, number = (os.P_ALL, 0) if pid is None else (os.P_PID, pid)
    try:
        ended = os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "gone"
    return "lives" if ended is None else "ended"


def _claimed() -> set[int]:
    """The processes that objects of subprocess and multiprocessing stand for, and that were not waited for."""
    found: set[Any] = set()
    popen = getattr(sys.modules.get("subprocess"), "Popen", None)
    if popen is not None:
        kinds = [popen]
        for kind in kinds:
            kinds += kind.__subclasses__()
        for one in gc.get_referrers(*kinds):
            if isinstance(one, popen) and getattr(one, "returncode", None) is None:
                found.add(getattr(one, "pid", None))
    processes = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
    found.update(getattr(getattr(one, "_popen", None), "pid", None) for one in list(processes))
    return {pid for pid in found if isinstance(pid, int)}


def _after_fork() -> None:
    for orphans in list(_live):
        orphans.forked()


os.register_at_fork(after_in_parent=_after_fork)
