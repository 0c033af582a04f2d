"""The number of the grant with which a task of a pool with `fencing=True` runs.

It stands in `core` because a TaskPool sets it and `headgate.current_task()`, which belongs to workers, reads it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple


class Fenced(NamedTuple):
    """A task that runs in this process, in a pool with `fencing=True`."""

    task_id: str
    caller: str | None
    """The id of the task that submitted it."""
    function: str
    tenant: str | None
    fence: int


FENCED: ContextVar[Fenced | None] = ContextVar("headgate_fenced", default=None)
"""The task whose code is running, if its pool counts fences."""
