"""Set the tenant of a request once, and read it wherever the request goes: on workers, in nested calls, in streams."""

import asyncio
import os

import headgate

tenant = headgate.ContextVar("tenant", default="unknown")
spent = headgate.ContextVar("spent", default=0)
workers = headgate.ContextVar("workers", default=frozenset())


@headgate.routine
async def look_up(word):
    """Read the tenant without a parameter for it. What this function sets is also set for its caller."""
    spent.set(spent.get() + len(word))
    workers.set(workers.get() | {os.getpid()})
    return f"{word} of {tenant.get()}"


@headgate.routine
async def handle(*words):
    """Runs on one worker; its nested calls run on both."""
    return [await look_up(word) for word in words]


@headgate.routine
async def pages(count):
    for page in range(1, count + 1):
        spent.set(spent.get() + 1)
        yield f"page {page} of {tenant.get()}"


async def request(name, *words):
    """Runs as a separate task, so its values are separate too."""
    tenant.set(name)
    return await handle(*words), spent.get(), len(workers.get() - {os.getpid()})


async def main():
    async with headgate.WorkerPool(spawn=2):
        print(await look_up("door"))
        async with asyncio.TaskGroup() as group:
            acme = group.create_task(request("acme", "key", "lock"))
            bolt = group.create_task(request("bolt", "nut", "screw"))
        for found, cost, many in (acme.result(), bolt.result()):
            print(f"{', '.join(found)}: spent {cost} on {many} workers")
        print("spent here:", spent.get())

        token = tenant.set("acme")
        async for page in pages(3):
            print(page, "- spent so far:", spent.get())
            if spent.get() == 6:
                tenant.set("bolt")  # the generator sees it from its next step on
        tenant.reset(token)
        print(await look_up("door"))


asyncio.run(main())
