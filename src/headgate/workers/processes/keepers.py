"""The port `Keepers`: what has the processes of workers started, signals them, and reports what becomes of them.

`LocalKeepers` is one keeper of this machine. If it is killed, the kernel kills its workers, and another is started for
the next one.
"""

from __future__ import annotations

import asyncio
import marshal
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from headgate.workers.processes.keeper_client import KeeperClient, end_strays

if TYPE_CHECKING:
    from headgate.workers.processes.local_worker import LocalWorker
    from headgate.workers.processes.placement import Launch

OnReport = Callable[[Mapping[str, Any]], None]
"""Is told that a worker has "started", "said" something or "exited", as a keeper reports it (`keeper`), or that those
of some uids are "gone" with what kept them."""


class Keepers(Protocol):
    """What has processes started for the workers of one pool. Used on one event loop, except where it says."""

    def open(self, launch: Launch, on_report: OnReport) -> None:
        """Learn with what workers are started, and who is told of them. Called once."""

    def prepare(self, workers: int) -> None:
        """Get ready for so many workers in all. WorkerStartFailed: that is not possible."""

    def spawn(self, worker: LocalWorker) -> None:
        """Have the process of a worker started. WorkerStartFailed: that is not possible."""

    def signal(self, uid: str, number: int) -> None:
        """Have a signal sent to a worker, if it still lives."""

    def vacate(self, uid: str) -> None:
        """Note that another worker is to take the place of this one, beside it at first."""

    def clean_up(self, worker: LocalWorker) -> None:
        """Remove what was prepared for a worker that ended before it was ready."""

    def is_dead(self, worker: LocalWorker) -> bool:
        """Tell whether the process of a worker is known to have ended, though that was not reported yet. From any
        thread."""
        ...

    async def close(self) -> None:
        """End what is left of the workers, and all that kept them."""

    def abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """The same from another loop than the one on which it was opened. That one does not run."""


class LocalKeepers:
    """Has workers of this machine started by a keeper."""

    def __init__(self) -> None:
        self.keeper: KeeperClient | None = None
        """What speaks to the keeper; None: no worker was wanted yet."""
        self._ended = False  # and there is no other yet
        self._forks = True  # workers are forks of a fork server
        self._uids: dict[str, bool] = {}  # of its workers, and whether they were ready
        self._farewell: asyncio.Task[None] | None = None  # of a keeper that was killed
        self._closing = False
        self._launch: Launch
        self._on_report: OnReport

    def open(self, launch: Launch, on_report: OnReport) -> None:
        """Note the settings. The keeper is started when workers are wanted."""
        self._launch, self._on_report = launch, on_report

    def prepare(self, workers: int) -> None:
        """Start the keeper, if workers are wanted and there is none."""
        if workers and self.keeper is None:
            self._start()

    def _start(self) -> KeeperClient:
        folder = None if self.keeper is None else self.keeper.folder
        over_tls = self._launch.credentials is not None and self._launch.host is not None
        keeper = KeeperClient(self._hear, several=self._forks, folder=folder, logs_refusals=over_tls)
        keeper.start()
        keeper.listen()
        self._launch.kept_locks.keep_in(keeper)
        self.keeper, self._ended = keeper, False
        return keeper

    def spawn(self, worker: LocalWorker) -> None:
        """Have the keeper start a process; if there is no keeper any more, start another first."""
        keeper = self._start() if self.keeper is None or self._ended else self.keeper
        launch = self._launch
        worker.spawn(keeper, launch.limits, launch.host, launch.lifetime, launch.setup)
        self._uids[worker.uid] = False

    def signal(self, uid: str, number: int) -> None:
        """Have the keeper send a signal."""
        if self.keeper is not None:
            self.keeper.signal(uid, number)

    def vacate(self, uid: str) -> None:
        """Do nothing: there is room for one more on this machine."""

    def clean_up(self, worker: LocalWorker) -> None:
        """Remove the file with the settings of a worker that ended before it read them."""
        if self.keeper is not None:
            worker.clean_up(self.keeper)

    def is_dead(self, worker: LocalWorker) -> bool:
        """Look at the process itself: the keeper's report may be under way."""
        return is_dead(worker.pid)

    def _hear(self, report: Mapping[str, Any]) -> None:
        event = report["event"]
        if event == "gone":
            self._gone()
            return
        if event == "said" and marshal.loads(report["said"]).get("ready"):
            self._uids[report["uid"]] = True
        elif event == "exited":
            self._uids.pop(report["uid"], None)
        self._on_report(report)

    def _gone(self) -> None:
        """The keeper was killed, and the kernel has killed its workers."""
        if self._closing or self.keeper is None:
            return
        old, uids = self.keeper, self._uids
        self._ended, self._uids = True, {}
        self._forks = any(uids.values())  # else it may have been the fork server's fault
        self._farewell = asyncio.get_running_loop().create_task(old.close())
        self._on_report({"event": "gone", "uids": list(uids)})
        end_strays(old.directory)

    async def close(self) -> None:
        """End the keeper, which ends what is left of its workers."""
        self._closing = True
        if self.keeper is not None:
            await self.keeper.close()
            self._launch.kept_locks.keep_in(None)

    def abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hang up on the keeper and wait for its end: nobody hears it any more, so it ends everything."""
        self._closing = True
        if self.keeper is not None:
            self.keeper.let_go() if loop.is_closed() else self.keeper.hang_up()
            self.keeper.wait()
            self._launch.kept_locks.keep_in(None)


def is_dead(pid: int) -> bool:
    """Tell whether a process has ended, even if nobody has noticed yet (Linux; elsewhere it is taken to live)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except FileNotFoundError:
        return os.path.isdir("/proc/self")
    except OSError:
        return False
