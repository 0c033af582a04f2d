"""L09: keys with learned quotas are kept busy in a task pool, whether answers are slow or headers exaggerate."""

from __future__ import annotations

import asyncio
import itertools
import math
import random

import headgate
from headgate import Resource, ResourcePool, TaskPool
from headgate.core.clock import clock
from headgate.testing import virtual
from tests.resources.test_learned_quotas import Response

LIMIT, PER = 60, 6.0
NAMES = ("a", "b", "c", "d", "e")


class Refused(Exception):
    """An error as SDKs raise them."""

    def __init__(self, response: Response) -> None:
        super().__init__("refused")
        self.response = response


class Bucket:
    """A limit that refills all the time."""

    def __init__(self, limit: float) -> None:
        self.limit = self.left = limit
        self.at = clock.now()

    def advance(self) -> None:
        now = clock.now()
        self.left, self.at = min(self.limit, self.left + (now - self.at) * self.limit / PER), now


class Key:
    """What the provider does with one key: its headers may describe a larger bucket than the one that counts."""

    def __init__(self, exaggeration: float) -> None:
        self.real, self.told = Bucket(LIMIT), Bucket(LIMIT * exaggeration)
        self.accepted: list[float] = []
        self.refused: list[float] = []

    def call(self) -> Response:
        self.real.advance()
        self.told.advance()
        is_accepted = self.real.left >= 1
        (self.accepted if is_accepted else self.refused).append(clock.now())
        for bucket in (self.real, self.told):
            bucket.left -= is_accepted
        reset = (self.told.limit - self.told.left) * PER / self.told.limit
        headers = {
            "x-ratelimit-limit-requests": f"{self.told.limit:.0f}",
            "x-ratelimit-remaining-requests": str(int(self.told.left)),
            "x-ratelimit-reset-requests": f"{math.ceil(reset * 1000)}ms",
        }
        if not is_accepted:
            headers["retry-after-ms"] = str(math.ceil(1000 * (1 - self.real.left) * PER / LIMIT))
        return Response(200 if is_accepted else 429, headers)

    def check(self, begin: float, end: float) -> None:
        """Check how much of the key was used in this time, the longest gap, and the refusals."""
        late = [at for at in self.accepted if begin <= at < end]
        refused = [at for at in self.refused if begin <= at < end]
        allowed = (end - begin) * LIMIT / PER
        assert len(late) >= 0.97 * allowed, (len(late), allowed)
        assert (
            max(later - earlier for earlier, later in itertools.pairwise([begin, *late, end])) <= 2 * PER / LIMIT + 0.2
        )
        assert len(refused) <= 0.01 * allowed, refused


async def keep_busy(*, latency: float, at_a_time: int, exaggeration: float = 1.0, transit: float = 0.002) -> list[Key]:
    """Run more tasks than the keys allow for four periods."""
    chance, keys = random.Random(1), {name: Key(exaggeration) for name in NAMES}
    pool = ResourcePool({name: name for name in NAMES}, quota="learn", classify=headgate.http_errors)

    async def ask(key: Resource[str], number: int) -> Response:
        await asyncio.sleep(transit * chance.uniform(0.2, 2.0))
        answer = keys[key.value].call()
        is_accepted = answer.status_code == 200
        await asyncio.sleep((latency if is_accepted else transit) * chance.uniform(1.0, 1.1))
        if not is_accepted:
            raise Refused(answer)
        return answer

    async with TaskPool("asks", max_concurrent=at_a_time, resources=pool) as tasks:
        await tasks.submit_many(ask, [(number,) for number in range(3000)])
        await asyncio.sleep(4 * PER)
        await tasks.close(cancel=True)
    return list(keys.values())


@virtual
async def test_l09_slow_answers_leave_no_gaps() -> None:
    """A pool has twice the slots that the keys need. Without a pace they would run out in waves of two seconds."""
    for key in await keep_busy(latency=2.0, at_a_time=200):
        key.check(PER, 4 * PER)
        assert not key.refused


@virtual
async def test_l09_headers_that_say_twice_the_limit_cost_few_refusals() -> None:
    for key in await keep_busy(latency=0.05, at_a_time=40, exaggeration=2.0):
        key.check(PER, 4 * PER)
        assert len(key.refused) <= 8


@virtual
async def test_l09_calls_that_overtake_each_other_do_not_hide_what_a_bucket_allows() -> None:
    for key in await keep_busy(latency=0.05, at_a_time=40, exaggeration=2.0, transit=0.01):
        key.check(PER, 4 * PER)


@virtual
async def test_l09_a_call_that_is_too_large_for_the_tokens_left_says_nothing_about_requests() -> None:
    pool = ResourcePool({"a": "a"}, quota="learn", classify=headgate.http_errors)
    told = {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "500",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "90000",
        "x-ratelimit-remaining-tokens": "700",
        "x-ratelimit-reset-tokens": "59s",
    }
    answers = iter([Response(200, told), Response(429, {**told, "retry-after-ms": "500"}), Response(200, told)])

    async def operation(key: Resource[str]) -> Response:
        return next(answers)

    await pool.run(operation)
    await pool.run(operation, cost=600, wait_for_capacity=True)
    left = pool.snapshot()["a"]["quota"]["left"]
    assert left["requests"] >= 490
    assert left["tokens"] <= 1200
