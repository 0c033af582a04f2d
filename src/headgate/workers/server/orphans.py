"""Reaping of processes that the children of routines left behind in a worker.

A worker is a child subreaper: a process whose parent ends becomes a child of the worker, so that it ends with it. When
such an orphan ends, nobody waits for it, and it would stay a zombie as long as the worker lives. So the worker reaps
it. It must never reap a process that a routine started itself, because the exit status belongs to whoever waits for
that process (subprocess, asyncio, multiprocessing, `os.waitpid`).

How to tell them apart: Linux keeps the children of each thread apart. A process that a routine starts is a child of the
thread that started it, and no routine runs on the main thread; an orphan is given to the main thread. There is one way
for a process of a routine to come to the main thread: the thread that started it ended before it. So a child of the
main thread is left alone, whatever became of it, if

- it was seen as the child of another thread, or was there before the first routine, or
- it was made by `os.fork` (noted at once, by a hook), or
- a `subprocess.Popen` or a `multiprocessing.Process` that was not waited for stands for it.

Any other child that was a zombie at two checks is reaped. This is wrong in one case only: C code started the process in
a thread that ended within a second, and nobody waited for the process within a second of its end.

The worker checks each second while it has calls, and after that every five seconds as long as it has children. It does
not use SIGCHLD, because the handler may belong to somebody else, such as uvloop. A check costs a microsecond while
there are no children.
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
"""Seconds between two checks: while there are calls, and while there are only children."""

_live: weakref.WeakSet[Orphans] = weakref.WeakSet()


class Adopted:
    """The decision which children are orphans that nobody waits for. Pure."""

    def __init__(self, own: Iterable[int] = ()) -> None:
        self.own: set[int] = set(own)
        """Children that this process started itself, and that were not waited for yet."""
        self.ended: set[int] = set()
        """Children that were zombies at the last check and will be reaped at the next."""

    def due(
        self,
        of_main: Iterable[int],
        of_others: Iterable[int],
        state: Callable[[int], str],
        claimed: Callable[[], Iterable[int]],
    ) -> list[int]:
        """Return the children to reap: those of the main thread that are not own ones and had ended at the last check.

        `state` returns for a pid "lives", "ended" or "gone" (no child any more). `claimed` returns the children that
        somebody is known to wait for; it is called only when there is something to reap.
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
    """Reaps orphans of this process from the running loop, as long as there are calls or children."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._timer: asyncio.TimerHandle | None = None
        self._pause = BUSY
        self._pid = os.getpid()
        self._works = sys.platform == "linux" and os.path.exists(f"/proc/self/task/{self._pid}/children")
        self._adopted = Adopted(_children(self._pid) if self._works else ())
        _live.add(self)

    def begin(self) -> None:
        """Begin to check, because there may be children from now on."""
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
        """Note the child that was just forked. Called in the thread that called `os.fork`."""
        if os.getpid() == self._pid:
            self._adopted.own.update(_children("thread-self"))


def _children(thread: int | str) -> list[int]:
    """Return the children of one thread of this process; none if the thread has ended or cannot be examined."""
    path = "/proc/thread-self/children" if thread == "thread-self" else f"/proc/self/task/{thread}/children"
    try:
        with open(path, "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _state(pid: int | None) -> str:
    """Return the state of a child without reaping it; for None, "gone" if there are no children."""
    kind, number = (os.P_ALL, 0) if pid is None else (os.P_PID, pid)
    try:
        ended = os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "gone"
    return "lives" if ended is None else "ended"


def _claimed() -> set[int]:
    """Return the processes of `subprocess` and `multiprocessing` objects that were not waited for."""
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
