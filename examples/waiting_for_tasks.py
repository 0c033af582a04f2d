"""Wait for one task or for many, and learn how each of them ended. From Harn's pool library, in Python."""

import asyncio

from headgate import TaskCancelled, TaskPool, pool_wait, wait_agent


async def work_a():
    return "a"


async def work_b():
    raise ValueError("no b today")


async def work_c():
    await asyncio.sleep(3600)


async def main():
    async with TaskPool("work", max_concurrent=3) as pool:
        handles = [await pool.submit(work_a), await pool.submit(work_b), await pool.submit(work_c)]
        handles[2].cancel()

        outcomes = await pool_wait(handles)  # or: wait_agent(handles)
        for outcome in outcomes:
            print(outcome.status, outcome.result, repr(outcome.error))
        assert await wait_agent(handles) == outcomes  # the tasks have ended, so this returns the same at once

        # Awaiting a handle gives the result, or raises.
        print(await handles[0])
        try:
            await handles[1]
        except ValueError as error:
            print("its own exception:", error)
        try:
            await handles[2]
        except TaskCancelled as error:
            print(type(error).__name__, error.code)


asyncio.run(main())
