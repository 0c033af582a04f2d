"""`HostProcess`: starts a host (`worker_host`) as a child of an engine's process, and ends it. Synchronous.

For the code that an engine runs on its nodes: an actor of Ray, a plugin of a Dask worker.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
import threading
from typing import Any

from headgate.errors import WorkerStartFailed
from headgate.workers.protocol.grpc_environment import grpc_variables

STAY, END = b"s", b"e"
"""What an engine's process says to its host before it closes: that only the engine's head is gone, or that no workers
are wanted here any more. If it says nothing, it was killed."""

_BOOT = (
    "import sys,json;sys.path[:]=json.loads(sys.argv.pop());"
    "from headgate.workers.processes.worker_host import main;main()"
)
_PATIENCE = 60.0  # for it to import gRPC and to listen, on a busy machine


class HostProcess:
    """A host that is a child of this process, and that ends when this process does."""

    def __init__(self, settings: bytes, ip: str) -> None:
        self._settings, self._ip = settings, ip
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._where: dict[str, Any] = {}
        self._lock = threading.Lock()

    def where(self) -> dict[str, Any]:
        """Return the address, the id and the pid of the host. It is started, also again if it has ended.

        WorkerStartFailed: it did not come up. Blocks.
        """
        with self._lock:
            if self._has_ended():
                self._start()
            return self._where

    def _has_ended(self) -> bool:
        """Tell whether there is no host, or it has closed its socket: it ends when nobody wants it any more."""
        if self._process is None or self._control is None or self._process.poll() is not None:
            return True
        try:
            return not self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _start(self) -> None:
        import json

        self._close_control()
        if self._process is not None:
            self._process.wait()  # it has said that it ends, or was killed
        ours, theirs = socket.socketpair()
        try:
            folder = os.getcwd()
            path = json.dumps([entry or folder for entry in sys.path])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), self._ip, path],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **grpc_variables(os.environ)},
                start_new_session=True,
            )
            theirs.close()
            ours.sendall(len(self._settings).to_bytes(4, "big") + self._settings)
            self._where = pickle.loads(self._answer(ours))
        except OSError as error:
            ours.close()
            theirs.close()
            raise WorkerStartFailed(f"the host of a worker could not be started: {error}") from error
        except WorkerStartFailed:
            ours.close()
            raise
        self._control = ours

    def _answer(self, ours: socket.socket) -> bytes:
        assert self._process is not None, "it was started"
        poll = select.poll()
        poll.register(ours, select.POLLIN | select.POLLHUP)
        if not poll.poll(_PATIENCE * 1000):
            self._process.kill()
        if answer := ours.recv(1 << 16):
            return answer
        code = self._process.wait(_PATIENCE)
        raise WorkerStartFailed(
            f"the host of a worker ended before it listened (exit code {code}); its reason is in the log of this "
            f"process (pid {os.getpid()})"
        )

    def end(self, *, stay: bool = False) -> None:
        """Let the host end everything. With `stay` it stays until its placement leaves."""
        with self._lock:
            if self._control is not None:
                try:
                    self._control.sendall(STAY if stay else END)
                except OSError:  # it has ended
                    pass
            self._close_control()
            process, self._process = self._process, None
            if process is not None and not stay:
                try:
                    process.wait(5.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            elif process is not None:
                process.returncode = 0  # not ours to wait for

    def _close_control(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()
