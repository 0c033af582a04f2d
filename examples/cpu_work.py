"""A plain function that computes: it is awaited like any routine, and runs in a thread of a worker, on another core."""

import asyncio
import os

from headgate import WorkerPool, routine


@routine
def primes_below(limit):
    sieve = bytearray([1]) * limit
    sieve[:2] = b"\0\0"
    for number in range(2, int(limit**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, limit, number)))
    return sum(sieve), os.getpid()


async def main():
    async with WorkerPool(spawn=2):
        work = asyncio.gather(*(primes_below(2_000_000) for _ in range(4)))
        turns = 0
        while not work.done():  # meanwhile this process's loop is free
            await asyncio.sleep(0.001)
            turns += 1
        counts, pids = zip(*await work, strict=True)
    print("primes below 2 million:", set(counts))
    print("counted by", len(set(pids)), "processes, and this one is none of them:", os.getpid() not in pids)
    print("meanwhile this one had its turns:", turns > 10)


asyncio.run(main())
