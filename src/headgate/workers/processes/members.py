"""A worker as its pool knows it."""

from __future__ import annotations

import os

from headgate.workers.model import WorkerState
from headgate.workers.processes.local_worker import LocalWorker


class Member:
    """A worker that the pool started."""

    __slots__ = ("failure", "lost", "replaced", "stopping", "view", "worker")

    def __init__(self, worker: LocalWorker) -> None:
        self.worker: LocalWorker = worker
        self.failure: str = ""
        self.lost: str = ""
        """Why it was ended, if it could not be reached."""
        self.replaced: str = ""
        """Why it was ended, if routines kept it from its work."""
        self.stopping: bool = False
        self.view: WorkerState = "starting"


def is_dead(pid: int) -> bool:
    """Has this process ended, though nobody may have noticed yet? (Linux; elsewhere it is taken to live.)"""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except FileNotFoundError:
        return os.path.isdir("/proc/self")
    except OSError:
        return False
