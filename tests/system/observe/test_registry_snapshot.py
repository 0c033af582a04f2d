"""`registry.snapshot()`: all pools of the process at one moment, frozen, as values that JSON knows."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import re
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest

from headgate import (
    CooldownResource,
    DisableResource,
    InvalidType,
    PoolExhausted,
    Quota,
    Resource,
    ResourcePool,
    TaskPool,
    WorkerPool,
    registry,
)
from headgate.core.views import ResourcePoolView, TaskPoolView, Unread, look_of
from headgate.tasks.runtime.view import endings, find_task
from headgate.testing import settle, virtual
from tests.system.observe.conftest import Program

SECRET = "sk-planted-5f6e7d8c"


def views(kind: str, **match: Any) -> list[dict[str, Any]]:
    """The pools of a kind in a snapshot that went through JSON."""
    seen = json.loads(json.dumps(registry.snapshot()))["pools"]
    return [one for one in seen if one["kind"] == kind and all(one[name] == value for name, value in match.items())]


@virtual
async def test_o01_one_snapshot_tells_tenants_tasks_and_resources_and_no_value() -> None:
    keys = ResourcePool([Resource("key-1", SECRET, max_in_flight=1), Resource("key-2", "b" * 20)], name="o01-keys")
    await keys.disable("key-2")

    async def call(resource: Resource[str], number: int) -> None:
        await asyncio.sleep(1)
        if number == 0:
            raise ValueError(f"refused {resource.value}")

    async with TaskPool("o01-calls", max_concurrent=3, resources=keys, queue="fair_round_robin") as pool:
        handles = [await pool.submit(call, number, key=f"tenant {number % 2}") for number in range(4)]
        await asyncio.sleep(1.5)
        [tasks] = views("tasks", name="o01-calls")
        assert (tasks["active"], tasks["queued"], tasks["failed"], tasks["max_concurrent"]) == (1, 2, 1, 3)
        assert {one["tenant"]: one["queued"] for one in tasks["tenants"]} == {"tenant 0": 1, "tenant 1": 1}
        assert [(one["number"], one["resource"], one["seconds"]) for one in tasks["running"]] == [(2, "key-1", 0.5)]
        assert [one["seconds"] for one in tasks["oldest"]] == [1.5, 1.5]
        [failure] = tasks["failures"]
        assert failure["why"] == "ValueError: refused <key-1>"
        [resources] = views("resources", name="o01-keys")
        assert {one["id"]: one["status"] for one in resources["resources"]} == {"key-1": "healthy", "key-2": "disabled"}
        assert SECRET not in json.dumps(registry.snapshot())
        with pytest.raises(ValueError, match="refused"):
            await handles[0]


@virtual
async def test_o01_tasks_that_ended_badly_are_listed_also_if_very_many_went_well_after_them() -> None:
    async def fail() -> None:
        raise ValueError("refused")

    async with TaskPool("o01-bad", max_concurrent=100, keep=100, keep_failed=60) as pool:
        async with asyncio.TaskGroup() as group:
            for body in [fail] * 60 + [lambda: asyncio.sleep(0)] * 200:
                group.create_task(_ended(pool, body))
        [tasks] = views("tasks", name="o01-bad")
        assert tasks["failed"] == 60
        assert [one["number"] for one in tasks["failures"]] == list(range(60, 10, -1))
        assert all(one["can_retry"] for one in tasks["failures"])
        assert find_task(pool.__executor__(), 11) is not None, "its story can be told"
        assert find_task(pool.__executor__(), 10) is None


async def _ended(pool: TaskPool, body: Any) -> None:
    try:
        await (await pool.submit(body))
    except ValueError:
        pass


@virtual
@pytest.mark.parametrize(("ended", "listed"), [(1000, 1000), (1999, 1000), (2001, 667)])
async def test_o30_a_look_reads_at_most_a_thousand_tasks_that_have_ended(ended: int, listed: int) -> None:
    async with TaskPool("o30-ended", max_concurrent=100) as pool:
        for _ in range(ended):
            await pool.submit(asyncio.sleep, 0)
        await pool.drain()
        seen = endings(pool.__executor__(), 0)
        assert (seen.total, seen.new, len(seen.tasks)) == (ended, ended, listed)


@virtual
async def test_o01_the_tasks_that_run_longest_are_listed_also_if_others_were_submitted_before_them() -> None:
    async with TaskPool("o01-slow", max_concurrent=2, queue="priority") as pool:
        blocker = pool.submit_nowait(asyncio.sleep, 1, priority=9)
        pool.submit_nowait(asyncio.sleep, 60, priority=9)
        pool.submit_nowait(asyncio.sleep, 60, priority=1)  # the third starts last
        pool.submit_nowait(asyncio.sleep, 3, priority=2)
        await blocker
        await asyncio.sleep(2)
        pool.resize(3)
        await asyncio.sleep(0.5)
        listed = pool._view(10).running
        assert [(one.number, one.seconds) for one in listed] == [(2, 3.5), (4, 2.5), (3, 0.5)]
        assert [one.number for one in pool._view(2).running] == [2, 4]
        view = pool._view(0)
        assert (view.tenant_count, view.tenants) == (1, []), "counts are of all"
        await pool.close(cancel=True)


@virtual
async def test_o01_a_row_of_a_resource_says_what_is_left_of_its_quota() -> None:
    limited = Resource("limited", "sk-1", quota=Quota(requests=1, per=60.0, delay=0.0))
    pool = ResourcePool([limited, Resource("free", "sk-2")], name="quotas in a snapshot")
    async with pool.lease(exclude=["free"]):
        pass
    rows = {row.id: row for row in pool._view(10).resources}
    soon = pytest.approx(60.0, abs=0.7)
    window = {"left": 0.0, "limit": 1, "seconds_until_full": soon}
    assert rows["limited"].quota == {
        "left": {"requests": 0.0},
        "windows": {"requests": window},
        "seconds_until_open": soon,
    }
    assert rows["free"].quota is None


@virtual
async def test_o01_the_snapshot_is_frozen_at_every_depth() -> None:
    async with TaskPool("o01-frozen"):
        seen = registry.snapshot()
        with pytest.raises(TypeError, match="frozen"):
            seen["pools"] = ()
        with pytest.raises(TypeError, match="frozen"):
            seen["pools"][0]["name"] = "other"
        with pytest.raises(TypeError, match="frozen"):
            seen["pools"][0].update(name="other")
        assert isinstance(seen["pools"], tuple)
        assert pickle.loads(pickle.dumps(seen)) == seen


def test_o01_what_another_program_reads_of_a_pool_is_what_was_seen(program: Program) -> None:
    adaptive = ResourcePool({"key-1": "value"}, name="o01-read", max_in_flight="adaptive", quota=Quota(tokens=9))
    adaptive.run_sync(lambda key: key.spent(3))
    looks = [look for look in (entry.view() for entry in registry.pools()) if look is not None]
    assert {type(look.state) for look in looks} == {TaskPoolView, ResourcePoolView}
    for look in [*looks, replace(looks[0], state=Unread(broken="ValueError"))]:
        told = json.loads(json.dumps(look.to_dict()))
        assert look_of(told) == look
        assert look_of({**told, "of a later release": 1}) == look


def test_o01_lists_are_bounded_and_counts_are_of_all() -> None:
    pool = ResourcePool([Resource(f"key-{number}", f"value-{number}") for number in range(30)], name="o01-many")
    asyncio.run(pool.disable("key-29"))
    [view] = [one for one in registry.snapshot(rows=5)["pools"] if one["name"] == "o01-many"]
    assert (view["resource_count"], len(view["resources"])) == (30, 5)
    assert view["resources"][0]["id"] == "key-29", "what is out of order is shown first"


@virtual
async def test_o20_refusals_are_what_the_upstream_service_refused() -> None:
    pool = ResourcePool({"key-1": "a", "key-2": "b", "key-3": "c"}, name="o20-refusals")
    await pool.disable("key-1")
    await pool.enable("key-1")
    await pool.cool("key-1", 5)

    async def refuse(key: Resource[str]) -> None:
        if key.resource_id == "key-2":
            raise CooldownResource(60)
        raise DisableResource("revoked")

    with pytest.raises(PoolExhausted):
        await pool.run(refuse, exclude=["key-1"])
    [view] = views("resources", name="o20-refusals")
    assert [(one["cooldowns"], one["disables"], one["refusals"]) for one in view["resources"]] == [
        (1, 1, 0),
        (1, 0, 1),
        (0, 1, 1),
    ]
    await pool.remove("key-2")
    assert views("resources", name="o20-refusals")[0]["refusals"] == 2, "what was refused stays refused"


def test_o01_a_snapshot_keeps_no_pool_alive() -> None:
    pool = ResourcePool(["k"], name="o01-weak")
    weak, seen, entries = weakref.ref(pool), registry.snapshot(), registry.pools()
    del pool
    gc.collect()
    assert weak() is None
    assert [one.view() for one in entries if one.name == "o01-weak"] == [None]
    assert "o01-weak" in json.dumps(seen)


@virtual
async def test_o01_hostile_tenants_do_not_break_it() -> None:
    class Angry:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    async with TaskPool("o01-hostile", queue="fair_round_robin", max_concurrent=1) as pool:
        for tenant in (Angry(), ("a", 1), "x" * 5000, "line\nbreak"):
            await pool.submit(asyncio.sleep, 1, key=tenant)
        [view] = views("tasks", name="o01-hostile")
        shown = {one["tenant"] for one in view["tenants"]}
        assert shown == {
            "a test_o01_hostile_tenants_do_not_break_it.<locals>.Angry",
            "('a', 1)",
            "x" * 200 + "...",
            "line break",
        }


@pytest.mark.integration
def test_o01_another_thread_can_look_while_tasks_come_and_go() -> None:
    faults: list[BaseException] = []
    over = threading.Event()

    def look() -> None:
        try:
            while not over.is_set():
                json.dumps(registry.snapshot())
        except BaseException as error:  # pragma: no cover - a fault
            faults.append(error)

    async def main() -> None:
        async with TaskPool("o01-busy", max_concurrent=10, queue="fair_round_robin", keep=50) as pool:
            for number in range(4000):
                await pool.submit(asyncio.sleep, 0, key=f"t{number % 40}")
                if number % 50 == 0:
                    await asyncio.sleep(0)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        over.set()
        thread.join()
    assert faults == []


@pytest.mark.integration
def test_o01_workers_are_shown_with_their_memory() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, name="gpus") as workers:
            [view] = [one for one in views("workers") if one["workers"][0]["pid"] == workers.workers()[0].pid]
            assert (view["name"], workers.name) == ("gpus", "gpus")
            assert (view["size"], view["ready"]) == (1, 1)
            assert view["workers"][0]["memory"] is None or view["workers"][0]["memory"] > 1_000_000

    asyncio.run(main())


def test_o01_a_pool_of_workers_without_a_name_is_given_one() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, name=" "):
            [view] = views("workers")
            assert re.fullmatch(r"workers-\d+", view["name"])

    asyncio.run(main())
    with pytest.raises(InvalidType, match="name must be a string or None, got int"):
        WorkerPool(name=7)  # type: ignore[arg-type]


def test_o01_pools_of_two_threads_may_be_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class TakenByAnother(list[Any]):
        def __bool__(self) -> bool:
            return True  # as it was before the other thread took what was in it

    called: list[str] = []
    monkeypatch.setattr(registry, "_first", TakenByAnother())
    registry.on_first(lambda: called.append("once"))
    pool = ResourcePool(["value"], name="o01-first")
    assert called == ["once"]
    del pool


@virtual
async def test_o30_a_task_pool_waits_for_a_resource_once_for_each_requirement() -> None:
    keys = ResourcePool(
        [Resource("eu", "sk-eu", tags=["eu"]), Resource("us", "sk-us", tags=["us"])], name="o30-waiters"
    )
    await keys.cool("eu", 60, "by hand")
    await keys.cool("us", 60, "by hand")

    async def work(key: Resource[str]) -> None:
        return None

    async with TaskPool("o30-waiters", resources=keys, max_concurrent=8) as pool:
        for number in range(30):
            await pool.submit(work, tags=["eu"] if number % 3 else ["us"])
        await settle()
        [resources], [tasks] = views("resources", name="o30-waiters"), views("tasks", name="o30-waiters")
        assert (resources["waiting"], tasks["queued"]) == (2, 30)
        assert keys.stats().waiting == 2
