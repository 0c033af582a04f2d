"""W34, W92: how a worker ended, from the report of its keeper."""

from __future__ import annotations

import pytest

from headgate.workers.processes.exit_status import Ending, ending_of, why_replaced

SAYS = (
    b"worker w-1 ends, to be replaced: jobs.spins:3 (task t/1) holds its loop, 30 s past its timeout. Its other calls\n"
)


def test_w34_a_worker_that_ended_itself_tells_why_on_stderr_too() -> None:
    """The message to its clients can be read later than the report of its keeper."""
    ending = ending_of({"code": 70, "errors": b"before\n" + SAYS + b"after\n"})
    assert why_replaced(ending).startswith("jobs.spins:3 (task t/1) holds its loop, 30 s past its timeout")


def test_w34_without_that_line_it_is_said_in_general() -> None:
    assert why_replaced(Ending(exit_code=70)) == "its loop was held for too long"


@pytest.mark.parametrize(
    "ending", [Ending(), Ending(exit_code=0), Ending(exit_code=1, stderr=SAYS.decode()), Ending(signal=9)]
)
def test_w34_other_ends_are_no_replacement(ending: Ending) -> None:
    assert why_replaced(ending) == ""
