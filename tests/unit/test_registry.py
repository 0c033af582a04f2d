"""The registry: every live pool of this process, held weakly."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate import InvalidArgument, Resource, ResourcePool, TaskPool, WorkerPool, registry
from headgate.registry import Kind, LivePool
from headgate.testing import virtual

SECRET = "sk-planted-1a2b3c4d"


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """Pools of other tests are collected before; in these tests reference counts must suffice."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def before() -> set[LivePool]:
    return set(registry.pools())


def fresh(before: set[LivePool], kind: Kind | None = None) -> list[tuple[str, str]]:
    """The kind and name of each pool that was not there before."""
    return [(one.kind, one.name) for one in registry.pools(kind) if one not in before]


class Pool:
    """Something that can be registered."""

    def __init__(self, name: str) -> None:
        self.name = name


@virtual
async def test_pools_are_listed_by_kind_oldest_first(before: set[LivePool]) -> None:
    tasks = TaskPool("listed-tasks")
    resources = ResourcePool(["k"], name="listed-resources")
    assert fresh(before) == [("tasks", "listed-tasks"), ("resources", "listed-resources")]
    assert fresh(before, "tasks") == [("tasks", "listed-tasks")]
    assert fresh(before, "resources") == [("resources", "listed-resources")]
    assert fresh(before, "workers") == []
    del resources
    await tasks.close()


def test_the_name_of_an_entry_is_the_current_one(before: set[LivePool]) -> None:
    pool = ResourcePool(["k"], name="early")
    pool.name = "late"
    assert fresh(before) == [("resources", "late")]


def test_two_pools_of_one_name_are_two_entries(before: set[LivePool]) -> None:
    first, second = ResourcePool(["a"], name="same"), ResourcePool(["b", "c"], name="same")
    found = [one for one in registry.pools("resources") if one not in before]
    assert [one.name for one in found] == ["same", "same"]
    assert [len(one.snapshot()) for one in found] == [1, 2]
    del first
    assert fresh(before) == [("resources", "same")]
    del second
    assert fresh(before) == []


def test_a_pool_that_nothing_refers_to_is_gone_without_a_collection(before: set[LivePool]) -> None:
    pool = ResourcePool(["k"], name="short-lived")
    [entry] = [one for one in registry.pools() if one not in before]
    assert entry.snapshot()
    del pool
    assert fresh(before) == []
    assert entry.snapshot() is None


@virtual
async def test_a_closed_task_pool_is_not_live_though_somebody_holds_it(before: set[LivePool]) -> None:
    async with TaskPool("closes") as pool:
        assert fresh(before) == [("tasks", "closes")]
    assert fresh(before) == []
    assert pool.name == "closes"


def test_a_pool_that_could_not_be_made_is_not_listed(before: set[LivePool], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        TaskPool("unmade", audit=tmp_path)
    assert fresh(before) == []


def test_a_task_pool_whose_loop_is_gone_leaves_when_its_name_is_taken(before: set[LivePool]) -> None:
    async def abandon() -> None:
        await (await TaskPool("abandoned").submit(asyncio.sleep, 0))

    asyncio.run(abandon())
    again = TaskPool("abandoned")
    gc.collect()  # what ran in it may still refer to it
    assert fresh(before) == [("tasks", "abandoned")]
    asyncio.run(again.close())
    assert fresh(before) == []


@pytest.mark.integration
def test_a_worker_pool_is_live_from_entering_to_leaving(before: set[LivePool]) -> None:
    async def main() -> None:
        pool = WorkerPool(spawn=1)
        assert fresh(before) == []
        async with pool:
            [entry] = [one for one in registry.pools("workers") if one not in before]
            assert entry.kind == "workers"
            assert entry.name.startswith("workers-")
            assert entry.snapshot() == pool.workers()
            assert [view.state for view in entry.snapshot()] == ["ready"]
        assert fresh(before) == []

    asyncio.run(main())


@virtual
async def test_snapshots_are_those_of_the_pools_and_contain_no_value(before: set[LivePool]) -> None:
    resources = ResourcePool([Resource("id-1", SECRET)], name="keys")
    async with TaskPool("users-of-keys", resources=resources) as pool:

        async def use(resource: Resource[str]) -> str:
            return resource.value

        await (await pool.submit(use))
        found = {one.kind: one for one in registry.pools() if one not in before}
        assert found["resources"].snapshot() == resources.snapshot()
        assert found["tasks"].snapshot().completed == 1
        for entry in found.values():
            assert SECRET not in f"{entry!r} {entry.snapshot()!r} {entry.snapshot()}"


def test_entries_are_frozen(before: set[LivePool]) -> None:
    pool = Pool("plain")
    registry.register(pool, "tasks", lambda one: one.name)
    [entry] = [one for one in registry.pools() if one not in before]
    assert repr(entry) == "LivePool(kind='tasks', name='plain')"
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.name = "other"  # type: ignore[misc]


def test_registering_twice_is_one_entry_and_unregistering_twice_is_no_error(before: set[LivePool]) -> None:
    pool = Pool("twice")
    for _ in range(2):
        registry.register(pool, "tasks", lambda one: one.name)
    assert fresh(before) == [("tasks", "twice")]
    for _ in range(2):
        registry.unregister(pool)
    assert fresh(before) == []
    del pool


def test_a_pool_that_is_registered_again_is_forgotten_with_its_last_reference(before: set[LivePool]) -> None:
    pool = Pool("again")
    registry.register(pool, "tasks", lambda one: one.name)
    registry.unregister(pool)
    registry.register(pool, "tasks", lambda one: one.name)
    assert fresh(before) == [("tasks", "again")]
    del pool
    assert fresh(before) == []


def test_pools_are_made_dropped_and_listed_in_many_threads(before: set[LivePool]) -> None:
    start, faults = threading.Barrier(6), []
    kept: list[Pool] = []

    def make(number: int) -> None:
        try:
            start.wait()
            for turn in range(300):
                pool = Pool(f"{number}-{turn}")
                registry.register(pool, "tasks", lambda one: one.name)
                if turn % 3 == 0:
                    registry.unregister(pool)
                elif turn % 3 == 1:
                    kept.append(pool)
        except BaseException as error:  # pragma: no cover - a fault of the registry
            faults.append(error)

    def look() -> None:
        try:
            start.wait()
            for _ in range(300):
                for entry in registry.pools("tasks"):
                    assert entry.snapshot() in (entry.name, None) or entry in before
        except BaseException as error:  # pragma: no cover - a fault of the registry
            faults.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(4)]
    threads += [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert {name for _, name in fresh(before)} == {pool.name for pool in kept}
    assert len(kept) == 400
