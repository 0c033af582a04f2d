"""One tenant submits too much, two others submit three tasks each: first in first out, and in turn."""

import asyncio

from headgate import TaskPool, fair_round_robin, fifo


async def serve(queue):
    served = []

    async def work(name):
        served.append(name)

    async with TaskPool(max_concurrent=1, queue=queue) as pool:
        gate = asyncio.Event()
        await pool.submit(gate.wait)  # holds the only slot while the others queue
        for number in range(1, 13):
            await pool.submit(work, f"F{number}", key="flood")
        for tenant in ("ann", "bob"):
            for number in range(1, 4):
                await pool.submit(work, f"{tenant}{number}", key=tenant)
        gate.set()
    return served, pool.stats().jain


async def main():
    for queue in (fifo(), fair_round_robin()):
        served, jain = await serve(queue)
        done = 1 + max(served.index("ann3"), served.index("bob3"))
        print(f"{queue.kind}: {' '.join(served)}")
        print(f"  ann and bob are done after {done} of {len(served)} tasks; Jain's index {jain:.2f}")


asyncio.run(main())
