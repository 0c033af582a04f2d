"""A worker's lifeline: a pipe from its keeper that is never written to. When it closes, the worker is to be dead.

On Linux the kernel sees to that (the pipe signals SIGKILL to the worker's process group), so code that holds the
interpreter's lock cannot outlive the keeper by a moment. Elsewhere a thread waits for the end of the pipe.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading


def arm(fd: int) -> None:
    """Have this process and its group killed when the other end of the pipe closes."""
    os.set_inheritable(fd, False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        poll = select.poll()
        poll.register(fd, select.POLLIN | select.POLLHUP)
        if poll.poll(0):  # it closed before it was armed
            os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=_wait, args=(fd,), name="headgate lifeline", daemon=True).start()


def _wait(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os.killpg(0, signal.SIGKILL)
