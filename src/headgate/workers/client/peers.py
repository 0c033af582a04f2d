"""How the workers of a pool are introduced to each other, so that routines on one can call routines on another."""

from __future__ import annotations

import json
import threading

from headgate._version import __version__
from headgate.errors import HeadgateError
from headgate.workers.model import WorkerMetadata
from headgate.workers.options import ChannelOptions
from headgate.workers.protocol.messages import Introduction, Peer


class Introductions:
    """The list by which the client of a pool introduces its workers to each other, from all its event loops.

    A dispatcher adds the workers that it uses from now on, and removes those that it lost or that left. If each told
    only of its own, one that has just begun on another loop, and has reached one worker, would make the workers drop
    all others. Each change makes another list with the next number.
    """

    def __init__(self, pool: str) -> None:
        self._lock = threading.Lock()  # dispatchers are on several threads
        self._peers: dict[str, Peer] = {}
        self._latest = Introduction(pool, [], 1)

    @property
    def latest(self) -> Introduction:
        """The list as it is now; the same object until it changes."""
        return self._latest

    def add(self, metadata: WorkerMetadata, uid: str) -> None:
        """Add a worker, or note how it is reached now. `uid`: as it calls itself; "": that is not known yet."""
        with self._lock:
            known = self._peers.get(metadata.uid)
            peer = as_peer(metadata, uid or (known.uid if known is not None else ""))
            if peer != known:
                self._peers[metadata.uid] = peer
                self._change()

    def remove(self, uid: str) -> None:
        """Remove a worker, by the uid of its metadata."""
        with self._lock:
            if self._peers.pop(uid, None) is not None:
                self._change()

    def _change(self) -> None:
        pool, _, number = self._latest
        self._latest = Introduction(pool, list(self._peers.values()), number + 1)


def as_peer(metadata: WorkerMetadata, uid: str) -> Peer:
    """Return what other workers are told of this one. `uid`: as it calls itself, which a list of addresses cannot tell;
    "": that is not known yet."""
    options = "" if metadata.options is None else json.dumps(metadata.options.to_dict())
    return Peer(uid or metadata.uid, metadata.address, metadata.secure, options)


def usable_peers(peers: list[Peer], *, secure: bool) -> list[WorkerMetadata]:
    """Return the peers that a worker may call: with credentials only secure ones, without only insecure ones.

    Unix sockets are reached by one user of one machine only, and pass always.
    """
    return [
        WorkerMetadata(peer.uid, peer.address, 0, __version__, secure=peer.secure, options=_options(peer.options))
        for peer in peers
        if peer.secure == secure or peer.address.startswith("unix:")
    ]


def _options(text: str) -> ChannelOptions | None:
    """Read options. Those that cannot be read, because a later release knows others, are left out."""
    try:
        given = json.loads(text) if text else None
        return ChannelOptions.from_dict(given) if isinstance(given, dict) else None
    except (ValueError, HeadgateError):
        return None
