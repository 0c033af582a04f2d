"""The task of a TaskPool whose code is running, and how calls name it and its tenant.

It stands in `core` because a TaskPool sets it, and calls of routines, which belong to workers, carry its id.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

CURRENT: ContextVar[Any] = ContextVar("headgate_task", default=None)
"""The `TaskRecord` whose code is running; None: the code of no task. `headgate.tasks` has it with its type."""


class Standing(NamedTuple):
    """How urgent a task is, and for whom it runs, as far as the queue of its pool goes by that."""

    priority: int = 0
    tenant: Hashable = None


_NOBODY: Final = Standing()


def current_standing() -> Standing:
    """Return the standing of the running task, with which its calls wait for scarce things."""
    task = CURRENT.get()
    standing: Standing = _NOBODY if task is None else task.standing
    return standing


def current_retry_budget() -> Any:
    """Return the `RetryBudget` of the pool whose task runs; None if there is none."""
    task = CURRENT.get()
    return None if task is None else task.owner.retry_budget


def tenant_text(partition: object) -> str:
    """Return the fairness key of a task as text that a message can carry; "": it has none."""
    if partition is None:
        return ""
    try:
        text = partition if isinstance(partition, str) else str(partition)
    except Exception:  # it runs code of users
        return f"a {type(partition).__qualname__}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()  # half of a character
