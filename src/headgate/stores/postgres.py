"""`PostgresStore`: shared budgets, health and journals in a PostgreSQL database, for processes on many machines.

    store = PostgresStore("postgresql://user:password@host/database")

Its tables are in the schema `headgate` and are made on first use. Making a store does nothing yet: the first use starts
its thread, which connects, takes part as a member and renews its lease. `sharing/postgres` runs the steps and keeps the
lease, `postgres_journal` keeps journals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from headgate.core.checks import is_finite, named_options
from headgate.errors import InvalidArgument
from headgate.sharing.postgres.address import parsed
from headgate.sharing.postgres.backend import PostgresBackend, stored_key
from headgate.sharing.postgres.errors import require_asyncpg
from headgate.sharing.transactions import Transactions
from headgate.stores.codec import refuse_pickle
from headgate.stores.jsonl.writer import JsonLinesJournal
from headgate.stores.postgres_journal import Journals, open_journal
from headgate.stores.shared import SharedStore


class PostgresStore(SharedStore):
    """Shared state and journals in a PostgreSQL database.

    `dsn` is an address as libpq knows it; what it leaves out is taken from PGHOST, PGPASSWORD and the like, or a
    passfile. `lease` is after how many seconds without a sign of life a member counts as gone: a process that was
    killed, stopped, or cut off. A process renews it every third of that, in a thread of the store; code that holds the
    GIL longer than the lease loses it.

    Texts that are not durable survive a clean restart of the server. If it crashes, or another takes over, changes of
    the last half second may be lost, and then all members have lost their leases too.

    One object serves all threads and event loops of a process. A forked child takes part as a member of its own.
    """

    _closing = 3.0

    @named_options
    def __init__(self, dsn: str, *, lease: float = 15.0, codec: Literal["json"] = "json") -> None:
        refuse_pickle(codec)
        require_asyncpg()
        self._address = address = parsed(dsn)
        if not is_finite(lease) or lease <= 0:
            raise InvalidArgument(f"lease must be > 0 seconds, got {lease!r}")
        self.lease: float = float(lease)
        """Seconds after which a member that does not renew its lease is gone."""
        seconds = self.lease  # not `self`: the thread would keep it alive
        name = f"headgate-postgres {address.place}"
        super().__init__(
            Transactions(
                name,
                address.shown,
                lambda host: PostgresBackend(address, seconds, host),
                normal=stored_key,
                at_exit=1.0,
            )
        )
        self._journals: Journals | None = None

    def __repr__(self) -> str:
        return f"<PostgresStore {self._address.shown}{' closed' if self.is_closed else ''}>"

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> JsonLinesJournal:
        """Lock and read the journal of this pool, or make it. See `stores.port.Store`."""
        journals = self._transactions.call(self._journals_on).result()
        return open_journal(self, journals, pool_id, about, keep)

    async def _journals_on(self, backend: PostgresBackend) -> Journals:
        """The journals of this process. Those that were opened before a fork are the parent's."""
        if self._journals is None or self._journals.backend is not backend:
            self._journals = Journals(self._transactions, backend)
        return self._journals
