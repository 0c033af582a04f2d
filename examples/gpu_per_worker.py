"""Four jobs, two GPUs, two workers: each job has its own GPU and its own worker, where a plain function computes."""

import asyncio
import os
from collections import Counter

from small_upstream import Reply, get_plainly, serve

from headgate import LeastLoadedLoadBalancer, Resource, ResourcePool, TaskPool, WorkerPool

gpus = ResourcePool([Resource(f"gpu-{n}", f"cuda:{n}", max_in_flight=1) for n in range(2)], name="gpus")


def train(gpu, url, job):
    """Runs in a thread of a worker. `gpu` is a copy of the Resource: `gpu.value` is the device."""
    limit = int(get_plainly(f"{url}/begin/{job}?{gpu.resource_id}").text)
    primes = sum(all(number % d for d in range(2, number)) for number in range(2, limit))
    get_plainly(f"{url}/end/{job}?{gpu.resource_id}")
    return job, primes, os.getpid()


async def losses(gpu, job):
    """A stream, which holds a GPU and a worker from its first item to its last."""
    for epoch in range(1, 5):
        await asyncio.sleep(0.01)
        yield f"{job} {1 / epoch:.2f}"


async def main():
    async with serve(storage) as url, WorkerPool(spawn=2, loadbalancer=LeastLoadedLoadBalancer()) as workers:
        async with TaskPool("train", max_concurrent=8, resources=gpus, workers=workers) as pool:
            handles = [await pool.submit(train, url, f"job-{number}") for number in (1, 2, 3, 4)]
            print("running:", pool.snapshot().active, "- queued for a GPU:", pool.snapshot().queued)
            results = [await handle for handle in handles]
            print("primes:", {job: primes for job, primes, _ in results})
            print("on both workers:", {pid for *_, pid in results} == {worker.pid for worker in workers.workers()})
            print("jobs on one GPU at a time: at most", max(most.values()))
            print(*[loss async for loss in pool.stream(losses, "job-5")], sep=", ")


# The storage that jobs read from. It counts the jobs on each GPU.
now, most = Counter(), Counter()


async def storage(request):
    path, _, gpu = request.target.partition("?")
    now[gpu] += 1 if path.startswith("/begin") else -1
    most[gpu] = max(most[gpu], now[gpu])
    return Reply(200, path[-1] + "000")


asyncio.run(main())
