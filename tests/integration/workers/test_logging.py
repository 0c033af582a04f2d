"""What an operator reads of workers: one line for each that is lost or blocked, none for what goes as it should."""

from __future__ import annotations

import logging
import os
import signal

import pytest

from headgate import WorkerPool
from headgate.core.events import Event
from headgate.workers.events import (
    WORKERS,
    WorkerBlocked,
    WorkerLostEvent,
    WorkerNotStarted,
    WorkerReady,
    WorkerStarted,
    WorkerStopped,
    WorkerUnblocked,
)
from tests.support.workers.support import all_ready, pids, run, until


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    records = [record for record in caplog.records if record.name == "headgate.workers"]
    return [(record.levelno, record.getMessage()) for record in records]


LINES = {
    "worker w-1 (pid 7) is lost: killed by SIGKILL; another takes its place": (
        logging.WARNING,
        WorkerLostEvent(at=0.0, uid="w-1", pid=7, reason="killed by SIGKILL", restarted=True),
    ),
    "worker w-1 (pid 7) is lost: exit code 3": (
        logging.WARNING,
        WorkerLostEvent(at=0.0, uid="w-1", pid=7, reason="exit code 3", restarted=False),
    ),
    "worker w-1 (pid 7) is blocked: jobs.crunch:4 holds its loop; no new calls go there until it is free": (
        logging.WARNING,
        WorkerBlocked(at=0.0, uid="w-1", pid=7, tag="jobs.crunch:4"),
    ),
    "worker w-1 is blocked: its loop is held, or it gives no sign of life; no new calls go there until it is free": (
        logging.WARNING,
        WorkerBlocked(at=0.0, uid="w-1", pid=0, tag=None),
    ),
    "worker w-1 (pid 7) did not start (try 3 in a row): exit code 9; the next try is in 0.2 s": (
        logging.WARNING,
        WorkerNotStarted(at=0.0, uid="w-1", pid=7, reason="exit code 9", failed_tries=3, retry_in=0.2),
    ),
    "a worker did not start (try 5 in a row): no processes; no further try": (
        logging.WARNING,
        WorkerNotStarted(at=0.0, uid="", pid=0, reason="no processes", failed_tries=5, retry_in=None),
    ),
    "worker w-1 (pid 7) is ready: workers start again, after 4 tries that failed": (
        logging.INFO,
        WorkerReady(at=0.0, uid="w-1", pid=7, failed_tries=4),
    ),
    "worker w-1 (pid 7) takes calls again": (logging.INFO, WorkerUnblocked(at=0.0, uid="w-1", pid=7)),
}


@pytest.mark.parametrize("line", LINES)
def test_w34_a_worker_in_trouble_is_one_line(caplog: pytest.LogCaptureFixture, line: str) -> None:
    level, event = LINES[line]
    with caplog.at_level(logging.INFO, "headgate.workers"):
        WORKERS.emit(event)
    assert said(caplog) == [(level, line)]


@pytest.mark.parametrize("kind", [WorkerStarted, WorkerReady, WorkerStopped])
def test_a_worker_that_comes_or_goes_as_told_is_not_news(caplog: pytest.LogCaptureFixture, kind: type[Event]) -> None:
    with caplog.at_level(logging.DEBUG, "headgate.workers"):
        WORKERS.emit(kind(at=0.0, uid="w-1", pid=7))  # type: ignore[call-arg]
    assert said(caplog) == []


@pytest.mark.integration
def test_w26_a_killed_worker_is_told_once_and_a_closed_pool_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            [view, _] = pool.workers()
            os.kill(view.pid, signal.SIGKILL)
            await until(lambda: view.pid not in pids(pool))
            await all_ready(pool, 2)
            line = f"worker {view.uid} (pid {view.pid}) is lost: killed by SIGKILL; another takes its place"
            assert said(caplog) == [(logging.WARNING, line)]

    run(main)
    assert len(said(caplog)) == 1
