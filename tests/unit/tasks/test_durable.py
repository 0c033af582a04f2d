"""T06, T11, T14, T60-T62: pipeline pools, with real files."""

from __future__ import annotations

import asyncio
import datetime
import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    DuplicatePool,
    IdempotencyConflict,
    InvalidArgument,
    PipelineIdMissing,
    StoreFormatTooNew,
    StoreLocked,
    StoreWriteFailed,
    TaskFailed,
    TaskPool,
    TaskStale,
    backpressure_queue,
    fail_fast,
    pipeline_scope,
    pool_get,
    pool_list,
    pool_wait,
    ring_buffer,
    subscribe,
)
from headgate.core.files import Files
from headgate.errors import PoolBusy, QueueFull
from headgate.stores import JsonLinesStore, MemoryStore, read_journal


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test has its own folder, and closes its pools."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADGATE_PIPELINE_ID", raising=False)
    monkeypatch.delenv("HEADGATE_DIR", raising=False)
    yield
    for pool in pool_list():
        pool._let_go()


def durable(name: str = "work", **options: Any) -> TaskPool:
    return TaskPool(name, **{"scope": "pipeline", "pipeline_id": "p", "store": JsonLinesStore("journals"), **options})


async def double(number: int) -> int:
    return 2 * number


async def fail(text: str) -> None:
    raise LookupError(text)


def crash(pool: TaskPool) -> None:
    """What is left of a pool whose process is gone: the file, and no lock."""
    pool._let_go()


def journal_text() -> str:
    (file,) = Path("journals").glob("*.jsonl")
    return file.read_text()


# -- ids and places ----------------------------------------------------------------------------------------------------


def test_t06_an_id_is_needed() -> None:
    with pytest.raises(PipelineIdMissing, match="pipeline_scope"):
        TaskPool("work", scope="pipeline", store=MemoryStore())
    assert pool_get("work") is None


def test_t06_the_argument_comes_first_then_the_scope_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_PIPELINE_ID", "from env")
    store = MemoryStore()
    with pipeline_scope("from scope"):
        found = [TaskPool("a", scope="pipeline", pipeline_id="given", store=store).snapshot().config["pipeline_id"]]
        found.append(TaskPool("b", scope="pipeline", store=store).snapshot().config["pipeline_id"])
        with pipeline_scope("inner"):
            found.append(TaskPool("c", scope="pipeline", store=store).snapshot().config["pipeline_id"])
    found.append(TaskPool("d", scope="pipeline", store=store).snapshot().config["pipeline_id"])
    assert found == ["given", "from scope", "inner", "from env"]


@pytest.mark.parametrize("bad", ["", "  ", 3])
def test_t06_a_blank_scope_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="pipeline_id"):
        with pipeline_scope(bad):
            pass


def test_t06_the_id_is_the_same_after_a_restart_and_differs_by_scope_id_and_name() -> None:
    first = durable()
    crash(first)
    again, other_name = durable(), durable("other")
    other_pipeline = durable("third", pipeline_id="q")
    assert first.id == again.id
    assert len({again.id, other_name.id, other_pipeline.id}) == 3


def test_t05_a_session_pool_touches_no_file(tmp_path: Path) -> None:
    async def main() -> None:
        async with TaskPool("session") as pool:
            assert await (await pool.submit(double, 2)) == 4

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", [False, True])
def test_t60_the_journal_lies_in_headgate_dir_or_in_dot_headgate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: bool
) -> None:
    if variable:
        monkeypatch.setenv("HEADGATE_DIR", str(tmp_path / "elsewhere"))
    TaskPool("work", scope="pipeline", pipeline_id="p")
    (file,) = (tmp_path / ("elsewhere" if variable else ".headgate")).glob("*.jsonl")
    assert file.stat().st_mode & 0o777 == 0o600


def test_t60_opened_and_locked_in_the_constructor() -> None:
    durable()
    with pytest.raises(StoreLocked, match=str(os.getpid())):
        TaskPool("copy", scope="pipeline", pipeline_id="p", store=_under_the_name("work"))
    assert pool_get("copy") is None


def _under_the_name(name: str) -> Any:
    """A store that opens the journal of another pool, as a second process would that makes the same pool."""
    pool_id = pool_get(name).id  # type: ignore[union-attr]

    class Other(JsonLinesStore):
        def open(self, _: str, about: Any, keep: int) -> Any:
            return super().open(pool_id, about, keep)

    return Other("journals")


def test_t02_a_duplicate_leaves_the_journal_alone() -> None:
    durable()
    before = journal_text()
    with pytest.raises(DuplicatePool):
        durable()
    assert journal_text() == before


def test_t62_a_newer_format_is_refused_and_nothing_is_half_made() -> None:
    crash(durable())
    (file,) = Path("journals").glob("*.jsonl")
    text = file.read_text().replace('"format":1', '"format":99')
    file.write_text(text)
    with pytest.raises(StoreFormatTooNew, match="99"):
        durable()
    assert pool_get("work") is None
    assert file.read_text() == text


# -- after a restart ---------------------------------------------------------------------------------------------------


def test_t60_finished_tasks_read_as_they_were_and_unfinished_ones_are_stale() -> None:
    async def first() -> dict[str, Any]:
        pool = durable(max_concurrent=2)
        completed = await pool.submit(double, 21, key="k", priority=3, labels={"a": 1})
        failed = await pool.submit(fail, "nobody home")
        await pool_wait([completed, failed])
        gate = asyncio.Event()
        running = [await pool.submit(gate.wait) for _ in range(2)]
        queued = await pool.submit(double, 1)
        dropped = await pool.submit(double, 1)
        dropped.cancel()
        assert [task.status for task in (*running, queued, dropped)] == ["running"] * 2 + ["queued", "cancelled"]
        await asyncio.sleep(0.05)
        before = pool.snapshot()
        pool._let_go()
        return dict(before)

    before = asyncio.run(first())
    pool = durable()
    after = pool.snapshot()
    assert (after.completed, after.failed, after.cancelled, after.stale, after.queued, after.active) == (
        1,
        1,
        1,
        3,
        0,
        0,
    )
    assert [task.id for task in after.tasks] == [task.id for task in before["tasks"]]
    old, new = before["tasks"][-1], after.tasks[-1]
    for field in ("id", "status", "key", "priority", "labels", "result", "attempt", "submitted_at", "finished_at"):
        assert new[field] == old[field], field
    failed = after.tasks[-2]
    assert isinstance(failed.error, TaskFailed)
    assert "LookupError" in str(failed.error)
    assert "nobody home" in str(failed.error)
    assert any("in fail" in note for note in failed.error.__notes__)


def test_t60_a_completed_key_gives_its_stored_result_without_running() -> None:
    ran: list[int] = []

    async def work(number: int) -> tuple[int, str]:
        ran.append(number)
        return number, "done"

    async def once() -> Any:
        async with durable() as pool:
            return await (await pool.submit(work, 5, idempotency_key="five"))

    assert [asyncio.run(once()) for _ in range(3)] == [(5, "done")] * 3
    assert ran == [5]


def test_t60_a_stale_key_runs_afresh_and_awaiting_the_old_task_says_stale() -> None:
    async def first() -> None:
        pool = durable()
        await pool.submit(asyncio.sleep, 60, idempotency_key="k")
        pool._let_go()

    asyncio.run(first())

    async def second() -> None:
        async with durable() as pool:
            (stale,) = pool._executor.states.finished
            with pytest.raises(TaskStale, match="same idempotency key"):
                await stale  # type: ignore[misc]
            fresh = await pool.submit(double, 4, idempotency_key="k")
            assert fresh.number == 2, "numbers are never used again"
            assert await fresh == 8

    asyncio.run(second())


def test_t15_a_failure_that_holds_its_key_forever_is_task_failed_after_a_restart() -> None:
    async def once(error: type[Exception]) -> None:
        async with durable() as pool:
            handle = await pool.submit(fail, "x", idempotency_key="k", window="forever")
            with pytest.raises(error, match="x"):
                await handle

    asyncio.run(once(LookupError))
    asyncio.run(once(TaskFailed))


def test_t14_another_payload_under_the_same_key_conflicts_across_restarts() -> None:
    async def once(fn: Any, *args: Any) -> Any:
        async with durable() as pool:
            return await (await pool.submit(fn, *args, idempotency_key="k"))

    tags = {"one", "two", "three", "four", "five"}

    async def work(number: int, names: set[str]) -> int:
        return number

    assert asyncio.run(once(work, 3, tags)) == 3
    assert asyncio.run(once(work, 3, set(tags))) == 3
    with pytest.raises(IdempotencyConflict):
        asyncio.run(once(work, 4, tags))
    with pytest.raises(IdempotencyConflict):
        asyncio.run(once(double, 3))


def _named(module: str, name: str) -> Any:
    async def work(number: int) -> int:
        return number

    work.__module__, work.__qualname__ = module, name
    return work


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("fn", "number", "says"),
    [
        (
            _named("jobs", "review"),
            4,
            r"the arguments differ: (argument 1 was 3 and is now 4|.*a digest is stored, \w{8}, .* is \w{8})\.",
        ),
        (
            _named("jobs", "renamed"),
            3,
            "it was jobs:review and is now jobs:renamed, with the same arguments",
        ),
        (_named("jobs.later", "review"), 4, "it was jobs:review and is now jobs.later:review, with other arguments"),
        (_named("__main__", "review"), 3, "it was jobs:review and is now __main__:review.*script that is run directly"),
    ],
)
def test_t19_a_conflict_names_both_functions_or_says_that_the_arguments_differ(
    fn: Any, number: int, says: str, later: bool
) -> None:
    async def once(*works: tuple[Any, int]) -> None:
        async with durable() as pool:
            for fn, number in works:
                await (await pool.submit(fn, number, idempotency_key="k"))

    held = (_named("jobs", "review"), 3)
    if later:
        asyncio.run(once(held))
    with pytest.raises(IdempotencyConflict, match=f"the idempotency_key 'k' is held by .*#1 completed.*{says}"):
        asyncio.run(once(*() if later else (held,), (fn, number)))


@pytest.mark.parametrize(
    "value",
    [
        42,
        "text",
        None,
        (1, (2, 3)),
        {1, 2},
        b"\x00\xff",
        {1: "a", "b": 2},
        float("inf"),
        datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC),
        {"$tuple": [1]},
    ],
)
def test_t60b_results_keep_value_and_type(value: Any) -> None:
    async def give() -> Any:
        return value

    async def once() -> Any:
        async with durable() as pool:
            return await (await pool.submit(give, idempotency_key="k"))

    first, second = asyncio.run(once()), asyncio.run(once())
    assert first is value
    assert (type(second), second) == (type(value), value)


class Odd:
    pass


def test_t60b_what_json_cannot_keep_completes_and_is_named_after_a_restart() -> None:
    async def make() -> Odd:
        return Odd()

    async def first() -> None:
        async with durable() as pool:
            assert isinstance(await (await pool.submit(make, idempotency_key="k")), Odd)

    async def second() -> None:
        async with durable() as pool:
            handle = await pool.submit(make, idempotency_key="k")
            assert handle.status == "completed"
            with pytest.raises(TaskFailed, match=r"Odd.*pickle"):
                await handle

    asyncio.run(first())
    asyncio.run(second())


def test_t60b_pickle_by_choice() -> None:
    async def make() -> complex | Odd:
        return Odd()

    async def once() -> Any:
        async with durable(store=JsonLinesStore("journals", codec="pickle")) as pool:
            return await (await pool.submit(make, idempotency_key="k"))

    assert [type(asyncio.run(once())) for _ in range(2)] == [Odd, Odd]


def test_t50_keep_holds_across_restarts_and_spares_keys() -> None:
    async def first() -> None:
        async with durable(keep=3) as pool:
            for number in range(10):
                await (await pool.submit(double, number, **({"idempotency_key": "k"} if number == 2 else {})))

    asyncio.run(first())
    pool = durable(keep=3)
    assert [task.result for task in pool.snapshot().tasks] == [18, 16, 14, 4]


# -- submitting --------------------------------------------------------------------------------------------------------


def test_t11_a_task_starts_when_its_submit_is_on_disk() -> None:
    seen: list[str] = []

    async def look() -> None:
        seen.append(journal_text())

    async def main() -> None:
        async with durable() as pool:
            submit = asyncio.create_task(pool.submit(look))
            await asyncio.sleep(0)
            assert pool.snapshot().active == 1, "its slot is reserved"
            assert seen == []
            handle = await submit
            assert handle.status == "running"
            await handle

    asyncio.run(main())
    assert '"submit"' in seen[0]


def test_t11_submit_nowait_names_submit() -> None:
    async def main() -> None:
        async with durable() as pool:
            with pytest.raises(InvalidArgument, match=r"await pool\.submit"):
                pool.submit_nowait(double, 1)
            assert pool.size() == 0

    asyncio.run(main())


def test_t60_a_result_is_visible_when_its_record_is_on_disk() -> None:
    async def main() -> None:
        async with durable() as pool:
            handle = await pool.submit(double, 21)
            assert await handle == 42
            ends = [line for line in map(json.loads, journal_text().splitlines()) if "completed" in line.values()]
            assert len(ends) == 1

    asyncio.run(main())


def test_t14_two_submitters_of_one_key_get_one_task_while_it_is_being_written() -> None:
    async def main() -> None:
        async with durable() as pool:
            first, second = await asyncio.gather(*(pool.submit(double, 3, idempotency_key="k") for _ in range(2)))
            assert first is second
            assert pool.snapshot().total == 1

    asyncio.run(main())


def test_a_submit_that_is_cancelled_while_it_is_written_runs_nothing() -> None:
    ran: list[int] = []

    async def main() -> None:
        async with durable() as pool:
            submit = asyncio.create_task(pool.submit(ran.append, 1))
            await asyncio.sleep(0)
            submit.cancel()
            with pytest.raises(asyncio.CancelledError):
                await submit
            await pool.drain()
            assert pool.snapshot().cancelled == 1

    asyncio.run(main())
    assert ran == []


@pytest.mark.parametrize("policy", [fail_fast(), backpressure_queue(1, "fail_submitter")])
def test_t32_places_are_reserved_while_the_disk_works(policy: Any) -> None:
    async def main() -> None:
        async with durable(backpressure=policy) as pool:
            outcomes = await asyncio.gather(*(pool.submit(double, n) for n in range(5)), return_exceptions=True)
            refused = [one for one in outcomes if isinstance(one, (PoolBusy, QueueFull))]
            assert len(refused) == (4 if policy.kind == "fail_fast" else 3)

    asyncio.run(main())


@pytest.mark.parametrize("on_full", ["drop_oldest", "drop_newest", "drop_fair"])
def test_t31_dropped_tasks_are_recorded(on_full: Any) -> None:
    async def main() -> None:
        pool = durable(backpressure=backpressure_queue(2, on_full))
        gate = asyncio.Event()
        await pool.submit(gate.wait)
        handles = [await pool.submit(double, n) for n in range(5)]
        gate.set()
        await pool.close()
        assert sorted(handle.status for handle in handles) == ["completed"] * 2 + ["rejected"] * 3

    asyncio.run(main())
    again = durable()
    assert again.snapshot().rejected == 3
    assert {task.rejection_policy for task in again.snapshot().tasks if task.status == "rejected"} == {on_full}


@pytest.mark.parametrize("store", ["memory", "files"])
@pytest.mark.parametrize("on_full", ["drop_oldest", "drop_fair", "ring_buffer"])
def test_t31_a_durable_pool_holds_no_more_than_its_depth(on_full: Any, store: str) -> None:
    policy = ring_buffer(3) if on_full == "ring_buffer" else backpressure_queue(3, on_full)

    async def main() -> None:
        options = {"store": MemoryStore()} if store == "memory" else {}
        async with durable(backpressure=policy, **options) as pool:
            gate = asyncio.Event()
            await pool.submit(gate.wait)
            depths: list[int] = []

            def look(event: Any) -> None:
                depths.extend((pool.snapshot(0).queued, pool.size() - 1, getattr(event, "queue_depth", 0)))

            unsubscribe = subscribe(look, "lifecycle.pool.audit")
            submits = [asyncio.create_task(pool.submit(double, number, delay=number % 2)) for number in range(20)]
            while not all(submit.done() for submit in submits):
                depths.append(pool.snapshot(0).queued)
                await asyncio.sleep(0)
            unsubscribe()
            assert max(depths) <= 4  # the newcomer, before its victim is told
            handles = [submit.result() for submit in submits]
            assert [handle.status for handle in handles] == ["rejected"] * 17 + ["queued"] * 3
            assert pool.snapshot(0).queued == 3
            gate.set()
            assert [await handle for handle in handles[-3:]] == [34, 36, 38]

    asyncio.run(main())


@pytest.mark.parametrize("how", ["submitter", "close"])
def test_t31_a_task_that_is_being_written_can_be_cancelled(how: str) -> None:
    async def main() -> None:
        pool = durable(backpressure=ring_buffer(1))
        gate = asyncio.Event()
        held = [await pool.submit(gate.wait), await pool.submit(double, 1)]
        submits = [asyncio.create_task(pool.submit(double, number)) for number in range(5)]
        await asyncio.sleep(0)
        if how == "submitter":
            for submit in submits:
                submit.cancel()
            await asyncio.wait(submits)
            gate.set()
            assert await held[1] == 2, "nobody took its place"
            await pool.close()
        else:
            await pool.close(cancel=True)
            assert {handle.status for handle in [*held, *[await submit for submit in submits]]} == {"cancelled"}
        assert pool.size() == 0
        assert pool.snapshot(0).cancelled == (5 if how == "submitter" else 7)

    asyncio.run(main())


def test_t30_the_door_of_a_durable_pool() -> None:
    async def main() -> None:
        async with durable(backpressure=backpressure_queue(1)) as pool:
            handles = await asyncio.gather(*(pool.submit(double, n) for n in range(20)))
            assert [await handle for handle in handles] == [2 * n for n in range(20)]
            assert [handle.number for handle in handles] == list(range(1, 21))

    asyncio.run(main())


# -- a bad disk --------------------------------------------------------------------------------------------------------


class Full(Files):
    """A disk with no room, as long as it is told so."""

    full = False

    def write(self, file: int, data: memoryview) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(file, data)


def test_t62_a_full_disk_surfaces_to_the_submitter_and_the_pool_goes_on_when_there_is_room() -> None:
    async def main() -> None:
        disk = Full()
        async with durable(store=JsonLinesStore("journals", files=disk), backpressure=backpressure_queue(1)) as pool:
            assert await (await pool.submit(double, 1)) == 2
            disk.full = True
            outcomes = await asyncio.gather(
                *(pool.submit(double, n, idempotency_key="k") for n in (7, 7)), return_exceptions=True
            )
            assert [type(one) for one in outcomes] == [StoreWriteFailed] * 2
            assert "No space left" in str(outcomes[0])
            assert (pool.size(), pool.snapshot().total, pool.snapshot().completed) == (0, 1, 1)
            disk.full = False
            handle = await pool.submit(double, 8, idempotency_key="k")
            assert await handle == 16, "the key was not consumed, nor the place"

    asyncio.run(main())
    assert [task.result for task in durable().snapshot().tasks] == [16, 2]


def test_t62_an_end_that_cannot_be_written_reaches_the_waiter_is_logged_and_written_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        disk = Full()
        async with durable(store=JsonLinesStore("journals", files=disk)) as pool:
            gate = asyncio.Event()

            async def work() -> int:
                await gate.wait()
                return 42

            handle = await pool.submit(work)
            disk.full = True
            gate.set()
            with caplog.at_level(logging.ERROR, "headgate.tasks"):
                assert await handle == 42
            disk.full = False
            await (await pool.submit(double, 1))

    asyncio.run(main())
    assert any("is not on disk" in record.message for record in caplog.records)
    assert [task.result for task in durable().snapshot().tasks] == [2, 42]


def test_t62_a_torn_tail_loses_that_line_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with durable() as pool:
            for number in range(3):
                await (await pool.submit(double, number))

    asyncio.run(main())
    (file,) = Path("journals").glob("*.jsonl")
    whole = file.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        file.write_bytes(whole[:cut])
        caplog.clear()
        pool = durable()
        snapshot = pool.snapshot()
        assert (snapshot.completed, snapshot.stale) == (2, 1), cut
        assert bool(caplog.records) == (cut > last), "it says so"
        crash(pool)


# -- readers -----------------------------------------------------------------------------------------------------------


def test_t61_what_runs_reads_running_for_those_who_do_not_own_the_journal() -> None:
    async def main() -> None:
        async with durable(stale_after=0.6) as pool:
            first = await pool.submit(asyncio.sleep, 1.2)
            second = await pool.submit(double, 1, delay=1.0)
            await asyncio.sleep(1.0)
            read = {task["task"]: task["status"] for task in read_journal("journals", pool_id=pool.id, stale_after=0.6)}
            assert read == {first.number: "running", second.number: "queued"}
            pool_id = pool.id
        assert {task["status"] for task in read_journal("journals", pool_id=pool_id)} == {"completed"}

    asyncio.run(main())


def test_t61_a_free_lock_means_stale() -> None:
    async def first() -> str:
        pool = durable()
        await pool.submit(asyncio.sleep, 60)
        pool._let_go()
        return pool.id

    pool_id = asyncio.run(first())
    assert [task["status"] for task in read_journal("journals", pool_id=pool_id, stale_after=3600)] == ["stale"]


@pytest.mark.parametrize("bad", [0, -1, float("nan"), "soon", None])
def test_t61_stale_after_is_validated(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="stale_after"):
        durable(stale_after=bad)
    assert pool_get("work") is None


def test_t61_stale_after_is_recorded() -> None:
    durable(stale_after=datetime.timedelta(seconds=90))
    assert '"stale_after":90.0' in journal_text().replace(" ", "")
