"""Has faulthandler write the stacks of all threads if the server's thread has no turn, because nothing else can."""

from __future__ import annotations

import faulthandler

AFTER, AFTER_IMPORTING = 1.75, 30.0
"""Seconds without a turn of the server's thread. Loading a C extension holds the interpreter's lock for many seconds,
and nobody can do anything about that."""

_CAN_DUMP = hasattr(faulthandler, "dump_traceback_later")


def dump_later(*, importing: bool) -> None:
    """Write the stacks after `AFTER` seconds from now, or `AFTER_IMPORTING`, unless this is called again before.

    faulthandler needs a thread for that. If none can be started now, the next call tries again.
    """
    if _CAN_DUMP:
        try:
            faulthandler.dump_traceback_later(AFTER_IMPORTING if importing else AFTER, file=2)
        except (RuntimeError, MemoryError):
            pass


def cancel() -> None:
    """Write no stacks."""
    if _CAN_DUMP:
        faulthandler.cancel_dump_traceback_later()
