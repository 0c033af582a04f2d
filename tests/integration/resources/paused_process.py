"""A process of the tests of shared clocks: makes calls, and may be held up in a transaction before."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from headgate import Quota, Resource, ResourcePool, SqliteStore
from headgate.sharing.states import Outcome, Seen, Step

REQUESTS = 10
PER = 5.0


class PausingStore(SqliteStore):
    """Pauses between reading the clock and running a step, as a process that is not given the processor."""

    pause = 0.0

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        def paused(text: str | None, seen: Seen) -> Outcome:
            if key.startswith("quotas/"):
                time.sleep(self.pause)
            return step(text, seen)

        return super().transact(key, paused, durable=durable)


async def main(path: str, calls: int, pause: float) -> None:
    with closing(PausingStore(path)) as store:
        store.pause = pause
        quota = Quota(requests=REQUESTS, per=PER, burst=REQUESTS, delay=0.3)
        pool = ResourcePool([Resource("a", "sk-a", quota=quota)], name="keys", store=store)

        async def say(key: Resource[str]) -> None:
            sys.stdout.write(f"{time.monotonic()}\n")
            sys.stdout.flush()

        store.pause = 0.0
        await asyncio.gather(*(pool.run(say, wait_for_capacity=True) for _ in range(calls)))
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
