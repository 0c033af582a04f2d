"""L10 and L11 through the pool: which errors of tasks are tried again, after which pauses, and how often in all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate import (
    Backoff,
    CooldownResource,
    InvalidArgument,
    InvalidType,
    PoolExhausted,
    ResourcePool,
    RetryOperation,
    TaskCancelled,
    TaskPool,
)
from headgate.tasks import PoolRequeue
from headgate.testing import capture_events, virtual

PAUSES = Backoff(0.5, jitter=False)


def now() -> float:
    return asyncio.get_running_loop().time()


class Fails:
    """Raises the first so many times, and notes when it was called."""

    def __init__(self, *errors: BaseException, seconds: float = 0.0) -> None:
        self.errors = list(errors)
        self.seconds = seconds
        self.at: list[float] = []

    async def __call__(self, *_: object) -> str:
        self.at.append(now())
        await asyncio.sleep(self.seconds)
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    @property
    def gaps(self) -> list[float]:
        return [round(after - before, 6) for before, after in zip(self.at, self.at[1:], strict=False)]


@virtual
async def test_l10_pauses_between_attempts_grow() -> None:
    work = Fails(*[OSError() for _ in range(4)])
    async with TaskPool(max_concurrent=1) as pool:
        assert await pool.run(work, retries=4, backoff=PAUSES) == "done"
    assert work.gaps == [0.5, 1, 2, 4]


@virtual
async def test_l10_without_a_backoff_a_task_is_tried_again_at_once() -> None:
    work = Fails(OSError(), OSError())
    async with TaskPool(max_concurrent=1) as pool:
        assert await pool.run(work, retries=2) == "done"
    assert work.gaps == [0, 0]


@virtual
async def test_l10_jitter_keeps_tasks_apart_that_failed_together() -> None:
    works = [Fails(OSError()) for _ in range(50)]
    async with TaskPool(max_concurrent=50) as pool:
        handles = [await pool.submit(work, retries=1, backoff=Backoff(8)) for work in works]
        for handle in handles:
            await handle
    gaps = [work.gaps[0] for work in works]
    assert all(4 <= gap <= 8 for gap in gaps)
    assert len(set(gaps)) > 40


@virtual
async def test_l10_a_task_that_pauses_holds_no_slot() -> None:
    work, other = Fails(OSError(), seconds=1), Fails(seconds=5)
    async with TaskPool(max_concurrent=1) as pool:
        first = await pool.submit(work, retries=1, backoff=Backoff(3, jitter=False))
        second = await pool.submit(other)
        await asyncio.sleep(1.5)
        assert (first.status, second.status) == ("queued", "running")
        assert pool.snapshot().active == 1
        assert await second == "done"
        assert await first == "done"
    assert work.at == [0, 6], "its pause was over at 4, when another had its slot"


@virtual
async def test_l10_after_its_pause_a_task_is_first_of_its_tenant() -> None:
    order: list[str] = []

    async def named(name: str) -> None:
        order.append(name)
        await asyncio.sleep(1)
        if order.count(name) == 1 and name == "fails":
            raise OSError

    async with TaskPool(max_concurrent=1) as pool:
        await pool.submit(named, "fails", retries=1, backoff=Backoff(1.5, jitter=False))
        for number in range(4):
            await pool.submit(named, str(number))
    assert order == ["fails", "0", "1", "fails", "2", "3"]


@pytest.mark.parametrize(
    ("retry_on", "attempts"),
    [
        (OSError, 3),
        ((KeyError, ConnectionError), 3),
        (ValueError, 1),
        (lambda error: isinstance(error, ConnectionError), 3),
        (lambda error: False, 1),
        (None, 3),
    ],
    ids=["its class", "a class above it", "another", "a function", "one that refuses", "all"],
)
@virtual
async def test_l10_only_what_retry_on_names_is_tried_again(retry_on: Any, attempts: int) -> None:
    work = Fails(*[ConnectionResetError("gone") for _ in range(3)])
    async with TaskPool(max_concurrent=1) as pool:
        with pytest.raises(ConnectionResetError, match="gone"):
            await pool.run(work, retries=2, retry_on=retry_on)
    assert len(work.at) == attempts


@virtual
async def test_l10_a_retry_on_that_raises_hides_nothing() -> None:
    async with TaskPool() as pool:
        with pytest.raises(OSError, match="the first") as caught:
            await pool.run(Fails(OSError("the first")), retries=3, retry_on=lambda error: error.missing)
    assert "retry_on raised AttributeError" in caught.value.__notes__[0]


class Busy(Exception):
    retry_after = 7.0


@virtual
async def test_l10_an_upstream_that_asks_for_more_time_gets_it() -> None:
    work = Fails(Busy(), OSError())
    async with TaskPool() as pool:
        assert await pool.run(work, retries=2, backoff=PAUSES) == "done"
    assert work.gaps == [7, 1]


class Response:
    """An answer of an HTTP client."""

    status_code = 503

    def __init__(self, **headers: str) -> None:
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class HttpError(Exception):
    def __init__(self, response: Response) -> None:
        super().__init__("HTTP 503")
        self.response = response


@virtual
async def test_l10_a_retry_after_header_is_a_lower_bound() -> None:
    work = Fails(HttpError(Response(retry_after="12")), HttpError(Response(retry_after="0.1")))
    async with TaskPool() as pool:
        assert await pool.run(work, retries=2, backoff=PAUSES) == "done"
    assert work.gaps == [12, 1]


@virtual
async def test_l10_a_pause_beyond_the_deadline_is_not_begun() -> None:
    """The error is told at once: waiting would end in nothing but a TaskExpired."""
    work = Fails(OSError("why it failed"), OSError())
    async with TaskPool() as pool:
        with pytest.raises(OSError, match="why it failed"):
            await pool.run(work, retries=5, backoff=Backoff(10, jitter=False), deadline=now() + 8)
        assert now() == 0
    assert work.at == [0]


@virtual
async def test_l10_a_task_that_pauses_can_be_cancelled() -> None:
    work = Fails(OSError())
    async with TaskPool() as pool:
        handle = await pool.submit(work, retries=1, backoff=Backoff(60, jitter=False))
        await asyncio.sleep(1)
        assert handle.cancel()
        with pytest.raises(TaskCancelled):
            await handle
        assert now() == 1
        assert pool.snapshot().queued == 0
    assert len(work.at) == 1


@virtual
async def test_l10_a_drain_waits_for_tasks_that_pause() -> None:
    work = Fails(OSError())
    async with TaskPool() as pool:
        handle = await pool.submit(work, retries=1, backoff=Backoff(9, jitter=False))
    assert handle.status == "completed"
    assert work.gaps == [9]


@virtual
async def test_l10_eta_and_story_tell_of_the_pause() -> None:
    async with TaskPool() as pool:
        handle = await pool.submit(Fails(OSError("boom")), retries=1, backoff=Backoff(9, jitter=False))
        await asyncio.sleep(2)
        assert handle.eta() == pytest.approx(7)
        assert "boom; again in 9 s" in handle.story()
        await handle
    assert handle.story().count("attempt") >= 1


@virtual
async def test_l10_an_event_tells_of_the_pause() -> None:
    with capture_events("lifecycle.pool.audit") as events:
        async with TaskPool() as pool:
            await pool.run(Fails(OSError()), retries=1, backoff=Backoff(9, jitter=False))
    [requeued] = [event for event in events if isinstance(event, PoolRequeue)]
    assert (requeued.reason, requeued.attempt, requeued.pause) == ("OSError", 1, 9.0)


@virtual
async def test_l10_children_end_and_the_pause_is_kept() -> None:
    """An attempt that fails cancels its children; one with a key is waited for before the next attempt begins."""
    began: list[float] = []

    async def child() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(5)  # it takes a while to end

    async def parent(pool: TaskPool) -> None:
        began.append(now())
        await pool.submit(child, idempotency_key="once")
        await asyncio.sleep(1)
        if len(began) == 1:
            raise OSError

    for seconds, second in ((2, 6), (20, 21)):
        began.clear()
        start = now()
        async with TaskPool(max_concurrent=4) as pool:
            handle = await pool.submit(parent, pool, retries=1, backoff=Backoff(seconds, jitter=False))
            await asyncio.sleep(30)
            await handle
            await pool.close(cancel="all")
        assert [at - start for at in began] == [0, second]


@virtual
async def test_l10_map_pauses_too() -> None:
    failed: set[int] = set()

    async def flaky(item: int) -> int:
        if item % 2 and item not in failed:
            failed.add(item)
            raise OSError
        return item

    async with TaskPool(max_concurrent=4) as pool:
        results = [one async for one in pool.map(flaky, range(20), retries=1, backoff=PAUSES, retry_on=OSError)]
    assert results == list(range(20))


@virtual
async def test_l10_verdicts_and_errors_are_counted_separately() -> None:
    """`max_attempts` governs verdicts, `retries` errors of the task's own; each kind has pauses of its own."""
    work = Fails(RetryOperation("a"), OSError(), RetryOperation("b"), OSError())
    async with TaskPool(resources=ResourcePool(["k1", "k2", "k3", "k4"])) as pool:
        assert await pool.run(work, retries=2, max_attempts=3, backoff=PAUSES) == "done"
    assert work.gaps == [0.5, 0.5, 1, 1]


@virtual
async def test_l10_a_service_that_is_down_is_waited_for() -> None:
    """What an HTTP client raises is a verdict that says nothing against the key: it has the pauses of the task too."""
    up_at = now() + 10

    async def call(key: Any) -> str:
        if now() < up_at:
            raise HttpError(Response())
        return "done"

    keys = ResourcePool(["k1", "k2"])
    async with TaskPool(max_concurrent=20, resources=keys) as pool:
        handles = [await pool.submit(call, retries=6, backoff=Backoff(0.5)) for _ in range(100)]
        assert [await handle for handle in handles] == ["done"] * 100


@virtual
async def test_l10_a_verdict_does_not_pause_beyond_the_deadline() -> None:
    async with TaskPool(resources=ResourcePool(["k1"])) as pool:
        with pytest.raises(PoolExhausted, match="deadline"):
            await pool.run(Fails(RetryOperation("down")), backoff=Backoff(60), retries=3, deadline=now() + 10)
        assert now() == 0


@virtual
async def test_l11_rate_limits_are_no_retries() -> None:
    """A resource that says when it can be used again bounds its calls by itself."""
    work = [Fails(CooldownResource(1), CooldownResource(1)) for _ in range(40)]
    async with TaskPool(max_concurrent=5, resources=ResourcePool(["k1", "k2"]), retry_budget=0.0) as pool:
        handles = [await pool.submit(one) for one in work]
        assert [await handle for handle in handles] == ["done"] * 40


class Hostile(Exception):
    """An error of which nothing can be learned."""

    @property
    def retry_after(self) -> float:
        raise RuntimeError

    @property
    def response(self) -> Any:
        raise RuntimeError

    def add_note(self, note: str) -> None:
        raise RuntimeError

    def __str__(self) -> str:
        raise RuntimeError


def raises_that(error: BaseException) -> bool:
    raise Hostile


@pytest.mark.parametrize("error", [Hostile(), OSError()], ids=["hostile", "plain"])
@pytest.mark.parametrize("retry_on", [raises_that, None], ids=["raises", "all"])
@virtual
async def test_l10_an_error_of_any_class_ends_or_repeats_its_task(retry_on: Any, error: Exception) -> None:
    """Whatever its attributes do, the slot comes free and the task ends."""
    async with TaskPool(max_concurrent=1, retry_budget=0) as pool:
        handle = await pool.submit(Fails(error), retries=1, retry_on=retry_on, backoff=PAUSES)
        await asyncio.gather(handle, return_exceptions=True)
        assert handle.status == ("completed" if retry_on is None else "failed")
        assert pool.snapshot().active == 0


class Asks(Exception):
    def __init__(self, retry_after: Any) -> None:
        super().__init__()
        self.retry_after = retry_after


@pytest.mark.parametrize("asked", [-1, 1e300, 10**400, float("nan"), float("inf"), "9", True, None], ids=repr)
@virtual
async def test_l10_a_pause_that_cannot_be_meant_is_not_kept(asked: Any) -> None:
    work = Fails(Asks(asked))
    async with TaskPool() as pool:
        assert await pool.run(work, retries=1, backoff=PAUSES) == "done"
    assert work.gaps == [0.5]


@virtual
async def test_l10_a_retry_on_that_cancels_its_task_is_obeyed() -> None:
    handles: list[Any] = []
    work = Fails(OSError("once"), OSError("twice"))
    async with TaskPool(max_concurrent=1) as pool:
        handles.append(await pool.submit(work, retries=5, retry_on=lambda _: handles[0].cancel(), backoff=PAUSES))
        with pytest.raises(OSError, match="once"):
            await handles[0]
        assert len(work.at) == 1
        assert await pool.run(Fails()) == "done"


def test_l10_a_retry_on_that_is_interrupted_leaves_no_task_behind() -> None:
    handles: list[Any] = []

    def interrupted(error: BaseException) -> bool:
        raise KeyboardInterrupt

    async def main() -> None:
        async with TaskPool(max_concurrent=1) as pool:
            handles.append(await pool.submit(Fails(OSError()), retries=5, retry_on=interrupted))
            await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert handles[0].status == "failed"


@virtual
async def test_l10_a_story_does_not_take_a_pause_for_a_wait_behind_others() -> None:
    async with TaskPool(max_concurrent=1) as pool:
        handle = await pool.submit(Fails(OSError("boom")), retries=1, backoff=Backoff(9, jitter=False))
        await asyncio.sleep(2)
        assert "waits" not in handle.story()
        await pool.submit(asyncio.sleep, 10)
        await handle
    assert "attempt 1 ends: OSError: boom; again in 9 s\n" in handle.story()
    assert "waits 3.000 s for its turn behind other tasks" in handle.story()


@pytest.mark.parametrize("options", [{"backoff": 1}, {"retry_on": OSError}, {"retries": 0, "backoff": PAUSES}], ids=str)
@virtual
async def test_l10_a_backoff_without_retries_is_refused(options: Any) -> None:
    async with TaskPool() as pool:
        with pytest.raises(InvalidArgument, match="need retries"):
            await pool.submit(Fails(), **options)
        with pytest.raises(InvalidType, match="retry_on"):
            await pool.submit(Fails(), retries=1, retry_on="OSError")


# -- budgets -----------------------------------------------------------------------------------------------------------


@virtual
async def test_l11_an_outage_is_not_answered_with_a_storm() -> None:
    works = [Fails(*[OSError("down") for _ in range(4)]) for _ in range(500)]
    async with TaskPool(max_concurrent=50, retry_budget=0.2) as pool:
        handles = [await pool.submit(work, retries=3) for work in works]
        for handle in handles:
            with pytest.raises(OSError, match="down"):
                await handle
    tries = sum(len(work.at) for work in works)
    assert 500 + 10 <= tries <= 500 + 100
    with pytest.raises(OSError, match="down") as caught:
        await handles[-1]
    assert "the retry budget is spent" in caught.value.__notes__[0]


@virtual
async def test_l11_a_pool_with_little_to_do_may_repeat_ten() -> None:
    works = [Fails(OSError()) for _ in range(12)]
    async with TaskPool(max_concurrent=1, retry_budget=0.0) as pool:
        handles = [await pool.submit(work, retries=1) for work in works]
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        assert outcomes.count("done") == 10
        await asyncio.sleep(61)
        assert await pool.run(Fails(OSError()), retries=1) == "done", "a minute later they are forgotten"
    assert sum(len(work.at) for work in works) == 12 + 10


@virtual
async def test_l11_verdicts_count_and_the_error_says_why() -> None:
    work = [Fails(*[RetryOperation("down") for _ in range(5)]) for _ in range(60)]
    async with TaskPool(max_concurrent=5, resources=ResourcePool(["k1", "k2"]), retry_budget=0.1) as pool:
        handles = [await pool.submit(one, max_attempts=5) for one in work]
        for handle in handles:
            with pytest.raises(PoolExhausted):
                await handle
    assert sum(len(one.at) for one in work) == 60 + 10
    with pytest.raises(PoolExhausted, match="the retry budget is spent"):
        await handles[-1]


@virtual
async def test_l11_the_budget_of_a_resource_pool_counts_the_tasks_that_use_it() -> None:
    """A TaskPool without a budget has that of its resources: first attempts, verdicts and errors of tasks count."""
    for error in (RetryOperation("down"), OSError("down")):
        works = [Fails(error) for _ in range(50)]
        async with TaskPool(max_concurrent=5, resources=ResourcePool(["k1", "k2"], retry_budget=0.6)) as pool:
            handles = [await pool.submit(work, retries=1) for work in works]
            outcomes = await asyncio.gather(*handles, return_exceptions=True)
        assert sum(len(work.at) for work in works) == 50 + 30
        assert outcomes.count("done") == 30


@virtual
async def test_l11_siblings_that_were_cancelled_are_no_retries() -> None:
    """The oldest use of a key finds it rate-limited: the younger ones are cancelled, and begin again for nothing."""
    first = True

    async def work(key: Any) -> str:
        nonlocal first
        if first:
            first = False
            await asyncio.sleep(1)
            raise CooldownResource(5)
        await asyncio.sleep(3)
        return "done"

    async with TaskPool(max_concurrent=40, resources=ResourcePool(["k"]), retry_budget=0.0) as pool:
        handles = [await pool.submit(work) for _ in range(40)]
        assert [await handle for handle in handles] == ["done"] * 40


@virtual
async def test_l11_inside_a_task_the_budget_of_its_pool_counts() -> None:
    keys = ResourcePool(["k1", "k2", "k3"], retry_budget=100)
    tries = 0

    async def call(key: Any) -> None:
        nonlocal tries
        tries += 1
        raise RetryOperation("down")

    async def work() -> None:
        await keys.run(call, retry_delay=0)

    async with TaskPool(max_concurrent=2, retry_budget=0.1) as pool:
        for _ in range(40):
            with pytest.raises(PoolExhausted):
                await pool.run(work)
    assert tries == 40 + 10
