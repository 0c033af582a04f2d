"""How the workers of a pool are introduced to each other, so that routines on one can call routines on another."""

from __future__ import annotations

import json

from headgate._version import __version__
from headgate.errors import HeadgateError
from headgate.workers.model import WorkerMetadata
from headgate.workers.options import ChannelOptions
from headgate.workers.protocol.messages import Peer


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
