"""Finds what a block leaves behind: tasks, threads, open files, child processes.

Each kind is a snapshot, taken before and after as a dict from identity to what puts it into words; what is new is a
leak if it does not go away within `grace` seconds. Those are real seconds, read from the real clock and not from
headgate's: a thread ends when the machine lets it, whatever time a test pretends. Only leaks are put into words: a
suite takes a snapshot twice for each test, and most find nothing.

Files and children are read from /proc, and are not checked where there is none. Threads of C libraries that never
entered Python are invisible to all of this.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from types import TracebackType

from headgate.core.threads import current_frames, living_threads
from headgate.errors import InvalidArgument
from headgate.testing.waiting import Leak, describe, place

__all__ = ["no_leaks"]

Snapshot = dict[Hashable, Callable[[], str]]

_PAUSE = 0.005  # real seconds between two looks
_TURNS = 5  # that what is about to end has in any case: one collection of a large process may take a second


class no_leaks:  # noqa: N801 - used as `with no_leaks():`, where it reads as a word and not as a type
    """Raise `Leak` at the end of the block when something made inside it is still there after `grace` real seconds.

    ``async with no_leaks():`` lets the loop turn during the grace, so that cancelled tasks can end. With a plain
    ``with`` inside a coroutine they cannot, and must have ended before. A block that raises is not checked.
    """

    def __init__(
        self,
        *,
        tasks: bool = True,
        threads: bool = True,
        files: bool = True,
        children: bool = True,
        grace: float = 1.0,
    ) -> None:
        if not grace >= 0:
            raise InvalidArgument(f"grace must be >= 0 seconds, got {grace!r}")
        wanted: list[tuple[bool, Callable[[], Snapshot]]] = [
            (tasks, _tasks),
            (threads, _threads),
            (files, _files),
            (children, _children),
        ]
        self._looks = [look for yes, look in wanted if yes]
        self._grace = grace
        self._before: list[frozenset[Hashable]] = []

    def __enter__(self) -> None:
        self._before = [frozenset(look()) for look in self._looks]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            for _leaks in self._until_gone():
                time.sleep(_PAUSE)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            for _leaks in self._until_gone():
                await asyncio.sleep(0)  # no timer: on a virtual loop it would move time
                time.sleep(_PAUSE)  # noqa: ASYNC251 - blocks the loop for a moment, so that time stands

    def _until_gone(self) -> Iterator[list[str]]:
        """Yield the leaks as long as there are some and time is left, and at least a few times; then raise."""
        deadline = time.monotonic() + self._grace
        turns = 0
        while leaks := self._leaks():
            turns += 1
            if time.monotonic() >= deadline and turns > _TURNS:
                raise Leak(f"{len(leaks)} left behind:\n" + "\n".join(leaks))
            gc.collect()  # what nobody holds any more is closed by this, and Python warns of it in its own words
            yield leaks

    def _leaks(self) -> list[str]:
        return [
            words()
            for look, before in zip(self._looks, self._before, strict=True)
            for identity, words in look().items()
            if identity not in before
        ]


def _tasks() -> Snapshot:
    loop = asyncio._get_running_loop()
    return {task: partial(describe, task) for task in asyncio.all_tasks(loop)} if loop is not None else {}


def _threads() -> Snapshot:
    return {thread: partial(_thread, thread) for thread in living_threads()}


def _thread(thread: threading.Thread) -> str:
    frame = current_frames().get(thread.ident or 0)
    where = "its end" if frame is None else place(frame)
    return f"  {'daemon thread' if thread.daemon else 'thread'} {thread.name!r} at {where}"


def _files() -> Snapshot:
    tracker = _tracker("_fd")
    found: Snapshot = {}
    for fd in map(int, _listed("/proc/self/fd")):
        try:
            about = os.fstat(fd)  # a third of the time that its name takes; a removed file's number may come again
        except OSError:  # closed since it was listed, as the one that listed it always is
            continue
        if fd != tracker:
            found[fd, about.st_dev, about.st_ino, about.st_rdev] = partial(_file, fd)
    return found


def _file(fd: int) -> str:
    try:
        return f"  file {fd} -> {os.readlink(f'/proc/self/fd/{fd}')}"
    except OSError as error:
        return f"  file {fd}, closed since: {error}"


def _children() -> Snapshot:
    tracker = _tracker("_pid")
    found: Snapshot = {}
    for thread in _listed("/proc/self/task"):
        for pid in map(int, _text(f"/proc/self/task/{thread}/children").split()):
            if pid != tracker:
                found[pid] = partial(_child, pid)
    return found


def _child(pid: int) -> str:
    return f"  child {pid}: {_command(pid)}"


def _command(pid: int) -> str:
    if "State:\tZ" in _text(f"/proc/{pid}/status"):
        return "ended, and nobody waited for it"
    # A child on its way through exec has no command line for a moment, but always a name.
    words = _text(f"/proc/{pid}/cmdline") or _text(f"/proc/{pid}/comm")
    return words.replace("\0", " ").strip()


def _tracker(what: str) -> object:
    """Pid or file of multiprocessing's resource tracker: started once, kept till the end, nobody's leak."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    return getattr(getattr(module, "_resource_tracker", None), what, None)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""
