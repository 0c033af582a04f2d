"""What PostgresStore says when it cannot be used, and that it never says the password."""

from __future__ import annotations

import logging
import shutil
import subprocess
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate import PostgresStore
from headgate.core.clock import clock
from headgate.errors import (
    HeadgateError,
    InvalidArgument,
    InvalidType,
    StoreFormatTooNew,
    StoreUnreachable,
    StoreWriteFailed,
)
from headgate.sharing.postgres.address import parsed
from headgate.sharing.postgres.errors import Verdict, explained
from tests.faults import Proxy
from tests.integration.stores.shared.postgres_support import PATIENCE, Heard, eventually, increment
from tests.integration.stores.shared.postgres_support import ask as step
from tests.ports import number_of, reserved_port
from tests.postgres_server import ENCODED, PASSWORD, PostgresServer, ask

pytestmark = pytest.mark.integration

SECRETS = (PASSWORD, ENCODED, "pl4nted")


@pytest.fixture(autouse=True)
def no_password_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    assert not any(secret in caplog.text for secret in SECRETS)


@pytest.fixture
def role(postgres_server: PostgresServer) -> Iterator[str]:
    """A role without any rights of its own, whose password is PASSWORD."""
    name = f"role_{clock.token()[:12]}"
    postgres_server.ask(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
    yield name
    postgres_server.ask(f"DROP ROLE {name}")


def refusal(dsn: str, timeout: float = PATIENCE) -> HeadgateError:
    """The error of `connect`, after looking for the password in all of it."""
    with PostgresStore(dsn) as store:
        with pytest.raises(HeadgateError) as caught:
            store.connect(timeout)
        shown = "".join([str(caught.value), repr(store), *traceback.format_exception(caught.value, chain=True)])
        assert caught.value.__cause__ is None
        assert not any(secret in shown for secret in SECRETS)
        return caught.value


def with_role(dsn: str, role: str) -> str:
    return dsn.replace("postgres@", f"{role}:{ENCODED}@")


@pytest.mark.parametrize(
    "dsn",
    [
        "mysql://user:pl4nted@host/db",
        "host=localhost password=pl4nted",
        "postgresql://user:pl4nted@x@host/db",
        "postgresql://user:pl4nted/x@host/db",
        "postgresql://user:pl4nted#x@host/db",
        "postgresql://user:pl4nted@host:notaport/db",
        "postgresql://user:pl4nted@host:70000/db",
        "postgresql://user:pl4nted@[::1/db",
        "postgresql://user:pl4nted@host/db?novalue",
        "",
    ],
)
def test_g02_a_wrong_address_is_refused_without_showing_it(dsn: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        PostgresStore(dsn)
    assert "pl4nted" not in str(caught.value)
    assert "pl4nted" not in "".join(traceback.format_exception_only(caught.value))
    assert caught.value.__cause__ is None


def test_g02_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidType):
        PostgresStore(5)  # type: ignore[arg-type]
    for lease in (0, -1.0, float("nan"), float("inf"), "15"):
        with pytest.raises(InvalidArgument):
            PostgresStore("postgresql://host/db", lease=lease)  # type: ignore[arg-type]


def test_g02_a_store_shows_its_place_and_not_its_password() -> None:
    address = f"postgresql://me:{ENCODED}@one.example,two.example:6543/app?sslmode=require&password=pl4nted"
    store = PostgresStore(address)
    assert repr(store) == "<PostgresStore one.example:5432,two.example:6543/app>"
    assert not any(secret in repr(vars(store)) for secret in SECRETS)


def test_g02_an_option_that_the_driver_does_not_know_is_refused() -> None:
    error = refusal(f"postgresql://me:{ENCODED}@127.0.0.1/db?sslmode=nonsense")
    assert isinstance(error, InvalidArgument)


def test_g02_no_server_names_host_port_and_cause() -> None:
    with reserved_port() as unheard:
        port = number_of(unheard)
        error = refusal(f"postgresql://me:{ENCODED}@127.0.0.1:{port}/db", timeout=0.5)
    assert isinstance(error, StoreUnreachable)
    assert f"127.0.0.1:{port}" in str(error)
    assert "refused" in str(error) or "Connect call failed" in str(error)


def test_g02_an_unknown_host_is_named() -> None:
    error = refusal(f"postgresql://me:{ENCODED}@no-such-host.invalid:5433/db", timeout=2.0)
    assert isinstance(error, StoreUnreachable)
    assert "no-such-host.invalid:5433" in str(error)


def test_g02_a_server_that_accepts_and_says_nothing_is_given_up(postgres_server: PostgresServer) -> None:
    with Proxy(postgres_server.port) as proxy:
        proxy.is_silent = True
        error = refusal(postgres_server.dsn(port=proxy.port), timeout=1.0)
    assert isinstance(error, StoreUnreachable)
    assert "no answer within" in str(error)


def test_g02_a_wrong_password(postgres_server: PostgresServer, postgres_dsn: str, role: str) -> None:
    error = refusal(with_role(postgres_dsn, role).replace("word@", "wrong@"))
    assert isinstance(error, StoreUnreachable)
    assert "password authentication failed" in str(error)
    assert "Correct the user name or the password" in str(error)


def test_g02_an_unknown_database(postgres_server: PostgresServer) -> None:
    error = refusal(postgres_server.dsn("no_such_database"))
    assert isinstance(error, StoreUnreachable)
    assert 'database "no_such_database" does not exist' in str(error)
    assert "createdb" in str(error)


def test_g02_missing_rights_are_named_one_after_the_other(postgres_dsn: str, role: str) -> None:
    dsn = with_role(postgres_dsn, role)
    database = postgres_dsn.rpartition("/")[2]
    error = refusal(dsn)
    assert isinstance(error, StoreWriteFailed)
    assert f"GRANT CREATE ON DATABASE {database} TO {role}" in str(error)

    ask(postgres_dsn, "CREATE SCHEMA headgate")
    assert f"GRANT USAGE ON SCHEMA headgate TO {role}" in str(refusal(dsn))
    ask(postgres_dsn, f"GRANT USAGE ON SCHEMA headgate TO {role}")
    assert f"GRANT CREATE ON SCHEMA headgate TO {role}" in str(refusal(dsn))

    with PostgresStore(postgres_dsn) as store:
        store.connect(PATIENCE)
    assert "GRANT DELETE, INSERT, SELECT, UPDATE ON" in str(refusal(dsn))
    ask(postgres_dsn, f"GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA headgate TO {role}")
    error = refusal(dsn)
    assert f"GRANT DELETE ON headgate.chunks, headgate.members, headgate.texts TO {role}" in str(error)
    ask(postgres_dsn, f"GRANT DELETE ON headgate.chunks, headgate.members, headgate.texts TO {role}")
    with PostgresStore(dsn) as store:
        assert step(store, increment("a", 1)) == 1
        store.open("pool", {}, 10).close()
        ask(postgres_dsn, f"REVOKE UPDATE ON headgate.texts FROM {role}")
        with pytest.raises(StoreWriteFailed, match="permission denied"):
            step(store, increment("a", 2))
    ask(postgres_dsn, f"DROP OWNED BY {role}")


def test_g02_a_read_only_database_is_waited_for(postgres_server: PostgresServer, postgres_dsn: str) -> None:
    database = postgres_dsn.rpartition("/")[2]
    postgres_server.ask(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    error = refusal(postgres_dsn, timeout=0.5)
    assert isinstance(error, StoreUnreachable)
    assert "read-only" in str(error)
    with PostgresStore(postgres_dsn) as store:
        heard = Heard()
        store.listen("key", heard)
        future = store.transact("key", increment("a", 1))
        eventually(lambda: heard.errors, "it is told")
        postgres_server.ask(f"ALTER DATABASE {database} SET default_transaction_read_only = off")
        assert future.result(PATIENCE) == 1


def test_g02_tables_of_a_newer_release_are_refused(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        store.connect(PATIENCE)
    ask(postgres_dsn, "UPDATE headgate.format SET version = 2")
    ask(postgres_dsn, "DROP TABLE headgate.chunks")  # a newer release may have other tables
    error = refusal(postgres_dsn)
    assert isinstance(error, StoreFormatTooNew)
    assert "format 2" in str(error)
    with PostgresStore(postgres_dsn) as store:
        with pytest.raises(StoreFormatTooNew):
            store.open("pool", {}, 10)
        with pytest.raises(StoreFormatTooNew):
            step(store, increment("a", 1))


def test_g02_a_table_that_was_dropped_is_named(postgres_dsn: str) -> None:
    with PostgresStore(postgres_dsn) as store:
        store.connect(PATIENCE)
    ask(postgres_dsn, "DROP TABLE headgate.members")
    assert "headgate.members" in str(refusal(postgres_dsn))


@pytest.fixture
def pooler(postgres_server: PostgresServer) -> Iterator[Pooler]:
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer is not installed")
    running = Pooler(program, postgres_server)
    yield running
    running.stop()


class Pooler:
    """A pgbouncer before the server."""

    def __init__(self, program: str, server: PostgresServer) -> None:
        self._program = program
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = server.folder / "pooler"
        self._reserved = reserved_port()

    def start(self, mode: str) -> int:
        port = number_of(self._reserved)
        self._folder.mkdir(exist_ok=True)
        settings = self._folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n* = host=127.0.0.1 port={self._server.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = {mode}\nlogfile =\n"
            "ignore_startup_parameters = extra_float_digits\n[users]\n"
        )
        text = settings.read_text().replace(
            f"* = host=127.0.0.1 port={self._server.port}",
            f"* = host=127.0.0.1 port={self._server.port} user=postgres",
        )
        settings.write_text(text)
        shutil.chown(self._folder, self._server.folder.owner())
        user = self._server.folder.owner()
        self._process = subprocess.Popen(
            [self._program, "-q", Path("pgbouncer.ini")], cwd=self._folder, user=user, stderr=subprocess.DEVNULL
        )
        return port

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._reserved.close()


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_g02_a_pooler_that_shares_sessions_is_refused(postgres_dsn: str, pooler: Pooler, mode: str) -> None:
    database = postgres_dsn.rpartition("/")[2]
    error = refusal(f"postgresql://postgres@127.0.0.1:{pooler.start(mode)}/{database}")
    assert isinstance(error, InvalidArgument)
    assert "pool_mode=session" in str(error)


def test_g02_a_pooler_in_session_mode_works(postgres_dsn: str, pooler: Pooler) -> None:
    database = postgres_dsn.rpartition("/")[2]
    with PostgresStore(f"postgresql://postgres@127.0.0.1:{pooler.start('session')}/{database}") as store:
        assert step(store, increment("a", 1)) == 1


def test_g02_prepared_statements_that_are_not_there_mean_a_pooler() -> None:
    asyncpg = pytest.importorskip("asyncpg")
    address = parsed("postgresql://host/db")
    for error in (asyncpg.InvalidSQLStatementNameError("x"), asyncpg.DuplicatePreparedStatementError("x")):
        trouble = explained(error, address)
        assert trouble.verdict is Verdict.REFUSED
        assert "pool_mode=session" in str(trouble.error)


def test_g21_a_full_disk_is_told_and_other_conflicts_are_tried_again() -> None:
    asyncpg = pytest.importorskip("asyncpg")
    address = parsed("postgresql://host/db")
    full = explained(asyncpg.DiskFullError("could not extend file"), address)
    assert full.verdict is Verdict.FAILED
    assert isinstance(full.error, StoreWriteFailed)
    for again in (
        asyncpg.SerializationError("x"),
        asyncpg.DeadlockDetectedError("x"),
        asyncpg.AdminShutdownError("x"),
        asyncpg.CannotConnectNowError("x"),
        asyncpg.TooManyConnectionsError("x"),
        asyncpg.ReadOnlySQLTransactionError("x"),
        asyncpg.ConnectionDoesNotExistError("x"),
        asyncpg.InterfaceError("connection is closed"),
        asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
        ConnectionResetError("x"),
        TimeoutError(),
    ):
        assert explained(again, address).verdict is Verdict.AGAIN, again
