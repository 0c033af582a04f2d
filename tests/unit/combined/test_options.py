"""What is refused, and how it is said: wrong pools, wrong options, wrong functions. Nothing is taken for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import headgate
import headgate.tasks
from headgate import (
    HeadgateError,
    InvalidArgument,
    InvalidType,
    PoolClosed,
    Resource,
    ResourcePool,
    TaskPool,
    WorkerPool,
    fair_round_robin,
    fair_share,
    pool_create,
    pool_get,
    pool_list,
)
from headgate.sharing.memory import SharedMemory
from headgate.stores import MemoryStore
from headgate.testing import run, virtual
from tests.support.combined.support import Key, counts, exclusive, free, hold, shared, tagged, use, which

OWN = {"tags": ["x"], "exclude": ["a"], "affinity": "ada", "max_attempts": 2}
"""The options that only a pool with resources has, each with a value that is fine."""


@pytest.fixture(autouse=True)
def leaves_no_pool_behind() -> Iterator[None]:
    before = pool_list()
    yield
    for pool in pool_list():
        if pool not in before:
            run(pool.close(cancel=True))


# -- making --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        "keys",
        b"keys",
        3,
        True,
        ["sk-hush"],
        {"a": "sk-hush"},
        Resource("a", "sk-hush"),
        ResourcePool,
        object(),
        lambda: None,
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_line_resources_must_be_a_pool_of_resources(bad: Any) -> None:
    with pytest.raises(InvalidType, match="resources") as caught:
        TaskPool("refused", resources=bad)
    assert pool_get("refused") is None, "nothing is half made"
    assert "sk-hush" not in str(caught.value), "what was given may hold a secret"


@pytest.mark.parametrize(
    "bad", ["workers", 4, 0, True, [], {}, WorkerPool, object()], ids=lambda bad: type(bad).__name__
)
def test_line_workers_must_be_a_pool_of_workers(bad: Any) -> None:
    with pytest.raises(InvalidType, match="workers"):
        TaskPool("refused", workers=bad)
    assert pool_get("refused") is None


def test_line_one_pool_is_not_taken_for_another() -> None:
    keys, workers, tasks = shared("a"), WorkerPool(spawn=1), TaskPool("tasks")
    with pytest.raises(InvalidType, match="resources"):
        TaskPool("refused", resources=workers)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="resources"):
        TaskPool("refused", resources=tasks)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="workers"):
        TaskPool("refused", workers=keys)  # type: ignore[arg-type]
    assert pool_get("refused") is None


class Runs:
    """A runner, as far as anybody can see."""

    def reserve(self, task: Any) -> object:
        return self

    def on_ready(self, callback: Any) -> None:
        pass

    def release(self, permit: Any) -> None:
        pass

    async def run(self, task: Any, permit: Any) -> Any:
        return await task.fn(*task.args)


@pytest.mark.parametrize("which_one", ["resources", "workers", "both"])
def test_line_a_runner_of_your_own_goes_with_neither(which_one: str) -> None:
    given: dict[str, Any] = {}
    if which_one != "workers":
        given["resources"] = shared("a")
    if which_one != "resources":
        given["workers"] = WorkerPool(spawn=1)
    with pytest.raises(InvalidArgument, match="runner"):
        TaskPool("refused", runner=Runs(), **given)
    assert pool_get("refused") is None


@virtual
async def test_line_a_runner_alone_is_fine() -> None:
    async def body(number: int) -> int:
        return number

    async with TaskPool(runner=Runs()) as pool:
        assert await (await pool.submit(body, 3)) == 3


def test_line_it_is_made_without_a_loop_and_takes_nothing() -> None:
    keys = exclusive("a")
    pool = TaskPool("made", max_concurrent=3, resources=keys)
    assert pool_get("made") is pool
    assert free(keys)
    assert pool.size() == 0


@virtual
async def test_line_none_is_none() -> None:
    async def body() -> str:
        return "no key"

    async with TaskPool(resources=None, workers=None) as pool:
        assert await (await pool.submit(body)) == "no key"


@pytest.mark.parametrize("how", ["keywords", "mapping"])
@virtual
async def test_t01_pool_create_makes_the_same(how: str) -> None:
    keys = shared("a")
    pool = pool_create(name="made", resources=keys) if how == "keywords" else pool_create({"resources": keys})
    assert type(pool) is TaskPool
    async with pool:
        assert await (await pool.submit(which)) == "a"


def test_t01_pool_create_checks_them_too() -> None:
    with pytest.raises(InvalidType, match="resources"):
        pool_create(name="refused", resources=["sk-hush"])
    with pytest.raises(InvalidType, match="workers"):
        pool_create({"name": "refused", "workers": 4})
    with pytest.raises(InvalidArgument, match="resources"):
        pool_create(name="refused", resorces=shared("a"))  # the nearest that is known is named
    assert pool_get("refused") is None


def test_line_other_bad_arguments_are_refused_as_before() -> None:
    keys = shared("a")
    with pytest.raises(InvalidArgument, match="max_concurrent"):
        TaskPool("refused", max_concurrent=0, resources=keys)
    with pytest.raises(InvalidArgument, match="queue"):
        TaskPool("refused", queue="random", resources=keys)
    with pytest.raises(TypeError):
        TaskPool("refused", resources=keys, resource=keys)  # type: ignore[call-arg]
    assert pool_get("refused") is None


@pytest.mark.parametrize("name", sorted(OWN))
@pytest.mark.parametrize("strategy", [fair_round_robin, fair_share])
def test_t10_an_option_of_the_line_cannot_be_the_fairness_key(strategy: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        TaskPool("refused", queue=strategy(name), resources=shared("a"))
    assert pool_get("refused") is None


# -- submitting ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["submit", "submit_nowait", "map"])
@pytest.mark.parametrize("name", sorted(OWN))
@virtual
async def test_line_options_for_keys_need_a_pool_that_has_some(name: str, how: str) -> None:
    async def body(*_: Any) -> None:
        raise AssertionError("it must not run")

    async with TaskPool() as pool:
        with pytest.raises(InvalidArgument, match=name):
            await _ask(pool, how, body, **{name: OWN[name]})
        assert pool.snapshot().total == 0


async def _ask(pool: TaskPool, how: str, fn: Any, *args: Any, **options: Any) -> Any:
    if how == "submit":
        return await (await pool.submit(fn, *args, **options))
    if how == "submit_nowait":
        return await pool.submit_nowait(fn, *args, **options)
    return [one async for one in pool.map(fn, [*args, 0], **options)]


@virtual
async def test_line_options_for_keys_are_fine_where_there_are_some() -> None:
    keys = tagged(None, a="x", b="x")
    async with TaskPool(resources=keys) as pool:
        assert await (await pool.submit(which, **OWN)) == "b"
        assert await pool.submit_nowait(which, **OWN) == "b"
        assert [one async for one in pool.map(which, range(2), **OWN)] == ["b", "b"]
    assert free(keys)


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        *[("tags", bad) for bad in ("gpu", b"gpu", 3, [1], [None], ["a", 2], True)],
        *[("exclude", bad) for bad in ("a", 3, [1], [None], True)],
    ],
)
@virtual
async def test_line_tags_and_exclude_are_collections_of_strings(option: str, bad: Any) -> None:
    keys = tagged(a="gpu")
    async with TaskPool(resources=keys) as pool:
        for how in ("submit", "submit_nowait"):
            with pytest.raises(InvalidType, match=option):
                await _ask(pool, how, use, **{option: bad})
        assert pool.snapshot().total == 0
    assert free(keys)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", True, [3], float("inf"), float("nan")])
@virtual
async def test_line_max_attempts_is_checked(bad: Any) -> None:
    keys = shared("a")
    async with TaskPool(resources=keys) as pool:
        with pytest.raises(InvalidArgument, match="max_attempts must be >= 1"):
            await pool.submit(use, max_attempts=bad)
        with pytest.raises(InvalidArgument, match="max_attempts must be >= 1"):
            pool.submit_nowait(use, max_attempts=bad)
        assert pool.snapshot().total == 0
    assert free(keys)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("tag", "tags"),
        ("excludes", "exclude"),
        ("affinty", "affinity"),
        ("max_attempt", "max_attempts"),
        ("prioritty", "priority"),
        ("tenantid", "tenant_id"),
    ],
)
@virtual
async def test_t10_an_unknown_option_is_refused_with_the_nearest(wrong: str, meant: str) -> None:
    keys = shared("a")
    async with TaskPool(queue=fair_round_robin("tenant_id"), resources=keys) as pool:
        for how in ("submit", "submit_nowait"):
            with pytest.raises(InvalidArgument, match=f"(?i)did you mean {meant}") as caught:
                await _ask(pool, how, use, **{wrong: 1})
            assert wrong in str(caught.value)
        assert pool.snapshot().total == 0
    assert free(keys)


@pytest.mark.parametrize(
    "name", ["wait_for_capacity", "wait_for_cooldown", "retry_delay", "request_id", "within", "isolate", "resources"]
)
@virtual
async def test_line_options_of_the_keys_own_run_are_not_the_lines(name: str) -> None:
    keys = shared("a")
    async with TaskPool(resources=keys) as pool:
        with pytest.raises(InvalidArgument, match=name):
            await pool.submit(use, **{name: 1})
        assert pool.snapshot().total == 0
    assert free(keys)


@pytest.mark.parametrize(
    ("option", "bad"), [("priority", "3"), ("timeout", -1), ("ttl", 0), ("retries", -1), ("key", []), ("labels", 3)]
)
@virtual
async def test_t10_the_other_options_are_checked_as_before(option: str, bad: Any) -> None:
    keys = exclusive("a")
    async with TaskPool(resources=keys) as pool:
        with pytest.raises(HeadgateError, match=option):
            await pool.submit(use, tags=[], **{option: bad})
        assert pool.snapshot().total == 0
        assert await (await pool.submit(which)) == "a"
    assert free(keys)


async def _numbers(key: Key) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("bad", [3, "review", None, ["fn"], _numbers], ids=lambda bad: type(bad).__name__)
@virtual
async def test_t17_what_cannot_be_called_is_refused(bad: Any) -> None:
    keys = exclusive("a")
    async with TaskPool(resources=keys) as pool:
        for how in ("submit", "submit_nowait"):
            with pytest.raises(InvalidType):
                await _ask(pool, how, bad)
        assert pool.snapshot().total == 0
    assert free(keys)


@virtual
async def test_t17_a_coroutine_object_is_refused_with_the_remedy() -> None:
    keys = exclusive("a")
    async with TaskPool(resources=keys) as pool:
        with pytest.raises(InvalidType, match="called already"):
            await pool.submit(asyncio.sleep(0))  # type: ignore[call-overload]
        assert pool.snapshot().total == 0
    assert free(keys)


@virtual
async def test_t01b_a_closed_pool_takes_no_key() -> None:
    keys = exclusive("a")
    pool = TaskPool(resources=keys)
    assert await (await pool.submit(which)) == "a"
    await pool.close()
    with pytest.raises(PoolClosed):
        await pool.submit(which)
    assert free(keys)


@virtual
async def test_t11_submit_nowait_of_a_durable_line_names_submit_and_takes_nothing() -> None:
    keys = exclusive("a")
    async with TaskPool("durable", scope="pipeline", pipeline_id="p", store=MemoryStore(), resources=keys) as pool:
        with pytest.raises(InvalidArgument, match=r"submit\("):
            pool.submit_nowait(which)
        assert free(keys)
        assert await (await pool.submit(which)) == "a"


@virtual
async def test_line_refusals_while_tasks_wait_change_nothing_for_them() -> None:
    keys = exclusive("a")
    async with TaskPool(max_concurrent=3, resources=keys) as pool:
        handles = [await pool.submit(hold, 1, number) for number in range(3)]
        for bad in ({"tags": "a"}, {"max_attempts": 0}, {"zzz": 1}, {"exclude": 3}):
            with pytest.raises(HeadgateError):
                await pool.submit(use, **bad)
        assert counts(pool) == {"active": 1, "queued": 2}
        assert [await handle for handle in handles] == [0, 1, 2]
    assert free(keys)


@virtual
async def test_r07_the_value_of_a_key_is_in_nothing_that_the_pool_shows() -> None:
    keys = exclusive("a")
    async with TaskPool("shown", max_concurrent=2, resources=keys) as pool:
        handles = [await pool.submit(hold, 1), await pool.submit(hold, 1)]
        shown = [repr(pool), str(pool), repr(pool.snapshot()), repr(pool.stats())]
        shown += [text for handle in handles for text in (repr(handle), str(handle.snapshot()))]
        assert all("secret-" not in text for text in shown)
        assert "shown" in shown[0]


def test_g16_fencing_is_refused_where_tasks_run_on_workers() -> None:
    with pytest.raises(InvalidArgument, match="not known on a worker") as caught:
        TaskPool(
            "fenced",
            scope="org",
            scope_id="acme",
            store=SharedMemory().member(),  # type: ignore[arg-type]
            workers=headgate.WorkerPool(),
            fencing=True,
        )
    assert "current_task().fence" in str(caught.value.remedy)
    assert headgate.pool_get("fenced") is None
