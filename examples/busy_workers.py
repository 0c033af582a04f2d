"""A worker can refuse calls. Its hook refuses a call while the worker is busy, and the call goes to the next worker."""

import asyncio
import os
from collections import Counter

from headgate import LocalWorker, NoWorkersAvailable, WorkerPool, routine


def at_most_two(context):
    """Return True to refuse the call. `context.task` has the id and the tag of the call."""
    return context.active_task_count >= 2


def careful(*tags, credentials=None):
    return LocalWorker(*tags, credentials=credentials, backpressure=at_most_two)


@routine
async def render(page):
    await asyncio.sleep(0.6)
    return os.getpid()


async def main():
    async with WorkerPool(spawn=2, worker=careful):
        pids = await asyncio.gather(*(render(page) for page in range(4)))
        print("four pages, on each worker:", sorted(Counter(pids).values()))

        pages = [asyncio.create_task(render(page)) for page in range(6)]
        done = await asyncio.gather(*pages, return_exceptions=True)
        refused = [error for error in done if isinstance(error, NoWorkersAvailable)]
        print("six pages:", len(done) - len(refused), "done,", len(refused), "refused by both")
        print(refused[0].message.partition(": ")[2].partition("; ")[0])


asyncio.run(main())
