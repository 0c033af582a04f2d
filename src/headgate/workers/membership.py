"""Which discovered workers a pool uses: the tags, the security, the version and the lease decide. Pure.

A pool hears of workers through a discovery. `Membership` is told each event, and says what the dispatchers of the pool
are to hear: only of workers that the pool may use. The others are remembered with the reason, a limited number of them,
because anybody on a network can announce workers.

A lease counts workers that answer. While those that have its places say nothing, others are tried beside them, so that
a worker which is there does not wait for a long row of addresses where nobody is. When as many answer as the lease
allows, the others wait again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from headgate.errors import InvalidArgument
from headgate.workers.model import WorkerMetadata

MOST_REFUSED = 256
"""How many workers that are not used are remembered with their reason."""
MOST_WAITING = 1024
"""How many workers wait for a place of the lease."""
MOST_TRIED = 64
"""How many workers are tried beyond the lease, at most, while those that have its places say nothing."""
_TRIED_FOR_EACH = 3  # of those that say nothing: 50 of them are past in a few turns, with a lease of 2 as well

Happened = Literal["worker-added", "worker-updated", "worker-dropped"]


class Change(NamedTuple):
    """What the dispatchers of a pool are to hear."""

    type: Happened
    metadata: WorkerMetadata


class Membership:
    """The discovered workers of one pool: those it uses, those that wait for a place, those it does not use and why."""

    def __init__(
        self, *, tags: Iterable[str] = (), lease: int | None = None, secure: bool = False, version: str = ""
    ) -> None:
        self._tags = frozenset(tags)
        self._lease = lease
        self._secure = secure
        self._version = version
        self._own: set[str] = set()
        self._admitted: dict[str, WorkerMetadata] = {}
        self._answering: set[str] = set()  # of the admitted
        self._silent: set[str] = set()  # of the admitted that do not answer
        self._waiting: dict[str, WorkerMetadata] = {}
        self._refused: dict[str, str] = {}

    @property
    def admitted(self) -> list[WorkerMetadata]:
        """The workers that the pool uses, in the order in which they came; those that answer first, if more are tried
        than the lease allows."""
        workers = list(self._admitted.values())
        if self._lease is not None and len(workers) > self._lease:
            workers.sort(key=lambda metadata: metadata.uid not in self._answering)
            del workers[self._lease :]
        return workers

    @property
    def known(self) -> list[WorkerMetadata]:
        """The workers that the pool uses, and those that wait for a place."""
        return [*self._admitted.values(), *self._waiting.values()]

    @property
    def refused(self) -> dict[str, str]:
        """By uid, why workers are not used. At most `MOST_REFUSED`, the latest."""
        full = f"the lease of {self._lease} is used up"
        return {**self._refused, **dict.fromkeys(self._waiting, full)}

    def owns(self, uid: str) -> list[Change]:
        """Note that the pool started this worker itself: what a discovery says of it is ignored."""
        self._own.add(uid)
        self._refused.pop(uid, None)
        return self._dropped(uid)

    def disowns(self, uid: str) -> None:
        """Note that a worker which the pool started has ended."""
        self._own.discard(uid)

    def heard(self, type: Happened, metadata: WorkerMetadata) -> list[Change]:
        """Take an event of the discovery; return what the dispatchers are to hear."""
        uid = metadata.uid
        if type not in ("worker-added", "worker-updated", "worker-dropped"):
            raise InvalidArgument(f"the type of an event must be worker-added, -updated or -dropped, got {type!r}")
        if uid in self._own:
            return []
        if type == "worker-dropped":
            self._refused.pop(uid, None)
            return self._dropped(uid)
        reason = self.reason_against(metadata)
        if reason:
            self._refuse(uid, reason)
            return self._dropped(uid)
        self._refused.pop(uid, None)
        known = self._admitted.get(uid)
        if known is not None:
            if known == metadata:
                return []
            self._admitted[uid] = metadata
            return [Change("worker-updated", metadata)]
        if self._is_full:
            self._wait(metadata)
            return []
        self._waiting.pop(uid, None)
        self._admitted[uid] = metadata
        return [Change("worker-added", metadata)]

    def silent(self, uid: str) -> list[Change]:
        """Have others tried beside a worker that has not answered yet."""
        if uid not in self._admitted or uid in self._answering:
            return []
        self._silent.add(uid)
        return self._filled()

    def answers(self, uid: str) -> list[Change]:
        """Note that a session with a worker is open. If as many answer as the lease allows, the others wait again, this
        one too if it came too late."""
        if uid not in self._admitted or self._lease is None:
            return []
        self._silent.discard(uid)
        if len(self._answering) < self._lease:
            self._answering.add(uid)
        if len(self._answering) < self._lease:
            return []
        late = [metadata for other, metadata in self._admitted.items() if other not in self._answering]
        for metadata in late:
            del self._admitted[metadata.uid]
            self._silent.discard(metadata.uid)
            self._wait(metadata)
        return [Change("worker-dropped", metadata) for metadata in late]

    def uses(self, uid: str) -> bool:
        """Whether a worker has a place."""
        return uid in self._admitted

    def out_of_reach(self, uid: str) -> list[Change]:
        """Give the place of a worker that cannot be reached to one that waits for it, if one does."""
        metadata = self._admitted.get(uid)
        self._answering.discard(uid)
        if metadata is None or not self._waiting:
            return []
        changes = self._dropped(uid)
        self._wait(metadata)
        return changes

    def reason_against(self, metadata: WorkerMetadata) -> str:
        """Say why the pool may not use a worker; "": it may."""
        if self._tags and not self._tags & metadata.tags:
            return f"it has none of the tags {', '.join(sorted(self._tags))}"
        if metadata.secure != self._secure:
            if self._secure:
                return "it has no credentials, and a pool with credentials uses secure workers only"
            return "it has credentials, and a pool without credentials uses insecure workers only: pass credentials="
        return version_trouble(metadata.version, self._version)

    def _dropped(self, uid: str) -> list[Change]:
        self._waiting.pop(uid, None)
        metadata = self._admitted.pop(uid, None)
        if metadata is None:
            return []
        self._answering.discard(uid)
        self._silent.discard(uid)
        return [Change("worker-dropped", metadata), *self._filled()]

    @property
    def _is_full(self) -> bool:
        if self._lease is None:
            return False
        tried = min(MOST_TRIED, _TRIED_FOR_EACH * len(self._silent))
        return len(self._admitted) >= self._lease + tried

    def _filled(self) -> list[Change]:
        """Give places that are free to workers that wait."""
        changes: list[Change] = []
        while self._waiting and not self._is_full:
            following = self._waiting.pop(next(iter(self._waiting)))
            self._admitted[following.uid] = following
            changes.append(Change("worker-added", following))
        return changes

    def _wait(self, metadata: WorkerMetadata) -> None:
        if metadata.uid in self._waiting or len(self._waiting) < MOST_WAITING:  # who came first is not forgotten
            self._waiting[metadata.uid] = metadata

    def _refuse(self, uid: str, reason: str) -> None:
        self._refused.pop(uid, None)
        self._refused[uid] = reason
        while len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]


_MAJOR = re.compile(r"(\d{1,6})(?:\.\d{1,6})*(?:[-+.]?[a-z]\S{0,40})?", re.ASCII)


def version_trouble(theirs: str, ours: str) -> str:
    """Say why workers of that release cannot be used by this one; "": they can.

    Releases with the same first number understand each other. What both can speak is settled when they connect.
    """
    read = _MAJOR.fullmatch(theirs)
    if read is None:
        return f"its version {theirs[:40]!r} cannot be read"
    own = _MAJOR.fullmatch(ours)
    if own is not None and read[1] != own[1]:
        return f"its version {theirs} is not compatible with {ours}: the first numbers differ"
    return ""
