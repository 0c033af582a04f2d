"""Budgets that processes share, beside queues of jobs in PostgreSQL: grants per second, latency, slots busy, bytes.

    make bench          twelve minutes
    make bench-quick    four minutes

All contestants take turns in one run. Most figures are ratios; those in milliseconds, bytes and grants per second are
promises of the specification (`docs/spec/shared.md`, Cost) for a machine that is not busy. "must" is the minimum of the
project's performance targets. The program prints MISSED for a figure that does not reach it, and exits with 0 all the
same.

Each contestant on one budget has four processes of its own (`contestants/budget.py`), which are idle while it is not
their turn; those that poll are stopped. How each is used, and what each cannot do, stands in `contestants/budgets.py`.
The PostgreSQL server is started for the run, with PostgreSQL's own settings.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import table
from dispatch import FOLDER, Lane, compile_ours
from server import Server, postgres_server
from table import MISSED, Bar, Contestant, Turns, in_turns, median, per_second, times

sys.path.append(str(FOLDER))
from budget import LIMIT, MEMBERS  # of the folder that was just named
from budgets import prepare

from headgate import PostgresStore, SqliteStore, TaskPool, fair_round_robin, pool_get
from headgate.sharing.states import Outcome
from headgate.tasks.names import unregister

PEERS = {"dbos": "3.3.0", "procrastinate": "3.10.0", "pgqueuer": "1.6.0"}
TITLES = {
    "memory": "headgate, one process, no store",
    "sqlite": "headgate, SqliteStore",
    "postgres": "headgate, PostgresStore",
    "sqlite-only": "headgate, SqliteStore, no other member",
    "postgres-only": "headgate, PostgresStore, no other member",
    "count": "SELECT count(*) under a lock",
    "dbos": "DBOS queue",
    "dbos-often": "DBOS queue, polling every 50 ms",
    "procrastinate": "procrastinate, four locks",
    "procrastinate-workers": "procrastinate, no lock, one job per worker",
    "pgqueuer": "pgqueuer, concurrency_limit",
}
POLLING = ("dbos", "dbos-often")
FOUR = ("sqlite", "postgres", "count", "procrastinate", "procrastinate-workers", "pgqueuer", "dbos", "dbos-often")

ALONE = Bar(0.8)
GRANTS = {"sqlite": Bar(2_000), "postgres": Bar(2_500)}
OF_ONE = Bar(0.5)
"""Tasks per second of four processes on SQLite beside those of one that is alone."""
TOGETHER = (1, 2, MEMBERS, 8)
BESIDE = {"dbos": Bar(10), "procrastinate": Bar(3)}
START_MS = {"sqlite": Bar(1, at_most=True), "postgres": Bar(3, at_most=True)}
HANDED_MS = {"sqlite": Bar(2, at_most=True), "postgres": Bar(5, at_most=True)}
BUSY = Bar(0.85)
"""The part of the time in which a slot is used, while more tasks wait than there are slots."""
SIX = 6
TASK_MS = 25
STATE = Bar(4096, at_most=True)
KEPT = Bar(0.02, at_most=True)
"""The part of what the second half of the changes wrote by which the store has grown meanwhile.

Not a ratio of sizes: a state takes a few pages, and a PostgreSQL that is busy needs some dozens more for the versions
that somebody may still be reading. That happens once, whenever it happens. A store that reuses nothing keeps a half, if
it compresses, or all of it.
"""
MANY = 8
"""Members of the budget whose state is weighed."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much is measured."""

    alone: Turns
    tasks: Mapping[str, int]
    """Tasks of all four processes together in one turn."""
    rounds: int
    starts: int
    hand_overs: int
    busy: float
    """Seconds for which six processes keep the slots busy."""
    exchanges: int
    tenants: int
    writes: int


FULL = Lengths(
    alone=Turns(5, 1.0),
    tasks={"sqlite": 10_000, "postgres": 4_000, "count": 400, "procrastinate": 160, "procrastinate-workers": 400}
    | {"pgqueuer": 400, "dbos": 80, "dbos-often": 200},
    rounds=5,
    starts=1_000,
    hand_overs=300,
    busy=10.0,
    exchanges=20_000,
    tenants=100_000,
    writes=100_000,
)
QUICK = Lengths(
    alone=Turns(3, 0.4),
    tasks={"sqlite": 4_000, "postgres": 1_200, "count": 120, "procrastinate": 120, "procrastinate-workers": 120}
    | {"pgqueuer": 120, "dbos": 40, "dbos-often": 60},
    rounds=3,
    starts=200,
    hand_overs=100,
    busy=4.0,
    exchanges=1_000,
    tenants=100_000,
    writes=10_000,
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the stores of a run are."""

    folder: Path
    server: Server

    async def place(self, name: str) -> str:
        """The file or the fresh database of a contestant."""
        if not name.startswith("sqlite"):
            await ask(self.server.dsn(), f"CREATE DATABASE {_database(name)}")
        return self.where(name)

    def where(self, name: str) -> str:
        """The file or the database of a contestant that has one."""
        return str(self.folder / f"{name}.db") if name.startswith("sqlite") else self.server.dsn(_database(name))


def _database(name: str) -> str:
    return "bench_" + name.replace("-", "_")


async def ask(dsn: str, query: str, *arguments: object) -> Any:
    """Run one statement; returns the first value of its answer."""
    import asyncpg

    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query, *arguments)
    finally:
        await connection.close()


def store_of(name: str, place: str) -> SqliteStore | PostgresStore:
    return SqliteStore(place) if name.startswith("sqlite") else PostgresStore(place)


def check_peers() -> None:
    for name, wanted in PEERS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            raise SystemExit(
                f"{name} {wanted}, a peer to measure against, is not installed.\n"
                "Run `make bench` or `make bench-quick`: they install the `bench` extra first."
            ) from None
        if found != wanted:
            table.say(f"note: {name} {found} is installed; the targets are about {wanted}")


# -- one pool alone on its store --------------------------------------------------------------------------------------


@asynccontextmanager
async def pools(around: Surroundings, what: str) -> AsyncIterator[dict[str, TaskPool]]:
    """A pool in memory, one on a SQLite file and one on a PostgreSQL database, each alone on its store."""
    async with AsyncExitStack() as stack:
        made = {"memory": await stack.enter_async_context(TaskPool(f"{what}-memory", max_concurrent=LIMIT))}
        for name in ("sqlite", "postgres"):
            store = store_of(name, await around.place(f"{name}_{what}"))
            stack.callback(store.close)
            pool = TaskPool(f"{what}-{name}", max_concurrent=LIMIT, scope="tenant", scope_id="bench", store=store)
            made[name] = await stack.enter_async_context(pool)
        yield made


async def measure_alone(lengths: Lengths, around: Surroundings) -> list[dict[str, Any]]:
    """Tasks of a millisecond: the exchanges must not be what they wait for."""
    table.say("one pool alone on its store ...")

    async def millisecond() -> None:
        await asyncio.sleep(0.001)

    def contestant(pool: TaskPool) -> Contestant:
        async def work(count: int) -> None:
            handles = [await pool.submit(millisecond) for _ in range(count)]
            for handle in handles:
                await handle

        return work

    async with pools(around, "alone") as made:
        rates = await in_turns(lengths.alone, {name: contestant(pool) for name, pool in made.items()})
    rows = []
    for name, rounds in rates.items():
        ratio = median([own / peer for own, peer in zip(rounds, rates["memory"], strict=True)])
        row = {"who": name, "rate": median(rounds), "ratio": ratio, "rounds": rounds}
        rows.append(row if name == "memory" else row | _judged(ALONE, ratio))
    return rows


def show_alone(rows: list[dict[str, Any]]) -> None:
    header = ("who", "tasks /s", "ratio", "must", "verdict")
    print_rows = [(TITLES[row["who"]], per_second(row["rate"]), times(row["ratio"]), *_bar(row, "{}x")) for row in rows]
    table.print_table(f"A pool alone on its store, tasks of 1 ms, {LIMIT} at a time", header, print_rows)


async def measure_starts(lengths: Lengths, around: Surroundings) -> list[dict[str, Any]]:
    """From submit to the first line of the task, while nothing else runs."""
    table.say("from submit to start ...")

    async def now() -> float:
        return time.perf_counter()

    spent: dict[str, list[float]] = {}
    async with pools(around, "starts") as made, second_members(around, "starts"):
        for _, (name, pool) in itertools.product(range(lengths.starts), made.items()):
            begun = time.perf_counter()
            handle = await pool.submit(now)
            spent.setdefault(name, []).append(1e3 * (await handle - begun))
            await asyncio.sleep(0.003)  # now the slot is given back, and all is quiet
    async with pools(around, "only") as made:
        for _, name in itertools.product(range(lengths.starts), START_MS):
            begun = time.perf_counter()
            handle = await made[name].submit(now)
            spent.setdefault(f"{name}-only", []).append(1e3 * (await handle - begun))
            await asyncio.sleep(0.003)
    return _latency_rows(spent, START_MS)


@asynccontextmanager
async def second_members(around: Surroundings, what: str) -> AsyncIterator[None]:
    """One more member of each budget that `pools` has made, which does nothing. So each start needs an exchange."""
    async with AsyncExitStack() as stack:
        for name in START_MS:
            unregister(pool_get(f"{what}-{name}"))
            store = store_of(name, around.where(f"{name}_{what}"))
            stack.callback(store.close)
            pool = TaskPool(f"{what}-{name}", max_concurrent=LIMIT, scope="tenant", scope_id="bench", store=store)
            await stack.enter_async_context(pool)
        yield


def show_starts(rows: list[dict[str, Any]]) -> None:
    table.print_table("From submit to start, uncontended", _LATENCIES, _latency_cells(rows))


# -- four processes on one budget -------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """One turn of a contestant."""

    rate: float
    """Tasks per second."""
    cpu: float
    """Microseconds of its processes for each task, without those of the server."""


class Four:
    """The processes of one contestant."""

    def __init__(self, lanes: Sequence[Lane], pids: Sequence[int]) -> None:
        self.lanes = lanes
        self._pids = pids
        self._total = 0

    @asynccontextmanager
    async def turn(self, *, polls: bool) -> AsyncIterator[None]:
        """Let a contestant that polls go on for its turn. It is stopped before and after: polls would burden others."""
        if polls:
            for pid in self._pids:
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(0.3)  # they began one after the other, and would poll at the same moment now
        yield
        if polls:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        for pid in self._pids:
            os.kill(pid, number)

    async def run(self, tasks: int) -> Ran:
        """Run so many tasks, from the first submit to the end of the last task."""
        each = tasks // len(self.lanes)
        self._total += each * len(self.lanes)
        asked = [lane.ask("run", tasks=each, total=self._total) for lane in self.lanes]
        answers = await asyncio.gather(*asked)
        spent = max(one["ended"] for one in answers) - min(one["begun"] for one in answers)
        done = each * len(self.lanes)
        return Ran(done / spent, 1e6 * sum(one["cpu"] for one in answers) / done)

    async def hand_over(self, tasks: int, seconds: float) -> list[float]:
        """Milliseconds from the end of a task in one process to the begin of the next in another."""
        asked = [lane.ask("hand over", tasks=tasks, seconds=seconds) for lane in self.lanes[:2]]
        answers = await asyncio.gather(*asked)
        ran = sorted((begun, ended, number) for number, ones in enumerate(answers) for begun, ended in ones)
        return [1e3 * (after[0] - before[1]) for before, after in itertools.pairwise(ran) if before[2] != after[2]]

    async def keep_busy(self, seconds: float, task: float) -> tuple[float, int]:
        """How many slots are in use on average, without the first second and the last task, and most at a time."""
        asked = [lane.ask("keep busy", seconds=seconds, task=task) for lane in self.lanes]
        answers = await asyncio.gather(*asked)
        since = max(ones[0][0] for ones in answers) + 1.0
        until = min(ones[-1][1] for ones in answers) - 2 * task
        ran = [(begun, ended) for ones in answers for begun, ended in ones]
        used = sum(max(0.0, min(ended, until) - max(begun, since)) for begun, ended in ran)
        changes = sorted([(ended, -1) for _, ended in ran] + [(begun, 1) for begun, _ in ran])
        return used / (until - since), max(itertools.accumulate(change for _, change in changes))


@asynccontextmanager
async def four(
    name: str, around: Surroundings, members: int = MEMBERS, *, label: str | None = None
) -> AsyncIterator[Four]:
    """Start the processes of a contestant, on a store of their own; end them at the end."""
    label = label or (name if members == MEMBERS else f"{name}_of_{members}")
    place = await around.place(label)
    await prepare(name, place)
    tally = around.folder / f"{label}.tally"
    tally.write_bytes(bytes(8 * members))
    async with AsyncExitStack() as stack:
        lanes, pids = [], []
        for number in range(members):
            errors = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # the stack closes it
            command = (sys.executable, str(FOLDER / "budget.py"), name, place, str(number), str(tally))
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=errors, limit=2**24
            )
            lanes.append(Lane(name, process, errors))
            pids.append(process.pid)
            stack.push_async_callback(lanes[-1].close)
        for lane in lanes:
            await lane.answer("start")
        yield Four(lanes, pids)


async def measure_four(lengths: Lengths, around: Surroundings) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        contestants: dict[str, Four] = {}
        for name in FOUR:
            table.say(f"four processes of {name} start ...")
            contestants[name] = one = await stack.enter_async_context(four(name, around))
            await one.run(max(40, lengths.tasks[name] // 10))  # warm
            if name in POLLING:
                one.signal(signal.SIGSTOP)
                stack.callback(one.signal, signal.SIGCONT)  # to end
        rounds: dict[str, list[Ran]] = {name: [] for name in FOUR}
        for number in range(lengths.rounds):
            table.say(f"four processes on one budget, turn {number + 1} of {lengths.rounds} ...")
            for name, one in contestants.items():
                async with one.turn(polls=name in POLLING):
                    rounds[name].append(await one.run(lengths.tasks[name]))
        table.say("from a release to the start in another process ...")
        handed = {name: await contestants[name].hand_over(lengths.hand_overs, 0.003) for name in HANDED_MS}
    return {"grants": grant_rows(rounds), "handed": _latency_rows(handed, HANDED_MS)}


def grant_rows(rounds: Mapping[str, list[Ran]]) -> list[dict[str, Any]]:
    """One row for each contestant, with how many times as fast ours on PostgreSQL is."""
    rows: list[dict[str, Any]] = []
    for name, ran in rounds.items():
        rates = [one.rate for one in ran]
        row: dict[str, Any] = {"who": name, "rate": median(rates), "cpu": median([one.cpu for one in ran])}
        row["rounds"] = rates
        if name in GRANTS:
            row |= _judged(GRANTS[name], row["rate"])
        else:
            row["ratio"] = median([ours.rate / peer for ours, peer in zip(rounds["postgres"], rates, strict=True)])
            row |= _judged(BESIDE[name], row["ratio"]) if name in BESIDE else {}
        rows.append(row)
    return rows


def show_four(rows: list[dict[str, Any]]) -> None:
    header = ("who", "tasks /s", "cpu us per task", "headgate on PostgreSQL", "must", "verdict")
    print_rows = [
        (
            TITLES[row["who"]],
            per_second(row["rate"]),
            f"{row['cpu']:,.0f}",
            times(row["ratio"]) if "ratio" in row else "-",
            *_bar(row, "{}x" if "ratio" in row else "{:,} /s"),
        )
        for row in rows
    ]
    table.print_table(
        f"{MEMBERS} processes on one budget of {LIMIT}, 100 tenants, tasks that return at once", header, print_rows
    )


def show_handed(rows: list[dict[str, Any]]) -> None:
    table.print_table(
        "From the end of a task to the start of the next in another process", _LATENCIES, _latency_cells(rows)
    )


# -- one process, and several -----------------------------------------------------------------------------------------


async def measure_together(lengths: Lengths, around: Surroundings) -> list[dict[str, Any]]:
    """The same tasks in one process, in two, in four and in eight: what it costs to share."""
    rows: list[dict[str, Any]] = []
    for name in GRANTS:
        async with AsyncExitStack() as stack:
            table.say(f"{', '.join(map(str, TOGETHER))} processes of {name} start ...")
            groups = {
                count: await stack.enter_async_context(four(name, around, count, label=f"{name}_together_{count}"))
                for count in TOGETHER
            }
            rounds: dict[int, list[Ran]] = {count: [] for count in TOGETHER}
            for number in range(lengths.rounds + 1):  # the first one warms
                for count, group in groups.items():
                    ran = await group.run(lengths.tasks[name])
                    if number:
                        rounds[count].append(ran)
        for count, turns in rounds.items():
            row: dict[str, Any] = {
                "who": name,
                "processes": count,
                "rate": median([one.rate for one in turns]),
                "cpu": median([one.cpu for one in turns]),
                "ratio": median([one.rate / alone.rate for one, alone in zip(turns, rounds[1], strict=True)]),
            }
            judged = (name, count) == ("sqlite", MEMBERS)
            rows.append(row | (_judged(OF_ONE, row["ratio"]) if judged else {}))
    return rows


def show_together(rows: list[dict[str, Any]]) -> None:
    header = ("who", "processes", "tasks /s of all", "cpu us per task", "of one process", "must", "verdict")
    cells = [
        (
            TITLES[row["who"]],
            str(row["processes"]),
            per_second(row["rate"]),
            f"{row['cpu']:,.0f}",
            times(row["ratio"]),
            *_bar(row, "{}x"),
        )
        for row in rows
    ]
    table.print_table(f"One to {TOGETHER[-1]} processes on one budget of {LIMIT}, 100 tenants", header, cells)


# -- slots in use -----------------------------------------------------------------------------------------------------


async def measure_busy(lengths: Lengths, around: Surroundings) -> list[dict[str, Any]]:
    """Tasks that are as short as a fast call: each release hands a slot to another process."""
    rows = []
    for name in HANDED_MS:
        table.say(f"six processes keep the slots busy, {name} ...")
        async with four(name, around, SIX) as processes:
            slots, most = await processes.keep_busy(lengths.busy, TASK_MS / 1e3)
        rows.append({"who": name, "slots": slots, "most": most} | _judged(BUSY, slots / LIMIT))
    return rows


def show_busy(rows: list[dict[str, Any]]) -> None:
    header = ("who", "slots busy", "of all", "most at a time", "must", "verdict")
    print_rows = [
        (
            TITLES[row["who"]],
            f"{row['slots']:.2f} of {LIMIT}",
            f"{row['slots'] / LIMIT:.0%}",
            f"{row['most']}",
            *_bar(row, "{:.0%}"),
        )
        for row in rows
    ]
    table.print_table(
        f"Slots busy: {SIX} processes on one budget of {LIMIT}, tasks of {TASK_MS} ms", header, print_rows
    )


# -- bytes ------------------------------------------------------------------------------------------------------------


class Weighed:
    """A store that keeps the text of every exchange."""

    def __init__(self, store: Any, texts: list[str]) -> None:
        self._store = store
        self._texts = texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def transact(self, key: str, step: Callable[..., Any], **options: Any) -> Future[Any]:
        def weighed(text: str | None, seen: Any) -> Any:
            outcome = step(text, seen)
            if outcome.state is not None:
                self._texts.append(outcome.state)
            return outcome

        future: Future[Any] = self._store.transact(key, weighed, **options)
        return future


async def measure_bytes(lengths: Lengths, around: Surroundings) -> dict[str, Any]:
    texts = await _texts(lengths, around)
    sizes = [len(text.encode()) for text in texts]
    state = {"exchanges": len(texts), "largest": max(sizes), "usual": statistics.median(sizes)}
    table_rows = []
    for name in ("sqlite", "postgres"):
        table.say(f"{lengths.writes:,} changes of such a state, {name} ...")
        table_rows.append(await _grown(name, lengths, around, texts[-1_000:]))
    return {"state": [state | _judged(STATE, max(sizes))], "growth": table_rows}


async def _texts(lengths: Lengths, around: Surroundings) -> list[str]:
    """The texts of so many exchanges, with many members and tenants.

    Each store object is a member of its own, so that one process can be all of them.
    """
    table.say(f"{lengths.exchanges:,} exchanges of {MANY} members, {lengths.tenants:,} tenants ...")
    place = await around.place("sqlite_state")
    texts: list[str] = []
    enough = asyncio.Event()

    async def work() -> None:
        if len(texts) >= lengths.exchanges:
            enough.set()
            await asyncio.Event().wait()  # nothing more starts

    async with AsyncExitStack() as stack:
        pools = []
        for _ in range(MANY):
            store = SqliteStore(place)
            stack.callback(store.close)
            options: dict[str, Any] = {"scope": "tenant", "scope_id": "bench", "store": Weighed(store, texts)}
            pools.append(TaskPool("state", max_concurrent=LIMIT, queue=fair_round_robin("tenant_id"), **options))
            unregister(pools[-1])  # the next one has the same name
        for number, pool in enumerate(pools):
            for tenant in range(number, lengths.tenants, MANY):
                pool.submit_nowait(work, tenant_id=f"tenant-{tenant}")
        await enough.wait()
        for pool in pools:
            await pool.close(cancel=True)
    return texts


async def _grown(name: str, lengths: Lengths, around: Surroundings, texts: Sequence[str]) -> dict[str, Any]:
    """Bytes of the table after half of the writes and after all, when members write in turn such states."""
    place = await around.place(f"{name}_growth")
    stores = [store_of(name, place) for _ in range(MEMBERS)]
    sizes, written, half = [], itertools.count(), lengths.writes // 2

    async def write(store: Any, many: int) -> None:
        for _ in range(many):
            text = texts[next(written) % len(texts)]
            await asyncio.wrap_future(store.transact("state", lambda _, __, text=text: Outcome(text)))

    try:
        for store in stores:
            store.connect(10)
        if name == "postgres":
            off = "autovacuum_enabled = off, toast.autovacuum_enabled = off"
            await ask(place, f"ALTER TABLE headgate.texts SET ({off})")
        begun = time.monotonic()
        for _ in range(2):
            await asyncio.gather(*(write(store, half // MEMBERS) for store in stores))
            sizes.append(await _size(name, place))
        rate = lengths.writes / (time.monotonic() - begun)
    finally:
        for store in stores:
            store.close()
    kept = max(0, sizes[1] - sizes[0]) / (half * statistics.mean(len(text.encode()) for text in texts))
    return {"who": name, "writes": lengths.writes, "rate": rate, "sizes": sizes, "kept": kept} | _judged(KEPT, kept)


async def _size(name: str, place: str) -> int:
    """Bytes of the files or of the table in which the state is, without autovacuum."""
    if name == "sqlite":
        folder = Path(place).parent
        return sum(path.stat().st_size for path in folder.glob(Path(place).name + "*") if path.is_file())
    size: int = await ask(place, "SELECT pg_total_relation_size('headgate.texts')")
    return size


def show_bytes(lengths: Lengths, results: Mapping[str, Any]) -> None:
    state = [
        (f"{row['exchanges']:,}", f"{row['largest']:,}", f"{row['usual']:,.0f}", *_bar(row, "at most {:,}"))
        for row in results["state"]
    ]
    header = ("exchanges", "largest", "usual", "must", "verdict")
    table.print_table(f"Bytes of the state, {MANY} members, {lengths.tenants:,} tenants", header, state)
    grown = [
        (
            TITLES[row["who"]],
            f"{row['writes']:,}",
            per_second(row["rate"]),
            *(f"{size:,}" for size in row["sizes"]),
            f"{row['kept']:.2%}",
            *_bar(row, "at most {:.0%}"),
        )
        for row in results["growth"]
    ]
    header = ("who", "changes", "/s", "bytes after half", "after all", "kept of what was written", "must", "verdict")
    table.print_table(
        f"What such a state takes in the store, changed by {MEMBERS} members, autovacuum is off", header, grown
    )


# -- verdicts ---------------------------------------------------------------------------------------------------------

_LATENCIES = ("who", "p50 ms", "p99 ms", "must (p50)", "verdict")


def _latency_rows(spent: Mapping[str, list[float]], bars: Mapping[str, Bar]) -> list[dict[str, Any]]:
    rows = []
    for name, figures in spent.items():
        row = {"who": name, "p50": median(figures), "p99": statistics.quantiles(figures, n=100)[98]}
        rows.append(row | {"many": len(figures)} | (_judged(bars[name], row["p50"]) if name in bars else {}))
    return rows


def _latency_cells(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [(TITLES[row["who"]], f"{row['p50']:.2f}", f"{row['p99']:.2f}", *_bar(row, "at most {} ms")) for row in rows]


def _judged(bar: Bar, figure: float) -> dict[str, Any]:
    return {"must": bar.must, "verdict": bar.verdict(figure)}


def _bar(row: Mapping[str, Any], form: str) -> tuple[str, str]:
    """The cells of must and verdict."""
    return (form.format(row["must"]), row["verdict"]) if "must" in row else ("-", "-")


def missed(results: Mapping[str, Any]) -> list[str]:
    """Every figure that missed its minimum, in words."""
    what: dict[str, Callable[[dict[str, Any]], str]] = {
        "alone": lambda row: f"alone: {times(row['ratio'])} of the rate in memory, must {row['must']}x",
        "starts": lambda row: f"from submit to start: {row['p50']:.2f} ms, must {row['must']} ms",
        "grants": lambda row: (
            f"headgate on PostgreSQL is {times(row['ratio'])} as fast, must {row['must']}x"
            if "ratio" in row
            else f"{row['rate']:,.0f} grants /s, must {row['must']:,}"
        ),
        "together": lambda row: f"{row['processes']} processes run {times(row['ratio'])} of one, must {row['must']}x",
        "handed": lambda row: f"from a release to a start: {row['p50']:.2f} ms, must {row['must']} ms",
        "busy": lambda row: f"{row['slots']:.2f} of {LIMIT} slots busy, must {row['must']:.0%}",
        "state": lambda row: f"a state of {row['largest']:,} bytes, must {row['must']:,}",
        "growth": lambda row: f"its table kept {row['kept']:.2%} of what was written, must {row['must']:.0%}",
    }
    return [
        f"{TITLES[row['who']]}: {words(row)}" if "who" in row else words(row)
        for part, words in what.items()
        for row in results[part]
        if row.get("verdict") == MISSED
    ]


async def measure(lengths: Lengths, around: Surroundings) -> dict[str, Any]:
    return {
        "alone": await measure_alone(lengths, around),
        "starts": await measure_starts(lengths, around),
        **await measure_four(lengths, around),
        "together": await measure_together(lengths, around),
        "busy": await measure_busy(lengths, around),
        **await measure_bytes(lengths, around),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    quick = parser.parse_args().quick
    lengths = QUICK if quick else FULL
    check_peers()
    compile_ours()
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder, postgres_server() as server:
        results = {"quick": quick, **asyncio.run(measure(lengths, Surroundings(Path(folder), server)))}
    show_alone(results["alone"])
    show_starts(results["starts"])
    show_four(results["grants"])
    show_together(results["together"])
    show_handed(results["handed"])
    show_busy(results["busy"])
    show_bytes(lengths, results)
    path = table.keep("shared", results)
    print(f"\nMedians, in turns. Kept in {path.parent.parent.name}/results/{path.name}.")
    table.warn_if_busy()
    if words := missed(results):
        print("MISSED: " + "; ".join(words) + ".")
    else:
        print("Every must is reached.")


if __name__ == "__main__":
    main()
