"""L09: keys with learned quotas are kept busy in a task pool, whether answers are slow or headers exaggerate."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Iterable, Mapping

import pytest

import headgate
from headgate import Resource, ResourcePool, TaskPool
from headgate.core.clock import clock
from headgate.testing import virtual
from tests.conftest import SCALE
from tests.unit.resources.test_learned_quotas import Response

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

    def wait(self) -> float:
        """Seconds until a call is allowed."""
        return (1 - self.left) * PER / LIMIT


class Window(Bucket):
    """A limit that is whole again at each multiple of its period."""

    def advance(self) -> None:
        now = clock.now()
        if now // PER != self.at // PER:
            self.left = self.limit
        self.at = now

    def wait(self) -> float:
        return PER - self.at % PER


class Key:
    """What the provider does with one key: its headers may describe a larger bucket than the one that counts."""

    def __init__(self, exaggeration: float, real: Bucket | None = None) -> None:
        self.real, self.told = real or Bucket(LIMIT), Bucket(LIMIT * exaggeration)
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
            headers["retry-after-ms"] = str(math.ceil(1000 * self.real.wait()))
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


async def keep_busy(
    keys: Mapping[str, Key], *, latency: float, at_a_time: int, transit: float = 0.002, periods: int = 4
) -> Iterable[Key]:
    """Run more tasks than the keys allow for some periods."""
    chance = random.Random(1)
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
        await tasks.submit_many(ask, [(number,) for number in range(750 * periods)])
        await asyncio.sleep(periods * PER)
        await tasks.close(cancel=True)
    return keys.values()


def exaggerating(factor: float) -> dict[str, Key]:
    return {name: Key(factor) for name in NAMES}


@virtual
async def test_l09_slow_answers_leave_no_gaps() -> None:
    """A pool has twice the slots that the keys need. Without a pace they would run out in waves of two seconds."""
    for key in await keep_busy(exaggerating(1.0), latency=2.0, at_a_time=200):
        key.check(PER, 4 * PER)
        assert not key.refused


@virtual
async def test_l09_headers_that_say_twice_the_limit_cost_few_refusals() -> None:
    for key in await keep_busy(exaggerating(2.0), latency=0.05, at_a_time=40):
        key.check(PER, 4 * PER)
        assert len(key.refused) <= 8


@virtual
async def test_l09_calls_that_overtake_each_other_do_not_hide_what_a_bucket_allows() -> None:
    for key in await keep_busy(exaggerating(2.0), latency=0.05, at_a_time=40, transit=0.01):
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


class SilentKey(Key):
    """A key whose provider says nothing but `Retry-After`, in whole seconds."""

    def __init__(self, real: Bucket) -> None:
        super().__init__(1.0, real)

    def call(self) -> Response:
        answer = super().call()
        refused = answer.status_code == 429
        return Response(answer.status_code, {"retry-after": str(math.ceil(self.real.wait()))} if refused else {})


@virtual
@pytest.mark.parametrize("kind", [Bucket, Window])
@pytest.mark.parametrize("latency", [0.05, 1.0])
async def test_l09_refusals_alone_tell_what_a_silent_provider_allows(kind: type[Bucket], latency: float) -> None:
    """Found by refusals, so there are some at first; then about one in a hundred looks for more."""
    periods = 10 if SCALE >= 1 else 6
    begin, end = 3 * PER, periods * PER
    keys = {name: SilentKey(kind(LIMIT)) for name in NAMES}
    await keep_busy(keys, latency=latency, at_a_time=40 if latency < 1 else 120, periods=periods)
    accepted = sum(begin <= at < end for key in keys.values() for at in key.accepted)
    refused = sum(begin <= at < end for key in keys.values() for at in key.refused)
    assert accepted >= 0.97 * len(keys) * (end - begin) * LIMIT / PER
    assert refused <= 0.02 * accepted


@virtual
async def test_r60_a_cooldown_of_a_key_with_a_quota_interrupts_no_call_that_may_be_paid_for() -> None:
    pool = ResourcePool({"a": "a", "b": "b"}, quota=headgate.Quota(requests=100, window="bucket"), max_in_flight=3)
    seen: list[str] = []

    async def operation(key: Resource[str], number: int) -> str:
        await asyncio.sleep(1.0 + number)
        if key.value == "a" and not seen:
            seen.append("refused")
            raise headgate.CooldownResource(30.0)
        seen.append(key.value)
        return key.value

    results = await asyncio.gather(*(pool.run(lambda key, n=n: operation(key, n)) for n in range(4)))
    assert sorted(results) == ["a", "b", "b", "b"]
    assert pool.stats().sibling_cancels == 0
