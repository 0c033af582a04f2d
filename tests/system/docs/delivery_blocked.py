"""Experiments for the table that tells lost workers from blocked ones in docs/delivery.md."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import headgate
from headgate import RoundRobinLoadBalancer, WorkerPool, routine
from tests.support.workers.support import alive, all_ready, states, until
from tests.system.docs import delivery_jobs as jobs
from tests.system.docs.delivery_lab import BLOCKED, Lab, begun, kill, shows, tell, until_begun

blocked = partial(shows, BLOCKED)


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the logger of workers says meanwhile, of these and of others."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Handler()
    logging.getLogger("headgate.workers").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("headgate.workers").removeHandler(handler)


@blocked(
    "what it is",
    "how it is known",
    "calls it has begun",
    "calls it has not begun",
    "new calls",
    "the worker",
    "in the log",
    apart=True,
    soak=True,
)
async def lost_by_silence(lab: Lab) -> None:
    """A worker is stopped: it looks blocked, and is lost within 10 s."""
    async with WorkerPool(spawn=2, loadbalancer=RoundRobinLoadBalancer()) as pool:
        workers = await all_ready(pool, 2)
        once_path, again_path = lab.file(), lab.file()
        for _ in range(4):
            await routine(jobs.returns)(lab.file())
        call = asyncio.create_task(routine(jobs.waits)(once_path))
        [victim] = await until_begun(once_path)
        [other] = set(workers) - {victim}
        beside = lab.file()
        await routine(jobs.returns)(beside)  # so that the next one goes to the victim
        retried = asyncio.create_task(routine(retries=1)(jobs.waits_for_a_file)(again_path))
        assert await until_begun(again_path) == [victim]
        with logged() as said:
            kill(victim, signal.SIGSTOP)
            await until(lambda: states(pool).get(victim) == "blocked")
            path = lab.file()
            assert await asyncio.gather(*(routine(jobs.returns)(path) for _ in range(4))) == ["result"] * 4
            assert set(begun(path)) == {other}, "new calls go to others"
            assert type(await lab.outcome(call)) is headgate.WorkerLost
            assert len(await until_begun(again_path, 2)) == 2
            tell(again_path)
            assert await retried == "result"
            await until(lambda: not alive(victim))
            await all_ready(pool, 2)
            assert any(f"(pid {victim}) is lost: " in line for line in said)
        assert len(begun(once_path)) == 1


@blocked("how it is known", "calls it has begun", "the worker", "in the log")
async def lost_by_its_end(lab: Lab) -> None:
    pool = await lab.rested()
    with logged() as said:
        call = asyncio.create_task(routine(jobs.waits)(lab.path))
        [victim] = await until_begun(lab.path)
        kill(victim)
        async with asyncio.timeout(5):  # not the 10 s of silence
            assert type(await lab.outcome(call)) is headgate.WorkerLost
        await until(lambda: victim not in states(pool))
        await lab.rested()
        assert any(f"(pid {victim}) is lost: " in line for line in said)


@blocked(
    "what it is",
    "how it is known",
    "calls it has begun",
    "calls it has not begun",
    "new calls",
    "the worker",
    "in the log",
    apart=True,
)
async def only_blocked(lab: Lab) -> None:
    """A routine holds the loop of its worker for three seconds."""
    async with WorkerPool(spawn=2) as pool:
        workers = await all_ready(pool, 2)
        for _ in range(4):
            await routine(jobs.returns)(lab.file())
        with logged() as said:
            holder = asyncio.create_task(routine(jobs.holds_the_loop)(lab.path, 3))
            [held] = await until_begun(lab.path)
            [other] = set(workers) - {held}
            path = lab.file()
            received = [asyncio.create_task(routine(jobs.returns)(path)) for _ in range(4)]
            assert await asyncio.gather(*received) == ["result"] * 4
            assert begun(path) == [other] * 4, "those it had received and not begun too"
            await until(lambda: states(pool)[held] == "blocked")
            path = lab.file()
            for _ in range(4):
                await routine(jobs.returns)(path)
            assert begun(path) == [other] * 4, "new calls go to others"
            assert await holder == "result", "what it has begun goes on"
            await until(lambda: states(pool)[held] == "ready")
            path = lab.file()
            for _ in range(4):
                await routine(jobs.returns)(path)
            assert set(begun(path)) == set(workers), "and to it again"
            assert any(f"(pid {held}) is blocked: " in line for line in said)
            assert not any(f"(pid {held}) is lost: " in line for line in said)
