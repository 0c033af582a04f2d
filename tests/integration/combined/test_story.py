"""One id through all events, and the story of a task: what happened to it, when, and why."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskPool,
    backpressure_queue,
    fifo,
    pool_wait,
)
from headgate import tasks as rooms
from headgate.core.events import Event
from headgate.stores import JsonLinesStore
from headgate.testing import Captured, capture_events, settle, virtual
from tests.integration.combined import combined_jobs
from tests.support.combined.combined_support import Apart, noted, tell
from tests.support.resources.support import keys
from tests.support.workers.support import until

AUDIT = "lifecycle.pool.audit"
SIBLING = "sibling|older use"
"""How it may be told that a task went back because of another's verdict."""


def two_keys(**options: Any) -> ResourcePool[str]:
    return keys("a", "b", strategy="primary_backup", **options)


async def ident(key: Resource[str]) -> str:
    return key.resource_id


async def quick() -> str:
    return "done"


async def slow(*args: Any) -> str:
    await asyncio.sleep(args[-1])
    return "done"


async def fails(*args: Any) -> None:
    raise LookupError("nothing there")


def by_key(**outcomes: BaseException) -> Any:
    """Raises what is given for its key."""

    async def work(key: Resource[str]) -> str:
        await asyncio.sleep(1)
        if key.resource_id in outcomes:
            raise outcomes[key.resource_id]
        return key.resource_id

    return work


# -- reading a story ---------------------------------------------------------------------------------------------------

_CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d(?:\.\d+)?)")
_SECONDS = re.compile(r"^\W*\+?\s*(\d+(?:\.\d+)?)\s*(?:s\b)?")


def times_in(story: str) -> list[float]:
    """The time of each line that has one: a time of day anywhere, or seconds at its beginning."""
    clocks = [found for line in story.splitlines() if (found := _CLOCK.search(line))]
    if len(clocks) > 1:
        return [int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3]) for found in clocks]
    return [float(found[1]) for line in story.splitlines() if (found := _SECONDS.match(line))]


def names(story: str, handle: Any) -> bool:
    """Whose story is it? The id, or what errors and reprs call the task."""
    return handle.id in story or handle.label in story


def check(story: str, handle: Any, *words: str) -> str:
    """A story of several lines, with a name and times that ascend, which tells these things in this order."""
    assert isinstance(story, str)
    assert len(story.splitlines()) > 1, story
    assert names(story, handle), story
    times = times_in(story)
    assert len(times) > 1, story
    assert times == sorted(times), story
    rest = story.lower()
    assert "submitted" in rest, story
    for word in words:
        _, found, rest = rest.partition(word.lower())
        assert found, f"{word!r} is not told, or too early:\n{story}"
    return story


# -- one id ------------------------------------------------------------------------------------------------------------


def id_of(event: Event) -> str | None:
    """Which task an event is about; None: about none."""
    usage = getattr(event, "usage", None)
    if hasattr(event, "request_id"):
        return str(event.request_id)
    return None if usage is None else str(usage.request_id)


def about(events: Captured, handle: Any) -> list[Event]:
    return [event for event in events if id_of(event) == handle.id]


@virtual
async def test_line_every_event_of_a_task_has_its_id() -> None:
    with capture_events() as events:
        async with TaskPool(resources=two_keys()) as pool:
            handle = await pool.submit(by_key(a=CooldownResource(60, "rate limited")))
            assert await handle == "b"
    assert {id_of(event) for event in events} == {handle.id}
    names = [event.name for event in events]
    assert names[0] == "pool_submit"
    assert {
        "pool_submit",
        "pool_dequeue",
        "pool_requeue",
        "pool_finish",
        "resource_acquired",
        "resource_released",
        "resource_cooled",
        "run_finished",
    } == set(names)
    assert [names.count(name) for name in ("pool_submit", "pool_requeue", "pool_finish", "run_finished")] == [1] * 4
    assert [names.count(name) for name in ("pool_dequeue", "resource_acquired", "resource_released")] == [2] * 3
    [finished] = [event.to_dict() for event in events if event.name == "run_finished"]
    assert (finished["request_id"], finished["outcome"], finished["attempts"]) == (handle.id, "ok", 2)
    assert [event.at for event in events] == sorted(event.at for event in events)


@virtual
async def test_line_events_of_pools_answer_with_the_task_as_request() -> None:
    with capture_events(AUDIT) as events:
        async with rooms.TaskPool(backpressure=backpressure_queue(1, "drop_newest")) as pool:
            handles = [await pool.submit(slow, 1) for _ in range(3)]
    assert [(event.name, id_of(event)) for event in events if event.name == "pool_drop"] == [
        ("pool_drop", handles[2].id)
    ]
    for event in events:
        assert event.to_dict()["task_id"] == id_of(event)


@virtual
async def test_line_tasks_that_run_at_once_keep_their_ids_apart() -> None:
    with capture_events() as events:
        async with TaskPool(max_concurrent=5, resources=two_keys()) as pool:
            handles = [await pool.submit(ident) for _ in range(20)]
    for handle in handles:
        assert [event.name for event in about(events, handle)].count("resource_acquired") == 1
    assert len(events) == sum(len(about(events, handle)) for handle in handles)


@virtual
async def test_line_outside_calls_of_the_same_keys_have_other_ids() -> None:
    chosen = keys("a")
    with capture_events() as events:
        async with TaskPool(resources=chosen) as pool:
            handle = await pool.submit(ident)
            await handle
            await chosen.run(ident, request_id="mine")
    assert {id_of(event) for event in events} == {handle.id, "mine"}


@virtual
async def test_line_sibling_cancelled_has_the_victims_id() -> None:
    async def younger(key: Resource[str]) -> str:
        await asyncio.sleep(5)
        return key.resource_id

    with capture_events() as events:
        async with TaskPool(max_concurrent=2, resources=two_keys()) as pool:
            elder = await pool.submit(by_key(a=DisableResource("gone")))
            victim = await pool.submit(younger)
            assert (await elder, await victim) == ("b", "b")
    assert [id_of(event) for event in events if event.name == "sibling_cancelled"] == [victim.id]
    assert [id_of(event) for event in events if event.name == "resource_disabled"] == [elder.id]


@virtual
async def test_line_a_stream_has_one_id_too() -> None:
    async def items(key: Resource[str]) -> AsyncGenerator[str, None]:
        if key.resource_id == "a":
            raise CooldownResource(60, "rate limited")
        yield key.resource_id

    with capture_events() as events:
        async with TaskPool(resources=two_keys()) as pool:
            assert [item async for item in pool.stream(items)] == ["b"]
            task = pool.snapshot().tasks[0]
    assert {id_of(event) for event in events} == {task.id}
    assert {"pool_submit", "pool_dequeue", "pool_requeue", "pool_finish", "resource_acquired", "run_finished"} <= set(
        events.names
    )


@virtual
async def test_line_events_are_plain_values() -> None:
    with capture_events() as events:
        async with TaskPool(resources=two_keys()) as pool:
            await (await pool.submit(by_key(a=CooldownResource(60, "rate limited")), key=("x", 1)))
    for event in events:
        json.dumps(event.to_dict())


@pytest.mark.integration
def test_line_every_event_of_a_placed_task_has_its_id(shared: Apart) -> None:
    async def main() -> None:
        with capture_events() as events:
            async with TaskPool(resources=two_keys(), workers=shared.pool) as pool:
                outcomes: combined_jobs.Outcomes = {"a": (CooldownResource, (60, "rate limited"), {})}
                handle = await pool.submit(combined_jobs.by_key, outcomes)
                assert await handle == "b"
        mine = about(events, handle)
        names = [event.name for event in mine]
        assert [names.count(name) for name in ("task_dispatched", "task_finished")] == [2, 2]
        strangers = [event.name for event in events if event not in mine and not event.topic.startswith("workers.life")]
        assert strangers == []
        uids = {view.uid for view in shared.pool.workers()}
        assert {event.to_dict()["uid"] for event in mine if event.topic == "workers.tasks"} <= uids

    shared(main)


# -- pool_requeue ------------------------------------------------------------------------------------------------------


def requeues(events: Captured) -> list[dict[str, Any]]:
    return [event.to_dict() for event in events if event.name == "pool_requeue"]


@virtual
async def test_t41_a_verdict_is_a_requeue_that_was_spent() -> None:
    with capture_events(AUDIT) as events:
        async with TaskPool(resources=keys("a", "b", "c", "d", strategy="primary_backup", max_attempts=4)) as pool:
            work = by_key(
                a=CooldownResource(60, "rate limited"), b=DisableResource("revoked"), c=RetryOperation("status 502")
            )
            handle = await pool.submit(work)
            assert await handle == "d"
    found = requeues(events)
    assert [(one["resource_id"], one["attempt"], one["spent"]) for one in found] == [
        ("a", 1, True),
        ("b", 2, True),
        ("c", 3, True),
    ]
    assert {(one["task_id"], one["pool_id"], one["topic"]) for one in found} == {(handle.id, pool.id, AUDIT)}
    for one, words in zip(found, ["cooldown|rate limited", "disable|revoked", "retry|status 502"], strict=True):
        assert re.search(words, one["reason"]), one["reason"]


@virtual
async def test_t41_a_sibling_is_a_requeue_that_was_not_spent() -> None:
    with capture_events(AUDIT) as events:
        async with TaskPool(max_concurrent=2, resources=two_keys()) as pool:
            await pool.submit(by_key(a=CooldownResource(60)))
            victim = await pool.submit(slow, 5)
    [told] = [one for one in requeues(events) if one["task_id"] == victim.id]
    assert (told["resource_id"], told["spent"]) == ("a", False)
    assert re.search(SIBLING, told["reason"])


@virtual
async def test_t41_a_retry_after_a_failure_is_a_requeue_too() -> None:
    calls: list[int] = []

    async def flaky(*args: Any) -> str:
        calls.append(1)
        if len(calls) == 1:
            raise LookupError("nothing there")
        return "done"

    for make in (lambda: rooms.TaskPool(), lambda: TaskPool(resources=keys("a"))):
        calls.clear()
        with capture_events(AUDIT) as events:
            async with make() as pool:
                handle = await pool.submit(flaky, retries=1)
                assert await handle == "done"
        assert events.names == ["pool_submit", "pool_dequeue", "pool_requeue", "pool_dequeue", "pool_finish"]
        [told] = requeues(events)
        assert told["task_id"] == handle.id
        assert re.search("retry|LookupError", told["reason"])


@virtual
async def test_t34_the_audit_file_has_requeues(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    async with TaskPool(resources=two_keys(), audit=path) as pool:
        handle = await pool.submit(by_key(a=CooldownResource(60, "rate limited")))
        await handle
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["name"] for one in written] == [
        "pool_submit",
        "pool_dequeue",
        "pool_requeue",
        "pool_dequeue",
        "pool_finish",
    ]
    assert {one["task_id"] for one in written} == {handle.id}
    assert (written[2]["resource_id"], written[2]["spent"]) == ("a", True)


@virtual
async def test_t41_the_last_verdict_is_no_requeue() -> None:
    with capture_events(AUDIT) as events:
        async with TaskPool(resources=two_keys(max_attempts=1)) as pool:
            handle = await pool.submit(by_key(a=DisableResource("revoked")))
            with pytest.raises(PoolExhausted):
                await handle
    assert events.names == ["pool_submit", "pool_dequeue", "pool_finish"]


# -- stories -----------------------------------------------------------------------------------------------------------


@virtual
async def test_line_the_story_of_a_lucky_task() -> None:
    async with rooms.TaskPool("plain") as pool:
        handle = await pool.submit(quick)
        await handle
        check(handle.story(), handle, "submitted", "completed")
    async with TaskPool("leased", resources=keys("key-a")) as leased:
        lucky = await leased.submit(slow, 3)
        await lucky
        check(lucky.story(), lucky, "submitted", "key-a", "completed")
    assert handle.story().splitlines(), "also when its pool is closed"


@virtual
async def test_line_the_story_of_a_task_that_went_back() -> None:
    async with TaskPool(resources=keys("key-a", "key-b", strategy="primary_backup")) as pool:
        outcomes: Any = {"key-a": CooldownResource(60, "rate limited")}

        async def work(key: Resource[str]) -> str:
            await asyncio.sleep(1)
            if key.resource_id in outcomes:
                raise outcomes[key.resource_id]
            return key.resource_id

        handle = await pool.submit(work)
        await handle
        check(handle.story(), handle, "submitted", "key-a", "rate limited", "key-b", "completed")


@virtual(limit=1000)
async def test_line_the_story_of_a_task_whose_attempts_were_spent() -> None:
    async with TaskPool(resources=two_keys(max_attempts=2)) as pool:
        handle = await pool.submit(by_key(a=DisableResource("revoked"), b=RetryOperation("status 502")))
        await pool_wait(handle)
        story = check(handle.story(), handle, "submitted", "revoked", "failed")
        assert "PoolExhausted" in story
        assert "status 502" in story


@virtual
async def test_line_the_story_of_a_sibling() -> None:
    async with TaskPool(max_concurrent=2, resources=two_keys()) as pool:
        await pool.submit(by_key(a=CooldownResource(60)))
        victim = await pool.submit(slow, 5)
        await victim
        assert re.search(SIBLING, check(victim.story(), victim, "submitted", "again", "completed"))


@virtual
async def test_line_the_story_of_a_task_that_was_retried() -> None:
    for make in (lambda: rooms.TaskPool(), lambda: TaskPool(resources=keys("a"))):
        async with make() as pool:
            handle = await pool.submit(fails, retries=2)
            await pool_wait(handle)
            story = check(handle.story(), handle, "submitted", "LookupError", "LookupError", "failed")
            assert "nothing there" in story


@virtual
async def test_line_the_story_of_a_task_that_failed() -> None:
    for make in (lambda: rooms.TaskPool(), lambda: TaskPool(resources=keys("a"))):
        async with make() as pool:
            handle = await pool.submit(fails)
            await pool_wait(handle)
            story = check(handle.story(), handle, "submitted", "failed")
            assert "LookupError" in story
            assert "nothing there" in story


@virtual
async def test_line_the_story_of_a_task_that_took_too_long() -> None:
    async with TaskPool(resources=keys("a")) as pool:
        handle = await pool.submit(slow, 100, timeout=5)
        await pool_wait(handle)
        story = check(handle.story(), handle, "submitted", "failed")
        assert re.search("(?i)timeout|timed out|overdue|took longer", story)


@virtual
async def test_line_the_story_of_a_cancelled_task() -> None:
    for make in (lambda: rooms.TaskPool(), lambda: TaskPool(resources=keys("a"))):
        async with make() as pool:
            running = await pool.submit(slow, 100)
            queued = await pool.submit(slow, 100)
            await asyncio.sleep(3)
            for handle in (queued, running):
                handle.cancel()
                await pool_wait(handle)
                check(handle.story(), handle, "submitted", "cancelled")


@virtual
async def test_line_the_story_of_an_expired_task() -> None:
    for make in (lambda: rooms.TaskPool(), lambda: TaskPool(resources=keys("a"))):
        async with make() as pool:
            await pool.submit(slow, 100)
            handle = await pool.submit(slow, 1, ttl=5)
            await pool_wait(handle)
            check(handle.story(), handle, "submitted", "expired")


@virtual
async def test_line_the_story_of_a_rejected_task() -> None:
    for on_full, number in (("drop_newest", 2), ("drop_oldest", 1)):
        async with rooms.TaskPool(backpressure=backpressure_queue(1, on_full)) as pool:
            handles = [await pool.submit(slow, 1) for _ in range(3)]
            check(handles[number].story(), handles[number], "submitted", "rejected")
            assert f"{on_full}_queue_full" in handles[number].story()


@virtual
async def test_line_the_story_of_a_task_that_nothing_can_serve() -> None:
    async with TaskPool(resources=keys("a")) as pool:
        handle = await pool.submit(ident, tags=["eu"])
        assert (await pool_wait(handle)).status == "failed"
        assert "eu" in check(handle.story(), handle, "submitted", "failed")


@virtual
async def test_line_the_story_so_far() -> None:
    for make in (lambda: rooms.TaskPool(), lambda: TaskPool(resources=keys("key-a"))):
        async with make() as pool:
            running = await pool.submit(slow, 100)
            queued = await pool.submit(slow, 1)
            await asyncio.sleep(3)
            assert "submitted" in running.story().lower()
            assert "running" in running.story().lower()
            assert names(running.story(), running)
            assert names(queued.story(), queued)
            assert "queued" in queued.story().lower()
            for word in ("completed", "failed", "cancelled", "expired"):
                assert word not in queued.story().lower()
                assert word not in running.story().lower()
    assert "completed" in queued.story()


@virtual
async def test_line_the_story_tells_what_it_waits_and_waited_for() -> None:
    chosen = keys("key-a")
    async with TaskPool(max_concurrent=2, resources=chosen, queue=fifo()) as pool:
        with pytest.raises(CooldownResource):
            async with chosen.lease():
                raise CooldownResource(50, "rate limited")
        handle = await pool.submit(slow, 1)
        await settle()
        assert handle.status == "queued"
        assert re.search("(?i)cool", handle.story()), handle.story()
        await handle
        check(handle.story(), handle, "submitted", "cool", "key-a", "completed")


def waits_in(story: str) -> list[str]:
    """What a story tells of times in the queue, with the second in which each begins."""
    lines = [line.split(" s  ", 1) for line in story.splitlines()[1:]]
    return [f"{float(when.split()[-1]):+.0f} {what}" for when, what in lines if what.startswith("waits")]


@virtual
async def test_o10_the_story_tells_how_long_a_task_waited_behind_others() -> None:
    for make in (lambda: rooms.TaskPool(max_concurrent=2), lambda: TaskPool(max_concurrent=2, resources=keys("a"))):
        async with make() as pool:
            handles = [await pool.submit(slow, 10) for _ in range(5)]
            handles.append(await pool.submit(slow, 1, delay=5))
            await asyncio.sleep(15)
            handles[4].cancel()
            await asyncio.sleep(1)
            assert waits_in(handles[5].story()) == [
                "+5 waits 11.000 s for its turn behind other tasks (max_concurrent 2)"
            ]
            await pool.drain()
        assert [waits_in(handle.story()) for handle in handles] == [
            [],
            [],
            ["+0 waits 10.000 s for its turn behind other tasks (max_concurrent 2)"],
            ["+0 waits 10.000 s for its turn behind other tasks (max_concurrent 2)"],
            ["+0 waits 15.000 s for its turn behind other tasks (max_concurrent 2)"],
            ["+5 waits 15.000 s for its turn behind other tasks (max_concurrent 2)"],
        ]
        check(handles[4].story(), handles[4], "submitted", "waits 15.000 s", "cancelled")


@virtual
async def test_o10_the_story_tells_that_keys_were_missing_meanwhile() -> None:
    chosen = keys("key-a", "key-b", strategy="primary_backup")
    refusals = [CooldownResource(30, "rate limited"), CooldownResource(20, "rate limited")]

    async def work(key: Resource[str]) -> None:
        if refusals:
            raise refusals.pop(0)
        await asyncio.sleep(10)

    async with TaskPool(max_concurrent=1, resources=chosen, queue=fifo()) as pool:
        first, second = await pool.submit(work), await pool.submit(work)
        await asyncio.sleep(5)
        third = await pool.submit(work)
        await pool.drain()
        fourth = await pool.submit(slow, 1)
        await fourth
    gone = f"no resource of {chosen.name} is free"
    assert waits_in(first.story())[-1].startswith(f"+0 waits: {gone}: 2 cooling down"), first.story()
    assert waits_in(second.story()) == [
        f"+0 waits 30.000 s for its turn behind other tasks (max_concurrent 1); for 20.000 s of it {gone}"
    ]
    assert waits_in(third.story()) == [
        f"+0 waits 35.000 s for its turn behind other tasks (max_concurrent 1); for 15.000 s of it {gone}"
    ]
    assert waits_in(fourth.story()) == [], "what was missing before does not concern it"


@virtual
async def test_o10_the_story_of_a_task_behind_one_that_waits_for_a_key_names_the_key_alone() -> None:
    chosen = keys("key-a")
    async with TaskPool(max_concurrent=2, resources=chosen, queue=fifo()) as pool:
        with pytest.raises(CooldownResource):
            async with chosen.lease():
                raise CooldownResource(50, "rate limited")
        first, second = await pool.submit(slow, 1), await pool.submit(slow, 1)
        await pool.drain()
    assert len(waits_in(first.story())) == 1
    assert waits_in(second.story()) == [f"+0 waits 50.000 s for its turn: no resource of {chosen.name} is free"]


@virtual
async def test_line_a_story_does_not_change_when_told_twice_and_costs_the_task_nothing() -> None:
    async with TaskPool(resources=two_keys()) as pool:
        handle = await pool.submit(by_key(a=CooldownResource(60, "rate limited")))
        for _ in range(5):
            handle.story()
            await asyncio.sleep(0.5)
        assert await handle == "b"
        assert handle.story() == handle.story()


@virtual
async def test_line_the_story_of_a_stream() -> None:
    async def items(key: Resource[str]) -> AsyncGenerator[str, None]:
        await asyncio.sleep(1)
        if key.resource_id == "key-a":
            raise CooldownResource(60, "rate limited")
        yield key.resource_id
        yield key.resource_id

    async with TaskPool(resources=keys("key-a", "key-b", strategy="primary_backup")) as pool:
        stream = pool.stream(items)
        assert await anext(stream) == "key-b"
        [task] = pool._executor.scheduler.unfinished()  # a stream has no handle that a caller sees
        assert "rate limited" in task.story()
        assert [item async for item in stream] == ["key-b"]
        check(task.story(), task, "submitted", "key-a", "rate limited", "key-b", "completed")


@virtual(limit=10_000)
async def test_line_many_verdicts_make_a_long_story_and_not_an_endless_one() -> None:
    chosen = keys("a", max_attempts=200)

    async def work(key: Resource[str]) -> None:
        await asyncio.sleep(1)
        raise CooldownResource(0, "rate limited")

    async with TaskPool(resources=chosen) as pool:
        handle = await pool.submit(work)
        await pool_wait(handle)
        story = check(handle.story(), handle, "submitted", "rate limited", "failed")
        assert len(story) < 100_000


@pytest.mark.integration
def test_line_the_story_of_a_placed_task_names_its_workers(shared: Apart) -> None:
    async def main() -> None:
        async with TaskPool(resources=keys("key-a", "key-b", strategy="primary_backup"), workers=shared.pool) as pool:
            outcomes: combined_jobs.Outcomes = {"key-a": (CooldownResource, (60, "rate limited"), {})}
            handle = await pool.submit(combined_jobs.by_key, outcomes)
            await handle
        story = check(handle.story(), handle, "submitted", "key-a", "rate limited", "key-b", "completed")
        workers = shared.pool.workers()
        named = [view for view in workers if view.uid in story or re.search(rf"\b{view.pid}\b", story)]
        assert named, story

    shared(main)


@pytest.mark.integration
def test_line_the_story_of_placed_tasks_that_ended_otherwise(shared: Apart, log: str) -> None:
    async def main() -> None:
        async with TaskPool(max_concurrent=3, resources=two_keys(), workers=shared.pool) as pool:
            stopped = await pool.submit(combined_jobs.endless, log)
            await noted(log, "begun a")
            stopped.cancel()
            failed = await pool.submit(combined_jobs.fails)
            await pool_wait([stopped, failed])
            check(stopped.story(), stopped, "submitted", "cancelled")
            assert "LookupError" in check(failed.story(), failed, "submitted", "failed")
            elder = await pool.submit(combined_jobs.elder, log)
            await noted(log, "elder begun a")
            younger = await pool.submit(combined_jobs.younger, log)
            await noted(log, "younger begun a")
            tell(log)
            await pool_wait([elder, younger])
            await until(lambda: younger.status == "completed")
            check(elder.story(), elder, "submitted", "too many", "completed")
            assert re.search(SIBLING, check(younger.story(), younger, "submitted", "again", "completed"))

    shared(main)


# -- after a restart ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leases", [False, True], ids=["plain", "resources"])
def test_t60_a_story_after_a_restart(tmp_path: Path, leases: bool) -> None:
    def make() -> TaskPool:
        options: dict[str, Any] = {"resources": keys("key-a")} if leases else {}
        return TaskPool(
            "work", scope="pipeline", pipeline_id="p", store=JsonLinesStore(tmp_path / "journals"), **options
        )

    async def main() -> None:
        async with make() as pool:
            done = await pool.submit(slow, 0.01, idempotency_key="done")
            broken = await pool.submit(fails, idempotency_key="broken", window="forever")
            await pool_wait([done, broken])
            check(done.story(), done, "submitted", "completed")
        async with make() as pool:
            old = await pool.submit(slow, 0.01, idempotency_key="done")
            assert (old.id, await old) == (done.id, "done")
            check(old.story(), old, "submitted", "completed")
            old_failure = await pool.submit(fails, idempotency_key="broken", window="forever")
            assert old_failure.id == broken.id
            assert "LookupError" in check(old_failure.story(), old_failure, "submitted", "failed")

    asyncio.run(main())
