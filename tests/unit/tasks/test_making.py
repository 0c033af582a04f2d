"""T01 to T06: pools are made, named, found, resized, drained and closed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import pytest

from headgate import (
    DuplicatePool,
    HeadgateError,
    InvalidArgument,
    InvalidType,
    LocalWorker,
    PipelineIdMissing,
    PoolClosed,
    Resource,
    ResourcePool,
    ScopeNeedsStore,
    TaskCancelled,
    TaskPool,
    WorkerPool,
    fifo,
    pipeline_scope,
    pool_create,
    pool_get,
    pool_list,
)
from headgate.stores import JsonLinesStore
from headgate.tasks import TaskPool as PlainTaskPool
from headgate.testing import run, settle, virtual
from tests.support.tasks.support import Gate, Turns, broken, counts, quick, slow


@pytest.fixture(autouse=True)
def leaves_no_pool_behind() -> Iterator[None]:
    before = pool_list()
    yield
    left = [pool for pool in pool_list() if pool not in before]
    for pool in left:
        run(pool.close(cancel=True))


# -- T01: making -----------------------------------------------------------------------


def test_t01_a_pool_is_made_without_a_loop_and_has_defaults() -> None:
    pool = TaskPool("review")
    snapshot = pool.snapshot()
    assert (snapshot.name, snapshot.max_concurrent, snapshot.scope) == ("review", 1, "session")
    assert snapshot.queue["kind"] == "priority"
    assert snapshot.backpressure["kind"] == "unbounded"
    assert pool.size() == 0


@pytest.mark.parametrize("blank", [None, "", "   ", "\t\n"])
def test_t01_an_absent_or_blank_name_is_drawn(blank: str | None) -> None:
    first, second = TaskPool(blank), pool_create(name=blank)
    assert first.name.strip()
    assert second.name.strip()
    assert first.name != second.name
    assert first.id != second.id
    assert pool_get(first.name) is first


def test_t01_drawn_names_avoid_given_ones() -> None:
    drawn = TaskPool()
    run(drawn.close())
    given = TaskPool(drawn.name)  # the name is free again, and somebody takes it
    others = [TaskPool() for _ in range(5)]
    assert len({given.name, *(pool.name for pool in others)}) == 6


@pytest.mark.parametrize("name", [3, b"review", ["review"]])
def test_t01_a_name_is_a_string(name: Any) -> None:
    with pytest.raises((InvalidType, InvalidArgument), match="name"):
        TaskPool(name)


def test_t01_pool_create_takes_keywords_or_one_mapping() -> None:
    by_keywords = pool_create(name="a", max_concurrent=3, queue=fifo())
    by_mapping = pool_create({"name": "b", "max_concurrent": 3, "queue": fifo()})
    by_any_mapping = pool_create(MappingProxyType({"name": "c", "max_concurrent": 3, "queue": "fifo"}))
    for pool in (by_keywords, by_mapping, by_any_mapping):
        assert isinstance(pool, TaskPool)
        assert pool.snapshot().max_concurrent == 3
        assert pool.snapshot().queue["kind"] == "fifo"


def test_t01_pool_create_knows_milliseconds() -> None:
    assert pool_create(stale_after_ms=1500).snapshot().config["stale_after"] == 1.5
    assert pool_create({"stale_after_ms": 250}).snapshot().config["stale_after"] == 0.25
    assert pool_create(stale_after=timedelta(minutes=1)).snapshot().config["stale_after"] == 60


@pytest.mark.parametrize(
    "bad", [{"stale_after": 0}, {"stale_after": -1}, {"stale_after": "soon"}, {"stale_after_ms": -5}]
)
def test_t01_stale_after_is_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="stale_after"):
        pool_create(name="checked", **bad)
    assert pool_get("checked") is None


def test_t01_pool_create_refuses_what_it_does_not_know() -> None:
    with pytest.raises(InvalidArgument, match="max_concurent"):
        pool_create(max_concurent=3)
    with pytest.raises((InvalidType, InvalidArgument)):
        pool_create("review")  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [-1, 1.5, "all", True])
def test_t01_keep_is_checked(keep: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="keep"):
        TaskPool("kept", keep=keep)
    assert pool_get("kept") is None


def test_t01_a_pool_binds_to_the_loop_of_its_first_submit() -> None:
    pool = TaskPool("bound")
    with asyncio.Runner() as first, asyncio.Runner() as second:

        async def use() -> Any:
            return await (await pool.submit(quick, 1))

        assert first.run(use()) == 1
        with pytest.raises(HeadgateError, match="loop"):
            second.run(use())
        assert first.run(use()) == 1
        first.run(pool.close())


def test_t01_a_handle_is_not_awaited_on_another_loop() -> None:
    pool = TaskPool("bound")
    with asyncio.Runner() as first, asyncio.Runner() as second:

        async def begin() -> Any:
            return await pool.submit(slow, 60)

        async def wait(handle: Any) -> Any:
            return await handle

        handle = first.run(begin())
        with pytest.raises(HeadgateError, match="loop"):
            second.run(wait(handle))
        first.run(pool.close(cancel=True))


def test_t01_submit_nowait_without_a_loop_says_so() -> None:
    pool = TaskPool("bound")
    with pytest.raises(HeadgateError, match="loop"):
        pool.submit_nowait(quick)
    assert pool.snapshot().total == 0


# -- T01b: drain and close ---------------------------------------------------------------


@virtual
async def test_t01b_drain_waits_for_everything_and_can_be_said_twice() -> None:
    pool = TaskPool()
    await pool.drain()
    handles = [await pool.submit(slow, 10) for _ in range(3)]
    await pool.drain()
    assert asyncio.get_running_loop().time() == 30
    assert {handle.status for handle in handles} == {"completed"}
    await pool.drain()
    assert await (await pool.submit(quick)) == "done"  # a drained pool is open
    await pool.close()


@virtual
async def test_t01b_drain_waits_for_delayed_and_parked_work_too() -> None:
    pool = TaskPool(backpressure={"kind": "queue", "max_depth": 1})
    await pool.submit(slow, 1, delay=5)
    parked = asyncio.create_task(pool.submit(slow, 1, delay=2))
    await settle()
    await pool.drain()
    assert (await parked).status == "completed"
    assert counts(pool) == {"completed": 2}
    await pool.close()


@virtual
async def test_t01b_close_lets_work_end_and_can_be_said_twice() -> None:
    pool = TaskPool("closing")
    handles = [await pool.submit(slow, 10, number) for number in range(3)]
    closing = [asyncio.create_task(pool.close()) for _ in range(2)]
    await settle()
    with pytest.raises(PoolClosed):
        await pool.submit(quick)
    await asyncio.gather(*closing)
    assert [await handle for handle in handles] == [0, 1, 2]
    await pool.close()
    await pool.close(cancel=True)
    assert pool_get("closing") is None


@virtual
async def test_t01b_close_with_cancel_ends_queued_and_running() -> None:
    pool, cleaned = TaskPool(), []

    async def body() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(3)
            cleaned.append(asyncio.get_running_loop().time())

    handles = [await pool.submit(body) for _ in range(3)]
    await settle()
    await pool.close(cancel=True)
    assert cleaned == [3]
    assert [handle.status for handle in handles] == ["cancelled"] * 3


@virtual
async def test_t01b_close_with_cancel_hurries_a_close_that_waits() -> None:
    pool = TaskPool()
    handle = await pool.submit(slow, 3600)
    patient = asyncio.create_task(pool.close())
    await asyncio.sleep(1)
    await pool.close(cancel=True)
    await patient
    assert handle.status == "cancelled"
    assert asyncio.get_running_loop().time() == 1


@virtual
async def test_t01b_leaving_the_block_drains() -> None:
    async with TaskPool("block", max_concurrent=2) as pool:
        handles = [await pool.submit(slow, 10, number) for number in range(4)]
    assert [await handle for handle in handles] == [0, 1, 2, 3]
    assert asyncio.get_running_loop().time() == 20
    assert pool_get("block") is None
    with pytest.raises(PoolClosed) as caught:
        await pool.submit(quick)
    assert caught.value.code == "HEADGATE-POL-008"
    with pytest.raises(PoolClosed):
        pool.submit_nowait(quick)


@virtual
async def test_t01b_leaving_the_block_by_an_exception_cancels() -> None:
    pool = TaskPool("block")

    async def block() -> None:
        async with pool:
            handles.extend([await pool.submit(slow, 60), await pool.submit(slow, 60)])
            raise LookupError("the block")

    handles: list[Any] = []
    with pytest.raises(LookupError, match="the block"):
        await block()
    running, queued = handles
    assert (running.status, queued.status) == ("cancelled", "cancelled")
    assert asyncio.get_running_loop().time() == 0
    with pytest.raises(TaskCancelled):
        await running
    with pytest.raises(PoolClosed):
        await pool.submit(quick)


@virtual
async def test_t01b_whoever_stands_at_the_door_is_told_that_the_pool_closes() -> None:
    pool = TaskPool(backpressure={"kind": "queue", "max_depth": 1})
    await pool.submit(slow, 1)
    await pool.submit(slow, 1)
    parked = asyncio.create_task(pool.submit(quick))
    await settle()
    await pool.close()
    assert isinstance(parked.exception(), PoolClosed) or parked.result().status == "completed"


@virtual
async def test_t01b_results_can_be_read_after_the_pool_is_closed() -> None:
    async with TaskPool() as pool:
        good, bad = await pool.submit(quick, 7), await pool.submit(broken)
    assert await good == 7
    with pytest.raises(LookupError, match="broken"):
        await bad
    assert pool.snapshot().completed == 1


# -- T02: names --------------------------------------------------------------------------


@virtual
async def test_t02_a_duplicate_name_is_refused_and_says_what_to_do() -> None:
    pool = TaskPool("review")
    with pytest.raises(DuplicatePool, match="pool_get") as caught:
        pool_create(name="review")
    assert caught.value.code == "HEADGATE-POL-003"
    assert "review" in str(caught.value)
    assert pool_get("review") is pool
    await pool.close()
    again = TaskPool("review")
    assert pool_get("review") is again
    assert again.id != pool.id
    await again.close()


@virtual
async def test_t02_a_pool_is_found_by_name_and_by_id_while_it_lives() -> None:
    async with TaskPool("review") as pool:
        assert pool_get("review") is pool
        assert pool_get(pool.id) is pool
        assert pool_get("other") is None
    assert pool_get("review") is None
    assert pool_get(pool.id) is None


@virtual
async def test_t02_the_list_is_oldest_first() -> None:
    before = pool_list()
    pools = [TaskPool(name) for name in ("z", "a", "m")]
    assert pool_list() == [*before, *pools]
    await pools[0].close()
    assert pool_list() == [*before, *pools[1:]]
    reborn = TaskPool("z")
    assert pool_list() == [*before, *pools[1:], reborn]
    for pool in (*pools[1:], reborn):
        await pool.close()
    assert pool_list() == before


def test_t02_the_registry_holds_a_pool_nobody_else_holds() -> None:
    made = TaskPool("held").id
    import gc

    gc.collect()
    found = pool_get("held")
    assert found is not None
    assert found.id == made


@virtual
async def test_t02_the_name_is_taken_until_closing_is_over() -> None:
    pool = TaskPool("busy")
    await pool.submit(slow, 10)
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(1)
    with pytest.raises(DuplicatePool):
        TaskPool("busy")
    await closing
    await TaskPool("busy").close()


# -- T03: max_concurrent and resize ------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", [], True])
def test_t03_max_concurrent_is_a_whole_number_of_at_least_one(bad: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="max_concurrent"):
        TaskPool("capped", max_concurrent=bad)
    assert pool_get("capped") is None
    pool = TaskPool("capped", max_concurrent=2)
    with pytest.raises((InvalidArgument, InvalidType), match="max_concurrent"):
        pool.resize(bad)
    with pytest.raises((InvalidArgument, InvalidType), match="max_concurrent"):
        pool.resize(None)  # type: ignore[arg-type]
    assert pool.snapshot().max_concurrent == 2


@virtual
async def test_t03_the_cap_is_hard() -> None:
    running = most = 0

    async def body() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1

    async with TaskPool(max_concurrent=7) as pool:
        for _ in range(50):
            await pool.submit(body)
    assert most == 7
    assert asyncio.get_running_loop().time() == 8


@virtual
async def test_t03_growing_starts_the_queued_at_once() -> None:
    async with TaskPool() as pool:
        gate = Gate()
        handles = [await pool.submit(gate.wait) for _ in range(5)]
        assert pool.resize(3) is None
        assert [handle.status for handle in handles] == ["running"] * 3 + ["queued"] * 2
        assert pool.snapshot().max_concurrent == 3
        gate.open()


@virtual
async def test_t03_shrinking_lets_the_running_run_and_starts_nobody_above_the_cap() -> None:
    async with TaskPool(max_concurrent=4) as pool:
        gates = [Gate() for _ in range(8)]
        for gate in gates:
            await pool.submit(gate.wait)
        pool.resize(2)
        await settle()
        assert counts(pool) == {"active": 4, "queued": 4}
        for done, active in ((0, 3), (1, 2), (2, 2), (3, 2)):
            gates[done].open()
            await settle()
            assert pool.snapshot().active == active
        assert pool.snapshot().queued == 2
        pool.resize(4)
        assert counts(pool) == {"active": 4, "completed": 4}
        for gate in gates:
            gate.open()


@virtual
async def test_t03_resize_there_and_back_keeps_the_cap() -> None:
    async with TaskPool(max_concurrent=3) as pool:
        turns, gates = Turns(), [Gate() for _ in range(12)]
        for gate in gates:
            await pool.submit(gate.wait)
        for size, opened in ((1, 0), (5, 1), (2, 2), (4, 5), (3, 6), (1, 7)):
            pool.resize(size)
            gates[opened].open()
            await settle()
            assert pool.snapshot().active <= max(size, 5)
        for gate in gates:
            gate.open()
        await pool.drain()
        blockers = [await pool.submit(slow, 1) for _ in range(4)]
        assert [handle.status for handle in blockers] == ["running"] + ["queued"] * 3
        await pool.submit(turns.take, "last")
    assert turns.order == ["last"]


def test_t03_resize_before_the_first_submit() -> None:
    pool = TaskPool()
    pool.resize(9)
    assert pool.snapshot().max_concurrent == 9


# -- T05, T06: scopes --------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["tenant", "org"])
def test_t05_a_shared_scope_needs_a_store_and_makes_no_pool(scope: Any) -> None:
    with pytest.raises(ScopeNeedsStore, match="store") as caught:
        TaskPool("shared", scope=scope, scope_id="acme")
    assert caught.value.code == "HEADGATE-POL-004"
    assert scope in str(caught.value)
    assert pool_get("shared") is None
    assert TaskPool("shared").name == "shared"


@pytest.mark.parametrize("scope", ["world", "", None, 3])
def test_t05_an_unknown_scope_names_the_four(scope: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TaskPool("scoped", scope=scope)
    assert all(name in str(caught.value) for name in ("session", "pipeline", "tenant", "org"))
    assert pool_get("scoped") is None


def test_t05_a_session_pool_does_no_io(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADGATE_DIR", str(tmp_path / "journals"))

    @virtual
    async def check() -> None:
        async with TaskPool() as pool:
            await (await pool.submit(quick))

    check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [None, "", "  "])
def test_t06_a_pipeline_pool_needs_an_id(given: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_PIPELINE_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineIdMissing) as caught:
        TaskPool("piped", scope="pipeline", pipeline_id=given)
    assert caught.value.code == "HEADGATE-POL-005"
    for remedy in ("pipeline_id", "pipeline_scope", "HEADGATE_PIPELINE_ID"):
        assert remedy in str(caught.value)
    assert pool_get("piped") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blank", ["", "  ", None, 7])
def test_t06_a_pipeline_scope_has_an_id(blank: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="pipeline_id"), pipeline_scope(blank):
        pass


# -- spellings ---------------------------------------------------------------------------


def test_t01_what_is_none_counts_as_not_given() -> None:
    names = ("name", "max_concurrent", "queue", "backpressure", "scope", "pipeline_id", "stale_after", "stale_after_ms")
    pool = pool_create(dict.fromkeys((*names, "store", "keep", "audit", "strategy", "scope_id", "run_id")))
    seen = pool.snapshot()
    assert (seen.max_concurrent, seen.queue["kind"], seen.backpressure["kind"]) == (1, "priority", "unbounded")
    assert seen.config["keep"] == 10_000
    with pytest.raises(InvalidArgument, match="Did you mean max_concurrent"):
        pool_create(max_concurent=None)


@pytest.mark.parametrize("spelling", ["pipeline_id", "scope_id", "run_id"])
def test_t06_the_seeds_names_of_the_pipeline(spelling: str, tmp_path: Any) -> None:
    pool = pool_create({"scope": "pipeline", spelling: "p-1", "store": JsonLinesStore(tmp_path)})
    assert pool.snapshot().config["pipeline_id"] == "p-1"


SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"strategy": "fifo"}, {"queue": {"kind": "fifo"}}),
    ({"queue": {"strategy": "lifo"}}, {"queue": {"kind": "lifo"}}),
    (
        {"queue": {"kind": "fair_round_robin", "key_field": "tenant_id"}},
        {"queue": {"kind": "fair_round_robin", "key": "tenant_id"}},
    ),
    (
        {"strategy": {"strategy": "fair_round_robin", "key": None}},
        {"queue": {"kind": "fair_round_robin", "key": "key"}},
    ),
    (
        {"backpressure": {"strategy": "queue", "capacity": 3, "on_full": None}},
        {"backpressure": {"kind": "queue", "max_depth": 3, "on_full": "block_submitter"}},
    ),
    (
        {"backpressure": {"kind": "ring_buffer", "max_depth": 4}},
        {"backpressure": {"kind": "ring_buffer", "capacity": 4}},
    ),
    (
        {"backpressure": {"_type": "backpressure", "kind": "fail_fast", "max_depth": None}},
        {"backpressure": {"kind": "fail_fast"}},
    ),
]


@pytest.mark.parametrize(("given", "meant"), SPELLINGS)
def test_t04_the_seeds_other_spellings(given: dict[str, Any], meant: dict[str, Any]) -> None:
    seen = pool_create(given).snapshot()
    for name, descriptor in meant.items():
        assert dict(seen[name]) == descriptor


@pytest.mark.parametrize(
    "given",
    [
        {"queue": "fifo", "strategy": "fifo"},
        {"pipeline_id": "a", "run_id": "a", "scope": "pipeline"},
        {"scope_id": "a", "run_id": "b", "scope": "pipeline"},
        {"stale_after": 1, "stale_after_ms": 1000},
        {"queue": {"kind": "fifo", "strategy": "fifo"}},
        {"queue": {"kind": "fair_round_robin", "key": "a", "key_field": "a"}},
        {"backpressure": {"kind": "queue", "max_depth": 1, "capacity": 1}},
    ],
)
def test_t04_two_spellings_of_one_option_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="are names of one option"):
        pool_create(given)
    assert pool_list() == []


@pytest.mark.parametrize(
    ("kind", "arguments", "near"),
    [
        (TaskPool, {"max_concurent": 3}, "max_concurrent"),
        (PlainTaskPool, {"back_pressure": None}, "backpressure"),
        (ResourcePool, {"resources": {"a": 1}, "max_atempts": 3}, "max_attempts"),
        (WorkerPool, {"spwan": 3}, "spawn"),
        (LocalWorker, {"bakpressure": None}, "backpressure"),
        (JsonLinesStore, {"codek": "json"}, "codec"),
        (Resource, {"resource_id": "a", "value": 1, "max_in_fligt": 2}, "max_in_flight"),
    ],
)
def test_t10_a_misspelt_option_of_a_constructor_names_the_nearest(kind: Any, arguments: Any, near: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__}.. has no option .* Did you mean {near}") as caught:
        kind(**arguments)
    assert isinstance(caught.value, HeadgateError)
    assert near in inspect.signature(kind).parameters, "its signature is as it was"
    assert pool_list() == []
