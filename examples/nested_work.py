"""Recursion through a pool of two slots. A task that waits for another lends its slot, so there is no deadlock.

A task that is stopped takes its subtasks with it.
"""

import asyncio

from headgate import TaskPool, WaitCycle, pool_get, pool_wait

active = []


async def fib(n):
    pool = pool_get("numbers")
    active.append(pool.snapshot(tasks=0).active)
    if n < 2:
        return n
    left = await pool.submit(fib, n - 1)
    right = await pool.submit(fib, n - 2)
    return await left + await right


async def ask_the_other(handles, other):
    await asyncio.sleep(0)
    try:
        return f"told: {await handles[other]}"
    except WaitCycle as error:
        return error.message


async def left_after_a_moment(pool):
    await asyncio.sleep(0.05)
    return pool.size()


async def main():
    async with TaskPool("numbers", max_concurrent=2) as pool:
        handle = await pool.submit(fib, 10)
        print(await handle, "after", len(active), "tasks, at most", max(active), "active at a time")

        # What a task submits ends with it, and so does what that has submitted.
        handle = await pool.submit(fib, 30, timeout=0.05)
        print((await pool_wait(handle)).status, "at its timeout;", await left_after_a_moment(pool), "subtasks left")

        # Waits that could never end are refused when they begin.
        handles = []
        handles.append(await pool.submit(ask_the_other, handles, 1))
        handles.append(await pool.submit(ask_the_other, handles, 0))
        print(await handles[0])
        print(await handles[1])


asyncio.run(main())
