"""What the attempts of one call decide: `workers/client/routine_call.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headgate.workers.client.routine_call import Attempts
from headgate.workers.protocol.messages import Answer


def attempts_of(retries: int) -> tuple[Attempts, Any]:
    options = SimpleNamespace(retries=retries)
    call: Any = SimpleNamespace(limit=0.0, request=None, routine=SimpleNamespace(options=options))
    attempts = Attempts()
    attempts.limit(call, "")
    return attempts, call


def after(attempts: Attempts, call: Any, kind: Any, casualties: int = 8) -> int:
    """How many calls may run beside the next attempt, itself included; 0: any number."""
    call.connection = SimpleNamespace(casualties=casualties, metadata=SimpleNamespace(uid="w"))
    attempts.after_answer(call, Answer(call, kind), here="")
    return 0 if attempts.isolation is None else attempts.isolation.max_calls


def test_w92_a_call_that_was_lost_has_fewer_neighbours_each_time_and_is_alone_at_the_last() -> None:
    attempts, call = attempts_of(3)
    assert [after(attempts, call, "lost") for _ in range(3)] == [4, 2, 1]


def test_w92_a_call_whose_worker_only_stopped_needs_no_isolation() -> None:
    attempts, call = attempts_of(3)
    assert [after(attempts, call, "stopped") for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("retries", [2, 3])
def test_w92_a_call_that_was_lost_and_whose_next_worker_stopped_runs_its_last_attempt_alone(retries: int) -> None:
    attempts, call = attempts_of(retries)
    after(attempts, call, "lost")
    assert [after(attempts, call, "stopped") for _ in range(retries - 1)][-1] == 1
    assert attempts.left == 0
