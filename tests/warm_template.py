"""The interpreter that `warm_start` starts: it forks programs, with all loaded that they need.

It is imported by itself, without the package `tests`, so that forks import test modules as other programs do. It has no
threads, and uses nothing of gRPC before it forks.
"""

from __future__ import annotations

import fcntl
import gc
import marshal
import os
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

_MESSAGE = 1 << 17
_HIGH = 512
"""Above the numbers of descriptors that a program is to have."""


def serve(requests: int, *modules: str) -> dict[str, Any]:
    """Import these, and make what pytest asks for, until pytest is gone. Returns in a process that was asked for."""
    for name in modules:
        module = import_module(name)
        for public in getattr(module, "__all__", ()):
            getattr(module, public)  # headgate imports what has a name when that is asked for
    pytest = socket.socket(fileno=requests)
    pytest.set_inheritable(False)
    gc.collect()
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(pytest, _MESSAGE, 16)
        if not message:
            os._exit(0)
        request = marshal.loads(message)
        pid = _fork_twice()
        if pid is None:
            pytest.detach()
            _take(fds, request["fds"])
            return request
        pytest.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def _fork_twice() -> int | None:
    """Return the pid of a process whose parent, here between us and it, has ended; 0: there is none. None: in it."""
    tells, told = os.pipe()
    between = os.fork()
    if not between:
        try:
            pid = os.fork()
            if not pid:
                return None
            os.write(told, str(pid).encode())
        except OSError:
            pass
        os._exit(0)
    os.close(told)
    pid = int(os.read(tells, 64) or 0)
    os.close(tells)
    os.waitpid(between, 0)
    return pid


def _take(fds: list[int], numbers: list[int]) -> None:
    """Have these descriptors under these numbers, and no others."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in fds]
    os.closerange(0, _HIGH)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def become(request: dict[str, Any]) -> None:
    """Run as an interpreter that was started with this command, folder and environment. It ends in the usual way."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    program, *arguments = request["argv"]
    main = ModuleType("__main__")
    if program == "-c":
        source, name = arguments.pop(0), "<string>"
        if "keeper.begin_with_fork_server" in source:
            _load_keeper()
    else:
        with open(program, encoding="utf-8") as file:
            source, name = file.read(), program
        main.__file__ = program
        sys.path[0] = os.path.dirname(program)
    sys.path[1:1] = [
        one for one in request["env"].get("PYTHONPATH", "").split(os.pathsep) if one and one not in sys.path
    ]
    transport = sys.modules.get("headgate.workers.protocol.transport")
    if transport is not None:
        transport.LOADED_IN = os.getpid()  # nothing of gRPC was used before the fork
    sys.argv[:] = [program, *arguments]
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec", dont_inherit=True), vars(main))


def _load_keeper() -> None:
    """Import the keeper as its program does, by its own name, and have it not replace the interpreter."""
    folder = os.path.dirname(sys.modules["headgate.workers.processes.fork_server"].__file__ or "")
    sys.path.insert(0, folder)
    try:
        keeper = import_module("keeper")
    finally:
        sys.path.remove(folder)
    begin, execv = keeper.begin_with_fork_server, os.execv

    def begin_without_exec() -> tuple[Any, ...]:
        os.execv = run_keeper  # type: ignore[assignment]
        try:
            made: tuple[Any, ...] = begin()  # returns in the fork server
            return made
        finally:
            os.execv = execv

    def run_keeper(program: str, command: Sequence[str]) -> None:
        os.execv = execv
        _run_keeper(program, command)

    keeper.begin_with_fork_server = begin_without_exec  # type: ignore[attr-defined]


def _run_keeper(program: str, command: Sequence[str]) -> None:
    """Become the keeper as `os.execv` would make it, in the same interpreter."""
    assert (program, *command[1:3]) == (sys.executable, "-ISs", "-c"), command
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not os.get_inheritable(fd):
                os.close(fd)
        except OSError:  # closed since it was listed
            pass
    sys.argv[:] = ["-c", *command[4:]]
    code = 1
    try:
        exec(compile(command[3], "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
        code = 0
    finally:
        os._exit(code)
