"""Starts keepers of pools, and other programs, as forks of an interpreter that has loaded what they need.

A pool starts one interpreter, and that takes a quarter of a second of CPU to import gRPC and headgate. Hundreds of
tests open a pool of their own, so `make test` spent minutes on it. Here a *template* is started once for each process
of pytest. It imports what the fork server of a pool imports, and makes keepers by forking twice: pytest is the
subreaper for that moment, so the keeper becomes a child of pytest, as one that is started in the usual way.

It also imports the libraries that test modules import. A worker imports the module of each routine that it runs, and
pytest alone takes 70 ms of CPU. It imports no test module.

From there on all is as usual, except that the fork becomes the keeper without `exec`: another interpreter would be a
third of the cost of a small pool. What shows how interpreters start is marked `cold`, or differs in what a fork would
not inherit (`_alike`). At full length (`make soak`) every pool starts its own.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headgate.workers.processes import keeper_client

_SUBREAPER = 36
_TEMPLATE = (
    "import sys;fd,here,*modules=sys.argv[1:];sys.path.append(here);import warm_template as t;sys.path.remove(here);"
    "del sys.modules['warm_template'];t.become(t.serve(int(fd), *modules))"
)

KEEPER = ("asyncio", "ctypes", "headgate.workers.processes.fork_server", "headgate.workers.server.serve")
"""What the fork server of a pool imports."""
LIBRARIES = ("headgate", "headgate.testing", "pytest", "cloudpickle", "argparse", "resource", "tempfile")
"""What test modules import. Nothing that starts a thread, as numpy does: a fork server must have none. Each megabyte
costs each fork 0.07 ms, so nothing that few of them import."""

enabled = False
"""Is the test that runs now one whose pools may start this way?"""


class Template:
    """The interpreter that forks, as pytest knows it."""

    _lock = threading.Lock()  # of all templates: pytest is the subreaper for one of them at a time

    def __init__(self, flags: Sequence[str], modules: Sequence[str]) -> None:
        self._owner = os.getpid()
        self._flags = [sys.executable, *flags]
        self._inherited = _inherited(os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [*self._flags, "-c", _TEMPLATE, str(theirs.fileno()), os.path.dirname(__file__), *modules],
            env={**os.environ, **keeper_client.grpc_variables(os.environ)},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for pytest; it ends when pytest is gone
        )
        theirs.close()
        self._socket = ours

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def makes(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Would an interpreter that is started with this command be like a fork of the template?"""
        return (
            os.getpid() == self._owner
            and list(command[: len(self._flags)]) == self._flags
            and _inherited(env) == self._inherited
            and _alike()
        )

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int], folder: Path | None = None
    ) -> int:
        """Have a process made that has these descriptors, by the numbers it is to know them by; return its pid."""
        cwd = os.getcwd() if folder is None else str(folder)
        request = {"argv": list(command[len(self._flags) :]), "env": dict(env), "cwd": cwd, "fds": list(fds)}
        with self._lock:
            _prctl(_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [marshal.dumps(request)], list(fds.values()))
                pid = int(self._socket.recv(64) or 0)
            finally:
                _prctl(_SUBREAPER, 0)
        if not pid:
            raise ChildProcessError("the template could not fork, or is gone")
        return pid


class Forked:
    """What `subprocess.Popen` is for a keeper, of which `KeeperClient` needs no more."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> int:
        with self._lock:
            if self.returncode is None:
                try:
                    self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:
                    self.returncode = 0
        return self.returncode

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def install() -> Template:
    """Let `keeper_client` start keepers this way, while `enabled`."""
    flags = keeper_client._interpreter()[1:]
    template = Template(flags, (*KEEPER, *LIBRARIES))

    def popen(command: list[str], **options: Any) -> Any:
        is_whole = len(command) > len(flags) + 2 and command[len(flags) + 2] == keeper_client._KEEP_WITH_FORK_SERVER
        if not enabled or not is_whole or not template.makes(command, options["env"]):
            return subprocess.Popen(command, **options)
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            standard = {
                0: nothing,
                1: nothing if options["stdout"] is not None else 1,
                2: nothing if options["stderr"] is not None else 2,
            }
            return Forked(template.fork(command, options["env"], standard | {fd: fd for fd in options["pass_fds"]}))
        finally:
            os.close(nothing)

    stand_in = ModuleType("subprocess")
    stand_in.__dict__.update(vars(subprocess), Popen=popen)
    keeper_client.subprocess = stand_in  # type: ignore[attr-defined]
    return template


def run_program(template: Template, command: Sequence[str], folder: Path, timeout: float) -> tuple[int, str, str]:
    """Run a program as a fork of a template; return its exit code, and what it wrote to stdout and stderr."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
        fds = {0: nothing.fileno(), 1: out.fileno(), 2: err.fileno()}
        program = Forked(template.fork(command, os.environ, fds, folder))
        end = time.monotonic() + timeout
        while program.poll() is None:
            if time.monotonic() > end:
                program.kill()
                program.wait()
                raise subprocess.TimeoutExpired(command, timeout)
            time.sleep(0.005)
        for file in (out, err):
            file.seek(0)
        return program.wait(), out.read().decode("utf-8"), err.read().decode("utf-8")


def uninstall(template: Template) -> None:
    keeper_client.subprocess = subprocess  # type: ignore[attr-defined]
    template.close()


def _inherited(env: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter and gRPC read of their environment when they start."""
    return {name: env[name] for name in env if name.startswith(("PYTHON", "GRPC", "LD_", "LC_", "LANG", "MALLOC"))} | {
        "GRPC_VERBOSITY": env.get("GRPC_VERBOSITY", "Error"),
        "GRPC_ENABLE_FORK_SUPPORT": env.get("GRPC_ENABLE_FORK_SUPPORT", "0"),
    }


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]


_LIMITS = _limits()


def _alike() -> bool:
    """Are limits and signals those with which the template was started, and is there a folder?"""
    try:
        os.getcwd()
    except OSError:
        return False
    return _limits() == _LIMITS and not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
