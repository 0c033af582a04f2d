"""Which discovered workers a pool misses: those that were lost and have not been replaced. Pure.

A discovery that hears of a dead worker forgets it, and so would the pool: with half of the fleet gone, "1 of 1 ready"
would be all there is to see. So a worker that was lost stays expected after its discovery has dropped it, until another
takes its place, or for an hour. A worker that said that it stops, as on SIGTERM, is not missed.
"""

from __future__ import annotations

from typing import Final

from headgate.workers.membership import Change
from headgate.workers.model import WorkerMetadata

REMEMBERED: Final = 3600.0
"""Seconds that a lost worker is expected to come back, or to be replaced, after its discovery has dropped it."""
JUST_LEFT: Final = 5.0
"""Seconds after its drop in which the loss of a worker is the reason of the drop: a discovery may hear of a death
before the connection does. One that is lost later was to leave, and had calls to finish."""
MOST: Final = 1024
"""How many are remembered of each kind."""


class MissingWorkers:
    """Counts the losses of discovered workers, and remembers those that nothing has replaced."""

    def __init__(self) -> None:
        self.losses: int = 0
        """How often a worker was lost."""
        self._told: dict[str, WorkerMetadata] = {}  # of which the discovery tells
        self._lost: dict[str, bool] = {}  # of those; True: another has replaced it
        self._left: dict[str, tuple[WorkerMetadata, float]] = {}  # dropped, and not lost as far as is known
        self._absent: dict[str, tuple[WorkerMetadata, float]] = {}  # lost and dropped

    def answers(self, uid: str) -> None:
        """Note that a session with a worker is open."""
        self._lost.pop(uid, None)

    def lost(self, uid: str, now: float) -> None:
        """Count the loss of a worker, once if several event loops tell of it."""
        if uid in self._lost or uid in self._absent:
            return
        left = self._left.pop(uid, None)
        if left is None and uid not in self._told:
            return  # it was dropped and replaced meanwhile
        self.losses += 1
        if left is None:
            self._lost[uid] = False
        elif now - left[1] <= JUST_LEFT:
            _keep(self._absent, left[0], now)

    def heard(self, change: Change, now: float) -> None:
        """Take what the dispatchers of the pool are told of a worker."""
        metadata = change.metadata
        self._absent = {uid: one for uid, one in self._absent.items() if now - one[1] < REMEMBERED}
        if change.type != "worker-dropped":
            if metadata.uid not in self._told:
                self._added(metadata)
            self._told[metadata.uid] = metadata
        else:
            self._told.pop(metadata.uid, None)
            replaced = self._lost.pop(metadata.uid, None)
            if replaced is None:
                _keep(self._left, metadata, now)
            elif not replaced:
                _keep(self._absent, metadata, now)

    def absent(self, now: float) -> list[WorkerMetadata]:
        """Return the workers that were lost, of which the discovery tells no longer, and which nothing replaced."""
        return [metadata for metadata, since in list(self._absent.values()) if now - since < REMEMBERED]

    def _added(self, metadata: WorkerMetadata) -> None:
        """Let a worker take its own place, that of one on the same host, or the one that is empty for longest.

        A worker that was killed and started again may be announced before its old self is dropped.
        """
        self._left.pop(metadata.uid, None)
        if self._absent.pop(metadata.uid, None) is not None:
            return
        host = _host(metadata)
        if self._absent:
            same = (uid for uid, (other, _) in self._absent.items() if _host(other) == host)
            del self._absent[next(same, None) or next(iter(self._absent))]
            return
        for uid, replaced in self._lost.items():
            if not replaced and uid in self._told and _host(self._told[uid]) == host:
                self._lost[uid] = True
                return


def _host(metadata: WorkerMetadata) -> str:
    return metadata.address.rpartition(":")[0]


def _keep(kept: dict[str, tuple[WorkerMetadata, float]], metadata: WorkerMetadata, now: float) -> None:
    kept[metadata.uid] = metadata, now
    if len(kept) > MOST:
        del kept[next(iter(kept))]
