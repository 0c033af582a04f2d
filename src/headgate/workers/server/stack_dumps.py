"""The stacks of a worker whose server thread had no turn for seconds, because a routine holds the interpreter's lock.

The server thread logs them itself when it has a turn again (`others`). If that takes too long, faulthandler writes them
from a thread that needs no lock (`dump_later`). It must be the last resort: faulthandler reads frames that may change
while it does, and one dump of a few dozen crashes a process whose Python code runs. A process that was stopped, or that
a busy machine starved, looks the same to it as one whose lock is held by C code.
"""

from __future__ import annotations

import faulthandler
import threading

from headgate.core.threads import stacks

AFTER = 10.0
"""Seconds without a turn of the server's thread until faulthandler writes the stacks. A worker that was stopped for so
long is lost anyway: it has not answered the pings of its clients."""

_CAN_DUMP = hasattr(faulthandler, "dump_traceback_later")


def dump_later() -> None:
    """Have faulthandler write the stacks `AFTER` seconds from now, unless this or `cancel` is called before.

    faulthandler needs a thread for that. If none can be started now, the next call tries again.
    """
    if _CAN_DUMP:
        try:
            faulthandler.dump_traceback_later(AFTER, file=2)
        except (RuntimeError, MemoryError):
            pass


def cancel() -> None:
    """Have faulthandler write nothing."""
    if _CAN_DUMP:
        faulthandler.cancel_dump_traceback_later()


def others() -> str:
    """Return the stacks of all threads except this one as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{stack}"
        for ident, stack in stacks().items()
        if ident != threading.get_ident()
    )
