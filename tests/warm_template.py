"""The interpreter that `warm_start` starts: it forks keepers of pools, with all loaded that their workers need.

It is imported by itself, without the package `tests`, so that forks have no module more than a keeper that was started.
It has no threads, and uses nothing of gRPC before it forks.
"""

from __future__ import annotations

import fcntl
import gc
import marshal
import os
import socket
import sys
from typing import Any

_MESSAGE = 1 << 17
_HIGH = 512
"""Above the numbers of descriptors that a keeper is to have."""


def serve(requests: int) -> None:
    """Make what pytest asks for, until pytest is gone."""
    import asyncio  # noqa: F401 - for those to come
    import ctypes  # noqa: F401

    from headgate.workers.processes import fork_server  # noqa: F401
    from headgate.workers.server import serve  # noqa: F401

    pytest = socket.socket(fileno=requests)
    pytest.set_inheritable(False)
    gc.collect()
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(pytest, _MESSAGE, 16)
        if not message:
            return
        pytest.send(str(_fork_twice(marshal.loads(message), fds)).encode())
        for fd in fds:
            os.close(fd)


def _fork_twice(request: dict[str, Any], fds: list[int]) -> int:
    """Return the pid of a process whose parent, here between us and it, has ended; 0: there is none."""
    tells, told = os.pipe()
    between = os.fork()
    if not between:
        try:
            pid = os.fork()
            if not pid:
                _become(request, fds)
            os.write(told, str(pid).encode())
        finally:
            os._exit(0)
    os.close(told)
    pid = int(os.read(tells, 64) or 0)
    os.close(tells)
    os.waitpid(between, 0)
    return pid


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Be as an interpreter that was started with this command, environment and descriptors."""
    try:
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in fds]
        os.closerange(0, _HIGH)
        for fd, number in zip(high, request["fds"], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.setsid()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        _, code, *arguments = request["argv"]
        sys.argv[:] = ["-c", *arguments]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
