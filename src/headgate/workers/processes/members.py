"""A worker as its placement knows it."""

from __future__ import annotations

import asyncio

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
        """Tell how the worker is, as far as was told."""
        if self.stopping:
            return "stopping"
        if self.replaced:
            return "lost"
        return "ready" if self.is_ready else "starting"
