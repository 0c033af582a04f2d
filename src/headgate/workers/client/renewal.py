"""Sessions that take the place of others with the same worker, without a gap.

A session is replaced before its connection gets too old, when nobody has used it for a while, and when its worker
advertises other options or another address. The next one is opened first, and is used from when it is open; the old one
then finishes its calls. If the next one does not open, the old one stays in use, and another is tried later. A session
that nobody uses needs no such care: the one in its place opens with the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.workers.client.availability import Openings
    from headgate.workers.client.balancing import Roster
    from headgate.workers.client.connection import Connection, Happening
    from headgate.workers.model import WorkerMetadata


class Renewals:
    """Replaces the sessions of a dispatcher.

    `make` makes a connection that is not open, `introduce` tells it of the other workers, and `end` closes it when its
    calls have ended. `gone` are those that are not in the roster and not closed.
    """

    def __init__(
        self,
        roster: Roster[Connection],
        openings: Openings,
        gone: set[Connection],
        make: Callable[[WorkerMetadata], Connection],
        introduce: Callable[[Connection], None],
        end: Callable[[Connection], None],
    ) -> None:
        self._roster = roster
        self._openings = openings
        self._gone = gone
        self._make = make
        self._introduce = introduce
        self._end = end
        self._opening: set[Connection] = set()

    def update(self, known: Connection, metadata: WorkerMetadata) -> None:
        """Note what a worker says of itself now. If it is to be reached in another way, that is used from now on."""
        before, known.metadata = known.metadata, metadata
        if (before.address, before.options, before.secure) == (metadata.address, metadata.options, metadata.secure):
            return
        if known.is_begun:
            self._open_next(known)
        else:
            self._take_over(known, self._make(metadata))

    def happened(self, connection: Connection, happening: Happening) -> bool:
        """Act on what a connection tells. True: nobody else need hear it."""
        current = self._roster.get(connection.metadata.uid)
        if happening in ("aging", "idle"):
            if current is connection and happening == "aging":
                self._open_next(connection)
            elif current is connection:
                self._take_over(connection, self._make(connection.metadata))
            return True
        if connection not in self._opening:
            # The worker of a session that only finishes its calls is told of by the session in its place.
            return current is not None and current is not connection and happening not in ("lost", "closed")
        self._opening.discard(connection)
        if happening != "open":
            if current is not None:
                current.lifetime.again()
            self._end(connection)
        elif current is None or current.session.epoch > connection.session.epoch:
            self._end(connection)  # the worker has left, or another was quicker
        else:
            self._gone.discard(connection)
            self._take_over(current, connection)
        return happening != "open"

    def _take_over(self, old: Connection, following: Connection) -> None:
        self._roster.replace(old.metadata.uid, following)
        self._introduce(following)
        if old.blocked:
            following.block(old)
        old.give_no_room()
        self._openings.forget(old)
        self._end(old)

    def _open_next(self, connection: Connection) -> None:
        following = self._make(connection.metadata)
        self._opening.add(following)
        self._gone.add(following)  # so that it is closed with the others
        following.open()
