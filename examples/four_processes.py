"""Four processes share two slots and two keys. They never run more, tenants take turns across them, a killed one frees
its slots, and a key that is limited in one rests in all."""

import asyncio
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

from headgate import CooldownResource, ResourcePool, SqliteStore, TaskPool, current_task, fair_round_robin


def open_pools(folder):
    """Make the same pools in every process: scope, id and names say what is shared, the store says where."""
    store = SqliteStore(folder / "shared.db")
    budget = {"scope": "org", "scope_id": "us", "store": store, "max_concurrent": 2}
    pool = TaskPool("work", **budget, queue=fair_round_robin("tenant_id"), fencing=True)
    return pool, ResourcePool({"key-1": "secret-1", "key-2": "secret-2"}, name="keys", store=store)


async def work(log, tenant, seconds):
    print(+1, current_task().fence, tenant, file=log, flush=True)  # fences grow with every start
    await asyncio.sleep(seconds)
    print(-1, file=log, flush=True)


async def ask(key):
    if key.resource_id == "key-1":
        raise CooldownResource(cooldown_seconds=60, reason="429")


async def child(folder, log, tenant, tasks, seconds):
    pool, keys = open_pools(folder)
    async with pool:
        if tenant == "stuck":
            await keys.run(ask)
        for _ in range(tasks):
            await pool.submit(work, log, tenant, seconds, tenant_id=tenant)
        await until(lambda: sum(one.held + one.queued for one in members(pool) if one.is_this_pool) == tasks)
        print("the others know of all my tasks", flush=True)


def members(pool):
    return pool.snapshot().shared.members


async def until(condition):
    while not condition():  # noqa: ASYNC110 (nothing tells when the others know)
        await asyncio.sleep(0.01)


async def start(*arguments):
    command = [sys.executable, __file__, *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    await process.stdout.readline()
    return process


async def share(pool, folder):
    gate = asyncio.Event()
    mine = [await pool.submit(gate.wait, tenant_id="me") for _ in range(2)]  # both slots, while the others queue
    children = [await start(folder, tenant, 4, 0.1) for tenant in ("big", "big", "small")]
    mine.append(await pool.submit(asyncio.sleep, 0, tenant_id="me"))
    seen = pool.snapshot().shared
    print(f"{len(seen.members)} processes, {seen.active} of {pool.max_concurrent} slots in use, {seen.queued} queued")
    gate.set()
    await asyncio.gather(*mine, *(process.wait() for process in children))

    lines = [line.split() for line in (folder / "log").read_text("utf-8").splitlines()]
    print(f"{len(lines) // 2} tasks have run, at most {max(accumulate(int(line[0]) for line in lines))} at a time")
    print("in turn:", *(tenant for _, tenant in sorted((int(line[1]), line[2]) for line in lines if line[1:])))


async def outlive(pool, keys, folder):
    victim = await start(folder, "stuck", 2, 60.0)
    task = await pool.submit(asyncio.sleep, 0, tenant_id="me")
    print(f"another process has both slots for a minute: my task is {task.status}")
    await until(lambda: keys.snapshot()["key-1"]["status"] == "cooling_down")
    print(f"it found a key limited, which rests here too: {keys}")
    victim.kill()
    killed = time.monotonic()
    await asyncio.gather(task, victim.wait())
    print(f"that process is killed: {time.monotonic() - killed:.3f} s later my task is {task.status}")


async def main(folder):
    pool, keys = open_pools(folder)
    async with pool:
        await share(pool, folder)
        await outlive(pool, keys, folder)


if len(sys.argv) > 1:
    folder = Path(sys.argv[1])
    with open(folder / "log", "a", encoding="utf-8") as log:
        asyncio.run(child(folder, log, sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
else:
    with tempfile.TemporaryDirectory() as made:
        asyncio.run(main(Path(made)))
