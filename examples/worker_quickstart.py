"""A function that runs on a worker process when it is awaited. From wool's quick start; only the name is different."""

import asyncio

import headgate


@headgate.routine
async def add(x: int, y: int) -> int:
    return x + y


async def main():
    async with headgate.WorkerPool(spawn=4):
        result = await add(1, 2)
        print(result)  # 3


asyncio.run(main())
