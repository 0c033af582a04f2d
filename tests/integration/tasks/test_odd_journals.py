"""T11, T14, T60, T62: durable pools whose records, files, stores or moments are odd."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from headgate import StoreWriteFailed, TaskPool, backpressure_queue, pool_list, pool_wait
from headgate.core.files import Files
from headgate.stores import JsonLinesStore, MemoryStore, read_journal

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    for pool in pool_list():
        pool._let_go()


def durable(store: Any = None, **options: Any) -> TaskPool:
    return TaskPool("work", scope="pipeline", pipeline_id="p", store=store or JsonLinesStore("journals"), **options)


def journal() -> Path:
    (file,) = Path("journals").glob("*.jsonl")
    return file


async def same(value: Any = 0) -> Any:
    return value


class Unshowable:
    def __str__(self) -> str:
        raise ValueError("no")

    __repr__ = __str__


class Sly:
    """Says that it is an int, and writes what it likes."""

    __class__ = int  # type: ignore[assignment]

    def __lt__(self, other: object) -> bool:
        return True

    __gt__ = __lt__

    def __repr__(self) -> str:
        return '1}\n{"kind":"end","at":2,"task":777,"status":"completed","result":6'


class Thing:
    pass


async def bad_syntax() -> None:
    raise SyntaxError("bad", ("f.py", 1, 1, b"text"))


async def unshowable() -> None:
    raise RuntimeError(Unshowable())


@pytest.mark.parametrize("options", [{"labels": {"a": Unshowable()}}, {"key": (Unshowable(),)}])
def test_t11_what_cannot_be_shown_is_recorded_as_such(options: Any) -> None:
    async def main() -> None:
        async with durable() as pool:
            await (await pool.submit(same, **options))

    asyncio.run(main())
    assert durable().snapshot().completed == 1


@pytest.mark.parametrize("make", [lambda: Mock(spec=int), lambda: weakref.proxy(Thing()), Sly])
def test_t60b_a_result_that_pretends_is_opaque_and_ends(make: Any) -> None:
    async def body() -> Any:
        return make()

    async def main() -> None:
        async with durable() as pool:
            await pool_wait(await pool.submit(body))

    asyncio.run(main())
    (task,) = read_journal(journal())
    assert (task["task"], type(task["result"]).__name__) == (1, "Opaque")


@pytest.mark.parametrize("body", [bad_syntax, unshowable])
def test_t60b_an_error_that_cannot_be_told_is_failed_all_the_same(body: Any) -> None:
    async def main() -> None:
        async with durable() as pool:
            assert (await pool_wait(await pool.submit(body))).status == "failed"

    asyncio.run(main())
    assert durable().snapshot().failed == 1


def test_t60b_what_is_not_kept_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with durable() as pool:
            for _ in range(3):
                await (await pool.submit(same, Thing()))

    asyncio.run(main())
    assert len([record for record in caplog.records if "Thing" in record.message]) == 1


def test_t60_opening_costs_no_more_for_each_task_when_there_are_many() -> None:
    """Counted by a comparison that was made once for every task and every forgotten one."""
    from headgate.stores.jsonl.journal import kept, submitted

    class Tasks(dict[int, Any]):
        walks = 0

        def __iter__(self) -> Iterator[int]:
            Tasks.walks += 1
            return super().__iter__()

    tasks = Tasks({number: {**submitted(number, 1.0, {}), "status": "completed"} for number in range(500)})
    assert [task["task"] for task in kept(tasks, 1, 2.0)] == [499]
    assert Tasks.walks < 10


def test_t35_delayed_tasks_of_a_durable_pool_are_dropped_once() -> None:
    async def main() -> None:
        async with durable(backpressure=backpressure_queue(2, "drop_fair")) as pool:
            gate = asyncio.Event()
            await pool.submit(gate.wait)
            handles = [await pool.submit(same, n, key="ab"[n % 2], delay=0.05) for n in range(6)]
            gate.set()
            ends = await pool_wait(handles)
            assert sorted(task.status for task in ends) == ["completed"] * 2 + ["rejected"] * 4

    asyncio.run(main())


class Full(Files):
    full = False

    def write(self, file: int, data: memoryview) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(file, data)


@pytest.mark.parametrize("on_full", ["drop_oldest", "drop_fair"])
def test_t62_a_submit_that_is_not_written_evicts_nobody(on_full: Any) -> None:
    async def main() -> None:
        disk = Full()
        async with durable(JsonLinesStore("journals", files=disk), backpressure=backpressure_queue(3, on_full)) as pool:
            gate = asyncio.Event()
            await pool.submit(gate.wait)
            handles = [await pool.submit(same, n) for n in range(3)]
            disk.full = True
            refused = await asyncio.gather(*(pool.submit(same) for _ in range(3)), return_exceptions=True)
            assert [type(one) for one in refused] == [StoreWriteFailed] * 3
            disk.full = False
            gate.set()
            assert [await handle for handle in handles] == [0, 1, 2]

    asyncio.run(main())


@pytest.mark.parametrize("how", ["deleted", "folder", "replaced", "cut", "written"])
def test_t62_a_journal_that_somebody_else_changed_is_not_written_on(how: str) -> None:
    async def main() -> None:
        async with durable() as pool:
            await (await pool.submit(same, 1))
            file = journal()
            if how == "deleted":
                file.unlink()
            elif how == "folder":
                shutil.rmtree("journals")
            elif how == "replaced":
                shutil.copy(file, "copy")
                os.replace("copy", file)
            elif how == "cut":
                os.truncate(file, 100)
            else:
                file.write_bytes(file.read_bytes() + b"meddling")
            with pytest.raises(StoreWriteFailed, match="somebody else"):
                await pool.submit(same, 2)

    asyncio.run(main())


SETS = """
import asyncio, dataclasses
from headgate import TaskPool
from headgate.stores import JsonLinesStore

@dataclasses.dataclass(frozen=True)
class Job:
    tags: frozenset

async def work(job):
    return len(job.tags)

async def main():
    async with TaskPool("r", scope="pipeline", pipeline_id="n", store=JsonLinesStore("journals")) as pool:
        job = Job(frozenset({"x", "yy", "zzz", "w"}))
        print(await (await pool.submit(work, job, idempotency_key="k")))

asyncio.run(main())
"""


def test_t14_the_order_of_a_set_is_no_conflict() -> None:
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ended = subprocess.run(
            [sys.executable, "-c", SETS], capture_output=True, text=True, env=environment, check=True
        )
        assert ended.stdout.strip() == "4"


def test_t14_what_expires_at_the_door_is_recorded_and_holds_its_key_forever() -> None:
    async def first() -> None:
        async with durable(backpressure=backpressure_queue(1)) as pool:
            gate = asyncio.Event()
            await pool.submit(gate.wait)
            await pool.submit(same)
            late = await pool.submit(same, 1, idempotency_key="k", window="forever", ttl=0.05)
            assert (late.status, late.number) == ("expired", 3)
            gate.set()

    async def second() -> None:
        async with durable() as pool:
            again = await pool.submit(same, 1, idempotency_key="k", window="forever")
            assert (again.status, again.number) == ("expired", 3)

    asyncio.run(first())
    asyncio.run(second())


def test_t60_a_newcomer_that_was_dropped_reads_as_it_was() -> None:
    async def main() -> Any:
        async with durable(backpressure=backpressure_queue(1, "drop_newest")) as pool:
            gate = asyncio.Event()
            await pool.submit(gate.wait)
            await pool.submit(same)
            dropped = await pool.submit(same, key="k", priority=3, labels={"a": "b"})
            gate.set()
            return dropped.snapshot()

    before = asyncio.run(main())
    after = next(task for task in durable().snapshot().tasks if task.status == "rejected")
    assert dict(after) == dict(before)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"until_success"', '"until_tuesday"'),
        ('"until_success"', "[3]"),
        ('"idempotency_key":"k"', '"idempotency_key":["k"]'),
        ('"type":"builtins:ValueError"', '"kind":3'),
        ('"error":{', '"mistake":{'),
        ('"text":"no"', '"text":[1]'),
    ],
)
def test_t62_odd_fields_are_read_as_well_as_they_can_be(old: str, new: str) -> None:
    async def no() -> None:
        raise ValueError("no")

    async def main() -> None:
        async with durable() as pool:
            await (await pool.submit(same, 1, idempotency_key="k"))
            await pool_wait(await pool.submit(no))

    asyncio.run(main())
    text = journal().read_text()
    assert old in text
    journal().write_text(text.replace(old, new))
    snapshot = durable().snapshot()
    assert snapshot.completed + snapshot.failed + snapshot.stale == 2
    assert all(task.status != "failed" or task.error is not None for task in snapshot.tasks)


def test_t61_readers_use_the_stale_after_of_the_pool() -> None:
    async def main() -> list[str]:
        async with durable(stale_after=0.3) as pool:
            handle = await pool.submit(asyncio.sleep, 0.01)
            assert pool._submitter._beat is not None
            pool._submitter._beat.cancel()  # a pool that has stopped giving signs of life
            await handle
            await pool.submit(asyncio.sleep, 1)
            await asyncio.sleep(0.5)
            return [task["status"] for task in read_journal(journal())]

    assert asyncio.run(main()) == ["completed", "stale"]


class Sloppy:
    """A store that breaks its promises."""

    shared = False

    def __init__(self, how: str) -> None:
        self.how = how
        self.inner = MemoryStore()

    def open(self, *args: Any) -> Any:
        journal = self.inner.open(*args)
        append = journal.append

        def sloppy(entry: Any, done: Any = None) -> None:
            if self.how == "raises":
                raise OSError("nothing is written here")
            append(entry)
            if done is not None:
                done(None)

        journal.append = sloppy  # type: ignore[method-assign]
        return journal


def test_t63_a_store_that_raises_hangs_nobody() -> None:
    async def main() -> None:
        async with durable(Sloppy("raises")) as pool:
            for _ in range(2):
                with pytest.raises(OSError, match="nothing is written"):
                    await pool.submit(same)

    asyncio.run(main())


def test_t63_a_store_that_says_so_at_once_is_heard() -> None:
    async def main() -> None:
        async with durable(Sloppy("at once")) as pool:
            assert [await (await pool.submit(same, n)) for n in range(3)] == [0, 1, 2]

    asyncio.run(main())


def test_t05_a_store_without_the_scope_is_refused() -> None:
    from headgate import InvalidArgument

    for options in ({"store": MemoryStore()}, {"pipeline_id": "p"}):
        with pytest.raises(InvalidArgument, match="scope"):
            TaskPool("quiet", **options)  # type: ignore[arg-type]
    assert pool_list() == []


def test_t06_a_pipeline_pool_without_a_name_has_the_same_one_each_time() -> None:
    store = MemoryStore()
    TaskPool()
    first = TaskPool(scope="pipeline", pipeline_id="nightly", store=store)
    first._let_go()
    assert TaskPool(scope="pipeline", pipeline_id="nightly", store=store).id == first.id
