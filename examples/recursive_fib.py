"""A routine that calls itself. A nested call goes to the workers of the same pool, also to the caller's own worker."""

import asyncio
import os

import headgate


@headgate.routine
async def fib(n: int) -> int:
    if n <= 1:
        return n
    async with asyncio.TaskGroup() as tg:
        a = tg.create_task(fib(n - 1))
        b = tg.create_task(fib(n - 2))
    return a.result() + b.result()


@headgate.routine
async def who_runs(calls: int) -> set[int]:
    """Make so many nested calls and return the processes that they run in."""
    return set(await asyncio.gather(*(where() for _ in range(calls))))


@headgate.routine
async def where() -> int:
    return os.getpid()


async def main():
    async with headgate.WorkerPool(spawn=2) as pool:
        print(await fib(7))
        pids = {worker.pid for worker in pool.workers()}
        print("nested calls went to all workers:", await who_runs(10) == pids)
        with headgate.do_dispatch(False):  # in this process, nested calls too
            print("with do_dispatch(False) they stay here:", await who_runs(10) == {os.getpid()})


asyncio.run(main())
