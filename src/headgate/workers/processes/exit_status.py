"""How a worker process ended, as its keeper reports it: exit code or signal, and the end of its stderr.

A stream to a worker that died ends a moment before its keeper can say how. So the calls that were lost with it wait for
that report, for `LAST_WORD` seconds at most (see `Connection`). It is not waited for where no keeper of this pool
reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headgate.core.redaction import redact
from headgate.workers.model import ENDED, ENDS_BECAUSE
from headgate.workers.processes.keeper import TAIL

LAST_WORD = 1.0
"""Seconds to wait for the keeper's report; it comes within a few milliseconds, as a rule."""
LINES = 20
"""How many of the last lines of stderr are kept."""


class Ending(NamedTuple):
    """How the process of a worker ended, as far as that is known."""

    exit_code: int | None = None
    """None: it was killed by a signal, or that is not known."""
    signal: int | None = None
    """None: it ended by itself, or that is not known."""
    stderr: str = ""
    """The last lines that it wrote, without values of resources."""

    def __str__(self) -> str:
        from headgate.workers.processes.local_worker import exit_text

        if self.signal is not None:
            return exit_text(-self.signal)
        return "" if self.exit_code is None else exit_text(self.exit_code)


def ending_of(report: Mapping[str, Any]) -> Ending:
    """Read how a worker ended from a report of the keeper; nothing is known if the keeper itself is gone."""
    code = report.get("code")
    if code is None:
        return Ending()
    errors = report.get("errors", b"")
    if len(errors) >= TAIL:  # it begins in the middle of a line, maybe of a value
        errors = errors.partition(b"\n")[2]
    stderr = "\n".join(redact(errors.decode(errors="replace")).strip().splitlines()[-LINES:])
    return Ending(None, -code, stderr) if code < 0 else Ending(code, None, stderr)


def why_replaced(ending: Ending) -> str:
    """Return why a worker ended itself to be replaced; "" if it did not.

    It tells its clients as well, but the keeper's report may be read before that message.
    """
    if ending.exit_code != ENDED:
        return ""
    reasons = [line.partition(ENDS_BECAUSE)[2] for line in ending.stderr.splitlines() if ENDS_BECAUSE in line]
    return reasons[-1] if reasons else "its loop was held for too long"
