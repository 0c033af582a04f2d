"""A TaskPool with resources and workers, beside the plain TaskPool and beside plain calls on the same workers.

    make bench          three minutes
    make bench-quick    under 20 seconds

All contestants are ours. They take turns in one process and on the same two workers. A ratio is the median of the
ratios of neighbouring turns. It says how much of the rate is left when a pool decides which task is next and with which
key. The program prints MISSED for a figure that does not reach its minimum ("must"), and exits with 0 all the same.

Workers import the functions from this file by reference, so it runs as the module `combined` and not as `__main__`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import table
from table import MISSED, Bar, Contestant, Turns, median, per_second, so_many_each, times

import headgate
from headgate.resources import Resource, ResourcePool
from headgate.tasks import TaskPool, fair_round_robin

AT_A_TIME = 100
WORKERS = 2
TENANTS = [f"tenant-{number}" for number in range(10)]
FAIR = fair_round_robin("tenant_id")
REQUIREMENTS = (("eu",), ("us",))

LOCAL = Bar(0.58, 0.62)
REMOTE = Bar(1.0)
ON_TOP = Bar(35, 25, at_most=True)
"""Microseconds of CPU that a task with a key on a worker costs this process more than a plain dispatch."""

Submit = Callable[[Any, int], Awaitable[Any]]
"""Submits the task of that number to that pool and returns its handle."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tasks, calls and items are measured, and how often."""

    tasks: int
    calls: int
    items_here: int
    items: int
    queued: int
    rates: Turns
    waits: Turns


FULL = Lengths(
    tasks=100_000,
    calls=8_000,
    items_here=20_000,
    items=500,
    queued=50_000,
    rates=Turns(3, 0, time.process_time),  # nothing here waits
    waits=Turns(9, 0),
)
QUICK = Lengths(
    tasks=1_500,
    calls=600,
    items_here=1_000,
    items=40,
    queued=1_500,
    rates=Turns(5, 0, time.process_time),
    waits=Turns(5, 0),
)


async def measured(many: int, turns: Turns, contestants: Mapping[str, Contestant]) -> dict[str, list[float]]:
    """The rate per second, without the costs that only the first tasks have, such as imports on workers."""
    for work in contestants.values():
        await work(many // 5)
    return await so_many_each(dict.fromkeys(contestants, many), turns, contestants)


# -- what is run ------------------------------------------------------------------------------------------------------
# The functions with a parameter `key` are for pools with resources.


async def at_once(item: int) -> int:
    """An operation without work, so that only the cost of the pool is measured."""
    return item


async def at_once_with(key: Resource[str], item: int) -> int:
    return item


async def suspending(item: int) -> int:
    """An operation that suspends for one turn of the loop, the least that real work does."""
    await asyncio.sleep(0)
    return item


async def suspending_with(key: Resource[str], item: int) -> int:
    await asyncio.sleep(0)
    return item


OPERATIONS = {"returns at once": (at_once, at_once_with), "suspends once": (suspending, suspending_with)}


async def numbers(items: int) -> AsyncIterator[int]:
    for item in range(items):
        yield item


async def numbers_with(key: Resource[str], items: int) -> AsyncIterator[int]:
    for item in range(items):
        yield item


@headgate.routine
async def add(a: int, b: int) -> int:
    return a + b


@headgate.routine
async def add_with(key: Resource[str], a: int, b: int) -> int:
    return a + b


async def plain_add_with(key: Resource[str], a: int, b: int) -> int:
    return a + b


@headgate.routine
async def count(items: int) -> AsyncIterator[int]:
    for item in range(items):
        yield item


@headgate.routine
async def count_with(key: Resource[str], items: int) -> AsyncIterator[int]:
    for item in range(items):
        yield item


# -- pools ------------------------------------------------------------------------------------------------------------


def plain_pool() -> Any:
    return TaskPool(max_concurrent=AT_A_TIME, queue=FAIR)


def combined_pool(keys: ResourcePool[str] | None = None, workers: Any = None) -> Any:
    return TaskPool(max_concurrent=AT_A_TIME, queue=FAIR, resources=keys, workers=workers)


def one_key() -> ResourcePool[str]:
    return ResourcePool({"key-1": "sk"})


def twenty_keys(max_in_flight: int) -> ResourcePool[str]:
    return ResourcePool([Resource(f"key-{number}", "sk", max_in_flight) for number in range(20)])


def key_of_each_requirement() -> ResourcePool[str]:
    return ResourcePool([Resource(f"key-{tags[0]}", "sk", tags=tags) for tags in REQUIREMENTS])


def tenant_of(item: int) -> str:
    return TENANTS[item % len(TENANTS)]


def class_of(item: int) -> tuple[str, ...]:
    """Alternate the requirements, so that each tenant has tasks of both."""
    return REQUIREMENTS[item // len(TENANTS) % 2]


# -- from submit to the result, here ----------------------------------------------------------------------------------


def submitted(make: Callable[[], Any], submit: Submit) -> Contestant:
    """Submit all tasks, then await the result of each."""

    async def work(many: int) -> None:
        async with make() as pool:
            handles = [await submit(pool, item) for item in range(many)]
            if [await handle for handle in handles] != list(range(many)):
                raise SystemExit("a contestant lost results: its figures would mean nothing")

    return work


PLAIN = "plain pool"
ONE_KEY = "one key"


def contestants_of(plain: Any, keyed: Any) -> dict[str, Contestant]:
    def fair(pool: Any, item: int) -> Any:
        return pool.submit(keyed, item, tenant_id=tenant_of(item))

    return {
        PLAIN: submitted(plain_pool, lambda pool, item: pool.submit(plain, item, tenant_id=tenant_of(item))),
        ONE_KEY: submitted(lambda: combined_pool(one_key()), fair),
        "20 keys, 5 uses of each": submitted(lambda: combined_pool(twenty_keys(5)), fair),
        "20 keys, 1 use of each": submitted(lambda: combined_pool(twenty_keys(1)), fair),
        "two requirements": submitted(
            lambda: combined_pool(key_of_each_requirement()),
            lambda pool, item: pool.submit(keyed, item, tenant_id=tenant_of(item), tags=class_of(item)),
        ),
    }


async def measure_rates(lengths: Lengths) -> list[dict[str, Any]]:
    rows = []
    for kind, (plain, keyed) in OPERATIONS.items():
        table.say(f"{lengths.tasks:,} tasks, operation {kind} ...")
        contestants = contestants_of(plain, keyed)
        rates = await measured(lengths.tasks, lengths.rates, contestants)
        rows += rows_of(kind, rates, PLAIN, {ONE_KEY: LOCAL})
    return rows


# -- on workers -------------------------------------------------------------------------------------------------------


def called(call: Callable[[int], Awaitable[int]]) -> Contestant:
    """Keep the pool full: so many callers, each of which makes its next call as soon as it has a result."""

    async def work(many: int) -> None:
        left = iter(range(many))

        async def caller() -> None:
            for item in left:
                if await call(item) != 3:
                    raise AssertionError("a contestant adds wrongly: its figures would mean nothing")

        await asyncio.gather(*[caller() for _ in range(AT_A_TIME)])

    return work


def through(pool: Any, fn: Any) -> Contestant:
    submit = pool.submit

    async def call(item: int) -> int:
        handle = await submit(fn, 1, 2, tenant_id=tenant_of(item))
        return await handle  # type: ignore[no-any-return]

    return called(call)


DISPATCH = "plain dispatch"
BY_HAND = "plain pool, its tasks take a key and dispatch"
KEYED = "workers, one key"


async def measure_calls(lengths: Lengths, workers: Any) -> dict[str, list[dict[str, Any]]]:
    table.say(f"{AT_A_TIME} callers, {WORKERS} workers ...")
    keys = one_key()

    async def by_hand(a: int, b: int) -> int:
        return await keys.run(lambda key: add_with(key, a, b))

    async with (
        plain_pool() as plain,
        combined_pool(None, workers) as pool,
        combined_pool(one_key(), workers) as keyed,
        combined_pool(twenty_keys(5), workers) as limited,
    ):
        contestants = {
            DISPATCH: called(lambda _: add(1, 2)),
            "plain pool, its tasks dispatch": through(plain, add),
            BY_HAND: through(plain, by_hand),
            "workers": through(pool, add),
            KEYED: through(keyed, add_with),
            "the same, not a routine": through(keyed, plain_add_with),
            "workers, 20 keys, 5 uses of each": through(limited, add_with),
        }
        rates = await measured(lengths.calls, lengths.waits, contestants)
        some = {who: contestants[who] for who in (DISPATCH, BY_HAND, KEYED)}
        spent = await measured(lengths.calls, Turns(lengths.waits.rounds, 0, time.process_time), some)
    rows = rows_of("add(1, 2)", rates, DISPATCH, {})
    rows += rows_of("add(1, 2)", {who: rates[who] for who in (BY_HAND, KEYED)}, BY_HAND, {KEYED: REMOTE})
    return {"calls": rows, "cpu": on_top(spent)}


def on_top(rates: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """The CPU of this process for one call, and how much more that is than for a plain dispatch."""
    rows = []
    for who, rounds in rates.items():
        more = median([1e6 / rate - 1e6 / plain for rate, plain in zip(rounds, rates[DISPATCH], strict=True)])
        row: dict[str, Any] = {"who": who, "us": 1e6 / median(rounds), "more": more}
        if who == KEYED:
            row |= {"must": ON_TOP.must, "verdict": ON_TOP.verdict(more)}
        rows.append(row)
    return rows


# -- streams ----------------------------------------------------------------------------------------------------------


def streamed(stream: Callable[[int], AsyncIterator[int]]) -> Contestant:
    """One stream of so many items."""

    async def work(many: int) -> None:
        got = 0
        async for _ in stream(many):
            got += 1
        if got != many:
            raise AssertionError("a contestant lost items: its figures would mean nothing")

    return work


async def measure_local_streams(lengths: Lengths) -> list[dict[str, Any]]:
    table.say("streams, here ...")
    async with plain_pool() as plain, combined_pool(one_key()) as keyed:
        contestants = {
            "bare generator": streamed(numbers),
            PLAIN: streamed(lambda many: plain.stream(numbers, many, tenant_id="one")),
            ONE_KEY: streamed(lambda many: keyed.stream(numbers_with, many, tenant_id="one")),
        }
        rates = await measured(lengths.items_here, lengths.rates, contestants)
    return rows_of("here", rates, "bare generator", {})


async def measure_streams(lengths: Lengths, workers: Any) -> list[dict[str, Any]]:
    table.say(f"streams, {WORKERS} workers ...")
    async with combined_pool(None, workers) as pool, combined_pool(one_key(), workers) as keyed:
        contestants = {
            DISPATCH: streamed(count),
            "workers": streamed(lambda many: pool.stream(count, many, tenant_id="one")),
            "workers, one key": streamed(lambda many: keyed.stream(count_with, many, tenant_id="one")),
        }
        rates = await measured(lengths.items, lengths.waits, contestants)
    return rows_of("on a worker", rates, DISPATCH, {})


# -- bytes ------------------------------------------------------------------------------------------------------------


async def measure_bytes(size: int) -> list[dict[str, Any]]:
    """Bytes of one more queued task, without the values of its arguments, its key and the caller's list."""
    table.say("bytes per queued task ...")

    def plainly(pool: Any, item: int) -> Any:
        return pool.submit(at_once, item, tenant_id=tenant_of(item))

    def fairly(pool: Any, item: int) -> Any:
        return pool.submit(at_once_with, item, tenant_id=tenant_of(item))

    def tagged(pool: Any, item: int) -> Any:
        return pool.submit(at_once_with, item, tenant_id=tenant_of(item), tags=class_of(item))

    figures = {
        PLAIN: await _queued(TaskPool(max_concurrent=1, queue=FAIR), plainly, size),
        ONE_KEY: await _queued(TaskPool(max_concurrent=1, queue=FAIR, resources=one_key()), fairly, size),
        "two requirements": await _queued(
            TaskPool(max_concurrent=1, queue=FAIR, resources=key_of_each_requirement()), tagged, size
        ),
    }
    limited = ResourcePool([Resource("key-1", "sk", max_in_flight=1)])
    figures["one key, in use elsewhere"] = await _queued(combined_pool(limited), fairly, size, taken=limited)
    return [{"who": who, "bytes": figure, "ratio": figure / figures[PLAIN]} for who, figure in figures.items()]


async def _queued(pool: Any, submit: Submit, size: int, taken: ResourcePool[str] | None = None) -> float:
    """Queue tasks while the only slot, or the only resource, is held."""
    items, handles, release = list(range(size)), [None] * size, asyncio.Event()

    async def hold(*_: object) -> None:
        await release.wait()

    async def hold_resource(keys: ResourcePool[str]) -> None:
        async with keys.lease():
            await release.wait()

    async with pool:
        holding = asyncio.ensure_future(hold_resource(taken)) if taken is not None else await pool.submit(hold)
        await asyncio.sleep(0)
        with _traced() as used:
            for item in items:
                handles[item] = await submit(pool, item)
        assert pool.size() == size + (taken is None), "all of them are queued"
        release.set()
        await holding
    return used[0] / size


@contextmanager
def _traced() -> Iterator[list[int]]:
    used = [0]
    gc.collect()
    tracemalloc.start()
    try:
        yield used
        gc.collect()
        used[0], _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


# -- tables -----------------------------------------------------------------------------------------------------------


def rows_of(
    what: str, rates: Mapping[str, Sequence[float]], beside: str, bars: Mapping[str, Bar]
) -> list[dict[str, Any]]:
    """One row for each contestant. Neighbouring turns are compared, because other load disturbs them alike."""
    rows = []
    for who, rounds in rates.items():
        ratio = median([figure / other for figure, other in zip(rounds, rates[beside], strict=True)])
        row = {"what": what, "who": who, "beside": beside, "rate": median(rounds), "ratio": ratio, "rounds": rounds}
        if (bar := bars.get(who)) is not None:
            row |= {"must": bar.must, "verdict": bar.verdict(ratio)}
        rows.append(row)
    return rows


def show(title: str, unit: str, rows: Sequence[dict[str, Any]]) -> None:
    header = ("what", "who", f"{unit}s /s", f"us per {unit}", "ratio", "beside", "must", "verdict")
    print_rows = [
        (
            row["what"],
            row["who"],
            per_second(row["rate"]),
            f"{1e6 / row['rate']:.2f}",
            times(row["ratio"]),
            row["beside"],
            f"{row['must']}x" if "must" in row else "-",
            row.get("verdict", "-"),
        )
        for row in rows
    ]
    table.print_table(title, header, print_rows)


def show_bytes(rows: Sequence[dict[str, Any]]) -> None:
    print_rows = [(row["who"], f"{row['bytes']:,.0f}", times(row["ratio"])) for row in rows]
    table.print_table(f"Bytes per queued task, beside the {PLAIN}", ("who", "bytes", "ratio"), print_rows)


def show_cpu(rows: Sequence[dict[str, Any]]) -> None:
    header = ("who", "us of this process", "more", "must", "verdict")
    print_rows = [
        (
            row["who"],
            f"{row['us']:.1f}",
            f"{row['more']:.1f}",
            f"{row['must']} us" if "must" in row else "-",
            row.get("verdict", "-"),
        )
        for row in rows
    ]
    table.print_table(f"CPU of the client for one call, beside {DISPATCH}", header, print_rows)


def missed(results: dict[str, Any]) -> list[str]:
    """Every must that was not reached, in words."""
    return [
        f"{row['what']}, {row['who']}: {times(row['ratio'])} of {row['beside']}, must {row['must']}x"
        for part in ("rates", "calls")
        for row in results[part]
        if row.get("verdict") == MISSED
    ] + [
        f"{row['who']}: {row['more']:.1f} us on top of {DISPATCH}, must {row['must']} us"
        for row in results["cpu"]
        if row.get("verdict") == MISSED
    ]


async def measure(lengths: Lengths) -> dict[str, Any]:
    results: dict[str, Any] = {
        "rates": await measure_rates(lengths),
        "bytes": await measure_bytes(lengths.queued),
        "streams": await measure_local_streams(lengths),
    }
    async with headgate.WorkerPool(spawn=WORKERS) as workers:
        results |= await measure_calls(lengths, workers)
        results["streams"] += await measure_streams(lengths, workers)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    quick = parser.parse_args().quick
    lengths = QUICK if quick else FULL
    results: dict[str, Any] = {"quick": quick, **asyncio.run(measure(lengths))}
    title = f"Submit to result, {lengths.tasks:,} tasks of {len(TENANTS)} tenants, {AT_A_TIME} at a time, run here"
    show(title, "task", results["rates"])
    show(f"{WORKERS} workers, {AT_A_TIME} callers, each doing one call after the other", "call", results["calls"])
    show_cpu(results["cpu"])
    show("One stream, pulled one by one", "item", results["streams"])
    show_bytes(results["bytes"])
    path = table.keep("combined", results)
    print(f"\nMedians, in turns. Kept in {path.parent.parent.name}/results/{path.name}.")
    if quick:
        print(f"note: the targets are about {FULL.tasks:,} tasks; among fewer the collector has less to do")
    table.warn_if_busy()
    if words := missed(results):
        print("MISSED: " + "; ".join(words) + ".")
    else:
        print("Every must is reached.")


if __name__ == "__main__":
    import combined

    combined.main()
