"""Which task is next? The same six tasks under each strategy. `QueueStrategy` is from Harn's pool library."""

import asyncio

from headgate import QueueStrategy, pool_create

queue = QueueStrategy()

TASKS = [
    ("a1", "acme", 0),
    ("a2", "acme", 0),
    ("a3", "acme", 9),
    ("b1", "bolt", 0),
    ("b2", "bolt", 5),
    ("c1", "core", 0),
]


async def order_of(strategy):
    ran = []

    async def work(name):
        ran.append(name)

    async with pool_create(name="tenant-work", max_concurrent=1, queue=strategy) as pool:
        gate = asyncio.Event()
        await pool.submit(gate.wait)  # holds the only slot while the others queue
        for name, tenant, priority in TASKS:
            await pool.submit(work, name, priority=priority, labels={"tenant_id": tenant})
        gate.set()
    return " ".join(ran)


async def main():
    print("fifo:            ", await order_of(queue.fifo()))
    print("lifo:            ", await order_of(queue.lifo()))
    print("priority:        ", await order_of(queue.priority()))
    print("fair_round_robin:", await order_of(queue.fair_round_robin("tenant_id")))
    print("by name:         ", await order_of("fifo"))


asyncio.run(main())
