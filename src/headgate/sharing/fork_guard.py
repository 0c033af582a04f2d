"""Keeps what belongs to one process out of the processes that are forked from it.

A connection of SQLite, a listening socket and a lock of flock(2) must not be used by two processes. A forked child gets
them all the same, and it gets the locks of other threads as they stood: a mutex inside SQLite that another thread held
at that moment is held for ever in the child. So whoever owns such things does three things with a `ForkGuard`:

- It works on them only inside ``with guard:``. A fork waits until no thread is inside.
- It passes a function that is called in the child, which lets go of them without touching them.
- What must not even be freed in the child (freeing a connection of SQLite closes it, and closing may write) is given to
  `never_free`. The price is a little memory in the child.

Two guards are never held at once by one thread, because a fork takes all of them, in no particular order.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()
_changing = threading.Lock()
_held: list[ForkGuard] = []


class ForkGuard:
    """A lock that a fork takes too, and a function for the child."""

    def __init__(self, in_child: Callable[[], None]) -> None:
        """`in_child` is called in a forked child, on its only thread. It must not raise."""
        self.in_child: Callable[[], None] = in_child
        self.lock: threading.RLock = threading.RLock()
        with _changing:
            _guards.add(self)

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.lock.release()


def never_free(thing: object) -> None:
    """Keep an object until the process ends, also while the interpreter clears everything at its end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _before() -> None:
    _changing.acquire()
    _held[:] = _guards
    for guard in _held:
        guard.lock.acquire()


def _in_parent() -> None:
    for guard in _held:
        guard.lock.release()
    _held.clear()
    _changing.release()


def _in_child() -> None:
    global _changing
    _changing = threading.Lock()
    guards = list(_held)
    _held.clear()
    for guard in guards:
        guard.lock = threading.RLock()
        guard.in_child()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
