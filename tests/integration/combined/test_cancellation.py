"""Whose cancellation is it? Tasks that are interrupted because an older use of their key failed, here and on workers.

A task that nobody cancelled never ends as cancelled, whatever its body makes of the interruption; one that somebody
cancelled never runs again. (`schedules.py` has the random ones.)
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from typing import Any

import pytest

from headgate import CooldownResource, Resource, ResourcePool, TaskCancelled, TaskHandle, TaskPool
from headgate.testing import run
from tests.integration.combined import cancel_jobs, combined_jobs, schedules
from tests.support.combined.combined_support import Apart, Line, noted, tell
from tests.support.combined.support import Key, outcome_of, watched
from tests.support.resources.support import in_flight
from tests.support.workers.support import lines

WHERE = pytest.mark.parametrize("line", ["resources", "both"], indirect=True)
needs_anyio = pytest.mark.skipif(cancel_jobs.anyio is None, reason="anyio is not installed; `pip install anyio`")


def two_keys(**options: Any) -> ResourcePool[str]:
    return ResourcePool({"a": "secret-a", "b": "secret-b"}, strategy="primary_backup", **options)


async def with_an_elder(pool: TaskPool, log: str) -> TaskHandle[str]:
    """A task that finds the key "a" overloaded when it is told to."""
    elder = await pool.submit(combined_jobs.elder, log)
    await noted(log, "elder begun a")
    return elder


def check_interrupted(line: Line, log: str, ways: list[str]) -> None:
    async def main() -> None:
        chosen = two_keys()
        async with line.pool(chosen, max_concurrent=50) as pool:
            elder = await with_an_elder(pool, log)
            handles = {way: await pool.submit(cancel_jobs.victim, log, way, max_attempts=1) for way in ways}
            for way in ways:
                await noted(log, f"begun a {way}")
            tell(log)
            ended = {way: await outcome_of(handle) for way, handle in handles.items()}
            assert ended == dict.fromkeys(ways, "b")
            assert {handle.snapshot().attempt for handle in handles.values()} == {1}, "it was not their fault"
            assert await elder == "b"
        assert (chosen.stats().sibling_cancels, in_flight(chosen)) == (len(ways), 0)

    line(main)


@WHERE
def test_r61_an_interrupted_task_runs_again_whatever_its_body_makes_of_the_interruption(line: Line, log: str) -> None:
    check_interrupted(line, log, list(cancel_jobs.WAYS))


@needs_anyio
@WHERE
def test_r61_an_interrupted_task_runs_again_below_scopes_of_anyio(line: Line, log: str) -> None:
    """What httpx, and clients that are built on it, wait in."""
    check_interrupted(line, log, list(cancel_jobs.ANYIO))


@WHERE
def test_r63_a_body_that_swallows_the_interruption_has_its_result_and_can_be_cancelled_later(
    line: Line, log: str
) -> None:
    async def main() -> None:
        chosen = two_keys()
        async with line.pool(chosen, max_concurrent=10) as pool:
            elder = await with_an_elder(pool, log)
            stays, goes = [await pool.submit(cancel_jobs.swallows, log) for _ in range(2)]
            await noted(log, "begun a swallows", 2)
            tell(log)
            assert await elder == "b"
            assert (stays.status, goes.status) == ("running", "running")
            await noted(log, "swallowed", 2)  # else the next one may be swallowed with it, on another worker
            assert goes.cancel()
            assert isinstance(await outcome_of(goes), TaskCancelled)
            tell(log, "end")
            assert await stays == "swallowed on a"
            assert stays.snapshot().attempt == 1
        assert in_flight(chosen) == 0
        assert "begun b swallows" not in lines(log)

    line(main)


@WHERE
def test_r63_a_body_that_makes_another_exception_of_the_interruption_fails_with_that(line: Line, log: str) -> None:
    async def main() -> None:
        chosen = two_keys()
        async with line.pool(chosen, max_concurrent=10) as pool:
            elder = await with_an_elder(pool, log)
            handle = await pool.submit(cancel_jobs.wraps, log)
            await noted(log, "begun a wraps")
            tell(log)
            assert await elder == "b"
            assert isinstance(await outcome_of(handle), LookupError)
        assert in_flight(chosen) == 0
        assert "begun b wraps" not in lines(log)

    line(main)


@WHERE
@pytest.mark.parametrize("way", ["replaces", "cleans_up", "has_a_group"])
def test_r62_a_cancel_in_the_turn_of_the_interruption_wins(line: Line, log: str, way: str) -> None:
    async def main() -> None:
        handles: list[TaskHandle[str]] = []

        def cooled(resource_id: str, old: str, new: str, number: int) -> None:
            if new == "cooling_down":
                handles[0].cancel()  # the interruptions are on their way
                asyncio.get_running_loop().call_soon(handles[1].cancel)  # they have just arrived

        chosen = two_keys(on_state_change=cooled)
        async with line.pool(chosen, max_concurrent=10) as pool:
            elder = await with_an_elder(pool, log)
            handles += [await pool.submit(cancel_jobs.victim, log, way) for _ in range(3)]
            await noted(log, f"begun a {way}", 3)
            tell(log)
            ended = [await outcome_of(handle) for handle in handles]
            assert [type(error) for error in ended[:2]] == [TaskCancelled, TaskCancelled]
            assert ended[2] == "b"
            assert await elder == "b"
        assert in_flight(chosen) == 0
        assert lines(log).count(f"begun b {way}") == 1

    line(main)


# -- here: the Task itself is cancelled, by those who know it ----------------------------------------------------------


class Elder:
    """Finds the key "a" overloaded when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, key: Key) -> str:
        await self.go.wait()
        if key.resource_id == "a":
            raise CooldownResource(60, "429")
        return key.resource_id


@pytest.mark.parametrize("when", ["before", "after", "in its clean-up", "after it was swallowed"])
def test_r62_whoever_cancels_the_task_of_asyncio_wins_too(when: str) -> None:
    async def main() -> None:
        chosen, elder = two_keys(), Elder()
        tasks: list[asyncio.Task[Any]] = []
        keys: list[str] = []

        async def body(key: Key) -> str:
            keys.append(key.resource_id)
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                if when == "after it was swallowed":
                    task.uncancel()
                    await asyncio.sleep(1000)
                await asyncio.sleep(1)
                raise asyncio.CancelledError("another one") from None
            return "not interrupted"

        async with TaskPool(resources=chosen, max_concurrent=5) as pool:
            first = await pool.submit(elder)
            handle = await pool.submit(body)
            await asyncio.sleep(1)
            elder.go.set()
            if when == "before":
                tasks[0].cancel()
            await asyncio.sleep(0.5)
            if when != "before":
                tasks[0].cancel()
            with pytest.raises(TaskCancelled):
                await handle
            assert await first == "b"
        assert keys == ["a"]
        assert in_flight(chosen) == 0

    run(main)


def test_r61_a_task_whose_count_was_never_taken_back_is_not_lost() -> None:
    """A TaskGroup of Python 3.11 and 3.12 whose child fails while it waits for it leaves a cancellation behind."""

    async def main() -> None:
        chosen, elder = two_keys(), Elder()

        async def fails() -> None:
            await asyncio.sleep(0.5)
            raise ValueError("a child's")

        async def body(key: Key) -> str:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(fails())
            except* ValueError:
                pass
            await asyncio.sleep(10)
            return key.resource_id

        async with TaskPool(resources=chosen, max_concurrent=5) as pool:
            first = await pool.submit(elder)
            handle = await pool.submit(body)
            await asyncio.sleep(1)
            elder.go.set()
            assert await first == "b"
            assert await handle in ("a", "b"), "to its end where it is, or again"
        assert in_flight(chosen) == 0

    run(main)


@pytest.mark.parametrize("swallows", [False, True])
def test_r64_a_stream_that_opens_after_it_was_asked_to_stop_is_not_interrupted_later(swallows: bool) -> None:
    async def main() -> None:
        chosen, elder = two_keys(), Elder()

        async def items(key: Key) -> Any:
            try:
                async with asyncio.timeout(1):  # ends in the very turn in which it is asked to stop
                    await asyncio.sleep(1000)
            except TimeoutError:
                pass
            if swallows:
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    pass
            yield key.resource_id
            await asyncio.sleep(5)
            yield "end"

        async with TaskPool(resources=chosen, max_concurrent=5) as pool:
            first = await pool.submit(elder)
            stream = pool.stream(items)
            asyncio.get_running_loop().call_later(1, elder.go.set)
            got = [item async for item in stream]
            assert got in (["a", "end"], ["b", "end"])
            assert await first == "b"
        assert in_flight(chosen) == 0

    run(main)


# -- random ------------------------------------------------------------------------------------------------------------


def test_r61_random_schedules_of_interrupted_tasks(scale: float) -> None:
    asked = cancelled = requeued = 0
    for seed in range(max(1, round(1500 * scale**1.8))):
        world = schedules.World(seed)
        try:
            world.run()
        except schedules.Violation as violation:
            trace = "\n".join(world.trace)
            pytest.fail(f"{trace}\nseed {seed}: {violation}")
        asked += world.sibling_cancels
        cancelled += world.outer_cancels
        requeued += world.interrupted
    assert min(asked, cancelled, requeued) > 0


@pytest.mark.parametrize("broken", [pytest.param("text", marks=pytest.mark.soak), "count"])
def test_r61_the_judge_sees_a_broken_rule(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that never objects proves nothing."""
    from headgate.core.cancellation import Steered, _sender

    rules: dict[str, Any] = {
        "text": lambda self, error: bool(error.args) and _sender(error.args[0]) is self,  # a renamed one is lost
        "count": lambda self, error: self.asked is not None,  # somebody else's cancellation in the same turn is lost
    }
    monkeypatch.setattr(Steered, "is_ours", rules[broken])
    problems: list[str] = []
    for seed in range(150):
        world = schedules.World(seed)
        try:
            world.run()
        except schedules.Violation:
            problems += [one for one in world.problems if one.startswith({"text": "R61", "count": "R62"}[broken])]
        if problems:
            break
    assert problems


@pytest.mark.integration
def test_r61_random_bodies_on_real_workers(shared: Apart, scale: float) -> None:
    """Nobody's task ends as cancelled, nobody's cancelled task comes back, and no key stays in use."""

    async def main() -> None:
        chosen = ResourcePool([Resource(name, f"secret-{name}", 8) for name in "abcd"], cooldown_table=(0.005,))
        chance = random.Random(7)
        async with TaskPool(resources=chosen, workers=shared.pool, max_concurrent=24) as pool:
            with watched(chosen, pool, every=100) as watch:
                handles = []
                cancelled: set[Any] = set()
                timers: list[asyncio.TimerHandle] = []
                loop = asyncio.get_running_loop()

                def cancel(handle: TaskHandle[Any]) -> None:
                    if handle.cancel():
                        cancelled.add(handle)

                for number in range(max(100, round(3000 * scale))):
                    handle = await pool.submit(cancel_jobs.random_body, number, max_attempts=1000)
                    handles.append(handle)
                    if chance.random() < 0.1:
                        timers.append(loop.call_later(chance.uniform(0, 1.5), cancel, handle))
                ended = [await outcome_of(handle) for handle in handles]
                watch.check_ends(handles)
            for timer in timers:
                timer.cancel()  # the loop is shared, and would keep the pool until they are due
            for number, (handle, outcome) in enumerate(zip(handles, ended, strict=True)):
                assert outcome == number or (handle in cancelled and isinstance(outcome, TaskCancelled)), outcome
        assert chosen.stats().sibling_cancels > 0
        assert (in_flight(chosen), chosen.stats().waiting) == (0, 0)

    shared(main)


@pytest.mark.integration
@needs_anyio
def test_r61_connections_of_anyio_that_are_interrupted_lose_no_task(scale: float) -> None:
    """`connect_tcp` races addresses in a group of its own, as most HTTP clients do with it, on a real loop."""
    tasks = max(100, round(3000 * scale**1.5))
    program = [sys.executable, "-c", CONNECTING, str(tasks)]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"{{'completed': {tasks}}}\n"), ran.stderr


CONNECTING = """
import asyncio, collections, logging, random, sys
import anyio
from headgate import CooldownResource, ResourcePool, TaskPool, pool_wait

async def answer(reader, writer):
    try:
        await reader.readexactly(1)
        writer.write(b"y")
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port, chance = server.sockets[0].getsockname()[1], random.Random(3)

    async def asks(key):
        async with await anyio.connect_tcp(chance.choice(["127.0.0.1", "localhost"]), port) as stream:
            await stream.send(b"x")
            await stream.receive()
        if chance.random() < 0.2:
            raise CooldownResource(0)

    keys = ResourcePool(dict.fromkeys("abcd", "secret"))
    async with TaskPool(resources=keys, max_concurrent=40) as pool:
        ended = await pool_wait([await pool.submit(asks, max_attempts=1000) for _ in range(int(sys.argv[1]))])
    assert keys.stats().sibling_cancels > 0
    print(dict(collections.Counter(one.status for one in ended)))
    server.close()

logging.disable()
asyncio.run(main())
"""
