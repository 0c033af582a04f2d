"""A worker is killed during calls. Without `retries` each call raises WorkerLost; with `retries` it runs again."""

import asyncio
import os
import signal

import headgate


async def square(number):
    await asyncio.sleep(0.3)
    return number * number


once = headgate.routine(square)
again = headgate.routine(retries=2)(square)  # for work that may run twice


async def twenty_calls(routine, pool):
    """Make twenty calls, and kill the worker that has half of them while they run."""
    calls = [asyncio.create_task(routine(number)) for number in range(20)]
    await asyncio.sleep(0.1)
    victim = pool.workers()[0]
    os.kill(victim.pid, signal.SIGKILL)
    return victim, await asyncio.gather(*calls, return_exceptions=True)


async def main():
    async with headgate.WorkerPool(spawn=2) as pool:
        await asyncio.gather(*(once(number) for number in range(2)))  # so that both workers are connected
        victim, results = await twenty_calls(once, pool)
        lost = [result for result in results if isinstance(result, headgate.WorkerLost)]
        print(f"without retries: {len(results) - len(lost)} results, {len(lost)} lost")
        print("each names its worker:", {error.worker for error in lost} == {victim.uid})

        await pool.resize(2)  # returns when the pool has two workers again
        _, results = await twenty_calls(again, pool)
        print(f"with retries: {len(results)} results, all right: {results == [n * n for n in range(20)]}")


asyncio.run(main())
