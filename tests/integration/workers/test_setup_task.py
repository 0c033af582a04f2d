"""The task that runs setup and teardown, on a task loop without a worker around it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from headgate.errors import WorkerStartFailed
from headgate.workers import setup as setups
from headgate.workers.server import setup_task
from headgate.workers.server.task_loop import TaskLoop
from headgate.workers.setup import dumped

# A real loop in a real thread.
pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No other test of this process finds the result of a setup."""
    before = setups._result
    yield
    setups._result = before


def with_task_loop(use: Callable[[TaskLoop], Any]) -> Any:
    async def main() -> Any:
        tasks = TaskLoop("a test", asyncio.get_running_loop(), lambda outcomes: None)
        tasks.start()
        try:
            async with asyncio.timeout(20):
                return await use(tasks)
        finally:
            released.set()
            tasks.stop()
            tasks.close()

    return asyncio.run(main())


arrived = threading.Event()
"""Does the other thread wait where it will stay?"""
released = threading.Event()


@pytest.fixture(autouse=True)
def not_yet() -> None:
    arrived.clear()
    released.clear()


async def once_there(ending: Coroutine[Any, Any, None]) -> None:
    """Await something with a time limit, and let no time pass here until the other thread has arrived."""
    task = asyncio.create_task(ending)
    await asyncio.sleep(0)  # now the limit counts, on this loop
    assert arrived.wait(10)
    await task


async def hang() -> None:
    asyncio.get_running_loop().call_soon(arrived.set)  # when this waits
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def hanging_manager() -> AsyncIterator[None]:
    await hang()
    yield


def block() -> None:
    released.wait(noted(20.0))


def noted(seconds: float) -> float:
    arrived.set()
    return seconds


@pytest.mark.parametrize(
    ("setup", "where"), [(hang, "in wait"), (hanging_manager, "in wait"), (block, "released.wait(")]
)
def test_w90_a_setup_that_takes_too_long_says_where_it_is(
    setup: Any, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def use(tasks: TaskLoop) -> None:
        pickled = dumped(setup, None, 0.05)
        assert pickled is not None
        with pytest.raises(WorkerStartFailed, match=r"setup did not end within 0\.05 s") as caught:
            await once_there(setup_task.SetupTask(tasks, pickled).begin())
        assert "quorum_timeout" in str(caught.value)

    with_task_loop(use)
    assert where in capsys.readouterr().err


@pytest.mark.parametrize("teardown", [hang, block])
def test_w90_a_teardown_that_takes_too_long_is_not_waited_for(
    teardown: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(setup_task, "TEARDOWN_SECONDS", 0.05)

    async def use(tasks: TaskLoop) -> None:
        pickled = dumped(None, teardown, None)
        assert pickled is not None
        task = setup_task.SetupTask(tasks, pickled)
        await task.begin()
        await once_there(task.end())

    with caplog.at_level(logging.WARNING, "headgate.workers"):
        with_task_loop(use)
    assert "the teardown of a worker did not end within 0.05 s and is cancelled" in caplog.text
