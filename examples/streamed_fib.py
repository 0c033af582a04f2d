"""Fibonacci both ways: a generator that is read as a stream, and a recursion whose calls go to all workers."""

import asyncio

import headgate


@headgate.routine
async def fib(n: int):
    a, b = 0, 1
    for _ in range(n):
        yield a
        a, b = b, a + b


@headgate.routine
async def nth(n: int) -> int:
    """A routine that waits for others does not count against the worker's limit, so one worker is enough."""
    if n <= 1:
        return n
    async with asyncio.TaskGroup() as tg:
        a = tg.create_task(nth(n - 1))
        b = tg.create_task(nth(n - 2))
    return a.result() + b.result()


@headgate.routine(prefetch=4)
async def one_by_one(n: int):
    """A stream whose items are nested calls. It runs up to four of them ahead of its reader."""
    for number in range(n):
        yield await nth(number)


@headgate.routine
async def callers(depth: int) -> list[str | None]:
    """Return the caller of this call and of each call below it."""
    task = headgate.current_task()
    below = await callers(depth - 1) if depth else [task.id]
    return [task.caller, *below]


async def main():
    async with headgate.WorkerPool(spawn=2):
        print("streamed:", *[number async for number in fib(12)])
        print("nested:  ", *[number async for number in one_by_one(8)])
        print("all at once:", await asyncio.gather(*(nth(n) for n in (4, 6, 8))))
        top, *chain = await callers(3)
        print("called by", top, "and then a chain of", len(set(chain)), "tasks")
    async with headgate.WorkerPool(spawn=1):
        print("on one worker:", await nth(8))


asyncio.run(main())
