"""Five reviews at a time, tenants in turn, one result. From Harn's pool library, in Python."""

import asyncio

from headgate import fair_round_robin, pool_create, pool_wait


async def agent_loop(task, system_prompt):
    """In place of an agent that works for a while."""
    await asyncio.sleep(0.01)
    return f"done: {task} ({system_prompt})"


async def main():
    pool = pool_create(
        name="pr-review",
        max_concurrent=5,
        queue=fair_round_robin("tenant_id"),
    )
    handle = await pool.submit(
        lambda: agent_loop("review this PR", system_prompt="be kind"),
        tenant_id="tenant-acme",
        priority=10,
    )
    print(handle.status, "in", handle.pool)

    result = await pool_wait(handle)  # a snapshot; it does not raise if the task failed
    print(result.status, "-", result["result"])
    print(await handle)  # the result itself; a handle can be awaited many times
    await pool.close()


asyncio.run(main())
