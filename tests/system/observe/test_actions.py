"""Actions on pools whose event loop is elsewhere, does not run, or does something that fails."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

import headgate
from headgate import InvalidArgument, TaskPool, registry
from headgate.observe.actions import act, on_home, story
from headgate.observe.events import ActionTaken
from tests.system.observe.conftest import Program
from tests.system.observe.support import eventually


def elsewhere(work: Coroutine[Any, Any, str]) -> str:
    """Await this on an event loop in another thread, as the one that serves the socket."""
    outcome: list[str] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except InvalidArgument as error:
            outcome.append(f"refused: {error}")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    [said] = outcome
    return said


@pytest.mark.parametrize(
    ("action", "target", "pool"), [("cancel", "o10-idle/1", ""), ("resize", "5", "o10-idle"), ("drain", "o10-idle", "")]
)
def test_o10_what_a_loop_that_does_not_run_would_have_to_do_is_refused(action: str, target: str, pool: str) -> None:
    gc.collect()
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[TaskPool, Any]:
        made = TaskPool("o10-idle", max_concurrent=1)
        handle = await made.submit(asyncio.Event().wait)
        await asyncio.sleep(0)
        return made, handle

    made, handle = loop.run_until_complete(begin())
    try:
        said = elsewhere(act(action, target, pool))
        assert said.startswith("refused: the event loop of 'o10-idle' is not running. Nothing was done"), said
        assert "o10-idle" in elsewhere(story("o10-idle/1")), "what only looks is answered"
        loop.run_until_complete(asyncio.sleep(0))
        assert (made.max_concurrent, made.snapshot().active, handle.status) == (1, 1, "running")
    finally:
        loop.run_until_complete(made.close(cancel=True))
        loop.close()


def test_o10_a_timeout_of_the_work_itself_is_not_taken_for_a_held_loop(program: Program) -> None:
    [entry] = [one for one in registry.pools("tasks") if one.name == program.pool.name]

    async def work(_: Any) -> str:
        raise TimeoutError("of its own")

    async def main() -> None:
        with pytest.raises(TimeoutError, match="of its own"):
            await on_home(entry, work)

    asyncio.run(main())


def test_o10_a_failure_after_the_answer_names_the_action_and_the_pool(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(pool: TaskPool) -> None:
        await asyncio.sleep(0.01)
        raise OSError("made to fail")

    told: list[ActionTaken] = []
    stop = headgate.subscribe(told.append, "observe.actions")
    with monkeypatch.context() as patch:
        patch.setattr(TaskPool, "close", broken)
        asyncio.run(act("drain", program.pool.name))
        eventually(lambda: len(told) == 2)
    stop()
    failed = next(one for one in told if one.outcome != "done")
    assert (failed.action, failed.pool) == ("drain", program.pool.name)
    assert failed.outcome == "OSError: made to fail"


@pytest.mark.integration
def test_o10_w26_to_resize_a_pool_that_only_discovers_workers_is_refused_to_the_one_who_asks() -> None:
    told: list[ActionTaken] = []
    stop = headgate.subscribe(told.append, "observe.actions")

    async def main() -> None:
        discovery = headgate.StaticDiscovery(["127.0.0.1:1"])
        async with headgate.WorkerPool(discovery=discovery, name="o10-fleet") as pool:
            with pytest.raises(InvalidArgument, match="cannot be resized: it starts none itself"):
                await act("resize", "3", "o10-fleet")
            assert pool.workers() == []

    asyncio.run(main())
    stop()
    [refused] = told
    assert "cannot be resized" in refused.outcome
