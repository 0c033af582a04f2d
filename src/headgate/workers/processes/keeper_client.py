"""The client's side of the keeper: start it, have it start workers, hear what becomes of them.

The keeper and its workers live in a directory of their own (0700) that holds the sockets. The keeper removes it; one
that a crash left behind (client and keeper killed together) is swept by the next start.
"""

from __future__ import annotations

import asyncio
import fcntl
import marshal
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from headgate.core.clock import clock
from headgate.errors import WorkerStartFailed
from headgate.workers.protocol.grpc_environment import grpc_variables

_BOOT = (
    "import sys,marshal;c=marshal.loads(bytes.fromhex(sys.argv[2]));sys.path[:]=c['path'];"
    "from importlib import import_module as i;"
    "i('headgate.workers.processes.'+sys.argv[1]).main(c,*map(int,sys.argv[-3:]))"
)
_HERE = os.path.dirname(os.path.abspath(__file__))
_PATIENCE = 5.0  # for the keeper to end everything and itself
_KEEP = "import sys;sys.path.append(sys.argv[3]);import keeper;keeper.main()"
"""Not by its path: what is run as a script is compiled each time."""
_KEEP_WITH_FORK_SERVER = (
    "import sys;sys.path[:]=[sys.argv[3],*(p for p in sys.path if p)];import keeper;"
    "c,*f=keeper.begin_with_fork_server();"
    "sys.path[:]=c['path'];del sys.modules['keeper'];from headgate.workers.processes.fork_server import main;main(c,*f)"
)
"""Without the current folder, whose modules are not ours."""
WARNINGS = "HEADGATE_PYTHONWARNINGS"
"""What PYTHONWARNINGS and -W say here of warnings of ours, for workers to read themselves."""
NEW, PREFIX = "headgate-new-", "headgate-pool-"
TRIES = 20
"""How often a directory is made that somebody sweeps before it is locked."""
MAX_PATH = 100
"""Bytes of a socket's path that every Unix takes."""

_open: weakref.WeakSet[KeeperClient] = weakref.WeakSet()


class KeeperClient:
    """Starts one keeper, sends it commands and passes on its reports; owns the directory of its sockets."""

    def __init__(
        self,
        on_event: Callable[[dict[str, Any]], None],
        *,
        several: bool = False,
        folder: str | None = None,
        logs_refusals: bool = False,
    ) -> None:
        self._on_event = on_event
        self._logs_refusals = logs_refusals  # most of its workers do
        self.folder: str | None = folder
        """The current folder when it was last known."""
        self._several = several  # so many workers that a fork server pays
        self._reader: asyncio.Task[None] | None = None
        self._ours: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: str | None = None
        self._sending = threading.Lock()  # commands come from the loop, locks from the threads of stores
        self._first: dict[str, Any] = {}  # the program of the fork server that comes with the keeper
        self._guard = -1  # as long as it is open, what becomes the keeper may live
        self._hung_up = False
        self.forgotten: bool = False
        """Is this process a forked child of the one that started the keeper?"""

    def start(self) -> None:
        """Start the process of the keeper, without waiting for it."""
        try:
            self._directory, lock = make_directory()
        except OSError as error:
            raise WorkerStartFailed(f"no folder for the sockets of workers could be made: {error}") from error
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            os.close(lock)
            _remove(self._directory)
            raise WorkerStartFailed(f"the keeper of the workers could not be started: {error}") from error
        guard = -1
        try:
            fds: tuple[int, ...] = (theirs.fileno(), lock)
            if self._several and sys.platform == "linux":
                guard, self._guard = os.pipe()
            self._first = self._program(self._logs_refusals)
            self._process = subprocess.Popen(
                self._command(fds, guard),
                env=self._first["env"],
                pass_fds=(*fds, guard) if guard >= 0 else fds,
                stdin=subprocess.DEVNULL,
                stdout=None if _is_stream(1) else subprocess.DEVNULL,
                stderr=None if _is_stream(2) else subprocess.DEVNULL,
                cwd=_place(),
                start_new_session=True,
            )
            if guard >= 0:
                _guard(guard, self._process.pid)
        except WorkerStartFailed:
            ours.close()
            self.let_go()
            _remove(self._directory)
            raise
        except BaseException as error:
            ours.close()
            self.let_go()
            _remove(self._directory)
            raise WorkerStartFailed(f"the keeper of the workers could not be started: {error}") from error
        finally:
            theirs.close()
            os.close(lock)  # the keeper holds it
            if guard >= 0:
                os.close(guard)
        ours.setblocking(False)
        self._ours = ours
        _open.add(self)

    def _command(self, fds: tuple[int, ...], guard: int) -> list[str]:
        """Return the command that starts the keeper, alone or together with its first fork server."""
        arguments = [",".join(map(str, fds)), self.directory, _HERE]
        if guard < 0:
            return [sys.executable, "-ISs", "-c", _KEEP, *arguments]
        config = marshal.dumps(self._config()).hex()
        return [*_interpreter(), "-c", _KEEP_WITH_FORK_SERVER, *arguments, _KEEP, config, str(guard)]

    def _program(self, logs_refusals: bool) -> dict[str, Any]:
        """Return the command and the environment of a worker process."""
        return {"argv": [*_interpreter(), "-c", _BOOT], "env": self._environment(logs_refusals)}

    def _config(self) -> dict[str, Any]:
        """Return where a worker finds modules, and its current folder: both as they are here and now."""
        try:
            self.folder = os.getcwd()
        except OSError as error:  # it was removed: workers start all the same (see `worker_main`)
            if self.folder is None:
                raise WorkerStartFailed(
                    f"workers start in the current folder, and there is none: {error}",
                    remedy="Change to a folder that exists (os.chdir) before the pool is entered.",
                ) from error
        folder = self.folder
        return {"path": [entry or folder for entry in sys.path], "cwd": folder}

    def _environment(self, logs_refusals: bool) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name != "HEADGATE_WORKER"}
        options = ours.get("PYTHONWARNINGS", "").split(",")
        about_us = dict.fromkeys(option for option in (*sys.warnoptions, *options) if "headgate." in option)
        if about_us:  # Python reads them before it can import us, and would complain on stderr
            ours[WARNINGS] = ",".join(about_us)
            ours["PYTHONWARNINGS"] = ",".join(option for option in options if option not in about_us)
        ours |= grpc_variables(ours, logs_refusals=logs_refusals)
        return {**ours, "HEADGATE_POOL": os.path.basename(self.directory)}

    @property
    def directory(self) -> str:
        """The directory with the sockets of the workers."""
        assert self._directory is not None, "it was started"
        return self._directory

    def listen(self) -> None:
        """Pass on the reports of the keeper from now on, on the running loop."""
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @property
    def pid(self) -> int:
        """The process id of the keeper."""
        assert self._process is not None, "it was started"
        return self._process.pid

    def spawn(self, uid: str, config: dict[str, Any], *, logs_refusals: bool = False) -> None:
        """Have a worker started, with the environment, path and folder that this process has now.

        With `logs_refusals` it writes to stderr whom it refused, and why (see `grpc_environment`).
        """
        config = {"uid": uid, **self._config(), **config}
        program = self._program(logs_refusals)
        worker = {"config": config, "program": program, "forks": self._several, "first": program == self._first}
        self._tell(do="spawn", worker=worker)

    def signal(self, uid: str, number: int = signal.SIGKILL) -> None:
        """Have a signal sent to a worker, if it still lives."""
        self._tell(do="signal", uid=uid, signal=int(number))

    def address(self, uid: str) -> str:
        """Return the address on which that worker is to listen."""
        return f"unix:{self.directory}/{uid}"

    def hold(self, file: int) -> None:
        """Have the keeper keep a copy of this descriptor until all below it has ended. Thread-safe."""
        self._tell(file, do="hold", file=file)

    def drop(self, file: int) -> None:
        """Have the keeper close its copy of the descriptor that has or had this number here. Thread-safe."""
        self._tell(do="drop", file=file)

    def _tell(self, *files: int, **command: object) -> None:
        """Send a command as a whole, together with open files."""
        data = marshal.dumps(command)
        data = len(data).to_bytes(4, "big") + data
        with self._sending:
            while data and self._ours is not None:
                try:
                    sent = socket.send_fds(self._ours, [data], list(files)) if files else self._ours.send(data)
                    data, files = data[sent:], ()
                except BlockingIOError:  # wait: commands are few, and the keeper reads at once
                    poll = select.poll()
                    poll.register(self._ours, select.POLLOUT)
                    poll.poll()
                except OSError:
                    return  # it is gone: the reader will see that

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        ours, heard = self._ours, b""
        assert ours is not None, "it was started"
        while True:
            try:
                data = await loop.sock_recv(ours, 1 << 16)
            except OSError:
                data = b""
            if not data:
                self._on_event({"event": "gone"})
                if self._hung_up:
                    self.let_go()
                return
            heard += data
            while len(heard) >= 4 and len(heard) >= (end := 4 + int.from_bytes(heard[:4], "big")):
                report = marshal.loads(heard[4:end])
                heard = heard[end:]
                self._on_event(report)

    async def close(self) -> None:
        """Let the keeper end what is left of its workers, and itself; return when it is gone."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        self.let_go()
        process = self._process
        if process is not None:
            # It looks again and again: asyncio tells the end only of processes that it started itself, and starting one
            # through it needs an await, which `start` must not. The keeper is gone after a few milliseconds.
            pause, deadline = 0.0005, clock.now() + _PATIENCE
            while process.poll() is None:
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.01)
                if clock.now() > deadline:
                    process.kill()  # somebody stopped it; the workers' lifelines end with it
        if self._directory is not None:
            _remove(self._directory)

    def wait(self) -> None:
        """Block until the keeper is gone: for the end of a program."""
        if self._process is not None:
            self._process.wait()
        if self._directory is not None:
            _remove(self._directory)

    def hang_up(self) -> None:
        """Have the keeper end all workers and itself, as `let_go` does, from another loop than its reader's. The reader
        closes the socket when its loop runs again: it would else find whatever has its number then."""
        self._hung_up = True
        if self._ours is not None:
            try:
                self._ours.shutdown(socket.SHUT_RDWR)
            except OSError:  # the keeper is gone
                pass
        guard, self._guard = self._guard, -1
        if guard >= 0:
            os.close(guard)

    def let_go(self) -> None:
        """Close our end of the socket, on which the keeper ends all workers and itself."""
        with self._sending:
            ours, self._ours = self._ours, None
            if ours is not None:
                ours.close()
        guard, self._guard = self._guard, -1
        if guard >= 0:
            os.close(guard)
        _open.discard(self)

    def forget(self) -> None:
        """Give up the keeper in a forked child: it belongs to the parent."""
        self.forgotten = True
        self._sending = threading.Lock()  # another thread of the parent may have held it
        self.let_go()
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for


def _guard(fd: int, pid: int) -> None:
    """Have the kernel kill a process when our end of the pipe closes (Linux).

    For what becomes the keeper: until then it is an interpreter that starts, and cannot see that the client is gone.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def _is_stream(fd: int) -> bool:
    """Tell whether this is still stdout or stderr. If that was closed, the number may belong to another file."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def _interpreter() -> list[str]:
    """Return the command of an interpreter like this one, with the same flags."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *(flag for flag in flags if not (flag.startswith("-W") and "headgate." in flag))]


def _place() -> str | None:
    """Return where the keeper starts: here, or elsewhere if the folder was removed (see `keeper.leave_gone_folder`)."""
    try:
        os.getcwd()
    except OSError:
        return "/"
    return None


def _after_fork() -> None:
    for spawner in list(_open):
        spawner.forget()


os.register_at_fork(after_in_child=_after_fork)


# -- directories ------------------------------------------------------------------------------------------------------


def make_directory() -> tuple[str, int]:
    """Make a directory that only this user may enter, with a path short enough for sockets; return it and its lock.

    It gets its name when the lock is held, so nobody who sweeps can take it for one that was left behind. Before that,
    for a moment, somebody can: then another is made.
    """
    for base in _bases():
        if not os.path.isdir(base) or not os.access(base, os.W_OK | os.X_OK):
            continue
        if len(os.fsencode(base)) + len(PREFIX) + 8 + 1 + 32 > MAX_PATH:
            continue
        sweep(base)
        for _ in range(TRIES):
            token = os.urandom(4).hex()
            made = os.path.join(base, NEW + token)
            try:
                os.mkdir(made, 0o700)
            except OSError:
                break
            try:
                return _locked(made, os.path.join(base, PREFIX + token))
            except FileNotFoundError:  # somebody swept it
                continue
    raise WorkerStartFailed(
        f"no folder for the sockets of workers: {', '.join(_bases())} cannot be written to, or their paths "
        f"are too long (a socket's path has at most {MAX_PATH} bytes)",
        remedy="Set XDG_RUNTIME_DIR or TMPDIR to a short path that can be written to.",
    )


def _locked(made: str, named: str) -> tuple[str, int]:
    """Lock a new directory and give it its final name. FileNotFoundError: it was swept meanwhile."""
    lock = -1
    try:
        lock = os.open(os.path.join(made, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(made, named)
    except BaseException:
        _remove(made)
        if lock >= 0:
            os.close(lock)
        raise
    return named, lock


def _bases() -> list[str]:
    """Return the folders to try, best first. Not by `tempfile`, which is slower to import than all of this module."""
    named = [os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp", "/var/tmp"]
    return [name for name in named if name and os.path.isabs(name)]


def sweep(base: str) -> None:
    """Remove what keepers that were killed left behind, and clients that were killed before they had one."""
    try:
        found = [entry for entry in os.scandir(base) if entry.name.startswith((PREFIX, NEW))]
    except OSError:
        return
    for entry in found:
        try:
            about = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                continue
            _remove_if_left(entry.path)
        except OSError:
            continue


def _remove(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def _remove_if_left(path: str) -> None:
    """Remove a directory if nobody holds its lock, or if it has neither a lock nor its final name yet."""
    try:
        fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        if os.path.basename(path).startswith(NEW):
            os.rmdir(path)  # only if it is empty
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    except OSError:
        return  # it is in use
    finally:
        os.close(fd)


def end_strays(directory: str) -> None:
    """End what workers of a keeper that was killed have started and left (Linux: found by their environment)."""
    mark = f"HEADGATE_POOL={os.path.basename(directory)}".encode()
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return
    for pid in pids:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
