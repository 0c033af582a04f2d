"""H10: quota="learn" goes by what the headers of answers say, and is hardly ever refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

import headgate
from headgate import PoolExhausted, Resource, ResourcePool, TaskPool
from headgate.core.clock import clock
from headgate.testing import settle, virtual
from tests.support.resources.support import Gate


class Response:
    """An answer, as HTTP libraries have them."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self.status_code = status
        self.headers = headers


class Service:
    """A service with a limit of requests, and one of tokens, in fixed windows; or one that fills up steadily."""

    def __init__(self, requests: int, per: float = 60.0, tokens: int | None = None, *, fills: bool = False) -> None:
        self.limits = {"requests": requests} | ({} if tokens is None else {"tokens": tokens})
        self.per = per
        self.fills = fills
        self.refused = 0
        self.served = 0
        self.by_window: dict[int, int] = {}
        self._left: dict[str, float] = dict(self.limits)
        self._at = 0.0

    def call(self, tokens: int = 0) -> Response:
        """Answer a request that arrives now."""
        self._pass_time()
        cost = {"requests": 1, "tokens": tokens}
        if any(left < cost[name] for name, left in self._left.items()):
            self.refused += 1
            missing = max(cost[name] - left for name, left in self._left.items())
            after = missing * self.per / self.limits["requests"] if self.fills else self._reset("requests")
            return Response(429, {**self._headers(), "retry-after": str(max(1, round(after)))})
        for name in self._left:
            self._left[name] -= cost[name]
        self.served += 1
        window = int(clock.now() // self.per)
        self.by_window[window] = self.by_window.get(window, 0) + 1
        return Response(200, self._headers())

    def _pass_time(self) -> None:
        now = clock.now()
        for name, limit in self.limits.items():
            if self.fills:
                self._left[name] = min(limit, self._left[name] + (now - self._at) * limit / self.per)
            elif now // self.per > self._at // self.per:
                self._left[name] = limit
        self._at = now

    def _reset(self, name: str) -> float:
        if self.fills:
            return (self.limits[name] - self._left[name]) / self.limits[name] * self.per
        return self.per - clock.now() % self.per

    def _headers(self) -> dict[str, str]:
        headers = {}
        for name, limit in self.limits.items():
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(int(self._left[name]))
            headers[f"x-ratelimit-reset-{name}"] = f"{self._reset(name):.3f}s"
        return headers


def learning(*names: str, **options: Any) -> ResourcePool[str]:
    return ResourcePool({name: name for name in names}, quota="learn", classify=headgate.http_errors, **options)


def left(pool: ResourcePool[str], name: str = "a") -> dict[str, float | None]:
    return pool.snapshot()[name]["quota"]["left"]


def slow(service: Service, seconds: float) -> Callable[[Resource[str]], Awaitable[Response]]:
    """An operation whose answers are written when the call arrives, and are read up to so many seconds later."""
    numbers = itertools.count()

    async def operation(key: Resource[str]) -> Response:
        await asyncio.sleep(0.01)
        answer = service.call()
        refused = answer.status_code != 200
        await asyncio.sleep(0.02 if refused else seconds * (next(numbers) * 7 % 13) / 13)
        return answer

    return operation


async def many(pool: ResourcePool[str], service: Service, calls: int, **options: Any) -> None:
    async def operation(key: Resource[str]) -> Response:
        await asyncio.sleep(0.01)
        answer = service.call(int(options.get("cost", 0)))
        await asyncio.sleep(0.04)
        return answer

    options = {"wait_for_capacity": True, "max_attempts": 20, **options}
    await asyncio.gather(*(pool.run(operation, **options) for _ in range(calls)))


# -- refusals ---------------------------------------------------------------------------------------------------------


@virtual
async def test_h10_what_remains_is_learned_from_headers() -> None:
    pool, service = learning("a"), Service(10, tokens=1000)
    await many(pool, service, 1, cost=100)
    assert left(pool) == {"requests": 9.0, "tokens": 900.0}


@virtual
async def test_h10_learning_uses_the_whole_quota_with_at_most_one_refusal_per_reset() -> None:
    pool, service = learning("a"), Service(50, per=60.0)
    await many(pool, service, 500)
    assert service.served == 500
    full = [service.by_window[window] for window in sorted(service.by_window)][:-1]
    assert all(number >= 0.95 * 50 for number in full), full
    assert service.refused <= len(full)


@pytest.mark.parametrize("seconds", [0.3, 5.0, 40.0])
def test_h10_answers_may_be_slow(seconds: float) -> None:
    """As those of language models are: what they say about the limit was true when the call arrived."""

    @virtual
    async def scenario() -> None:
        pool, service = learning("a", cancel_siblings=False), Service(50, per=60.0)
        operation = slow(service, seconds)
        await asyncio.gather(*(pool.run(operation, wait_for_capacity=True, max_attempts=20) for _ in range(400)))
        full = [service.by_window[window] for window in sorted(service.by_window)][:-1]
        assert all(number >= 0.95 * 50 for number in full), full
        assert service.refused <= 1

    scenario()


@virtual
async def test_h10_learning_works_with_limits_that_fill_up_steadily() -> None:
    pool, service = learning("a"), Service(60, per=60.0, fills=True)
    await many(pool, service, 300)
    assert service.served == 300
    assert service.refused <= clock.now() // 60
    assert clock.now() <= 5 * 60


@virtual
async def test_h10_learning_of_tokens_reserves_costs() -> None:
    pool, service = learning("a"), Service(1000, per=60.0, tokens=1000)
    await many(pool, service, 50, cost=100)
    assert service.served == 50
    assert service.refused <= len(service.by_window)
    assert clock.now() <= 5 * 60


@virtual
async def test_h10_two_learning_keys_have_quotas_of_their_own_and_a_group_has_one() -> None:
    one, other = Service(5), Service(5)
    pool = learning("a", "b")

    async def operation(key: Resource[str]) -> Response:
        return (one if key.resource_id == "a" else other).call()

    for _ in range(10):
        await pool.run(operation)
    assert (one.served, other.served, one.refused + other.refused) == (5, 5, 0)
    with pytest.raises(PoolExhausted, match="2 with a spent quota"):
        await pool.run(operation)
    organisation = Service(5)
    group = ResourcePool([Resource(name, name, quota="learn", quota_group="learning org") for name in "ab"])

    async def together(key: Resource[str]) -> Response:
        return organisation.call()

    for _ in range(5):
        await group.run(together)
    with pytest.raises(PoolExhausted, match="2 with a spent quota"):
        await group.run(together)
    assert organisation.refused == 0


@virtual
async def test_h10_one_call_goes_first_until_an_answer_came() -> None:
    pool, gate = learning("a"), Gate()
    calls = [asyncio.create_task(pool.run(gate, wait_for_capacity=True)) for _ in range(5)]
    await settle()
    assert len(gate.entered) == 1
    gate.finish(0, Response(200, {}))  # says nothing about limits: there are none
    await settle()
    assert len(gate.entered) == 5
    for number in range(1, 5):
        gate.finish(number)
    await asyncio.gather(*calls)
    assert left(pool) == {"requests": None}


@virtual
async def test_h10_answers_that_cannot_be_read_as_such_limit_nothing() -> None:
    """The operation returns what it has parsed. Then nothing is learned, and calls are made as without a quota."""
    pool, gate = learning("a"), Gate()
    calls = [asyncio.create_task(pool.run(gate, wait_for_capacity=True)) for _ in range(3)]
    await settle()
    gate.finish(0, {"text": "parsed"})
    await settle()
    assert len(gate.entered) == 3
    for number in (1, 2):
        gate.finish(number)
    await asyncio.gather(*calls)


@virtual
async def test_h10_an_operation_may_say_what_its_answer_told() -> None:
    pool, service = learning("a"), Service(3)

    async def operation(key: Resource[str]) -> str:
        answer = service.call()
        key.learn(answer if service.served == 1 else answer.headers)
        return "parsed"

    for _ in range(3):
        await pool.run(operation)
    with pytest.raises(PoolExhausted, match="spent quota") as caught:
        await pool.run(operation)
    assert (service.refused, caught.value.retry_after) == (0, pytest.approx(60.0, abs=0.1))


@virtual
async def test_h10_errors_tell_too() -> None:
    pool, service = learning("a"), Service(1)

    class Failed(Exception):
        def __init__(self, response: Response) -> None:
            super().__init__("failed")
            self.response = response

    async def operation(key: Resource[str]) -> None:
        raise Failed(service.call())

    with pytest.raises(Failed):
        await pool.run(operation)
    assert left(pool) == {"requests": 0.0}


@virtual
async def test_h10_a_call_that_failed_without_an_answer_leaves_the_next_to_find_out() -> None:
    pool, gate = learning("a"), Gate()
    first = asyncio.create_task(pool.run(gate))
    await settle()
    gate.finish(0, OSError("no connection"))
    with pytest.raises(OSError, match="no connection"):
        await first
    rest = [asyncio.create_task(pool.run(gate, wait_for_capacity=True)) for _ in range(3)]
    await settle()
    assert len(gate.entered) == 2
    gate.finish(1, Response(200, {}))
    await settle()
    for number in (2, 3):
        gate.finish(number)
    await asyncio.gather(*rest)


@virtual
async def test_h10_an_answer_without_a_reset_is_asked_again_soon() -> None:
    pool = learning("a")
    told = iter(["0", "0", "5"])

    async def operation(key: Resource[str]) -> Response:
        return Response(200, {"x-ratelimit-remaining-requests": next(told)})

    for _ in range(3):
        await pool.run(operation, wait_for_capacity=True)
    assert clock.now() == 2.0
    assert left(pool) == {"requests": 5.0}


@pytest.mark.parametrize(
    "headers",
    [
        {"x-ratelimit-remaining-requests": "-5", "x-ratelimit-reset-requests": "1s"},
        {"x-ratelimit-remaining-requests": "1e400", "x-ratelimit-reset-requests": "-3s"},
        {"x-ratelimit-limit-requests": "0", "x-ratelimit-remaining-requests": "9", "x-ratelimit-reset-requests": "0s"},
        {"x-ratelimit-remaining-requests": "many", "x-ratelimit-reset-requests": "yesterday"},
        {"anthropic-ratelimit-tokens-remaining": "0", "anthropic-ratelimit-tokens-reset": "1999-01-01T00:00:00Z"},
        {"ratelimit": '"a";r=0;t=1, "b";r=0;t=2, "c";r=0', "ratelimit-policy": '"a";q=0;w=0'},
        {f"anthropic-ratelimit-{name}-remaining": "0" for name in "abcdefghijkl"},
    ],
)
def test_h10_headers_that_lie_never_stop_a_pool_for_long(headers: dict[str, str]) -> None:
    @virtual
    async def scenario() -> None:
        pool = learning("a")

        async def operation(key: Resource[str]) -> Response:
            return Response(200, headers)

        for _ in range(5):
            await pool.run(operation, wait_for_capacity=True)
        assert clock.now() <= 12.0

    scenario()


@virtual
async def test_h10_tasks_wait_for_a_learned_quota_and_say_so() -> None:
    pool, service = learning("a"), Service(3, per=20.0)

    async def ask(key: Resource[str]) -> Response:
        return service.call()

    async with TaskPool("asks", max_concurrent=10, resources=pool) as tasks:
        handles = [await tasks.submit(ask) for _ in range(9)]
        await settle()
        assert tasks.snapshot().waiting_for == {"cause": "quota", "seconds": pytest.approx(20.0, abs=0.1)}
        for handle in handles:
            await handle
    assert (service.served, service.refused) == (9, 0)
    assert 40 <= clock.now() <= 60  # three windows of three calls each; the calls of a window are spaced
