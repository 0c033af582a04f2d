"""A routine that calls itself. Inside a worker a nested call goes to the workers of the same pool, itself included."""

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
    """The processes that so many nested calls run in."""
    return set(await asyncio.gather(*(where() for _ in range(calls))))


@headgate.routine
async def where() -> int:
    return os.getpid()


async def main():
    async with headgate.WorkerPool(spawn=2) as pool:
        print(await fib(7))
        pids = {worker.pid for worker in pool.workers()}
        print("nested calls went to all workers:", await who_runs(10) == pids)
        with headgate.do_dispatch(False):  # here, nested calls too
            print("and not, if they are not to:", await who_runs(10) == {os.getpid()})


asyncio.run(main())
