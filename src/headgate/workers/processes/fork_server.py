"""The main program of the fork server: it has loaded what every worker needs, and makes workers by forking.

Interpreters that load the same modules side by side cost a tenth of a second each and 15 MB that could be shared. So
the keeper starts one fork server for each program (interpreter, flags, environment), and asks it for workers. It forks
twice: the worker's parent is gone at once, and so the keeper, being the subreaper, becomes its parent and learns how it
ends. The process in between says which pid it made before it goes: whoever is the keeper's child has been announced.

A fork that fails is said instead, with a pid of 0, and the fork server goes on: the keeper then starts that worker as a
program, if it can.

The fork server has no threads and runs no code of the user. gRPC is imported, but not used: a process may do that
before it forks. Where something started a thread while Python itself started, the fork server ends, and the keeper
starts workers one by one, as it does on systems without subreapers.
"""

from __future__ import annotations

import gc
import marshal
import os
import socket
import sys
from typing import Any

from headgate.workers.processes import lifeline, worker_main

MESSAGE = 1 << 17
"""How many bytes a request may have."""
DESCRIPTORS = 3
"""How many descriptors come with a request: lifeline, status, and the file for what is written to stderr."""


def main(config: dict[str, Any], line: int, requests: int, stderr: int) -> None:
    """Make the workers that the keeper asks for, until the keeper is gone."""
    lifeline.arm(line)
    worker_main.prepare()
    import asyncio  # noqa: F401 - for those to come
    import ctypes  # noqa: F401

    from headgate.workers.server import serve  # noqa: F401

    worker_main.restore_stderr(stderr)
    keeper = socket.socket(fileno=requests)
    keeper.set_inheritable(False)
    if len(os.listdir("/proc/self/task")) > 1:
        return
    gc.freeze()  # what is there now is never looked at again, and so stays shared
    while True:
        request, fds, _, _ = socket.recv_fds(keeper, MESSAGE, DESCRIPTORS)
        if not request:
            return
        try:
            between = os.fork() if len(fds) == DESCRIPTORS else -1  # else there was no room for them here
        except OSError:
            between = -1
        if between == 0:
            _make_worker(marshal.loads(request), fds, keeper, line)
        for fd in fds:
            os.close(fd)
        if between < 0 or os.waitpid(between, 0)[1]:  # it ended before it could say what it made
            keeper.send(marshal.dumps({"uid": marshal.loads(request)["uid"], "pid": 0}))


def _make_worker(config: dict[str, Any], fds: list[int], keeper: socket.socket, line: int) -> None:
    """Fork again in the process between, tell the keeper the pid, and end. In the worker: run as one."""
    try:
        worker = os.fork()
        if worker:
            keeper.send(marshal.dumps({"uid": config["uid"], "pid": worker}))
            os._exit(0)
        keeper.close()
        os.close(line)
        _become_worker(config, *fds)
    finally:
        os._exit(1)


def _become_worker(config: dict[str, Any], line: int, status: int, errors: int) -> None:
    from headgate.workers.protocol import transport

    os.setsid()
    _adopt_orphans()
    stderr = os.dup(2)
    os.dup2(errors, 2)
    os.close(errors)
    os.environ["HEADGATE_WORKER"] = config["uid"]
    transport.LOADED_IN = os.getpid()  # imported, and never used before
    sys.path[:] = config["path"]
    worker_main.main(config, line, status, stderr)


def _adopt_orphans() -> None:
    """Become the parent of whatever our descendants leave behind, as the keeper does (see there)."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
