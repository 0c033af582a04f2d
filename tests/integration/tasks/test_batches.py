"""Many tasks at once: `run`, `submit_many`, options for each item of `map`, and how a pool closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import (
    IdempotencyConflict,
    InvalidArgument,
    InvalidType,
    PoolBusy,
    PoolClosed,
    QueueFull,
    Resource,
    ResourcePool,
    StoreWriteFailed,
    SubmitTimeout,
    TaskCancelled,
    TaskHandle,
    backpressure_queue,
    fail_fast,
    fair_round_robin,
)
from headgate.core.clock import clock
from headgate.stores import Done, Entry, JsonLinesStore, MemoryStore, PostgresStore, SqliteStore, postgres_journal
from headgate.stores.jsonl.locked_file import LockedFile
from headgate.stores.sqlite_journal import Rows
from headgate.tasks import TaskPool
from headgate.testing import capture_events, settle, virtual

AUDIT = "lifecycle.pool.audit"


async def double(number: int) -> int:
    await asyncio.sleep(1)
    return 2 * number


async def add(one: int, other: int) -> int:
    return one + other


def shout(text: str) -> str:
    return text.upper()


# -- run ---------------------------------------------------------------------------------------------------------------


@virtual
async def test_t16_run_gives_the_result_or_raises_what_the_task_raised() -> None:
    async with TaskPool() as pool:
        assert await pool.run(double, 4, priority=3) == 8
        assert await pool.run(shout, "loud") == "LOUD"
        with pytest.raises(ValueError, match="invalid literal"):
            await pool.run(int, "x")


@pytest.mark.parametrize("way", ["cancel", "timeout"])
@pytest.mark.parametrize("queued", [False, True])
@virtual
async def test_t16_run_cancels_the_task_of_a_caller_that_gives_up(way: str, queued: bool) -> None:
    async with TaskPool() as pool:
        first = await pool.submit(asyncio.sleep, 100) if queued else None
        if way == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5):
                    await pool.run(asyncio.sleep, 100)
        else:
            caller = asyncio.create_task(pool.run(asyncio.sleep, 100))
            await asyncio.sleep(5)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
        await settle()
        assert pool.snapshot(0).cancelled == 1
        assert pool.size() == queued
        if first is not None:
            first.cancel()


@pytest.mark.parametrize("queued", [False, True])
@virtual
async def test_t14_t16_a_caller_of_run_that_gives_up_leaves_the_task_to_another_with_its_key(queued: bool) -> None:
    async with TaskPool() as pool:
        first = await pool.submit(asyncio.sleep, 5) if queued else None
        one, two, three = (
            asyncio.create_task(pool.run(asyncio.sleep, 100, "slept", idempotency_key="k")) for _ in range(3)
        )
        await asyncio.sleep(1)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(three, 1)
        assert pool.snapshot(0).cancelled == 0
        assert await two == "slept"
        if first is not None:
            await first


@virtual
async def test_t14_t16_when_all_callers_of_run_give_up_the_task_is_cancelled() -> None:
    async with TaskPool() as pool:
        callers = [asyncio.create_task(pool.run(asyncio.sleep, 100, idempotency_key="k")) for _ in range(3)]
        await asyncio.sleep(1)
        for caller in callers:
            caller.cancel()
        ends = await asyncio.gather(*callers, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        await settle()
        assert (pool.snapshot(0).cancelled, pool.size()) == (1, 0)


# -- submit_many -------------------------------------------------------------------------------------------------------


@virtual
async def test_t16_submit_many_takes_calls_of_any_functions_and_returns_handles_in_order() -> None:
    async with TaskPool(max_concurrent=2) as pool:
        handles = await pool.submit_many(
            [(double, (1,), {"priority": 2}), (add, (3, 4)), (shout, ["x"], {"labels": {"n": 1}})]
        )
        assert [handle.priority for handle in handles] == [2, 0, 0]
        assert [await handle for handle in handles] == [2, 7, "X"]
        assert await pool.submit_many([]) == []


@virtual
async def test_t16_submit_many_takes_argument_tuples_of_one_function_and_options_for_each() -> None:
    async with TaskPool(queue=fair_round_robin("tenant_id")) as pool:
        handles = await pool.submit_many(
            add, [(1, 2), (3, 4)], tenant_id=lambda one, other: f"t{one}", idempotency_key=lambda one, other: one
        )
        assert [await handle for handle in handles] == [3, 7]
        assert [handle.partition for handle in handles] == ["t1", "t3"]
        assert [handle.snapshot().idempotency_key for handle in handles] == ["1", "3"]
        again = await pool.submit_many(add, iter([(1, 2), (1, 2)]), idempotency_key=lambda one, other: one)
        assert again == [handles[0], handles[0]]


@pytest.mark.parametrize(
    ("calls", "error", "text"),
    [
        ([(double, (1,)), (double, 2)], InvalidType, r"call 2 must be \(fn, args, options\)"),
        ([(double, (1,), {}), (double, (1,), {"prioritee": 1})], InvalidArgument, "prioritee"),
        ([(double, (1,), {}), (3, (1,), {})], InvalidType, "int"),
        ([double], InvalidType, "call 1 must be"),
        ({"a": 1}, InvalidType, "an iterable of calls, got dict"),
        (7, InvalidType, "an iterable of calls, got int"),
        ("ab", InvalidType, "an iterable of calls, got str"),
        ([(double, (1,), {"priority": lambda n: 1})], InvalidType, "priority must be a plain value"),
    ],
)
@virtual
async def test_t16_a_wrong_call_is_named_and_none_is_submitted(calls: Any, error: type[Exception], text: str) -> None:
    async with TaskPool() as pool:
        with pytest.raises(error, match=text):
            await pool.submit_many(calls)
        with pytest.raises(InvalidType, match="a tuple of arguments, got int"):
            await pool.submit_many(double, [1, 2])  # type: ignore[list-item]
        with pytest.raises(InvalidType, match="takes no 'priority' beside calls"):
            await pool.submit_many([(double, (1,))], priority=1)  # type: ignore[call-overload]
        assert pool.snapshot().total == 0


@virtual
async def test_t16_a_conflict_is_found_before_anything_is_submitted() -> None:
    async with TaskPool() as pool:
        with pytest.raises(IdempotencyConflict, match="the arguments differ"):
            await pool.submit_many(add, [(1, 2), (1, 3)], idempotency_key=lambda one, other: one)
        assert pool.snapshot().total == 0
        await pool.submit(add, 5, 6, idempotency_key="5")
        with pytest.raises(IdempotencyConflict):
            await pool.submit_many(add, [(1, 2), (5, 7)], idempotency_key=lambda one, other: one)
        assert pool.snapshot().total == 1


@pytest.mark.parametrize("durable", [False, True])
@virtual
async def test_t16_if_one_is_refused_none_is_accepted(durable: bool) -> None:
    ran: list[int] = []

    async def note(number: int) -> None:
        ran.append(number)

    options = pipeline(MemoryStore()) if durable else {}
    async with TaskPool(backpressure=backpressure_queue(1, "fail_submitter"), **options) as pool:
        with pytest.raises(QueueFull) as caught:
            await pool.submit_many(note, [(number,) for number in range(4)])
        assert (caught.value.queued, caught.value.active) == (1, 1)
        await pool.drain()
        assert ran == []
        assert pool.size() == 0
        assert len(await pool.submit_many(note, [(1,), (2,)])) == 2
    assert ran == [1, 2]


@virtual
async def test_t16_submit_many_waits_for_places_and_a_caller_that_gives_up_takes_back_all() -> None:
    async with TaskPool(backpressure=backpressure_queue(2)) as pool:
        waiting = asyncio.create_task(pool.submit_many(double, [(number,) for number in range(5)]))
        await asyncio.sleep(0.5)
        assert pool.snapshot(0).blocked_submitters == 2
        assert [await handle for handle in await waiting] == [0, 2, 4, 6, 8]
        hopeless = asyncio.create_task(pool.submit_many(double, [(number,) for number in range(5)]))
        await asyncio.sleep(0.5)
        hopeless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hopeless
        await settle()
        assert pool.size() == 0
        assert pool.snapshot(0).blocked_submitters == 0
        with pytest.raises(SubmitTimeout):
            await pool.submit_many([(double, (n,), {"wait_timeout": 0.1}) for n in range(5)])
        await settle()
        assert pool.size() == 0


def pipeline(store: Any) -> dict[str, Any]:
    return {"scope": "pipeline", "pipeline_id": "p", "name": "batch", "store": store}


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["jsonl", "sqlite", "postgres"])
def test_t16_a_durable_batch_is_one_write(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    place: Any = {"jsonl": LockedFile, "sqlite": Rows, "postgres": postgres_journal.Rows}[kind]
    writes: list[bytes] = []
    write = place.append

    def noted(self: Any, data: bytes) -> None:
        writes.append(data)
        write(self, data)

    monkeypatch.setattr(place, "append", noted)
    store: Any = JsonLinesStore(tmp_path) if kind == "jsonl" else SqliteStore(tmp_path / "s.db")
    if kind == "postgres":
        store = PostgresStore(request.getfixturevalue("postgres_dsn"))

    async def main() -> None:
        async with TaskPool(max_concurrent=1, **pipeline(store)) as pool:
            for _ in range(2):  # the second time the journal's thread is at work
                gate = asyncio.Event()
                first = await pool.submit(gate.wait)
                before = len(writes)
                handles = await pool.submit_many(add, [(number, 1) for number in range(500)])
                assert [one.count(b'"submit"') for one in writes[before:] if b'"submit"' in one] == [500]
                gate.set()
                await first
                assert [await handle for handle in handles] == list(range(1, 501))

    asyncio.run(main())
    if kind != "jsonl":
        store.close()


@pytest.mark.integration
def test_t16_a_shared_pool_takes_batches_too(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")

    async def main() -> None:
        async with TaskPool("shared", scope="org", scope_id="acme", store=store, max_concurrent=4) as pool:
            numbers = [(number, 1) for number in range(30)]
            handles = await pool.submit_many(add, numbers, idempotency_key=lambda one, other: one)
            assert [await handle for handle in handles] == list(range(1, 31))
            assert await pool.submit_many(add, numbers[:3], idempotency_key=lambda one, other: one) == handles[:3]
            plain = await pool.submit_many(add, numbers)
            assert [await handle for handle in plain] == list(range(1, 31))
            with pytest.raises(IdempotencyConflict):
                await pool.submit_many(add, [(50, 1), (3, 4)], idempotency_key=lambda one, other: one)
            await pool.drain()

    asyncio.run(main())
    store.close()


class Broken:
    """A store whose journal can be made to fail, or lacks `append_all`."""

    shared = False

    def __init__(self, how: str) -> None:
        self.how = how
        self.inner = MemoryStore()
        self.fails = False

    def open(self, pool_id: str, about: Any, keep: int) -> Any:
        journal = self.inner.open(pool_id, about, keep)
        return Appending(journal, self) if self.how == "alone" else Failing(journal, self)


class Appending:
    """A journal without `append_all`."""

    def __init__(self, journal: Any, store: Broken) -> None:
        self._journal, self._store = journal, store
        self.tasks = journal.tasks
        self.flush, self.close = journal.flush, journal.close

    def append(self, entry: Entry, done: Done | None = None) -> None:
        if self._store.fails and self._store.how == "raises":
            raise OSError("gone")
        if self._store.fails and done is not None:
            asyncio.get_running_loop().call_soon(done, StoreWriteFailed("the disk is full"))
        else:
            self._journal.append(entry, done)


class Failing(Appending):
    def append_all(self, entries: Sequence[tuple[Entry, Done | None]]) -> None:
        for entry, done in entries:
            self.append(entry, done)


@pytest.mark.parametrize("how", ["alone", "fails", "raises"])
@virtual
async def test_t16_a_batch_that_cannot_be_written_is_not_accepted(how: str) -> None:
    store = Broken(how)
    async with TaskPool(max_concurrent=2, **pipeline(store)) as pool:
        assert [await handle for handle in await pool.submit_many(add, [(1, 2), (3, 4), (5, 6)])] == [3, 7, 11]
        store.fails = True
        with pytest.raises(StoreWriteFailed):
            await pool.submit_many(add, [(1, 2), (3, 4), (5, 6)])
        await settle()
        assert (pool.size(), pool.snapshot(0).completed) == (0, 3)
        store.fails = False
        assert await pool.run(add, 1, 1) == 2


# -- map: options for each item ----------------------------------------------------------------------------------------


@dataclass
class Prompt:
    id: int
    tenant: str
    urgency: int = 0

    def title(self) -> str:
        return "no field"


PROMPTS = [Prompt(1, "acme"), Prompt(2, "umbrella", 5), Prompt(3, "acme", 9)]
ROWS = [{"id": one.id, "tenant": one.tenant, "urgency": one.urgency} for one in PROMPTS]


@pytest.mark.parametrize("items", [PROMPTS, ROWS], ids=["attributes", "fields"])
@pytest.mark.parametrize("named", [True, False], ids=["names", "functions"])
@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t17a_options_come_from_each_item(items: list[Any], named: bool, ordered: bool) -> None:
    def get(field: str) -> Any:
        return field if named else lambda item: item[field] if isinstance(item, dict) else getattr(item, field)

    async def ask(item: Any) -> str:
        return "asked"

    async with TaskPool(queue=fair_round_robin("tenant_id")) as pool:
        seen: list[TaskHandle[str]] = [
            handle
            async for handle in pool.map(
                ask,
                items,
                ordered=ordered,
                return_handles=True,
                tenant_id=get("tenant"),
                priority=get("urgency"),
                idempotency_key=get("id"),
                cost=lambda item: 2.5,
            )
        ]
        asked = sorted(
            (one.snapshot().idempotency_key or "", one.snapshot().partition, one.snapshot().priority) for one in seen
        )
        assert asked == [("1", "acme", 0), ("2", "umbrella", 5), ("3", "acme", 9)]
        assert all("completed" in handle.story() for handle in seen)


@virtual
async def test_t17a_a_plain_tenant_is_the_tenant_of_all_items() -> None:
    async with TaskPool(queue=fair_round_robin("tenant_id")) as pool:
        for items in (PROMPTS, ["title", "count"], [1, 2]):
            for tenant in ("acme", "title"):  # a method is no field
                handles = [one async for one in pool.map(as_it_is, items, tenant_id=tenant, return_handles=True)]
                assert {handle.partition for handle in handles} == {tenant}


async def as_it_is(item: Any) -> Any:
    return item


@virtual
async def test_t17a_tags_and_affinity_of_each_item() -> None:
    keys = ResourcePool([Resource("eu", 1, tags=["eu"]), Resource("us", 2, tags=["us"])])

    async def where(key: Resource[int], item: Any) -> str:
        return key.resource_id

    async with headgate.TaskPool(resources=keys) as pool:
        items = [{"where": "us"}, {"where": ["eu"]}, {"where": "us"}]
        assert [one async for one in pool.map(where, items, tags="where")] == ["us", "eu", "us"]
        chosen = pool.map(where, ["us", "eu"], tags=lambda item: [item], affinity=lambda item: item)
        assert [one async for one in chosen] == ["us", "eu"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"idempotency_key": "nothing"}, "idempotency_key='nothing' names a field"),
        ({"priority": "nothing"}, "priority='nothing' names a field"),
        ({"priority": "tenant"}, "priority must be a whole number, got 'acme'"),
        ({"cost": lambda item: -1}, "cost must be > 0"),
        ({"tenant_id": lambda item: 1 / 0}, "division by zero"),
        ({"idempotency_key": lambda item: " "}, "must be a non-blank string"),
    ],
)
@virtual
async def test_t17a_an_option_that_an_item_cannot_give_is_raised_and_names_it(options: Any, text: str) -> None:
    async with TaskPool(queue=fair_round_robin("tenant_id")) as pool:
        with pytest.raises((InvalidArgument, ZeroDivisionError), match=text) as caught:
            async for _ in pool.map(as_it_is, ROWS, **options):
                pass
        if "names a field" in text or "zero" in text:
            assert "item 1, {'id': 1" in "".join(caught.value.__notes__)
        with pytest.raises(InvalidArgument, match="this one has none"):
            async for _ in pool.map(as_it_is, [*ROWS, {"id": None, "tenant": "x"}], idempotency_key="id"):
                pass
        with pytest.raises(InvalidArgument, match="this one has none"):
            async for _ in pool.map(as_it_is, [*ROWS, {"id": 4}], tenant_id="tenant"):
                pass


@virtual
async def test_t17a_handles_instead_of_results_raise_nothing() -> None:
    async with TaskPool(max_concurrent=3) as pool:
        handles = [one async for one in pool.map(int, ["1", "x", "3"], return_handles=True)]
        assert [handle.status for handle in handles] == ["completed", "failed", "completed"]
        assert "ValueError" in handles[1].story()
        with pytest.raises(InvalidArgument, match="both given"):
            pool.map(int, ["1"], return_handles=True, return_exceptions=True)
        with pytest.raises(InvalidType, match="return_handles"):
            pool.map(int, ["1"], return_handles="yes")  # type: ignore[call-overload]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("durable", [True, False])
@virtual
async def test_t17a_items_with_one_key_are_one_task_and_each_gets_its_result(ordered: bool, durable: bool) -> None:
    runs: list[int] = []

    async def ask(number: int) -> int:
        runs.append(number)
        await asyncio.sleep(1)
        return number

    options = pipeline(MemoryStore()) if durable else {}
    async with TaskPool(max_concurrent=4, **options) as pool:
        results = [one async for one in pool.map(ask, [1, 2, 1, 3, 1], ordered=ordered, idempotency_key=str)]
        assert sorted(results) == [1, 1, 1, 2, 3]
        if ordered:
            assert results == [1, 2, 1, 3, 1]
    assert sorted(runs) == [1, 2, 3]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.integration
def test_t17a_a_durable_map_writes_in_groups(
    tmp_path: Path, ordered: bool, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    write = LockedFile.append

    def noted(self: LockedFile, data: bytes) -> None:
        writes.append(data.count(b'"submit"'))
        write(self, data)

    monkeypatch.setattr(LockedFile, "append", noted)

    async def source() -> AsyncIterator[int]:
        for number in range(400):
            yield number

    async def main() -> None:
        async with TaskPool(max_concurrent=50, **pipeline(JsonLinesStore(tmp_path))) as pool:
            items: Any = source() if asynchronous else range(400)
            results = [one async for one in pool.map(as_it_is, items, ordered=ordered, idempotency_key=str)]
            assert sorted(results) == list(range(400))

    asyncio.run(main())
    assert sum(writes) == 400
    assert sum(1 for one in writes if one) < 100, "each group has many"


@pytest.mark.parametrize("ordered", [True, False])
@virtual
async def test_t17a_a_durable_map_raises_what_the_disk_refuses(ordered: bool) -> None:
    store = Broken("fails")
    async with TaskPool(max_concurrent=4, **pipeline(store)) as pool:
        seen = []

        async def read() -> None:
            async for one in pool.map(as_it_is, range(100), ordered=ordered):
                seen.append(one)
                store.fails = len(seen) >= 10

        with pytest.raises(StoreWriteFailed):
            await read()
        store.fails = False
        await pool.drain()
        assert len(seen) < 100
        assert pool.size() == 0


# -- close -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cancel", "statuses", "seconds"),
    [
        ("none", ["completed"] * 4, 20.0),
        (False, ["completed"] * 4, 20.0),
        ("queued", ["completed"] * 2 + ["cancelled"] * 2, 10.0),
        ("all", ["cancelled"] * 4, 0.0),
        (True, ["cancelled"] * 4, 0.0),
    ],
)
@virtual
async def test_t18_close_gives_up_what_it_is_told_to(cancel: Any, statuses: list[str], seconds: float) -> None:
    pool = TaskPool(max_concurrent=2)
    handles = [await pool.submit(asyncio.sleep, 10) for _ in range(4)]
    await settle()
    await pool.close(cancel=cancel)
    assert [handle.status for handle in handles] == statuses
    assert clock.now() == seconds
    with pytest.raises(PoolClosed):
        await pool.submit(double, 1)


@virtual
async def test_t18_after_its_timeout_close_cancels_what_is_left() -> None:
    pool = TaskPool(max_concurrent=2)
    handles = [await pool.submit(asyncio.sleep, seconds) for seconds in (3, 100, 100)]
    await pool.close(cancel="none", timeout=7)
    assert [handle.status for handle in handles] == ["completed", "cancelled", "cancelled"]
    assert clock.now() == 7


@virtual
async def test_t18_close_that_drops_the_queue_lets_nested_work_finish_and_repeats_nothing() -> None:
    async def outer() -> int:
        await asyncio.sleep(1)
        return await (await pool.submit(double, 4))

    async def failing() -> None:
        tries.append(1)
        await asyncio.sleep(1)
        raise LookupError

    tries: list[int] = []
    pool = TaskPool(max_concurrent=3)
    parent = await pool.submit(outer)
    retried = await pool.submit(failing, retries=5)
    needed: list[TaskHandle[int]] = []

    async def waits() -> int:
        return await needed[0]

    waiting = await pool.submit(waits)
    needed.append(await pool.submit(double, 1))
    lost = await pool.submit(double, 1)
    await settle()
    await pool.close(cancel="queued")
    assert (await parent, await waiting, await needed[0]) == (8, 2, 2)
    assert (retried.status, lost.status, len(tries)) == ("cancelled", "cancelled", 1)
    with pytest.raises(TaskCancelled):
        await lost


@pytest.mark.parametrize("bad", ["some", 1, None])
@virtual
async def test_t18_close_and_on_signal_name_their_choices(bad: Any) -> None:
    async with TaskPool() as pool:
        with pytest.raises(InvalidArgument, match="cancel must be 'none', 'queued' or 'all'"):
            await pool.close(cancel=bad)
        with pytest.raises(InvalidArgument, match="timeout must be >= 0"):
            await pool.close(timeout=-1)
        assert await pool.run(double, 1) == 2
    with pytest.raises(InvalidArgument, match="on_signal must be 'drain' or None"):
        TaskPool(on_signal="explode")  # type: ignore[arg-type]


@pytest.mark.integration
def test_t18_signals_cannot_be_handled_beside_the_main_thread() -> None:
    async def main() -> None:
        pool = TaskPool(on_signal="drain")
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="main thread"):
                await pool.submit(double, 1)
        await pool.close()
        pool = TaskPool()
        with pytest.raises(InvalidArgument, match="main thread"):
            pool.drain_on_signals()
        await pool.close()

    async def beside() -> None:
        await asyncio.to_thread(asyncio.run, main())

    asyncio.run(beside())


# -- refusals, snapshots, events ---------------------------------------------------------------------------------------


@virtual
async def test_t19_a_refusal_says_how_loaded_the_pool_is_and_when_to_come_back() -> None:
    async with TaskPool(max_concurrent=2, backpressure=backpressure_queue(1, "fail_submitter")) as pool:
        await pool.run(asyncio.sleep, 10)
        for _ in range(3):
            await pool.submit(asyncio.sleep, 10)
        await asyncio.sleep(4)
        for submit in (lambda: pool.submit_nowait(asyncio.sleep, 10), lambda: pool.submit_nowait(asyncio.sleep, 1)):
            with pytest.raises(QueueFull) as caught:
                submit()
            assert (caught.value.queued, caught.value.active, caught.value.retry_after) == (1, 2, 6.0)
        await asyncio.sleep(caught.value.retry_after)
        await settle()
        pool.submit_nowait(asyncio.sleep, 1)
    async with TaskPool(backpressure=fail_fast()) as pool:
        await pool.submit(asyncio.sleep, 30)
        with pytest.raises(PoolBusy) as busy:
            await pool.submit(double, 1)
        assert (busy.value.queued, busy.value.active, busy.value.retry_after) == (0, 1, None)
        await asyncio.sleep(12)
        with pytest.raises(PoolBusy) as busy:
            await pool.submit(double, 1)
        assert busy.value.retry_after == 12.0, "nothing to compare it with: as long again as it has run"


@virtual
async def test_t19_while_keys_rest_the_wait_is_that_of_the_first() -> None:
    keys = ResourcePool({"a": 1, "b": 2})
    async with headgate.TaskPool(resources=keys, backpressure=fail_fast()) as pool:
        for name, seconds in (("a", 60), ("b", 30)):
            with pytest.raises(headgate.PoolExhausted):
                await keys.run(_limited(seconds), max_attempts=1, exclude=[{"a": "b", "b": "a"}[name]])
        with pytest.raises(PoolBusy) as caught:
            await pool.submit(as_it_is)
        assert caught.value.retry_after == 30.0


def _limited(seconds: float) -> Any:
    async def limited(key: Any) -> None:
        raise headgate.CooldownResource(seconds)

    return limited


@virtual
async def test_t50a_snapshots_tell_scope_durability_and_age() -> None:
    await asyncio.sleep(5)
    made = clock.wall()
    async with TaskPool("plain") as plain, TaskPool(**pipeline(MemoryStore())) as durable:
        await asyncio.sleep(5)
        seen = plain.snapshot()
        assert (seen.scope_id, seen.durable, seen.created_at) == (None, False, made)
        assert (durable.snapshot().scope_id, durable.snapshot().durable) == ("p", True)


@virtual
async def test_t50a_the_event_of_a_submit_tells_its_key_and_who_submitted_it() -> None:
    async def outer() -> int:
        return await pool.run(double, 1, idempotency_key="inner")

    with capture_events(AUDIT) as events:
        async with TaskPool() as pool:
            handle = await pool.submit(outer)
            await handle
    first, second = (event for event in events if event.name == "pool_submit")
    assert (first.idempotency_key, first.submitted_by) == (None, None)
    assert (second.idempotency_key, second.submitted_by) == ("inner", handle.id)
    assert second.to_dict()["submitted_by"] == handle.id


@virtual
async def test_t50a_pending_lists_the_unfinished_tasks_of_all_pools() -> None:
    assert headgate.pending() == []
    async with TaskPool("one") as one, TaskPool("two") as two:
        await one.submit(double, 1, key="acme")
        await asyncio.sleep(0.1)
        await two.submit(double, 1)
        await asyncio.sleep(0.1)
        await one.submit(double, 2)
        seen = headgate.pending()
        assert [f"{task.pool} {task.status}" for task in seen] == ["one running", "two running", "one queued"]
        assert seen[0].key == "acme"
        await one.drain()
        assert headgate.pending() == []
