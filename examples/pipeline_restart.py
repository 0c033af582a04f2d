"""A durable pipeline: after a restart a completed key gives its stored result, and unfinished tasks are stale."""

import asyncio
import os
import subprocess
import sys
import tempfile

from headgate import TaskPool
from headgate.stores import JsonLinesStore


async def fetch(page):
    print("  fetching", page, flush=True)
    if page == "two" and len(sys.argv) > 1:
        os._exit(1)  # the process ends in the middle of its work
    return {"page": page, "size": (3, 4)}


async def run(folder):
    store = JsonLinesStore(folder)
    async with TaskPool("fetch", scope="pipeline", pipeline_id="nightly", store=store) as pool:
        for task in reversed(pool.snapshot().tasks):
            print(f"  {task.idempotency_key} is {task.status}", flush=True)
        for page in ("one", "two"):
            handle = await pool.submit(fetch, page, idempotency_key=page)
            print(" ", await handle, flush=True)


def main():
    if len(sys.argv) > 1:
        asyncio.run(run(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        print("first run, in a process that dies", flush=True)
        subprocess.run([sys.executable, __file__, folder], check=False)
        print("second run")
        asyncio.run(run(folder))
        print("third run")
        asyncio.run(run(folder))


main()
