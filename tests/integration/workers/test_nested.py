"""W08, W04, W02, W09: routines that call routines, far and wide, and how many a worker runs at a time."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import HeadgateError, RoutineTimeout, WorkerLost, WorkerPool
from tests.integration.workers import size_jobs
from tests.support.workers import jobs
from tests.support.workers.support import Shared, all_ready, in_flight, lines, pids, run, script, until

pytestmark = pytest.mark.integration

PLACES = 1000
"""How many routines a worker executes at a time."""


def opened(workers: int) -> Iterator[Shared]:
    shared = Shared(spawn=workers, lazy=False, shutdown_timeout=1)
    shared.open()

    async def warm() -> None:
        for _ in range(4 * workers):
            await jobs.leaves(workers)

    shared(warm)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def single() -> Iterator[Shared]:
    """One worker: all that a routine calls is run by the worker that it stands on."""
    yield from opened(1)


@pytest.fixture(scope="module")
def four() -> Iterator[Shared]:
    yield from opened(4)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.soak), 4])
def several(request: pytest.FixtureRequest) -> Shared:
    """One worker, and four."""
    found: Shared = request.getfixturevalue("single" if request.param == 1 else "four")
    return found


def go(path: str) -> None:
    """Let those go on that wait for it."""
    Path(f"{path}.go").touch()


# -- fib --------------------------------------------------------------------------------------------------------------


def test_w08_fib_of_twenty_finishes(several: Shared, scale: float) -> None:
    """About 22,000 calls, most of which wait for others at some time; while working fib(15), and 2,000."""

    async def main() -> None:
        assert await jobs.fib(20 if scale >= 1 else 15) == (6765 if scale >= 1 else 610)
        assert in_flight(several.pool) == 0
        assert await jobs.add(1, 2) == 3

    several(main, patience=90)


def test_w08_several_fibs_at_once(shared: Shared) -> None:
    async def main() -> None:
        assert await asyncio.gather(*(jobs.fib(n) for n in (9, 10, 11) * 3)) == [34, 55, 89] * 3
        assert in_flight(shared.pool) == 0

    shared(main, patience=60)


# As in the seed's text, with our name.
RECURSIVE = """
import asyncio
import headgate

@headgate.routine
async def fib(n: int) -> int:
    if n <= 1:
        return n
    async with asyncio.TaskGroup() as tg:
        a = tg.create_task(fib(n - 1))
        b = tg.create_task(fib(n - 2))
    return a.result() + b.result()

async def main():
    async with headgate.WorkerPool(spawn=%d):
        print([await fib(n) for n in range(9)])

asyncio.run(main())
"""


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_w02_the_recursive_fib_runs_as_written(tmp_path: Path, workers: int) -> None:
    done = script(RECURSIVE % workers, tmp_path, patience=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 1, 2, 3, 5, 8, 13, 21]\n", "")


# -- depth ------------------------------------------------------------------------------------------------------------


def test_w08_calls_two_hundred_deep(several: Shared) -> None:
    async def main() -> None:
        assert await size_jobs.deep(200) == 200
        found = await size_jobs.deep_pids(200)
        assert len(found) == 201
        assert set(found) == set(pids(several.pool)), "they went round"
        assert await asyncio.gather(*(size_jobs.deep(200) for _ in range(2))) == [200] * 2
        assert in_flight(several.pool) == 0

    several(main, patience=60)


def test_w08_routines_in_threads_call_each_other_deep(shared: Shared) -> None:
    """More than a worker has threads for."""

    async def main() -> None:
        assert await size_jobs.deep_in_threads(100) == 100

    shared(main, patience=60)


def test_w43_a_failure_comes_up_from_the_depth_as_it_is(shared: Shared) -> None:
    """And what is noted on its way up does not double at each step."""

    async def main() -> None:
        with pytest.raises(jobs.SeveralArguments) as caught:
            await size_jobs.deep_failure(16)
        assert (caught.value.reason, caught.value.detail) == ("at the bottom", {"depth": 0})
        noted = "\n".join(caught.value.__notes__)
        assert "in innermost" in noted
        assert len(noted) < 200_000

    shared(main, patience=60)


def test_w06_a_cancellation_goes_down_to_the_bottom(shared: Shared, log: str) -> None:
    async def main() -> None:
        task = asyncio.create_task(size_jobs.deep_and_endless(log, 20))
        await until(lambda: "begun" in lines(log))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert lines(log) == ["begun", *(f"ended {depth}" for depth in range(21))], "each waited for the one below"
        assert in_flight(shared.pool) == 0

    shared(main, patience=60)


def test_w08_a_timeout_ends_what_was_called_too(shared: Shared, log: str) -> None:
    async def main() -> None:
        with pytest.raises(RoutineTimeout):
            await size_jobs.has_no_time(log, 6)
        said = lines(log)
        begun = sorted(line.split()[1] for line in said if line.startswith("begun"))
        assert begun == sorted(line.split()[1] for line in said if line.startswith("ended"))

    shared(main)


# -- who called whom --------------------------------------------------------------------------------------------------


def check_chain(found: list[dict[str, Any]]) -> None:
    """From the outermost to the innermost."""
    assert found[0]["caller"] is None
    for outer, inner in itertools.pairwise(found):
        assert inner["caller"] == outer["id"]
    assert len({str(fields["id"]) for fields in found}) == len(found)


def check_tree(node: dict[str, Any], ids: list[str]) -> None:
    ids.append(str(node["id"]))
    for child in node["children"]:
        assert child["caller"] == node["id"]
        check_tree(child, ids)


def test_w08_callers_form_a_chain_up_to_none(shared: Shared) -> None:
    async def main() -> None:
        for chain in await asyncio.gather(*(size_jobs.ancestry(20) for _ in range(5))):
            assert len(chain) == 21
            check_chain(chain)

    shared(main)


def test_w08_callers_form_a_tree(shared: Shared) -> None:
    async def main() -> None:
        trees = await asyncio.gather(*(size_jobs.family_tree(3, 3) for _ in range(2)))
        ids: list[str] = []
        for tree in trees:
            assert tree["caller"] is None
            check_tree(tree, ids)
        assert len(set(ids)) == len(ids) == 2 * (1 + 3 + 9 + 27)

    shared(main)


def test_w08_threads_are_callers_too(shared: Shared) -> None:
    async def main() -> None:
        parent, children = await size_jobs.threaded_parent()
        assert parent["caller"] is None
        assert [child["caller"] for child in children] == [parent["id"]] * 2

    shared(main)


# -- how many at a time -----------------------------------------------------------------------------------------------


def test_w08_a_worker_executes_a_thousand_at_a_time(single: Shared, log: str) -> None:
    """What is above has to wait, and is forgotten by nobody."""

    async def main() -> None:
        calls = [asyncio.create_task(size_jobs.holds(log, number)) for number in range(PLACES + 300)]
        await until(lambda: len(lines(log)) >= PLACES, 20)
        await asyncio.sleep(0.2)  # time enough for one too many
        assert len(lines(log)) == PLACES
        go(log)
        assert max(await asyncio.gather(*calls)) == PLACES
        assert len(set(lines(log))) == PLACES + 300

    single(main, patience=60)


def test_w08_who_waits_for_a_place_can_be_cancelled(single: Shared, log: str) -> None:
    async def main() -> None:
        calls = [asyncio.create_task(size_jobs.holds(log, number)) for number in range(PLACES)]
        await until(lambda: len(lines(log)) == PLACES, 20)
        more = [asyncio.create_task(size_jobs.holds(log, PLACES + number)) for number in range(20)]
        await asyncio.sleep(0.1)
        for call in more[:10]:
            call.cancel()
        await asyncio.wait(more[:10])
        assert all(call.cancelled() for call in more[:10])
        go(log)
        assert len(await asyncio.gather(*calls, *more[10:])) == PLACES + 10
        assert len(set(lines(log))) == PLACES + 10, "the cancelled ones did not begin"
        assert in_flight(single.pool) == 0

    single(main, patience=60)


def test_w08_who_waits_for_others_is_not_counted(single: Shared) -> None:
    """1,300 calls stand on one worker, all but thirteen of which wait for the next; these end when all are there."""

    async def main() -> None:
        chains = [size_jobs.stands(99, 1300) for _ in range(13)]
        assert await asyncio.gather(*chains) == [100] * 13
        assert in_flight(single.pool) == 0

    single(main, patience=60)


def test_w08_a_full_worker_whose_routines_all_begin_to_call_goes_on(single: Shared, log: str) -> None:
    """Every place is taken by one that then needs another call on the same worker."""

    async def main() -> None:
        calls = [asyncio.create_task(size_jobs.holds_and_calls(log, number)) for number in range(PLACES + 200)]
        await until(lambda: len(lines(log)) >= PLACES, 20)
        go(log)
        found = await asyncio.gather(*calls)
        assert [total for _, total in found] == list(range(1, PLACES + 201))
        assert in_flight(single.pool) == 0

    single(main, patience=60)


def test_w08_one_routine_may_call_more_than_there_are_places(single: Shared) -> None:
    async def main() -> None:
        me, leaves = await jobs.leaves(2 * PLACES + 1)
        assert leaves == [me] * (2 * PLACES + 1)
        assert pids(single.pool) == [me]

    single(main, patience=60)


# -- peers ------------------------------------------------------------------------------------------------------------


def test_w04_the_peers_are_all_workers_and_oneself(four: Shared) -> None:
    async def main() -> None:
        for _ in range(4):
            _, leaves = await jobs.leaves(12)
            assert set(leaves) == set(pids(four.pool))

    four(main)


async def spread(pool: WorkerPool) -> None:
    """Wait till nested calls go to all workers there are, and to no other."""
    async with asyncio.timeout(20):
        while True:
            try:
                found = await asyncio.gather(*(jobs.leaves(12) for _ in range(4)))
            except HeadgateError:
                continue  # some worker still asked one that has gone
            if {pid for me, leaves in found for pid in (me, *leaves)} == set(pids(pool)):
                return
            await asyncio.sleep(0.02)


def test_w04_the_peers_are_those_of_now() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            await spread(pool)
            await pool.resize(3)
            await spread(pool)
            killed = pids(pool)[0]
            os.kill(killed, signal.SIGKILL)
            await until(lambda: killed not in pids(pool))  # another may be there at once
            await all_ready(pool, 3)
            await spread(pool)
            await pool.resize(2)
            await spread(pool)

    run(main, patience=60)


def test_w04_a_routine_sees_the_loss_of_a_peer() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            before = set(pids(pool))
            said = await size_jobs.survives_a_peer()
            assert "dies_unless" in said
            await until(lambda: len(before & set(pids(pool))) == 1)
            await all_ready(pool, 2)
            assert await jobs.fib(5) == 5

    run(main)


def test_w04_what_a_lost_worker_had_called_is_cancelled(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2, shutdown_timeout=1) as pool:
            call = asyncio.create_task(size_jobs.calls_endless_ones(log, 6))
            await until(lambda: len(lines(log)) == 6)
            [victim] = map(int, lines(f"{log}.outer"))
            [other] = {*pids(pool)} - {victim}
            assert lines(log).count(f"begun {other}") == 3
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(WorkerLost):
                await call
            await until(lambda: lines(log).count(f"ended {other}") == 3)
            await all_ready(pool, 2)
            assert await jobs.fib(5) == 5

    run(main)


def test_w04_nested_calls_stay_in_the_pool_of_their_call() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as outer:
            for_later = jobs.leaves(8)  # dispatched where it is awaited
            async with WorkerPool(spawn=2) as inner:
                me, leaves = await for_later
                assert {me, *leaves} == set(pids(inner))
            me, leaves = await jobs.leaves(8)
            assert {me, *leaves} == set(pids(outer))

    run(main)
