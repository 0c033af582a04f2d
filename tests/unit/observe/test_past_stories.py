"""Stories of tasks that have ended and whose handle nobody holds."""

from __future__ import annotations

import asyncio
import gc

from headgate import CooldownResource, Resource, ResourcePool, RetryOperation, TaskPool
from headgate.observe.actions import story
from headgate.testing import virtual

SECRET = "sk-planted-5f6e7d8c"


@virtual
async def test_o10_the_story_of_a_task_that_nobody_holds_names_its_attempts_keys_and_reasons() -> None:
    async def call(key: Resource[str], what: str) -> None:
        await asyncio.sleep(0.1)
        if what == "refused" and key.resource_id == "key-1":
            raise CooldownResource(60, "rate limited")
        if what == "fails":
            raise ValueError(f"no answer for {key.value}")

    keys = ResourcePool([Resource("key-1", SECRET), Resource("key-2", "b" * 20)], name="o10-story-keys")
    async with TaskPool("o10-story", resources=keys) as pool:
        for what in ("fine", "refused", "fails"):
            await pool.submit(call, what)
        await pool.drain()
        gc.collect()
        told = [_words(await story(f"o10-story/{number}")) for number in (1, 2, 3)]
    assert told[0] == ["submitted", "attempt 1 begins with key-1", "completed"]
    assert "attempt 1 begins with key-1" in told[1]
    assert any(line.startswith("attempt 1 ends: ") and "rate limited" in line for line in told[1])
    assert told[1][-2:] == ["attempt 2 begins with key-2", "completed"]
    assert told[2][-2:] == ["attempt 1 begins with key-2", "failed: ValueError: no answer for <key-2>"]


@virtual
async def test_o10_a_story_that_nobody_holds_keeps_its_last_lines() -> None:
    async def call(tries: list[int]) -> None:
        tries.append(1)
        await asyncio.sleep(1)
        raise RetryOperation(f"try {len(tries)}")

    keys = ResourcePool({"key-1": SECRET}, name="o10-long-keys")
    async with TaskPool("o10-long", resources=keys) as pool:
        await pool.submit(lambda key, tries: call(tries), [], retries=50)
        await pool.drain()
        gc.collect()
        told = _words(await story("o10-long/1"))
    assert told[0] == "submitted"
    assert told[-1].startswith("failed: ")
    assert len(told) <= 1 + 20 + 2
    assert not any(line.startswith("waits") for line in told), "its first lines are gone, so nobody knows"


def _words(text: str) -> list[str]:
    """The lines of a story without its title and times."""
    return [line.partition(" s  ")[2] for line in text.splitlines()[1:]]
