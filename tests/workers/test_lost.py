"""W92: what a caller learns of a worker that died, and who dies with it."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import ResourcePool, WorkerLost, WorkerPool
from headgate.testing import no_leaks
from headgate.workers.endings import LINES, Ending, ending_of
from headgate.workers.keeper import TAIL
from tests.workers import jobs, lost_jobs
from tests.workers.support import Shared, all_ready, lines, pids, script, until

pytestmark = pytest.mark.integration

ENDS = [("exit 7", 7, None), ("exit 0", 0, None), ("SIGSEGV", None, 11), ("SIGKILL", None, 9), ("SIGABRT", None, 6)]


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """Two workers of this module's own: here they are killed."""
    shared = Shared(spawn=2, lazy=False)
    shared.open()
    yield shared
    shared.close()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    with no_leaks(files=False, threads=False):
        yield


# -- how it ended -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "code", "number"), ENDS)
def test_w92_a_lost_worker_tells_its_exit_code_or_signal(
    shared: Shared, how: str, code: int | None, number: int | None
) -> None:
    async def main() -> None:
        await all_ready(shared.pool, 2)
        ways = [lost_jobs.ends(how), lost_jobs.ends_in_a_thread(how)]
        stream = lost_jobs.ends_after_an_item(how)
        assert await anext(stream) == 1
        ways.append(anext(stream))  # type: ignore[arg-type]
        for way in ways:
            with pytest.raises(WorkerLost) as caught:
                await way
            error = caught.value
            assert (error.exit_code, error.signal) == (code, number), error
            assert (f"exit code {code}" if number is None else f"killed by {signal.Signals(number).name}") in str(error)
            await all_ready(shared.pool, 2)

    shared(main)


def test_w92_every_call_that_is_lost_with_it_is_told(shared: Shared, log: str) -> None:
    async def main() -> None:
        await all_ready(shared.pool, 2)
        calls = [asyncio.create_task(jobs.begun_at(log, n, 60)) for n in range(20)]
        mine: list[BaseException] = []

        def elsewhere() -> None:
            async def call() -> None:
                try:
                    await jobs.begun_at(log, 20, 60)
                except WorkerLost as error:
                    mine.append(error)

            asyncio.run(call())

        thread = threading.Thread(target=contextvars.copy_context().run, args=(elsewhere,))
        thread.start()
        await until(lambda: len(lines(log)) == 21)
        for pid in pids(shared.pool):
            os.kill(pid, signal.SIGKILL)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert {getattr(error, "signal", None) for error in errors} == {9}
        await asyncio.to_thread(thread.join)
        assert [getattr(error, "signal", None) for error in mine] == [9]

    shared(main)


def test_w92_the_loss_of_a_peer_is_told_without_a_keeper(shared: Shared) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2):
            await jobs.pid()
            await jobs.pid()
            with pytest.raises(WorkerLost):
                await lost_jobs.calls_one_that_ends("SIGKILL")

    shared(main)


# -- what it said last ------------------------------------------------------------------------------------------------


def test_w92_the_last_lines_of_stderr_come_with_the_loss(shared: Shared) -> None:
    async def main() -> None:
        keys = ResourcePool({"mine": "sk-very-secret"})
        async with WorkerPool(spawn=1):
            await lost_jobs.says("something sk-very-secret said", 500)
            with pytest.raises(WorkerLost) as caught:
                await lost_jobs.reads_null()
            error = caught.value
            said = error.stderr.splitlines()
            assert 1 < len(said) <= LINES
            assert "something <mine> said" in said
            assert any("Segmentation fault" in line for line in said)
            assert any("in reads_null" in line for line in said), "where it crashed"
            assert error.stderr in error.__notes__[-1]
            assert "secret" not in str(error) + error.stderr + "".join(error.__notes__)
            with pytest.raises(WorkerLost) as caught:
                await lost_jobs.ends("SIGKILL")
            assert caught.value.stderr == "", "another process has said nothing"
            assert not hasattr(caught.value, "__notes__")
        del keys

    shared(main)


def test_w92_stderr_of_a_worker_is_still_the_clients(tmp_path: Path) -> None:
    code = """
import asyncio, headgate
from tests.workers import lost_jobs

async def main():
    async with headgate.WorkerPool(spawn=1):
        await lost_jobs.says("said", 20_000)
        print(await lost_jobs.about_stderr())

if __name__ == "__main__":
    asyncio.run(main())
"""
    ran = script(code, tmp_path)
    assert ran.stdout == "(2, '<stderr>', False, 'backslashreplace')\n"
    assert ran.stderr == "said\n" * 20_000


def test_w92_what_a_report_of_the_keeper_says() -> None:
    def report(code: int, errors: bytes = b"") -> dict[str, Any]:
        return {"event": "exited", "uid": "w-1", "pid": 7, "code": code, "errors": errors}

    assert ending_of(report(0)) == Ending(0, None)
    assert ending_of(report(3, b" one\ntwo\n\n")) == Ending(3, None, "one\ntwo")
    assert (str(ending_of(report(3))), str(ending_of(report(-11)))) == ("exit code 3", "killed by SIGSEGV")
    assert str(ending_of(report(-60))) == "killed by signal 60"
    assert ending_of({"event": "gone"}) == Ending()
    assert str(Ending()) == ""
    numbered = "".join(f"{n}\n" for n in range(100)).encode()
    assert ending_of(report(-9, numbered)).stderr.splitlines() == [str(n) for n in range(100 - LINES, 100)]
    keys = ResourcePool({"a": "sk-0123456789", "b": "sk-abcdefghij"})
    cut = b"23456789 is half of a value" + b"." * TAIL + b"\nsk-abcdefghij \xff"
    assert ending_of(report(-9, cut[-TAIL:])).stderr == "<b> �"
    del keys
