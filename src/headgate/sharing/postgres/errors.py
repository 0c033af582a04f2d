"""What an exception of asyncpg means: try again, give up, or fail this one transaction. And how to say it.

Nothing of asyncpg escapes from the store. The texts of the server are shown, because they say what is wrong; they never
contain a password. An exception that asyncpg raises while it reads the address may quote a part of it, so the text of
that is not shown. All errors are made outside of `except`, so that none carries the original one along.
"""

from __future__ import annotations

import ssl
from enum import Enum
from importlib.util import find_spec

from headgate.errors import HeadgateError, InvalidArgument, StoreUnreachable, StoreWriteFailed
from headgate.sharing.postgres.address import Address

SCHEMA = "headgate"
DIRECT = "Connect to the server directly, or use a pool of pgbouncer with pool_mode=session."


class Verdict(Enum):
    """What to do after a failure."""

    AGAIN = "the connection is broken or the server not ready: try again on a new one"
    REFUSED = "the server answers, and will give the same answer again until somebody changes something"
    FAILED = "this transaction failed; the connection is fine"


class Trouble(Exception):
    """A failure, explained. Internal: whoever called the store gets `error`."""

    def __init__(self, verdict: Verdict, error: HeadgateError) -> None:
        super().__init__(verdict, error)
        self.verdict: Verdict = verdict
        self.error: HeadgateError = error


_AGAIN = ("08", "40", "53300", "57", "25006", "25P02", "25P03")
"""Classes and codes of PostgreSQL after which another connection may do better: connections, conflicts, too many
connections, a server that shuts down or starts, one that is read-only, a transaction that the server ended."""
_POOLED = ("26000", "42P05")
"""A prepared statement that is not there, or there already: another session than the one it was made in."""


def require_asyncpg() -> None:
    """Raise InvalidArgument, with the remedy, if asyncpg is not installed."""
    if find_spec("asyncpg") is None:
        raise InvalidArgument(
            "PostgresStore needs the package asyncpg, which is not installed",
            remedy='Run: pip install "headgate[postgres]".',
        )


def explained(error: Exception, address: Address, *, silent_for: float | None = None) -> Trouble:
    """Say what an exception of a connection means. `silent_for`: we closed it after so many seconds of silence."""
    import asyncpg  # not above: only a store that is used needs it

    if silent_for is not None or isinstance(error, TimeoutError):
        seconds = f"{silent_for:g} s" if silent_for is not None else "the time allowed"
        return _again(address, f"no answer within {seconds}")
    if isinstance(error, asyncpg.PostgresError):
        return _from_server(error, address)
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return read_only(address)
    if isinstance(error, (asyncpg.InterfaceError, OSError, EOFError)):
        if isinstance(error, ValueError):  # ClientConfigurationError: quotes parts of the address
            return Trouble(Verdict.REFUSED, _bad_address())
        return _again(address, _text(error))
    if isinstance(error, asyncpg.InternalClientError):
        # A session that the server ends between two commands can leave asyncpg confused about its own state.
        return _again(address, str(error))
    if isinstance(error, ValueError):
        return Trouble(Verdict.REFUSED, _bad_address())
    return Trouble(Verdict.FAILED, StoreWriteFailed(f"{address.shown}: {type(error).__name__}: {error}"))


def pooled(address: Address) -> Trouble:
    """Make the failure for a pooler that gives each statement another session."""
    error = InvalidArgument(
        f"{address.shown} is a connection pooler that gives every transaction another session (pool_mode=transaction "
        "of pgbouncer): LISTEN does not work there",
        remedy=DIRECT,
    )
    return Trouble(Verdict.REFUSED, error)


def missing_grant(address: Address, what: str, grant: str) -> Trouble:
    """Make the failure for a role without a right."""
    return Trouble(Verdict.REFUSED, StoreWriteFailed(f"{address.shown}: {what}", remedy=f"Run: {grant}"))


def read_only(address: Address) -> Trouble:
    """Make the failure for a server that takes no writes now."""
    error = StoreUnreachable(
        f"{address.shown} is read-only: the server is a standby or in recovery, or default_transaction_read_only is on",
        remedy="Name the primary server; several hosts may be listed, as in postgresql://user@one:5432,two:5432/db.",
    )
    return Trouble(Verdict.AGAIN, error)


def _from_server(error: Exception, address: Address) -> Trouble:
    code = str(getattr(error, "sqlstate", None) or "")
    text = str(error)
    if code == "25006":
        return read_only(address)
    if code in _POOLED:
        return pooled(address)
    if code.startswith("28"):
        remedy = "Correct the user name or the password, or what pg_hba.conf allows."
        return Trouble(Verdict.REFUSED, StoreUnreachable(f"{address.shown} refuses the login: {text}", remedy=remedy))
    if code == "3D000":
        remedy = "Create the database (createdb), or correct its name at the end of the address."
        return Trouble(Verdict.REFUSED, StoreUnreachable(f"{address.place}: {text}", remedy=remedy))
    if code in ("42501", "42P01", "3F000", "42703"):
        return Trouble(Verdict.REFUSED, _rights(address, text))
    if code.startswith(_AGAIN):
        return _again(address, text)
    if code.startswith("53"):
        remedy = "Make room on the disk of the server, then try again."
        return Trouble(Verdict.FAILED, StoreWriteFailed(f"{address.shown} cannot write: {text}", remedy=remedy))
    return Trouble(Verdict.FAILED, StoreWriteFailed(f"{address.shown}: {text}", remedy="Fix the cause named above."))


def _rights(address: Address, text: str) -> StoreWriteFailed:
    remedy = (
        f"Run: GRANT USAGE ON SCHEMA {SCHEMA} TO the role; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN "
        f"SCHEMA {SCHEMA} TO the role. If tables are missing, DROP SCHEMA {SCHEMA} CASCADE lets them be made anew."
    )
    return StoreWriteFailed(f"{address.shown}: {text}", remedy=remedy)


def _again(address: Address, text: str) -> Trouble:
    return Trouble(Verdict.AGAIN, StoreUnreachable(f"{address.place} cannot be reached: {text}"))


def _bad_address() -> InvalidArgument:
    return InvalidArgument(
        "the address of the PostgreSQL server has an option that asyncpg does not accept",
        remedy="Look at what stands after the question mark: sslmode, sslrootcert, port ...",
    )


def _text(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
