"""`KeptLocks`: locks that stay held until the workers of a killed process have ended.

A shared store counts a process as alive for as long as a file of it is locked (flock). The workers of that process
outlive it by up to two seconds if it is killed, and what they run still uses its slots. So the keeper of its workers,
which ends them and knows when the last one has gone, holds the same open file: the kernel frees a lock of flock when
the last copy of the descriptor is closed. To give the lock up earlier, the store unlocks it by name, which counts for
all copies.

The stores and the workers do not know each other. A pool that uses both passes the `KeptLocks` of its workers to the
store (`SharesLock`).
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol, runtime_checkable


class LockKeeper(Protocol):
    """A process that holds open files until all workers below it have ended."""

    def hold(self, file: int) -> None:
        """Have the process keep a copy of this descriptor. Thread-safe."""

    def drop(self, file: int) -> None:
        """Have the process close its copy of this descriptor, which may be closed here by now. Thread-safe."""


class KeptLocks:
    """The locks that the keeper of one WorkerPool holds too, now and whenever there is a new keeper. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._files: set[int] = set()
        self._keeper: LockKeeper | None = None
        _all.add(self)

    @property
    def are_kept(self) -> bool:
        """True while there is a keeper, so while there may be workers."""
        return self._keeper is not None

    def add(self, file: int) -> None:
        """Have this locked file kept until `remove`. Adding it again changes nothing."""
        with self._guard:
            if file not in self._files:
                self._files.add(file)
                if self._keeper is not None:
                    self._keeper.hold(file)

    def remove(self, file: int) -> None:
        """Have this file kept no longer. Called before the file is closed here: its number may soon name another."""
        with self._guard:
            if file in self._files:
                self._files.remove(file)
                if self._keeper is not None:
                    self._keeper.drop(file)

    def keep_in(self, keeper: LockKeeper | None) -> None:
        """Have all files kept by this process from now on, or by none."""
        with self._guard:
            self._keeper = keeper
            if keeper is not None:
                for file in self._files:
                    keeper.hold(file)

    def forget(self) -> None:
        """Start over in a forked child: files and keeper belong to the parent."""
        self._guard = threading.Lock()
        self._files, self._keeper = set(), None


@runtime_checkable
class SharesLock(Protocol):
    """A store that counts this process as alive for as long as a file is locked."""

    def share_lock(self, locks: KeptLocks) -> None:
        """Count this process as alive until those who keep these locks have ended too. May be said again."""


_all: weakref.WeakSet[KeptLocks] = weakref.WeakSet()


def _forked() -> None:
    for locks in list(_all):
        locks.forget()


os.register_at_fork(after_in_child=_forked)
