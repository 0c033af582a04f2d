"""Keeping the table of texts small while it is written all the time.

Every change of a text leaves the old one behind, and one of more than 2 KB lies in a table beside it, of which
PostgreSQL reuses nothing before a VACUUM. Its own autovacuum comes once a minute: at a thousand exchanges a second the
files grow by more than 100 MB meanwhile. So whoever makes the thousandth change of a text asks for a VACUUM, on a
connection that is made for that. It waits for nobody (SKIP_LOCKED), and takes some milliseconds, because pages in which
nothing has changed are not read.

A role that does not own the table may not do that: the server says so in a warning, and autovacuum remains.
"""

from __future__ import annotations

import asyncio
from typing import Final

from headgate.sharing.postgres.errors import SCHEMA, Trouble
from headgate.sharing.postgres.link import Link, Server

EVERY: Final = 1_000
"""Versions of a text, by all members together, after which it is time."""

_VACUUM: Final = f"VACUUM (SKIP_LOCKED, TRUNCATE FALSE) {SCHEMA}.texts"

_SECONDS: Final = 300.0
"""How long it may take: a table of very many keys that was never vacuumed is read once."""


class Upkeep:
    """Asks for a VACUUM now and then."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None

    def changed(self, version: int) -> None:
        """Note that this store has made this version of a text."""
        if version % EVERY == 0 and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._vacuum())

    async def _vacuum(self) -> None:
        link = Link("upkeep", self._server, timeout=_SECONDS)
        try:
            await link.tell(_VACUUM)
        except Trouble:
            pass  # it is only for space, and is due again soon; whoever exchanges hears what is the matter
        finally:
            link.close()
