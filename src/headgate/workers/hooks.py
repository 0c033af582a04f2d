"""Functions that are called around calls, at the caller and on the worker. Empty unless traces are made.

They are lists and not topics: a hook may change the Context of the call, and must be called before the Context is sent
or right after it has come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.workers.client.routine_call import RoutineCall
    from headgate.workers.server.running_call import RunningCall

CALLING: list[Callable[[RoutineCall], object]] = []
"""Called in the caller's Context with a call that is made, before the Context is sent along with it."""
RUNNING: list[Callable[[RunningCall], Callable[[str, BaseException | None], object] | None]] = []
"""Called on the worker in the Context of a call, before its function; what it returns is told how the call ended, and
what it raised, if it did."""
