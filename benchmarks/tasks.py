"""Task pools beside what asyncio has: from `submit` to the result, bytes, growth, and the journal beside a raw one.

    make bench          four minutes
    make bench-quick    under a minute

All contestants take turns in one run, and only ratios count. "must" and "goal" are the minimum and the goal of the
project's performance targets. The program prints MISSED for a figure that does not reach its minimum ("must"), and
exits with 0 all the same.

The garbage collector is on, except where a table says otherwise. It visits a million queued tasks again and again, and
that is part of what a task costs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import table
from table import MISSED, Bar, Contestant, Turns, in_turns, median, per_second, so_many_each, times

from headgate.stores import JsonLinesStore
from headgate.tasks import Strategy, TaskPool, fair_round_robin, fair_share, priority

AT_A_TIME = 100
TENANTS = [f"tenant-{number}" for number in range(10)]
PEER = "TaskGroup + Semaphore"
JUDGED = "fair_round_robin"

BARS = {"returns at once": Bar(0.9, 1.0), "suspends once": Bar(1.5, 1.8)}
BYTES = Bar(350, 300, at_most=True)
GROWTH = Bar(1.5, at_most=True)
JOURNAL = Bar(0.5, 0.8)

Work = Callable[[int], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much is measured."""

    tasks: int
    rates: Turns
    large: tuple[int, int]
    """Tasks and keys of the large pool whose cost per task is compared with that of the small one."""
    growth: Turns
    idle: Turns
    submits: int
    journal: Turns


SMALL = (1_000, 10)
FULL = Lengths(
    tasks=100_000,
    rates=Turns(5, 0, time.process_time),  # nothing here waits
    large=(1_000_000, 100_000),
    growth=Turns(3, 0, time.process_time),
    idle=Turns(11, 0.25, time.process_time),
    submits=40_000,
    journal=Turns(7, 0),  # a disk is waited for
)
QUICK = Lengths(
    tasks=20_000,
    rates=Turns(5, 0, time.process_time),
    large=(100_000, 10_000),
    growth=Turns(3, 0, time.process_time),
    idle=Turns(7, 0.1, time.process_time),
    submits=10_000,
    journal=Turns(5, 0),
)


async def at_once(item: int) -> int:
    """An operation without work, so that only the cost of the pool is measured."""
    return item


async def suspending(item: int) -> int:
    """An operation that suspends for one turn of the loop, the least that real work does."""
    await asyncio.sleep(0)
    return item


OPERATIONS: dict[str, Work] = dict(zip(BARS, (at_once, suspending), strict=True))


# -- contestants ------------------------------------------------------------------------------------------------------
# Each runs `count` tasks, at most AT_A_TIME at a time, and has the result of every one of them at its end.


def task_group(operation: Work) -> Contestant:
    """What a user can write without a pool: no order, no limits, and a result for each task."""

    async def work(count: int) -> None:
        room = asyncio.Semaphore(AT_A_TIME)

        async def limited(item: int) -> int:
            async with room:
                return await operation(item)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(limited(item)) for item in range(count)]
        _check([task.result() for task in tasks])

    return work


def workers(operation: Work) -> Contestant:
    """A queue with priorities, so many workers, and a future for each result. No limits, no cancelling of one."""

    async def work(count: int) -> None:
        queue: asyncio.PriorityQueue[tuple[int, int, asyncio.Future[int]]] = asyncio.PriorityQueue()
        loop = asyncio.get_running_loop()

        async def worker() -> None:
            while True:
                _, item, future = await queue.get()
                try:
                    future.set_result(await operation(item))
                except Exception as error:
                    future.set_exception(error)

        crew = [asyncio.create_task(worker()) for _ in range(AT_A_TIME)]
        futures = [loop.create_future() for _ in range(count)]
        for item, future in enumerate(futures):
            await queue.put((item % 10, item, future))
        _check([await future for future in futures])
        for one in crew:
            one.cancel()
        await asyncio.gather(*crew, return_exceptions=True)

    return work


def by_priority(operation: Work) -> Contestant:
    async def work(count: int) -> None:
        async with TaskPool("bench", max_concurrent=AT_A_TIME, queue=priority()) as pool:
            handles = [await pool.submit(operation, item, priority=item % 10) for item in range(count)]
            _check([await handle for handle in handles])

    return work


def by_tenant(operation: Work, strategy: Strategy, tenants: list[str]) -> Contestant:
    async def work(count: int) -> None:
        many = len(tenants)
        async with TaskPool("bench", max_concurrent=AT_A_TIME, queue=strategy) as pool:
            handles = [await pool.submit(operation, item, tenant_id=tenants[item % many]) for item in range(count)]
            _check([await handle for handle in handles])

    return work


def _check(results: list[int]) -> None:
    if results != list(range(len(results))):
        raise SystemExit("a contestant lost results: its figures would mean nothing")


def contestants_of(operation: Work) -> dict[str, Contestant]:
    return {
        PEER: task_group(operation),
        "PriorityQueue + workers": workers(operation),
        "priority": by_priority(operation),
        JUDGED: by_tenant(operation, fair_round_robin("tenant_id"), TENANTS),
        "fair_share": by_tenant(operation, fair_share("tenant_id"), TENANTS),
    }


# -- from submit to the result ----------------------------------------------------------------------------------------


async def measure_rates(lengths: Lengths) -> list[dict[str, Any]]:
    rows = []
    for kind, operation in OPERATIONS.items():
        table.say(f"{lengths.tasks:,} tasks, operation {kind} ...")
        contestants = contestants_of(operation)
        for work in contestants.values():
            await work(1_000)  # warm
        counts = dict.fromkeys(contestants, lengths.tasks)
        rates = await so_many_each(counts, lengths.rates, contestants)
        peer = median(rates[PEER])
        for name, rounds in rates.items():
            rate, bar = median(rounds), BARS[kind]
            row = {"operation": kind, "who": name, "rate": rate, "ratio": rate / peer, "rounds": rounds}
            if name == JUDGED:
                row |= {"must": bar.must, "goal": bar.goal, "verdict": bar.verdict(rate / peer)}
            rows.append(row)
    return rows


def show_rates(lengths: Lengths, rows: list[dict[str, Any]]) -> None:
    header = ("operation", "who", "tasks /s", "us per task", "ratio", "must", "goal", "verdict")
    print_rows = [
        (
            row["operation"],
            row["who"],
            per_second(row["rate"]),
            f"{1e6 / row['rate']:.2f}",
            times(row["ratio"]),
            *_bar(row, "{}x"),
        )
        for row in rows
    ]
    table.print_table(
        f"Submit to result, {lengths.tasks:,} tasks, {AT_A_TIME} at a time, beside {PEER}", header, print_rows
    )


# -- bytes ------------------------------------------------------------------------------------------------------------


async def measure_bytes(size: int = 50_000) -> list[dict[str, Any]]:
    """Bytes of one more queued task, without the values of its arguments, its key and the caller's list."""
    table.say("bytes per queued task ...")
    fair = fair_round_robin("tenant_id")
    waiting = {
        "fair_round_robin, 10 tenants": lambda *args: _queued_here(fair, TENANTS, *args),
        "fair_round_robin, a tenant each": lambda *args: _queued_here(fair, [f"one-{n}" for n in range(size)], *args),
        "priority": lambda *args: _queued_here(priority(), [], *args),
        PEER: _queued_at_semaphore,
        "PriorityQueue + workers": _queued_in_queue,
    }
    rows = []
    for who, make in waiting.items():
        figure = await make(list(range(size)), [None] * size) / size
        judged = who not in (PEER, "PriorityQueue + workers")
        verdict = {"must": BYTES.must, "goal": BYTES.goal, "verdict": BYTES.verdict(figure)} if judged else {}
        rows.append({"who": who, "bytes": figure} | verdict)
    return rows


async def _queued_here(strategy: Strategy, tenants: list[str], items: list[int], handles: list[Any]) -> int:
    release = asyncio.Event()
    async with TaskPool("bench", max_concurrent=1, queue=strategy) as pool:
        await pool.submit(release.wait)
        with _traced() as used:
            for item in items:
                option = {"tenant_id": tenants[item % len(tenants)]} if tenants else {"priority": item % 10}
                handles[item] = await pool.submit(at_once, item, **option)
        assert pool.size() == len(items) + 1, "all but the first are queued"
        release.set()
    return used[0]


async def _queued_at_semaphore(items: list[int], tasks: list[Any]) -> int:
    room = asyncio.Semaphore(1)

    async def limited(item: int) -> int:
        async with room:
            return await at_once(item)

    await room.acquire()
    async with asyncio.TaskGroup() as group:
        with _traced() as used:
            for item in items:
                tasks[item] = group.create_task(limited(item))
            await asyncio.sleep(0)  # now each waits at the semaphore
            await asyncio.sleep(0)
        room.release()
    return used[0]


async def _queued_in_queue(items: list[int], futures: list[Any]) -> int:
    """Queue items with a future for each, which a user needs to get the results."""
    queue: asyncio.PriorityQueue[tuple[int, int, asyncio.Future[int]]] = asyncio.PriorityQueue()
    loop = asyncio.get_running_loop()
    with _traced() as used:
        for item in items:
            futures[item] = loop.create_future()
            queue.put_nowait((item % 10, item, futures[item]))
    return used[0]


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


def show_bytes(rows: list[dict[str, Any]]) -> None:
    print_rows = [(row["who"], f"{row['bytes']:,.0f}", *_bar(row, "{}")) for row in rows]
    table.print_table("Bytes per queued task", ("who", "bytes", "must", "goal", "verdict"), print_rows)


# -- growth -----------------------------------------------------------------------------------------------------------


async def measure_growth(lengths: Lengths) -> list[dict[str, Any]]:
    """The cost of a task among very many tasks and keys, compared with few tasks and keys."""
    large, small = lengths.large, SMALL
    repeats = max(1, large[0] // small[0] // 5)
    contestants = {}
    for name, (_, keys), again in (("small", small, repeats), ("large", large, 1)):
        tenants = [f"tenant-{number}" for number in range(keys)]
        contestants[name] = _again(by_tenant(at_once, fair_round_robin("tenant_id"), tenants), again)
    counts = {"small": repeats * small[0], "large": large[0]}
    rows = []
    for collector in ("on", "off"):
        table.say(f"{large[0]:,} tasks over {large[1]:,} keys beside {small[0]:,} over {small[1]}, gc {collector} ...")
        (gc.enable if collector == "on" else gc.disable)()
        try:
            rates = await so_many_each(counts, lengths.growth, contestants)
        finally:
            gc.enable()
        costs = {name: 1e6 / median(rounds) for name, rounds in rates.items()}
        ratio = costs["large"] / costs["small"]
        verdict = {"must": GROWTH.must, "verdict": GROWTH.verdict(ratio)} if collector == "on" else {}
        rows.append({"collector": collector, "ratio": ratio, "rounds": rates} | costs | verdict)
    return rows


def _again(work: Contestant, repeats: int) -> Contestant:
    async def repeated(count: int) -> None:
        for _ in range(repeats):
            await work(count // repeats)

    return repeated


def show_growth(lengths: Lengths, rows: list[dict[str, Any]]) -> None:
    (many, keys), (few, least) = lengths.large, SMALL
    header = ("gc", f"{few:,} over {least}: us", f"{many:,} over {keys:,}: us", "ratio", "must", "goal", "verdict")
    print_rows = [
        (row["collector"], f"{row['small']:.2f}", f"{row['large']:.2f}", times(row["ratio"]), *_bar(row, "at most {}x"))
        for row in rows
    ]
    table.print_table("Submit to result, per task, as queue and keys grow (fair_round_robin)", header, print_rows)


# -- the journal ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RawLog:
    """The upper limit: many callers append lines, and one thread writes and syncs them in groups."""

    path: Path
    _group: tuple[list[bytes], list[asyncio.Future[None]]] = field(default_factory=lambda: ([], []))
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _done: bool = False

    async def append(self, line: bytes) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            lines, futures = self._group
            lines.append(line)
            futures.append(future)
            if len(lines) == 1:
                self._changed.notify()
        await future

    def write_groups(self, loop: asyncio.AbstractEventLoop) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            while True:
                with self._changed:
                    while not self._group[0] and not self._done:
                        self._changed.wait()
                    (lines, futures), self._group = self._group, ([], [])
                if not lines:
                    return
                os.write(file, b"".join(lines))
                os.fdatasync(file)
                loop.call_soon_threadsafe(_wake, futures)
        finally:
            os.close(file)

    def stop(self) -> None:
        with self._changed:
            self._done = True
            self._changed.notify()


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        future.set_result(None)


async def _from_all_sides(count: int, step: Callable[[int], Awaitable[object]]) -> float:
    """AT_A_TIME submitters, each doing its part one by one. Seconds until the last one is through."""

    async def submitter(first: int) -> None:
        for item in range(first, count, AT_A_TIME):
            await step(item)

    start = time.perf_counter()
    await asyncio.gather(*(submitter(first) for first in range(AT_A_TIME)))
    return time.perf_counter() - start


async def _raw(folder: Path, count: int, step_of: Callable[[RawLog], Callable[[int], Awaitable[object]]]) -> float:
    """The rate per second."""
    log = RawLog(folder / "raw")
    writer = threading.Thread(target=log.write_groups, args=(asyncio.get_running_loop(),))
    writer.start()
    try:
        return count / await _from_all_sides(count, step_of(log))
    finally:
        log.stop()
        writer.join()


def _raw_line(log: RawLog) -> Callable[[int], Awaitable[object]]:
    """Append one line that is already encoded."""
    line = _line_of({"kind": "submit", "at": time.time(), "task": 123456, "about": {"fn": "__main__:at_once"}})
    return lambda _: log.append(line)


def _raw_task(log: RawLog) -> Callable[[int], Awaitable[object]]:
    """What a durable task needs: a line when it is submitted and a line when it has ended, each made and synced."""

    async def step(item: int) -> None:
        at = time.time()
        await log.append(_line_of({"kind": "submit", "at": at, "task": item, "about": {"fn": "__main__:at_once"}}))
        result = await at_once(item)
        at = time.time()
        await log.append(_line_of({"kind": "end", "at": at, "task": item, "status": "completed", "result": result}))

    return step


def _line_of(content: dict[str, Any]) -> bytes:
    return (json.dumps(content) + "\n").encode()


async def _results(folder: Path, count: int) -> float:
    """Submit to result, per second."""
    pool = _durable(folder)

    async def step(item: int) -> None:
        if await (await pool.submit(at_once, item)) != item:
            raise AssertionError("a task came back with another result than its own")

    rate = count / await _from_all_sides(count, step)
    await pool.close()
    return rate


async def _only_queued(folder: Path, count: int) -> float:
    """Acknowledgements per second while every slot is taken: nothing is run and no end is written meanwhile."""
    pool = _durable(folder)
    for _ in range(AT_A_TIME):
        await pool.submit(asyncio.Event().wait)
    rate = count / await _from_all_sides(count, lambda item: pool.submit(at_once, item))
    await pool.close(cancel=True)
    return rate


def _durable(folder: Path) -> TaskPool:
    return TaskPool(
        "bench", max_concurrent=AT_A_TIME, scope="pipeline", pipeline_id="bench", store=JsonLinesStore(folder)
    )


async def measure_journal(lengths: Lengths) -> dict[str, Any]:
    """Use the disk of this folder, because the folder for temporary files may be in memory."""
    table.say(f"journal, {lengths.submits:,} submits from {AT_A_TIME} sides ...")
    table.LATEST.parent.mkdir(exist_ok=True)
    rounds: dict[str, list[float]] = {"raw task": [], "results": [], "raw line": [], "only queued": []}
    with tempfile.TemporaryDirectory(dir=table.LATEST.parent) as folder:
        for _ in range(lengths.journal.rounds):
            for name, measured in (
                ("raw task", _raw(_fresh(folder), lengths.submits, _raw_task)),
                ("results", _results(_fresh(folder), lengths.submits)),
                ("raw line", _raw(_fresh(folder), lengths.submits, _raw_line)),
                ("only queued", _only_queued(_fresh(folder), lengths.submits)),
            ):
                gc.collect()
                rounds[name].append(await measured)
    middle: dict[str, Any] = {name: median(rates) for name, rates in rounds.items()}
    ratio = middle["results"] / middle["raw task"]
    return middle | {
        "rounds": rounds,
        "ratio": ratio,
        "must": JOURNAL.must,
        "goal": JOURNAL.goal,
        "verdict": JOURNAL.verdict(ratio),
    }


def _fresh(folder: str) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


def show_journal(measured: dict[str, Any]) -> None:
    what = {
        "raw task": ("raw grouped append, the two lines of a task", "raw task"),
        "results": ("submit to result", "raw task"),
        "raw line": ("raw grouped append, one line ready made", "raw line"),
        "only queued": ("submits acknowledged, all slots taken", "raw line"),
    }
    rows = [
        (
            text,
            per_second(measured[name]),
            times(measured[name] / measured[beside]),
            *_bar(measured if name == "results" else {}, "{}x"),
        )
        for name, (text, beside) in what.items()
    ]
    title = f"Durable pool, {AT_A_TIME} submitters, each waiting for its own fdatasync (wall time)"
    table.print_table(title, ("what", "per second", "ratio", "must", "goal", "verdict"), rows)


# -- an idle pool -----------------------------------------------------------------------------------------------------


async def measure_idle(lengths: Lengths) -> dict[str, Any]:
    """The cost of one task in a pool that is otherwise idle."""
    table.say("one task on an idle pool ...")
    async with TaskPool("bench", max_concurrent=AT_A_TIME, queue=fair_round_robin("tenant_id")) as pool:

        async def submit(count: int) -> None:
            for item in range(count):
                await (await pool.submit(at_once, item, tenant_id="one"))

        async def create_task(count: int) -> None:
            for item in range(count):
                await asyncio.create_task(at_once(item))  # type: ignore[arg-type]

        rates = await in_turns(lengths.idle, {"submit": submit, "create_task": create_task})
    return {name: 1e6 / median(rounds) for name, rounds in rates.items()} | {"rounds": rates}


def show_idle(measured: dict[str, Any]) -> None:
    ours, task = measured["submit"], measured["create_task"]
    rows = [
        ("await create_task(...)", f"{task:.2f}", "-"),
        ("await (await pool.submit(...))", f"{ours:.2f}", f"{ours - task:.2f}"),
    ]
    table.print_table("One task on an idle pool", ("what", "us", "overhead"), rows)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def _bar(row: dict[str, Any], form: str) -> tuple[str, str, str]:
    """The cells of must, goal and verdict."""
    must, goal = (form.format(row[name]) if row.get(name) is not None else "-" for name in ("must", "goal"))
    return must, goal, row.get("verdict", "-")


def missed(results: dict[str, Any]) -> list[str]:
    """Every figure that missed its minimum, in words."""
    words = [
        f"operation {row['operation']}: {times(row['ratio'])}, must {row['must']}x"
        for row in results["rates"]
        if row.get("verdict") == MISSED
    ]
    words += [
        f"{row['who']}: {row['bytes']:.0f} bytes per queued task, must {row['must']}"
        for row in results["bytes"]
        if row.get("verdict") == MISSED
    ]
    words += [
        f"a large queue costs {times(row['ratio'])} of a small one, must {row['must']}x"
        for row in results["growth"]
        if row.get("verdict") == MISSED
    ]
    journal = results["journal"]
    if journal["verdict"] == MISSED:
        words.append(f"journal {times(journal['ratio'])} of a raw append, must {journal['must']}x")
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    quick = parser.parse_args().quick
    lengths = QUICK if quick else FULL
    results: dict[str, Any] = {
        "quick": quick,
        "rates": asyncio.run(measure_rates(lengths)),
        "idle": asyncio.run(measure_idle(lengths)),
        "bytes": asyncio.run(measure_bytes()),
        "growth": asyncio.run(measure_growth(lengths)),
        "journal": asyncio.run(measure_journal(lengths)),
    }
    show_rates(lengths, results["rates"])
    show_bytes(results["bytes"])
    show_growth(lengths, results["growth"])
    show_journal(results["journal"])
    show_idle(results["idle"])
    path = table.keep("tasks", results)
    print(f"\nMedians, in turns. Kept in {path.parent.parent.name}/results/{path.name}.")
    if quick:
        print(
            "note: the targets are about 100,000 tasks; among fewer the collector spares the peer, and ratios are lower"
        )
    table.warn_if_busy()
    if words := missed(results):
        print("MISSED: " + "; ".join(words) + ".")
    else:
        print("Every must is reached.")


if __name__ == "__main__":
    main()
