"""W40, W40c, W41, W32: which worker gets a call, and what happens when one does not want it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import (
    HeadgateError,
    LeastLoadedLoadBalancer,
    LocalWorker,
    NoWorkersAvailable,
    RoundRobinLoadBalancer,
    WorkerLost,
    WorkerPool,
)
from headgate.testing import capture_events
from tests.integration.context.wiretap import Tap
from tests.integration.workers import attack_jobs, stream_jobs
from tests.support.workers import jobs
from tests.support.workers.support import Shared, all_ready, in_flight, lines, pids, run, states, times, until

pytestmark = pytest.mark.integration


@asynccontextmanager
async def pool_left(pool: WorkerPool) -> AsyncIterator[None]:
    """Leave a pool that was entered by hand."""
    try:
        yield
    finally:
        await pool.__aexit__(None, None, None)


# -- round robin ------------------------------------------------------------------------------------------------------


def test_w40_calls_go_round_in_the_order_of_admission() -> None:
    async def main() -> None:
        with capture_events("workers") as events:
            pool = WorkerPool(spawn=3)
            await pool.__aenter__()
        async with pool_left(pool):
            told = [str(event.to_dict()) for event in events if event.name == "worker_ready"]
            by_uid = {view.uid: view.pid for view in pool.workers()}
            admitted = [pid for words in told for uid, pid in by_uid.items() if str(uid) in words]
            assert len(admitted) == 3
            found = [await jobs.pid() for _ in range(9)]
            assert found[:3] == found[3:6] == found[6:]
            first = admitted.index(found[0])
            assert found[:3] == admitted[first:] + admitted[:first]
            together = await asyncio.gather(*(jobs.pid() for _ in range(30)))
            assert set(Counter(together).values()) == {10}

    run(main)


def test_w40c_round_robin_does_not_look_at_the_load(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2, loadbalancer=RoundRobinLoadBalancer()):
            busy = asyncio.create_task(jobs.until_told(log, 1))
            await until(lambda: lines(log))
            found = Counter([await jobs.pid() for _ in range(10)])
            assert set(found.values()) == {5}
            jobs.note(f"{log}.go", "go")
            await busy

    run(main)


def test_w40c_one_balancer_may_serve_several_pools() -> None:
    async def use(pool_: WorkerPool, barrier: asyncio.Barrier) -> None:
        async with pool_ as pool:
            await barrier.wait()
            found = [await jobs.pid() for _ in range(8)]
            assert set(found) == set(pids(pool))
            assert found[::2] == found[:1] * 4, "another pool's calls do not disturb the order"
            await barrier.wait()

    async def main() -> None:
        balancer = RoundRobinLoadBalancer()
        barrier = asyncio.Barrier(2)
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(use(WorkerPool(spawn=2, loadbalancer=balancer), barrier))

    run(main)


# -- the fewest calls in flight ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("balancer", [None, LeastLoadedLoadBalancer()], ids=["default", "given"])
def test_w40_the_worker_with_the_fewest_calls_is_next(log: str, balancer: LeastLoadedLoadBalancer | None) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2, loadbalancer=balancer) as pool:
            calls = [asyncio.create_task(jobs.until_told(log, 0))]
            await until(lambda: lines(log))
            busy = int(lines(log)[0].split()[1])
            assert {await jobs.pid() for _ in range(6)} == set(pids(pool)) - {busy}
            calls += [asyncio.create_task(jobs.until_told(log, n)) for n in range(1, 10)]
            await until(lambda: len(lines(log)) == 10)
            assert sorted(view.in_flight for view in pool.workers()) == [5, 5]
            jobs.note(f"{log}.go", "go")
            await asyncio.gather(*calls)
            assert in_flight(pool) == 0

    run(main)


def test_w40_nested_calls_go_round_although_their_caller_is_in_flight() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2):
            for _ in range(4):  # in some of them the middle call is on the worker that makes it
                assert set(Counter(await jobs.branch(4)).values()) == {2}

    run(main)


def test_w40_a_generator_counts_from_its_first_step_to_its_end(shared: Shared) -> None:
    async def main() -> None:
        stream = stream_jobs.walks(1)
        assert await anext(stream) == 1
        found = {await jobs.pid() for _ in range(6)}
        assert len(found) == 1, "one of two has the generator, which waits for its next step"
        await stream.aclose()
        assert {await jobs.pid() for _ in range(2)} == set(pids(shared.pool))

    shared(main)


def test_w40_calls_of_many_event_loops_are_spread() -> None:
    """Each loop counts its own calls; which worker was picked longest ago, all of them know."""

    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            first = await jobs.pid()
            [other] = set(pids(pool)) - {first}
            found = [await asyncio.to_thread(lambda: asyncio.run(_pid())) for _ in range(6)]
            assert found == [other, first] * 3

    run(main)


async def _pid() -> int:
    return await jobs.pid()


def test_w40_messages_stay_whole_on_many_workers(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Eight workers with ten callers each: calls in turns would travel one or two at a time."""
    left = max(4_000, int(20_000 * scale))

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await jobs.add(1, 2)

    async def main() -> None:
        tap = Tap()
        async with WorkerPool(spawn=8):
            tap.lay(monkeypatch)
            await asyncio.gather(*(caller() for _ in range(80)))
            tap.close()
        messages = [len(message.calls) for message in tap.sent if message.calls]
        assert sum(messages) / len(messages) > 4

    run(main)


def test_w40_nothing_is_counted_any_more_after_calls_that_ended_in_every_way(log: str, scale: float) -> None:
    chance = random.Random(40)

    async def one(number: int) -> None:
        kind = chance.choice(["returns", "raises", "is cancelled", "stream", "broken stream"])
        try:
            if kind == "returns":
                await jobs.add(1, 2)
            elif kind == "raises":
                await jobs.fails(ValueError, number)
            elif kind == "is cancelled":
                async with asyncio.timeout(chance.random() * 0.02):
                    await jobs.slow(5)
            elif kind == "stream":
                assert len([value async for value in stream_jobs.walks(1)]) == 3
            else:
                stream = stream_jobs.walks(1)
                await anext(stream)
                await stream.aclose()
        except (ValueError, TimeoutError, WorkerLost):
            pass

    async def main() -> None:
        async with WorkerPool(spawn=3) as pool:
            for _ in range(3):
                calls = [asyncio.create_task(one(n)) for n in range(max(40, int(200 * scale)))]
                await asyncio.sleep(0.01)
                os.kill(chance.choice(pids(pool)), signal.SIGKILL)
                await asyncio.gather(*calls)
                await all_ready(pool, 3)
            await until(lambda: in_flight(pool) == 0)
            held = [asyncio.create_task(jobs.until_told(log, n)) for n in range(12)]
            await until(lambda: len(lines(log)) == 12)
            assert Counter(int(line.split()[1]) for line in lines(log)) == dict.fromkeys(pids(pool), 4)
            jobs.note(f"{log}.go", "go")
            await asyncio.gather(*held)

    run(main)


# -- a balancer of one's own ------------------------------------------------------------------------------------------


class Own:
    """Puts the workers in an order that a test can choose."""

    def __init__(self, order: Callable[[list[Any]], Any]) -> None:
        self.choose = order
        self.tasks: list[Any] = []
        self.reports: list[tuple[Any, str]] = []

    def order(self, task: Any, workers: Any) -> Any:
        self.tasks.append(task)
        return self.choose(list(workers))

    def report(self, worker: Any, outcome: str) -> None:
        self.reports.append((worker.pid, outcome))


def test_w23_a_balancer_sees_task_and_workers_and_chooses() -> None:
    balancer = Own(lambda workers: iter(sorted(workers, key=lambda view: -view.pid)))

    async def main() -> None:
        async with WorkerPool(spawn=2, loadbalancer=balancer) as pool:
            assert {await jobs.pid() for _ in range(4)} == {max(pids(pool))}
            assert balancer.reports == [(max(pids(pool)), "accepted")] * 4
            assert all("pid" in task.tag for task in balancer.tasks)
            assert len({str(task.id) for task in balancer.tasks}) == 4

    run(main)


def none(workers: list[Any]) -> list[Any]:
    return []


def strangers(workers: list[Any]) -> list[Any]:
    return [object()]


def nothing(workers: list[Any]) -> None:
    return None


def broken(workers: list[Any]) -> Iterator[Any]:
    raise LookupError("planted in the balancer")
    yield


@pytest.fixture(scope="module")
def steered() -> Iterator[tuple[Shared, Own]]:
    """One worker, and a balancer that each test may replace."""
    balancer = Own(list)
    shared = Shared(spawn=1, lazy=False, loadbalancer=balancer)
    shared.open()
    shared(jobs.pid)
    yield shared, balancer
    shared.close()


@pytest.mark.parametrize("order", [none, strangers, nothing, broken])
def test_w23_a_balancer_that_misbehaves_fails_the_call_and_nothing_else(
    steered: tuple[Shared, Own], log: str, order: Any
) -> None:
    shared, balancer = steered

    async def main() -> None:
        balancer.choose = order
        try:
            with headgate.RuntimeContext(dispatch_timeout=0.3), pytest.raises((HeadgateError, LookupError)) as caught:
                await jobs.noted_pid(log, 1)
        finally:
            balancer.choose = list
        if order is none:
            assert isinstance(caught.value, NoWorkersAvailable)
        if order is broken:
            assert "planted in the balancer" in str(caught.value)
        assert lines(log) == []
        assert in_flight(shared.pool) == 0
        assert await jobs.pid() == pids(shared.pool)[0]

    shared(main)


# -- refusing ---------------------------------------------------------------------------------------------------------


def pool_with(hook: Any, **options: Any) -> WorkerPool:
    def worker(*tags: str, credentials: Any = None) -> LocalWorker:
        return LocalWorker(*tags, credentials=credentials, backpressure=hook)

    return WorkerPool(worker=worker, **options)


@pytest.mark.parametrize(
    "hook", [attack_jobs.refuses_when_busy, attack_jobs.refuses_when_busy_async], ids=["sync", "async"]
)
def test_w32_a_refusal_goes_to_the_next_and_cools_nobody(log: str, hook: Any) -> None:
    async def main() -> None:
        async with pool_with(hook, spawn=2) as pool:
            with capture_events("workers") as events:
                first = asyncio.create_task(jobs.until_told(log, 1))
                await until(lambda: len(lines(log)) == 1)
                busy = int(lines(log)[0].split()[1])
                # One of two is the busy one's turn, and goes on to the other.
                assert {await jobs.pid() for _ in range(6)} == set(pids(pool)) - {busy}
                second = asyncio.create_task(jobs.until_told(log, 2))
                await until(lambda: len(lines(log)) == 2)
                with pytest.raises(NoWorkersAvailable) as caught:
                    await jobs.begun_at(log, 3, 0)
                said = str(caught.value)
                for view in pool.workers():
                    assert str(view.uid) in said or str(view.pid) in said or view.address in said
                assert "RESOURCE_EXHAUSTED" in said or "backpressure" in said
                assert set(states(pool).values()) == {"ready"}, "nobody is cooled"
                jobs.note(f"{log}.go", "go")
                assert await asyncio.gather(first, second) == [1, 2]
            assert len(lines(log)) == 2
            assert "worker_lost" not in events.names
            assert await jobs.pid() in pids(pool)

    run(main)


def test_w32_a_worker_that_refuses_all_is_passed_over_and_comes_back(log: str, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    balancer = Own(list)

    async def main() -> None:
        async with pool_with(partial(attack_jobs.refuses_while, str(flag)), spawn=2, loadbalancer=balancer) as pool:
            [first, second] = [await jobs.pid(), *(set(pids(pool)) - {await jobs.pid()})]
            flag.write_text(str(first))
            assert [await jobs.noted_pid(log, n) for n in range(5)] == [second] * 5
            assert times(log) == {str(n): 1 for n in range(5)}
            assert (first, "transient") in balancer.reports
            assert (first, "evicted") not in balancer.reports
            assert balancer.reports[-1] == (second, "accepted")
            flag.unlink()
            assert await jobs.pid() == first

    run(main)


def test_w32_a_hook_sees_the_task_and_one_that_raises_refuses_that_task_only() -> None:
    async def main() -> None:
        async with pool_with(attack_jobs.Oddly(), spawn=2) as pool:
            before = states(pool)
            with pytest.raises(NoWorkersAvailable):
                await jobs.echo(1)
            for _ in range(3):
                with pytest.raises(HeadgateError) as caught:
                    await jobs.raises_generator_exit()
                assert "planted in the hook" in str(caught.value) or "hook" in str(caught.value)
            assert {await jobs.pid() for _ in range(4)} == set(before)
            assert states(pool) == before

    run(main)


def test_w40a_a_refused_call_runs_once_or_not_at_all(log: str, scale: float) -> None:
    count = max(200, int(2000 * scale))

    async def main() -> None:
        async with pool_with(attack_jobs.refuses_by_chance, spawn=2) as pool:
            calls = [jobs.once(log, n, 0) for n in range(count)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            ran = times(log)
            for n, outcome in enumerate(outcomes):
                if isinstance(outcome, NoWorkersAvailable):
                    assert ran[str(n)] == 0
                else:
                    assert (outcome, ran[str(n)]) == (n, 1)
            refused = sum(isinstance(outcome, NoWorkersAvailable) for outcome in outcomes)
            assert 0 < refused < count / 2
            assert set(states(pool).values()) == {"ready"}
            assert in_flight(pool) == 0

    run(main)
