"""Six calls, two exclusive GPUs: fail at once, or wait in a queue for the next free one."""

import asyncio

from headgate import PoolExhausted, Resource, ResourcePool

pool = ResourcePool([Resource("gpu-0", "cuda:0", max_in_flight=1), Resource("gpu-1", "cuda:1", max_in_flight=1)])


async def train(gpu, job):
    await asyncio.sleep(0.05)
    return f"{job} on {gpu.resource_id}"


async def start(job, **options):
    try:
        print(" ", await pool.run(lambda gpu: train(gpu, job), **options))
    except PoolExhausted as error:
        print(f"  {job} has no GPU: {error.reason}")


async def main():
    jobs = [f"job {number}" for number in range(6)]
    print("at once:")
    await asyncio.gather(*(start(job) for job in jobs))
    print("waiting, first come first served:")
    await asyncio.gather(*(start(job, wait_for_capacity=True) for job in jobs))
    print("waiting, but not for long:")
    await asyncio.gather(*(start(job, wait_for_capacity=True, within=0.02) for job in jobs))


asyncio.run(main())
