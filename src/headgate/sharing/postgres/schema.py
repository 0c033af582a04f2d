"""The tables of a store, in the schema `headgate`, and whether this role may use them.

- `texts`: what `SharedState` keeps. Changes of one that is not durable are committed with ``synchronous_commit = off``:
  a server that crashes may lose those of the last half second, although they were acknowledged.
- `members`: one row for each live member. The table is UNLOGGED, which is the answer to that loss: after a crash, and
  after a failover to a standby, PostgreSQL empties it. So whenever a text may have gone back to an older one, all
  members that held something by the newer one take part again under new ids. (After a clean restart nothing is lost,
  and the table is as it was.) `former` is the id that the member had before: it has given up what it held under that.
- `members_since`: since when `members` is complete, which has one row and is emptied with it. Whoever finds it empty
  writes the time. A member of before may not have noticed yet that it lost its row, because it is cut off: it counts as
  alive for as long as its lease may stand. The time at which the server started would not do: a standby that takes over
  has run for long, and a server of which one process crashed runs on after it has emptied these tables.
- `journals` and `chunks`: the journals of pools, see `postgres_journal`.

Everything here is asked when a connection is made, and not again.
"""

from __future__ import annotations

from typing import Any, Final

from headgate.errors import StoreFormatTooNew
from headgate.sharing.postgres.address import Address
from headgate.sharing.postgres.errors import SCHEMA, Trouble, Verdict, missing_grant, read_only

FORMAT: Final = 1
"""Raised when an older release could misread what a newer one writes."""

_LOCK: Final = 7_450_962_114_330_271_853
"""The advisory lock under which the tables are made. Any number that nobody else uses."""

_TABLES: Final = f"""
CREATE TABLE {SCHEMA}.texts (
    key text PRIMARY KEY,
    version bigint NOT NULL,
    at double precision NOT NULL,
    expires double precision,
    state bytea NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
CREATE INDEX expiring ON {SCHEMA}.texts (expires) WHERE expires IS NOT NULL;
CREATE UNLOGGED TABLE {SCHEMA}.members (
    id text PRIMARY KEY,
    lease_until timestamptz NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    former text NOT NULL
) WITH (fillfactor = 50);
CREATE UNLOGGED TABLE {SCHEMA}.members_since (at timestamptz NOT NULL);
INSERT INTO {SCHEMA}.members_since VALUES (to_timestamp(0));
CREATE TABLE {SCHEMA}.journals (
    id bytea PRIMARY KEY,
    pool_id bytea NOT NULL,
    epoch bigint NOT NULL,
    seq bigint NOT NULL,
    size bigint NOT NULL,
    member text NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    opened_at double precision NOT NULL
) WITH (fillfactor = 50);
CREATE TABLE {SCHEMA}.chunks (
    journal bytea NOT NULL REFERENCES {SCHEMA}.journals (id) ON DELETE CASCADE,
    n bigint NOT NULL,
    lines bytea NOT NULL,
    PRIMARY KEY (journal, n)
);
CREATE TABLE {SCHEMA}.format (version integer NOT NULL);
INSERT INTO {SCHEMA}.format VALUES ({FORMAT});
"""

_NEEDS: Final = {
    "texts": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "members": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "members_since": ("SELECT", "INSERT"),
    "journals": ("SELECT", "INSERT", "UPDATE"),
    "chunks": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "format": ("SELECT",),
}

_ASK_PLACE: Final = f"""
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean AS read_only,
       quote_ident(current_user) AS role, quote_ident(current_database()) AS database,
       has_database_privilege(current_database(), 'CREATE') AS may_make_schema,
       has_schema_privilege(oid, 'USAGE') AS may_use, has_schema_privilege(oid, 'CREATE') AS may_make_tables,
       CASE WHEN has_schema_privilege(oid, 'USAGE') THEN to_regclass('{SCHEMA}.format') IS NOT NULL END AS has_tables
FROM (SELECT to_regnamespace('{SCHEMA}') AS oid) AS found
"""

_ASK_RIGHTS: Final = f"""
SELECT string_agg(DISTINCT wanted.right, ', ') AS rights,
       string_agg(DISTINCT '{SCHEMA}.' || wanted.relation, ', ') AS tables
FROM unnest($1::text[], $2::text[]) AS wanted (relation, "right")
WHERE to_regclass('{SCHEMA}.' || wanted.relation) IS NULL
   OR NOT has_table_privilege('{SCHEMA}.' || wanted.relation, wanted.right)
"""


async def prepare(connection: Any, address: Address) -> None:
    """Make the tables if they are not there. Trouble if this role may not use them, or they are of a newer release."""
    place = await connection.fetchrow(_ASK_PLACE)
    if place["read_only"]:
        raise read_only(address)
    if place["may_use"] is False:
        grant = f"GRANT USAGE ON SCHEMA {SCHEMA} TO {place['role']}"
        raise missing_grant(address, f"the role {place['role']} may not use the schema {SCHEMA}", grant)
    if not place["has_tables"]:
        await _make(connection, address, place)
    relations, rights = zip(*((table, right) for table, rights in _NEEDS.items() for right in rights), strict=True)
    missing = await connection.fetchrow(_ASK_RIGHTS, relations, rights)
    if f"{SCHEMA}.format" not in (missing["tables"] or ""):
        _check_format(await connection.fetchval(f"SELECT max(version) FROM {SCHEMA}.format"), address)
    if missing["rights"]:
        grant = f"GRANT {missing['rights']} ON {missing['tables']} TO {place['role']}"
        raise missing_grant(address, f"the role {place['role']} lacks rights on {missing['tables']}", grant)


def _check_format(found: int | None, address: Address) -> None:
    if found is None or found > FORMAT:
        error = StoreFormatTooNew(
            f"the schema {SCHEMA} of {address.shown} has format {found}, and this release reads formats up to {FORMAT}",
            remedy="Upgrade headgate, or use another database.",
        )
        raise Trouble(Verdict.REFUSED, error)


async def _make(connection: Any, address: Address, place: Any) -> None:
    """Make schema and tables. Many processes may begin at once: one makes them, the others wait and find them."""
    async with connection.transaction():
        await connection.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        again = await connection.fetchrow(_ASK_PLACE)
        if again["may_use"] is None:
            if not place["may_make_schema"]:
                grant = f"GRANT CREATE ON DATABASE {place['database']} TO {place['role']}"
                raise missing_grant(address, f"the role {place['role']} may not make the schema {SCHEMA}", grant)
            await connection.execute(f"CREATE SCHEMA {SCHEMA}")
        elif again["has_tables"]:
            return
        elif not again["may_make_tables"]:
            grant = f"GRANT CREATE ON SCHEMA {SCHEMA} TO {place['role']}"
            raise missing_grant(address, f"the role {place['role']} may not make tables in the schema {SCHEMA}", grant)
        await connection.execute(_TABLES)
