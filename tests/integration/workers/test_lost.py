"""W92: what a caller learns of a worker that died, and who dies with it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import ResourcePool, WorkerLost, WorkerPool
from headgate.testing import no_leaks
from headgate.workers.mapping import routine_for
from headgate.workers.processes.exit_status import LINES, Ending, ending_of
from headgate.workers.processes.keeper import TAIL
from tests.conftest import SCALE
from tests.integration.workers import lost_jobs
from tests.support.workers import jobs
from tests.support.workers.support import Shared, all_ready, in_flight, lines, pids, run, script, until

pytestmark = pytest.mark.integration

ENDS = [
    ("exit 7", 7, None),
    pytest.param("exit 0", 0, None, marks=pytest.mark.soak),
    ("SIGSEGV", None, 11),
    pytest.param("SIGKILL", None, 9, marks=pytest.mark.soak),
    pytest.param("SIGABRT", None, 6, marks=pytest.mark.soak),
]


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
        assert [getattr(error, "signal", None) for error in errors] == [9] * 20
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
from tests.integration.workers import lost_jobs

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


# -- who dies with whom -----------------------------------------------------------------------------------------------

once = headgate.routine(retries=1)
twice = headgate.routine(retries=2)
AGAIN = {
    1: (once(lost_jobs.neighbour), once(lost_jobs.culprit)),
    2: (twice(lost_jobs.neighbour), twice(lost_jobs.culprit)),
}


@pytest.mark.parametrize(
    ("workers", "retries", "how"),
    [
        (1, 2, "exit 3"),
        (4, 1, "SIGSEGV"),
        *(pytest.param(workers, 1, "SIGSEGV", marks=pytest.mark.soak) for workers in (1, 2)),
        *(pytest.param(workers, 2, "exit 3", marks=pytest.mark.soak) for workers in (2, 4)),
    ],
)
def test_w92_a_call_that_crashes_fails_by_itself(log: str, workers: int, retries: int, how: str) -> None:
    neighbour, culprit = AGAIN[retries]

    async def main() -> None:
        async with WorkerPool(spawn=workers):
            calls = [asyncio.create_task(neighbour(log, n, 0.02)) for n in range(30)]
            calls[10:10] = culprits = [asyncio.create_task(culprit(log, n, how, 0.01)) for n in range(2)]
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert [one for one in ended if not isinstance(one, BaseException)] == list(range(30)), ended
            for one in culprits:
                error = one.exception()
                assert isinstance(error, WorkerLost)
                assert (error.exit_code, error.signal) == ((3, None) if how == "exit 3" else (None, 11))
            for n in range(2):
                assert sum(line.startswith(f"culprit {n} ") for line in lines(log)) == retries + 1

    run(main)


def test_w92_calls_of_different_retries_that_crash_fail_by_themselves(log: str) -> None:
    """One that may have a neighbour begins in the moment in which another waits to be alone."""
    thrice = headgate.routine(retries=3)
    neighbour, culprit = thrice(lost_jobs.neighbour), thrice(lost_jobs.culprit)

    async def main() -> None:
        async with WorkerPool(spawn=3):
            calls = [asyncio.create_task(AGAIN[1][0](log, n, 0.2)) for n in range(20)]
            calls += [asyncio.create_task(neighbour(log, n, 0.2)) for n in range(20, 30)]
            culprits = [asyncio.create_task(AGAIN[1][1](log, 0, "exit 3", 0.1))]
            culprits += [asyncio.create_task(culprit(log, n, "exit 3", 0.1)) for n in (1, 2)]
            ended = await asyncio.gather(*calls, *culprits, return_exceptions=True)
            assert ended[:30] == list(range(30)), ended
            assert [error.neighbours for error in ended[30:] if isinstance(error, WorkerLost)] == [0, 0, 0]

    run(main, 60)


@pytest.mark.parametrize("seed", range(max(1, int(10 * SCALE))))
def test_w92_calls_that_crash_inside_calls(seed: int) -> None:
    """Callers wait for calls that wait to be alone: nobody waits for ever, and only culprits and their callers fail."""

    async def main() -> None:
        async with WorkerPool(spawn=3):
            names = [f"{seed}/{n}" for n in range(40 if SCALE >= 1 else 20)]
            trees = await asyncio.gather(*(lost_jobs.tree(name, 0.03) for name in names), return_exceptions=True)
        for name, found in zip(names, trees, strict=True):
            culprits = [lost_jobs.is_culprit(f"{name}.{n}", 0.03) for n in range(3)]
            if isinstance(found, BaseException):
                assert isinstance(found, WorkerLost)
                assert lost_jobs.is_culprit(name, 0.03) or any(culprits), (name, found)
            else:
                assert found == ["WorkerLost" if culprit else 1 for culprit in culprits], name

    run(main, 120)


class Rerun:
    """A request that was lost before: its call is to have few neighbours."""

    request_id, tenant, holds = "", "", False

    def __init__(self, max_calls: int) -> None:
        self.max_calls = max_calls

    def placed(self, uid: str) -> None:
        pass

    def hide(self, text: str) -> str:
        return text


def again(pool: WorkerPool, fn: Any, *args: Any, limit: float | None = None, max_calls: int = 1) -> asyncio.Task[Any]:
    """Call a routine as one is called that was on a worker when it died."""
    call = pool.__dispatcher__().call(routine_for(fn, "it"), args, {}, limit, "", request=Rerun(max_calls))
    return asyncio.ensure_future(call)


async def reserved(pool: WorkerPool, is_reserved: bool = True) -> None:
    dispatcher = pool.__dispatcher__()
    await until(lambda: {one.reserved for one in dispatcher.roster} == {is_reserved})


async def noted(log: str, *wanted: str) -> None:
    await until(lambda: lines(log) == [*wanted])


def let_go(log: str, *names: str) -> None:
    for name in names:
        Path(f"{log}.{name}").touch()


@pytest.fixture(scope="module")
def single() -> Iterator[Shared]:
    """One worker, which nobody kills."""
    single = Shared(spawn=1, lazy=False)
    single.open()
    yield single
    single.close()


def test_w92_while_one_runs_alone_others_wait_until_it_has_ended(
    single: Shared, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this loop, of another, and a broadcast; for longer than quorum_timeout."""

    async def main() -> None:
        monkeypatch.setattr(single.pool.__dispatcher__(), "_quorum_timeout", 0.1)
        alone = again(single.pool, lost_jobs.held, log, "alone")
        await noted(log, "alone begins")
        others = [asyncio.create_task(lost_jobs.noted(log, "other")) for _ in range(5)]
        context = contextvars.copy_context()

        async def elsewhere() -> None:
            other = asyncio.create_task(lost_jobs.noted(log, "other"))
            await reserved(single.pool)  # one that comes now is told so
            await other

        others.append(asyncio.create_task(asyncio.to_thread(context.run, asyncio.run, elsewhere())))
        others.append(asyncio.create_task(single.pool.broadcast(lost_jobs.noted, log, "other")))
        assert not (await asyncio.wait(others, timeout=0.5))[0]
        let_go(log, "alone")
        await asyncio.gather(alone, *others)
        assert lines(log) == ["alone begins", "alone ends", *["other"] * 7]
        await reserved(single.pool, False)

    single(main)


@pytest.mark.parametrize("fn", [lost_jobs.calls_others, lost_jobs.calls_others_in_a_thread], ids=["async", "thread"])
def test_w92_what_one_that_runs_alone_calls_is_admitted(single: Shared, fn: Any) -> None:
    async def main() -> None:
        assert set(await again(single.pool, fn, 5)) == set(pids(single.pool))

    single(main)


def test_w92_while_one_waits_to_be_alone_what_runs_may_call_others(single: Shared, log: str) -> None:
    async def main() -> None:
        first = asyncio.create_task(lost_jobs.held(log, "first", 4))
        await noted(log, "first begins")
        alone = [again(single.pool, lost_jobs.held, log, name) for name in ("one", "two")]
        await reserved(single.pool)
        later = asyncio.create_task(lost_jobs.noted(log, "later"))
        let_go(log, "first", "one", "two")
        await asyncio.gather(first, *alone, later)
        assert lines(log)[:2] == ["first begins", "first ends"]
        one, two = ["one begins", "one ends"], ["two begins", "two ends"]
        assert lines(log)[2:] in ([*one, *two, "later"], [*two, *one, "later"])  # each asks again after a while

    single(main)


@pytest.mark.parametrize("way", ["cancelled", "dispatch_timeout"])
def test_w92_who_waits_to_be_alone_may_give_up(single: Shared, log: str, way: str) -> None:
    async def main() -> None:
        first = asyncio.create_task(lost_jobs.held(log, "first"))
        await noted(log, "first begins")
        alone = again(single.pool, lost_jobs.held, log, "alone", limit=0.3 if way == "dispatch_timeout" else None)
        await reserved(single.pool)
        if way == "cancelled":
            alone.cancel()
        with pytest.raises((asyncio.CancelledError, headgate.DispatchTimeout)) as caught:
            await alone
        assert "room" in str(caught.value) or way == "cancelled"
        await lost_jobs.noted(log, "later")  # although the first one runs still
        let_go(log, "first")
        await first
        assert lines(log) == ["first begins", "later", "first ends"]
        await reserved(single.pool, False)

    single(main)


def test_w92_one_that_runs_alone_can_be_cancelled(single: Shared, log: str) -> None:
    async def main() -> None:
        alone = again(single.pool, lost_jobs.held, log, "alone")
        await noted(log, "alone begins")
        later = asyncio.create_task(lost_jobs.noted(log, "later"))
        alone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await alone
        await later
        await reserved(single.pool, False)

    single(main)


def test_w92_a_client_that_goes_leaves_nothing_reserved(single: Shared, log: str) -> None:
    async def main() -> None:
        first = asyncio.create_task(lost_jobs.held(log, "first"))
        await noted(log, "first begins")
        context = contextvars.copy_context()

        async def elsewhere() -> None:
            alone = again(single.pool, lost_jobs.held, log, "alone")
            await asyncio.sleep(0.1)
            assert not alone.done()

        await asyncio.to_thread(context.run, asyncio.run, elsewhere())
        await lost_jobs.noted(log, "later")
        let_go(log, "first")
        await first

    single(main)


def test_w92_a_generator_at_rest_keeps_nobody_from_being_alone(single: Shared) -> None:
    """Its consumer may wait for that very call."""

    async def main() -> None:
        async for n in lost_jobs.counts():
            assert await again(single.pool, jobs.add, n, 1) == n + 1
            if n == 3:
                break
        gc.collect()
        await until(lambda: in_flight(single.pool) == 0)

    single(main)


def test_w92_some_neighbours(single: Shared, log: str) -> None:
    async def main() -> None:
        first = asyncio.create_task(lost_jobs.held(log, "first"))
        await noted(log, "first begins")
        limited = again(single.pool, lost_jobs.held, log, "limited", max_calls=3)
        await noted(log, "first begins", "limited begins")
        second = asyncio.create_task(lost_jobs.held(log, "second"))
        await noted(log, "first begins", "limited begins", "second begins")
        await reserved(single.pool)
        third = asyncio.create_task(lost_jobs.noted(log, "third"))
        let_go(log, "first")
        await asyncio.gather(first, third)
        let_go(log, "limited", "second")
        await asyncio.gather(limited, second)

    single(main)


def test_w92_a_worker_without_calls_is_preferred(shared: Shared, log: str) -> None:
    async def main() -> None:
        await all_ready(shared.pool, 2)
        first = asyncio.create_task(lost_jobs.held(log, "first"))
        await noted(log, "first begins")
        found = {await again(shared.pool, jobs.pid) for _ in range(4)}
        let_go(log, "first")
        assert found == set(pids(shared.pool)) - set(await first)

    shared(main)


def test_w92_a_nested_call_is_run_again_away_from_its_caller(shared: Shared, log: str) -> None:
    """Its caller has lost nothing yet, and is not to be lost with it."""

    async def main() -> None:
        async with WorkerPool(spawn=3) as pool:
            await jobs.pid()
            caller, ran = await lost_jobs.calls_one_that_dies(log)
            if lines(log)[0].split()[0] != str(caller):  # else both were lost
                assert ran != caller
            await all_ready(pool, 3)

    shared(main)


def test_w92_leaving_the_pool_while_one_waits_to_be_alone(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, shutdown_timeout=5) as pool:
            first = asyncio.create_task(lost_jobs.held(log, "first"))
            await noted(log, "first begins")
            alone = again(pool, lost_jobs.held, log, "alone")
            await reserved(pool)
            let_go(log, "first", "alone")
        ended = await asyncio.gather(alone, return_exceptions=True)
        assert isinstance(ended[0], (headgate.PoolClosed, list)), ended
        assert await first

    run(main)


def test_w92_a_worker_that_stops_sends_those_who_wait_elsewhere(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, shutdown_timeout=5) as pool:
            first = asyncio.create_task(lost_jobs.held(log, "first"))
            await noted(log, "first begins")
            alone = again(pool, jobs.pid)
            await reserved(pool)
            old = pids(pool)[0]
            os.kill(old, signal.SIGTERM)  # it finishes what it has, and another comes
            await asyncio.sleep(0.05)
            let_go(log, "first")
            assert await first == [old]
            assert await alone != old

    run(main)
