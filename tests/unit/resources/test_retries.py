"""L10 and L11 of calls: `retries`, `retry_on` and `backoff` of `run`, `stream` and `run_sync`, and retry budgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate import Backoff, CooldownResource, InvalidArgument, PoolExhausted, ResourcePool, RetryOperation
from headgate.testing import virtual

PAUSES = Backoff(0.5, jitter=False)


def now() -> float:
    return asyncio.get_running_loop().time()


class Fails:
    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.at: list[float] = []
        self.used: list[str] = []

    async def __call__(self, resource: Any) -> str:
        self.at.append(now())
        self.used.append(resource.resource_id)
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    async def items(self, resource: Any) -> AsyncIterator[int]:
        await self(resource)
        yield 1
        yield 2

    @property
    def gaps(self) -> list[float]:
        return [round(after - before, 6) for before, after in zip(self.at, self.at[1:], strict=False)]


@virtual
async def test_l10_a_call_is_tried_again_after_the_errors_that_it_names() -> None:
    keys, work = ResourcePool({"k1": 1, "k2": 2}), Fails(OSError(), OSError(), OSError())
    assert await keys.run(work, retries=3, retry_on=OSError, backoff=PAUSES) == "done"
    assert work.gaps == [0.5, 1, 2]
    assert set(work.used) == {"k1", "k2"}, "each attempt takes a resource anew"
    assert all(one["status"] == "healthy" for one in keys.snapshot().values()), "an error says nothing against it"
    assert keys.snapshot()["k1"]["in_flight"] == 0


@virtual
async def test_l10_other_errors_and_the_last_one_are_raised() -> None:
    keys = ResourcePool({"k1": 1})
    work = Fails(KeyError("other"))
    with pytest.raises(KeyError, match="other"):
        await keys.run(work, retries=3, retry_on=(OSError, ValueError))
    work = Fails(OSError("1"), OSError("2"), OSError("3"))
    with pytest.raises(OSError, match="3"):
        await keys.run(work, retries=2, retry_on=OSError)
    assert len(work.at) == 3


@virtual
async def test_l10_verdicts_of_a_call_are_counted_by_max_attempts() -> None:
    keys = ResourcePool({"k1": 1, "k2": 2, "k3": 3, "k4": 4}, max_attempts=3)
    work = Fails(OSError(), RetryOperation("a"), OSError(), RetryOperation("b"))
    assert await keys.run(work, retries=2, retry_on=OSError, retry_delay=0) == "done"
    work = Fails(OSError(), *[RetryOperation("x") for _ in range(3)])
    with pytest.raises(PoolExhausted, match="max_attempts=3"):
        await keys.run(work, retries=2, retry_on=OSError, retry_delay=0)


@virtual
async def test_l10_a_call_does_not_pause_beyond_its_deadline() -> None:
    keys, work = ResourcePool({"k1": 1}), Fails(OSError("why"))
    with pytest.raises(OSError, match="why"):
        await keys.run(work, retries=1, retry_on=OSError, backoff=Backoff(10, jitter=False), within=9)
    assert now() == 0


@virtual
async def test_l10_use_takes_the_same_options() -> None:
    keys, left = ResourcePool({"k1": 1}), [OSError()]

    @keys.use(retries=1, retry_on=OSError)
    async def ask(resource: Any, word: str) -> str:
        if left:
            raise left.pop()
        return word

    assert await ask("yes") == "yes"


@virtual
async def test_l10_a_stream_is_tried_again_until_its_first_item() -> None:
    keys, work = ResourcePool({"k1": 1}), Fails(OSError(), OSError())
    stream = keys.stream(work.items, retries=2, retry_on=OSError, backoff=PAUSES)
    assert [item async for item in stream] == [1, 2]
    assert work.gaps == [0.5, 1]

    async def breaks(resource: Any) -> AsyncIterator[int]:
        yield 1
        raise OSError("half-way")

    broken = keys.stream(breaks, retries=5, retry_on=OSError)
    assert await anext(broken) == 1
    with pytest.raises(OSError, match="half-way"):
        await anext(broken)


def test_l10_a_call_without_a_loop_is_tried_again() -> None:
    keys, left = ResourcePool({"k1": 1}), [OSError(), OSError()]

    def work(resource: Any) -> str:
        if left:
            raise left.pop()
        return "done"

    assert keys.run_sync(work, retries=2, retry_on=OSError) == "done"


@pytest.mark.parametrize(
    "options", [{"retries": 2}, {"retry_on": OSError}, {"backoff": 1}, {"retries": 0, "backoff": PAUSES}], ids=str
)
@virtual
async def test_l10_a_call_says_which_errors_are_tried_again(options: Any) -> None:
    """`run` tries no error again by itself: whether an operation may run twice is for its author to say."""
    keys = ResourcePool({"k1": 1})
    with pytest.raises(InvalidArgument, match="need"):
        await keys.run(Fails(), **options)


@virtual
async def test_l11_calls_of_a_pool_share_a_budget() -> None:
    keys = ResourcePool({"k1": 1, "k2": 2}, retry_budget=0.1)
    works = [Fails(*[OSError("down") for _ in range(3)]) for _ in range(200)]
    for work in works:
        with pytest.raises(OSError, match="down") as caught:
            await keys.run(work, retries=2, retry_on=OSError)
    assert 200 + 10 <= sum(len(work.at) for work in works) <= 200 + 20
    assert "the retry budget is spent" in caught.value.__notes__[0]


@virtual
async def test_l11_a_spent_budget_ends_calls_with_verdicts() -> None:
    keys = ResourcePool({"k1": 1, "k2": 2, "k3": 3}, retry_budget=0)
    works = [Fails(*[RetryOperation("down") for _ in range(3)]) for _ in range(20)]
    for work in works:
        with pytest.raises(PoolExhausted) as caught:
            await keys.run(work, retry_delay=0)
    assert "the retry budget is spent" in str(caught.value)
    assert sum(len(work.at) for work in works) == 20 + 10


@virtual
async def test_l11_calls_that_get_no_resource_are_no_first_attempts() -> None:
    """Else those that are refused while all resources cool down would pay for a storm afterwards."""
    keys = ResourcePool({"k1": 1, "k2": 2}, retry_budget=0.1)
    for key in ("k1", "k2"):
        await keys.cool(key, 10)
    for _ in range(1000):
        with pytest.raises(PoolExhausted):
            await keys.run(Fails())
    await asyncio.sleep(10)
    works = [Fails(*[RetryOperation("down") for _ in range(3)]) for _ in range(40)]
    for work in works:
        with pytest.raises(PoolExhausted):
            await keys.run(work, retry_delay=0)
    assert sum(len(work.at) for work in works) == 40 + 10


@virtual
async def test_l10_an_error_of_any_class_ends_or_repeats_its_call() -> None:
    class Hostile(Exception):
        @property
        def retry_after(self) -> float:
            raise RuntimeError

        def add_note(self, note: str) -> None:
            raise RuntimeError

    keys = ResourcePool({"k1": 1}, retry_budget=0)
    assert await keys.run(Fails(Hostile()), retries=1, retry_on=Hostile, backoff=PAUSES) == "done"
    for _ in range(20):
        await asyncio.gather(keys.run(Fails(Hostile()), retries=1, retry_on=Hostile), return_exceptions=True)
    assert keys.snapshot()["k1"]["in_flight"] == 0


@virtual
async def test_l11_siblings_and_waits_for_cooldowns_are_no_retries() -> None:
    keys = ResourcePool({"k1": 1}, retry_budget=0)
    first = True

    async def work(resource: Any) -> str:
        nonlocal first
        if first:
            first = False
            await asyncio.sleep(1)
            raise CooldownResource(5)
        await asyncio.sleep(2)
        return "done"

    calls = [keys.run(work, wait_for_capacity=True, max_attempts=3, retry_delay=0) for _ in range(30)]
    assert await asyncio.gather(*calls) == ["done"] * 30
    assert now() == 8, "all waited for the cooldown"
