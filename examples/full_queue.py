"""One slot, two places in the queue, five submits: what each policy does. `Backpressure` is from Harn's library."""

import asyncio

from headgate import Backpressure, PoolBusy, QueueFull, SubmitTimeout, pool_create

backpressure = Backpressure()

POLICIES = {
    "block_submitter": backpressure.queue(2),
    "fail_submitter": backpressure.queue(2, "fail_submitter"),
    "drop_oldest": backpressure.queue(2, "drop_oldest"),
    "drop_newest": backpressure.queue(2, "drop_newest"),
    "drop_fair": backpressure.queue(2, "drop_fair"),
    "refuse_fair": backpressure.queue(2, "refuse_fair"),
    "ring_buffer": backpressure.ring_buffer(2),
    "fail_fast": backpressure.fail_fast(),
}


async def review():
    await asyncio.sleep(0.05)


async def try_to_submit(pool, tenant):
    try:
        return await pool.submit(review, key=tenant, wait_timeout=0.01)
    except (QueueFull, PoolBusy, SubmitTimeout) as error:
        return error


async def main():
    for name, policy in POLICIES.items():
        async with pool_create(name="review", max_concurrent=1, backpressure=policy) as pool:
            tried = [await try_to_submit(pool, tenant) for tenant in ("acme", "bolt", "acme", "acme", "acme")]
        print(f"{name:16}", *(getattr(one, "status", type(one).__name__) for one in tried))


asyncio.run(main())
