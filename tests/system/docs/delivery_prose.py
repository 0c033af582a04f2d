"""Experiments for what docs/delivery.md says outside of its tables."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from typing import Any

import headgate
from headgate import WorkerPool, routine
from tests.support.workers.support import all_ready, lines, pids, until
from tests.system.docs import delivery_jobs as jobs
from tests.system.docs.delivery_lab import PROSE, Lab, begun, ended, kill, shows, tell, until_begun
from tests.system.docs.delivery_tasks import combined_pool, keys, with_an_older

prose = partial(shows, PROSE)


@prose("Workers that go with notice", apart=True, soak=True)
async def workers_go_with_notice(lab: Lab) -> None:
    """No call is lost by a worker that is told to stop."""
    async with WorkerPool(spawn=2) as pool:
        for how in ("resize", signal.SIGTERM, signal.SIGINT):
            await pool.resize(2)
            await all_ready(pool, 2)
            path, beside = lab.file(), lab.file()
            running = [asyncio.create_task(routine(jobs.waits_for_a_file)(path)) for _ in range(4)]
            await until_begun(path, 4)
            leaving = pool.workers()[-1].pid
            if how == "resize":
                resizing = asyncio.create_task(pool.resize(1))
            else:
                kill(leaving, int(how))
            await until(lambda leaving=leaving: leaving not in pids(pool))
            assert await asyncio.gather(*(routine(jobs.returns)(beside) for _ in range(10))) == ["result"] * 10
            assert leaving not in begun(beside)
            tell(path)
            assert await asyncio.gather(*running) == ["result"] * 4
            assert len(begun(path)) == 4
            if how == "resize":
                await resizing


@prose("Order", apart=True, soak=True)
async def order(lab: Lab) -> None:
    """Of one event loop and one worker: as a rule the order of the calls; a large argument is overtaken."""
    async with WorkerPool(spawn=1):
        await routine(jobs.returns)(lab.file())
        path = lab.file()
        await asyncio.gather(*(routine(jobs.numbered)(path, number) for number in range(200)))
        assert lines(path) == [str(number) for number in range(200)]
        path = lab.file()
        large = asyncio.create_task(routine(jobs.numbered)(path, -1, bytes(64 * 2**20)))
        await asyncio.sleep(0)
        await asyncio.gather(*(routine(jobs.numbered)(path, number) for number in range(5)), large)
        assert sorted(lines(path), key=int) == ["-1", *map(str, range(5))]
        assert lines(path)[0] != "-1"


@prose("Nested calls of a lost call")
async def nested_calls(lab: Lab) -> None:
    for retries in (0, 1):
        outer, path, victim = await _on_another_worker(lab, retries)
        nested = f"{path}.nested"
        kill(victim)
        await until(lambda nested=nested: ended(nested)[:1] == ["finally"])  # it saw a CancelledError
        if retries:
            await asyncio.gather(until_begun(path, 2), until_begun(nested, 2))
            outer.cancel()
            await outer
        else:
            assert type(await outer) is headgate.WorkerLost
        assert len(begun(path)) == len(begun(nested)) == retries + 1


async def _on_another_worker(lab: Lab, retries: int) -> tuple[asyncio.Task[Any], str, int]:
    """A call whose nested call runs on the other worker: the task, its file, and the pid of the outer worker."""
    await lab.rested()
    while True:
        path = lab.file()
        called = routine(retries=retries)(jobs.calls_another)(path)
        outer = asyncio.create_task(lab.outcome(called))
        [one], [other] = await until_begun(path), await until_begun(f"{path}.nested")
        if one != other:
            return outer, path, one
        outer.cancel()
        await outer


@prose("what must not be interrupted, or repeated")
async def not_interrupted_not_repeated(lab: Lab) -> None:
    handle, path = await with_an_older(lab, jobs.waits_for_a_file, cancel_siblings=False)
    assert (await handle, len(begun(path))) == ("a", 1)
    path = lab.file()
    async with combined_pool(lab, keys()) as pool:
        handle = await pool.submit(jobs.fails_once, path)
        assert type(await lab.outcome(handle)) is LookupError
    assert len(begun(path)) == 1
