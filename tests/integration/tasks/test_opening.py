"""T60, T62: opening the journal of a durable pool: off the event loop, and with what is needed only."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    InvalidArgument,
    StoreFormatTooNew,
    StoreLocked,
    StoreWriteFailed,
    TaskPool,
    pool_get,
    pool_list,
)
from headgate.core.files import Files
from headgate.stores import JsonLinesStore
from headgate.stores.jsonl import scanner
from headgate.stores.jsonl import store as jsonl

pytestmark = pytest.mark.integration

PATIENCE = 30.0


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    for pool in pool_list():
        pool._let_go()


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every journal is large enough to be read in a thread."""
    monkeypatch.setattr(jsonl, "_LARGE", 0)


def durable(**options: Any) -> TaskPool:
    store = JsonLinesStore("journals", files=options.pop("files", None))
    return TaskPool("work", scope="pipeline", pipeline_id="p", store=store, **options)


def journal() -> Path:
    (file,) = Path("journals").glob("*.jsonl")
    return file


async def double(number: int) -> int:
    return 2 * number


async def write(count: int, **options: Any) -> None:
    async with durable(max_concurrent=50) as pool:
        for number in range(count):
            await (await pool.submit(double, number, idempotency_key=f"key-{number}", **options))


class Slow(Files):
    """Reading goes on when `go` is set. The first line can always be read."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.threads: list[threading.Thread] = []
        self.error: OSError | None = None

    def lines(self, file: int) -> Iterator[bytes]:
        for number, line in enumerate(super().lines(file)):
            if number == 1:
                self.threads.append(threading.current_thread())
                assert self.go.wait(PATIENCE), "the event loop was held"
                if self.error is not None:
                    raise self.error
            yield line


def test_t60_the_loop_turns_while_a_large_journal_is_read(large: None) -> None:
    async def main() -> None:
        await write(5)
        files = Slow()
        asyncio.get_running_loop().call_later(0.01, files.go.set)  # never, if somebody holds the loop
        async with durable(files=files) as pool:
            handle = await pool.submit(double, 3, idempotency_key="key-3")
            assert (handle.number, handle.status, await handle) == (4, "completed", 6)
            fresh = await pool.submit(double, 9)
            assert fresh.number > 5, "numbers are never used again"
            assert await fresh == 18
        assert files.threads
        assert threading.main_thread() not in files.threads

    asyncio.run(main())


def test_t60_a_journal_is_locked_in_the_constructor_and_read_in_the_order_of_its_users(large: None) -> None:
    async def main() -> None:
        await write(3)
        files = Slow()
        pool = durable(files=files)
        with pytest.raises(StoreLocked):
            JsonLinesStore("journals").open(pool.id, {}, 10)
        early = [asyncio.create_task(pool.submit(double, number, idempotency_key=f"key-{number}")) for number in (1, 7)]
        early += [asyncio.create_task(pool.submit(double, number)) for number in (8, 9)]
        hasty = asyncio.create_task(pool.submit(double, 2))
        await asyncio.sleep(0)
        hasty.cancel()
        drained = asyncio.create_task(pool.drain())
        await asyncio.sleep(0.01)
        assert not any(one.done() for one in early)
        assert not drained.done()
        files.go.set()
        handles = await asyncio.gather(*early)
        assert [handle.number for handle in handles] == [2, 5, 6, 7]  # a duplicate uses up a number
        await drained
        assert [await handle for handle in handles] == [2, 14, 16, 18]
        assert hasty.cancelled()
        await pool.close()
        assert pool.snapshot(0).completed == 6

    asyncio.run(main())


def test_t60_a_snapshot_waits_until_the_journal_is_read(large: None) -> None:
    async def main() -> None:
        await write(4)
        files = Slow()
        pool = durable(files=files)
        threading.Timer(0.01, files.go.set).start()
        snapshot = pool.snapshot(2)
        assert (snapshot.completed, [task.result for task in snapshot.tasks]) == (4, [6, 4])
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("use", ["enter", "submit", "drain", "close"])
def test_t62_a_journal_that_cannot_be_read_says_so_at_the_first_use(large: None, use: str) -> None:
    async def main() -> None:
        await write(1)
        files = Slow()
        files.error = OSError(errno.EIO, os.strerror(errno.EIO))
        files.go.set()
        pool = durable(files=files)
        first = {"enter": pool.__aenter__, "submit": lambda: pool.submit(double, 1)}.get(use) or getattr(pool, use)
        with pytest.raises(StoreWriteFailed, match="Input/output error"):
            await first()
        assert pool_get("work") is None
        with pytest.raises(StoreWriteFailed, match="Input/output error"):
            await pool.submit(double, 1)
        await pool.close()
        async with durable() as again:  # it is not locked any more
            assert await (await again.submit(double, 0, idempotency_key="key-0")) == 0

    asyncio.run(main())


def test_t62_what_the_first_line_tells_is_told_by_the_constructor(large: None) -> None:
    async def main() -> None:
        await write(1)
        text = journal().read_text()
        for old, new, error in (
            ('"format":1', '"format":99', StoreFormatTooNew),
            ('"headgate":"journal"', '"headgate":"ledger"', InvalidArgument),
            ('"pool_id":"pool-', '"pool_id":"pond-', InvalidArgument),
        ):
            journal().write_text(text.replace(old, new))
            with pytest.raises(error, match="line 1, the header, is damaged" if "pool-" in old else None):
                durable()
            assert pool_get("work") is None
            assert journal().read_text() == text.replace(old, new)

    asyncio.run(main())


def test_t60_a_pool_that_is_left_while_its_journal_is_read_frees_the_lock(large: None) -> None:
    async def main() -> None:
        await write(3)
        size = journal().stat().st_size
        files = Slow()
        pool = durable(files=files)
        threading.Timer(0.01, files.go.set).start()
        pool._let_go()
        assert journal().stat().st_size == size, "nothing was written"
        async with durable() as again:
            assert again.snapshot().completed == 3

    asyncio.run(main())


def test_t60_without_a_running_loop_it_is_read_at_once(large: None) -> None:
    asyncio.run(write(3))
    files = Slow()
    files.go.set()
    assert durable(files=files).snapshot().completed == 3
    assert files.threads == [threading.main_thread()]


def test_t60_a_machine_without_threads_reads_it_where_it_is(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        await write(2)
        with monkeypatch.context() as patched:
            patched.setattr("headgate.tasks.runtime.durable.Thread.start", refuse)
            pool = durable()
        async with pool:
            assert await (await pool.submit(double, 1, idempotency_key="key-1")) == 2

    asyncio.run(main())


def test_t60_results_are_decoded_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(write(20))
    asked: list[Any] = []

    def decode(encoded: Any, **options: Any) -> Any:
        asked.append(encoded)
        return encoded

    monkeypatch.setattr(scanner, "decode", decode)

    async def main() -> None:
        async with durable() as pool:
            assert pool.snapshot(0).completed == 20
            assert asked == []
            handle = await pool.submit(double, 7, idempotency_key="key-7")
            assert await pool.submit(double, 7, idempotency_key="key-7") is handle
            assert asked == [14]
            assert [task.result for task in pool.snapshot(3).tasks] == [38, 36, 34]
            assert [task.id for task in pool.snapshot().tasks].count(handle.id) == 1
            assert len(pool.snapshot().tasks) == 20

    asyncio.run(main())


def test_t60_more_keys_than_keep_are_all_found(tmp_path: Path) -> None:
    asyncio.run(write(30))

    async def main() -> None:
        async with durable(keep=3) as pool:
            for number in range(30):
                assert (await pool.submit(double, number, idempotency_key=f"key-{number}")).number == number + 1
            assert len(pool.snapshot().tasks) == 30

    asyncio.run(main())


# -- damage ---------------------------------------------------------------------------------


def test_t62_a_flipped_digit_in_a_result_is_noticed_and_nothing_else_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(write(4))
    lines = journal().read_text().splitlines(keepends=True)
    (damaged,) = [number for number, line in enumerate(lines) if '"result":2,' in line]
    lines[damaged] = lines[damaged].replace('"result":2,', '"result":3,')
    journal().write_text("".join(lines))
    caplog.clear()

    async def main() -> None:
        async with durable() as pool:
            assert (pool.snapshot(0).completed, pool.snapshot(0).stale) == (3, 1)
            [record] = caplog.records
            assert record.levelno == logging.WARNING
            assert f"{journal()}: 1 lines cannot be read" in record.getMessage().replace(f"{Path.cwd()}/", "")
            assert f"the first is line {damaged + 1}" in record.getMessage()
            assert "1 of them damaged: the checksum is wrong" in record.getMessage()
            numbers = []
            for number in range(4):
                handle = await pool.submit(double, number, idempotency_key=f"key-{number}")
                numbers.append(handle.number)
                assert await handle == 2 * number
            assert numbers == [1, 6, 3, 4], "the one whose result is lost has run again"

    asyncio.run(main())


def test_t62_a_journal_without_checksums_is_read_and_written_on() -> None:
    import re

    asyncio.run(write(4))
    older = re.sub(r',"crc":"[0-9a-f]{8}"', "", journal().read_text())
    journal().write_text(older)

    async def main() -> None:
        async with durable() as pool:
            for number in range(5):
                assert await (await pool.submit(double, number, idempotency_key=f"key-{number}")) == 2 * number
            assert pool.snapshot(0).completed == 5

    asyncio.run(main())
    text = journal().read_text()
    assert text.startswith(older)
    assert all('"crc":"' in line for line in text.removeprefix(older).splitlines())
