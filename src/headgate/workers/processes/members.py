"""A worker of this machine as its placement knows it."""

from __future__ import annotations

import asyncio
import os

from headgate.workers.model import WorkerState
from headgate.workers.processes.local_worker import LocalWorker


class Member:
    """A worker that was started for a pool, and what is known of it."""

    __slots__ = ("cause", "ended", "expired", "failure", "is_ready", "lost", "replaced", "stopping", "worker")

    def __init__(self, worker: LocalWorker) -> None:
        self.worker: LocalWorker = worker
        self.failure: str = ""
        """Why it will never be ready, in its own words."""
        self.cause: bytes = b""
        """The exception for that reason, pickled."""
        self.expired: str = ""
        """Why another is to take its place. It works until that is ready."""
        self.lost: str = ""
        """Why it was ended, if it could not be reached."""
        self.replaced: str = ""
        """Why it was ended, if routines kept it from its work."""
        self.stopping: bool = False
        """Is it to finish its calls and end?"""
        self.is_ready: bool = False
        """Has it said that it takes calls?"""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when its process has ended."""

    def state(self) -> WorkerState:
        """Tell how the worker is. One that has died is lost, though its keeper may not have said so yet."""
        if self.stopping:
            return "stopping"
        if self.replaced:
            return "lost"
        if not self.is_ready:
            return "starting"
        return "lost" if is_dead(self.worker.pid) else "ready"


def is_dead(pid: int) -> bool:
    """Tell whether a process has ended, even if nobody has noticed yet (Linux; elsewhere it is taken to live)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except FileNotFoundError:
        return os.path.isdir("/proc/self")
    except OSError:
        return False
