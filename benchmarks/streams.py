"""Streams, large and nested work on two worker processes, beside wool 0.15.7.

    make bench          three minutes
    make bench-quick    a minute
    python benchmarks/streams.py --before PATH     small calls too, beside those of an older headgate in that folder

All contestants take turns in one run, and only ratios count. "must" and "goal" are the minimum and the goal of the
project's performance targets. The program prints MISSED for a figure that does not reach its minimum ("must"), and
exits with 0 all the same. If a contestant cannot do something, its row says so.

Each contestant has a client process of its own (`contestants/streams_client.py`), new for each table: what one kind of
work leaves behind does not burden the next. It is idle while it is not its turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import table
from dispatch import FOLDER, Lane, compile_ours, installed
from table import MISSED, Bar, Turns, median, per_second, times

MB = 2**20
LARGE = 64 * MB
HUGE = 256 * MB
SMALL_CALLERS = 100

PULLED = Bar(1.3, 1.7)
AHEAD = Bar(15, 40)
ECHO = {MB: Bar(1.8, 3), LARGE: Bar(2.5, 8)}
FIB = Bar(0.2, 0.1, at_most=True)
P99_MS = Bar(10, at_most=True)
SLOWER = Bar(1.05, at_most=True)
FEWER = Bar(round(1 / 1.05, 3))
MEMORY = {"take": Bar(3, at_most=True), "echo": Bar(4, at_most=True)}
MOVED = {"take": f"{HUGE // MB} MB as an argument", "echo": f"{HUGE // MB} MB there and back"}

SHARED_MEMORY = "HEADGATE_SHARED_MEMORY"
TITLES = {"ours": "headgate", "chunks": f"headgate, {SHARED_MEMORY}=0", "wool": "wool"}


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much is measured."""

    streams: Turns
    echo: Turns
    fib: Turns
    beside: Turns
    before: Turns
    launches: int
    memory: int


FULL = Lengths(
    streams=Turns(5, 1.0),
    echo=Turns(5, 1.5),
    fib=Turns(5, 0.5),
    beside=Turns(3, 4.0),
    before=Turns(12, 0.3),
    launches=4,
    memory=3,
)
QUICK = Lengths(
    streams=Turns(3, 0.3),
    echo=Turns(3, 0.3),
    fib=Turns(3, 0.2),
    beside=Turns(1, 2.0),
    before=Turns(12, 0.15),
    launches=2,
    memory=1,
)


# -- the processes ----------------------------------------------------------------------------------------------------


class Failed(Exception):
    """What a contestant answered instead of a figure."""


async def ask(lane: Lane, measure: str, **about: Any) -> Any:
    answer = await lane.ask(measure, **about)
    if isinstance(answer, dict) and "failed" in answer:
        raise Failed(answer["failed"])
    return answer


@asynccontextmanager
async def started(name: str, *program: str, **environment: str) -> AsyncIterator[Lane]:
    env = {key: value for key, value in os.environ.items() if key != SHARED_MEMORY} | environment
    command = (sys.executable, str(FOLDER / program[0]), *program[1:])
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=errors, env=env)
        opened = Lane(name, process, errors)
        try:
            yield opened
        finally:
            await opened.close()


def lane(name: str) -> AbstractAsyncContextManager[Lane]:
    """A contestant's process: `ours`, `chunks` (ours without shared memory) or `wool`."""
    environment = {SHARED_MEMORY: "0"} if name == "chunks" else {}
    return started(TITLES[name], "streams_client.py", "wool" if name == "wool" else "ours", **environment)


@asynccontextmanager
async def lanes(*names: str) -> AsyncIterator[dict[str, Lane]]:
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(lane(name)) for name in names}


# -- in turns ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """One figure per round, or why there is none."""

    rounds: list[Any] = field(default_factory=list)
    failed: str | None = None

    def figure(self) -> float | None:
        return None if self.failed is not None else median(self.rounds)


async def in_turns(
    turns: Turns, works: Mapping[str, tuple[Lane, dict[str, Any]]], figure: Callable[[float], float]
) -> dict[str, Outcome]:
    """Each work on its lane. `figure` makes one of the seconds that a single time takes. Who fails once is out."""
    outcomes = {name: Outcome() for name in works}
    counts: dict[str, int] = {}
    for number in range(turns.rounds + 1):
        for name, (one, about) in works.items():
            outcome = outcomes[name]
            if outcome.failed is not None:
                continue
            try:
                if number == 0:
                    counts[name] = await ask(one, "how many", seconds=turns.seconds, **about)
                else:
                    spent = await ask(one, "timed", count=counts[name], **about)
                    outcome.rounds.append(figure(spent / counts[name]))
            except Failed as failed:
                outcome.failed = str(failed)
    return outcomes


def compared(what: str, ours: Outcome, peer: Outcome | None = None, bar: Bar | None = None) -> dict[str, Any]:
    """A row: ours, the peer's, their ratio, and what it is judged to be."""
    row: dict[str, Any] = {"what": what, "ours": ours.figure(), "peer": peer and peer.figure()}
    ratio = row["ours"] / row["peer"] if row["ours"] is not None and row["peer"] is not None else None
    row |= {"ratio": ratio, "rounds": {"ours": ours.rounds, "peer": peer.rounds if peer is not None else []}}
    row["failed"] = {
        name: outcome.failed for name, outcome in (("ours", ours), ("peer", peer)) if outcome and outcome.failed
    }
    return row | judged(bar, ratio, failed=ours.failed is not None)


def judged(bar: Bar | None, figure: float | None, *, failed: bool = False) -> dict[str, Any]:
    """Of ours. Where only the peer has no figure there is nothing to judge by."""
    if bar is None:
        return {}
    verdict = MISSED if failed else "-" if figure is None else bar.verdict(figure)
    return {"must": bar.must, "goal": bar.goal, "verdict": verdict}


def show_compared(
    title: str, rows: Sequence[dict[str, Any]], form: Callable[[float], str], bars: str, peer: str = "wool"
) -> None:
    header = ("what", "headgate", peer, "ratio", "must", "goal", "verdict")
    print_rows = [
        (
            row["what"],
            _cell(row["ours"], form, row["failed"].get("ours")),
            _cell(row["peer"], form, row["failed"].get("peer")),
            _cell(row["ratio"], times),
            *_bar(row, row.get("bars", bars)),
        )
        for row in rows
    ]
    table.print_table(title, header, print_rows)
    print_failures([(row["what"], who, why) for row in rows for who, why in row["failed"].items()], peer)


def print_failures(failures: Sequence[tuple[str, str, str]], peer: str = "wool") -> None:
    for what, who, why in failures:
        print(f"{what}: {TITLES.get(who, peer)} failed with {why}")


def _cell(figure: float | None, form: Callable[[float], str], failed: str | None = None) -> str:
    if failed is not None:
        return failed.partition(":")[0]
    return "-" if figure is None else form(figure)


def _bar(row: dict[str, Any], form: str) -> tuple[str, str, str]:
    """The cells of must, goal and verdict."""
    must, goal = (form.format(row[name]) if row.get(name) is not None else "-" for name in ("must", "goal"))
    return must, goal, row.get("verdict", "-")


# -- streams ----------------------------------------------------------------------------------------------------------


async def measure_streams(lengths: Lengths) -> list[dict[str, Any]]:
    """Items per second of one stream, its beginning and its end included."""
    table.say("streams ...")
    pulled, ahead = {"work": "stream", "ahead": False}, {"work": "stream", "ahead": True}
    async with lanes("ours", "wool") as opened:
        ours, wool = opened["ours"], opened["wool"]
        works = {"pulled": (ours, pulled), "ahead": (ours, ahead), "wool": (wool, pulled)}
        found = await in_turns(lengths.streams, works, lambda seconds: 1 / seconds)
    return [
        compared("pulled one by one", found["pulled"], found["wool"], PULLED),
        compared("prefetch=64, wool's pulled", found["ahead"], found["wool"], AHEAD),
    ]


# -- large work -------------------------------------------------------------------------------------------------------


async def measure_echo(lengths: Lengths) -> list[dict[str, Any]]:
    """MB per second, one echo after the other. What goes there and back counts once."""
    rows = []
    for size, bar in ECHO.items():
        table.say(f"echo of {_size(size)} ...")
        async with lanes(*TITLES) as opened:
            works = {name: (one, {"work": "echo", "size": size}) for name, one in opened.items()}
            found = await in_turns(lengths.echo, works, _megabytes_per_second(size))
        rows.append(compared(_size(size), found["ours"], found["wool"], bar))
        rows.append(compared(f"{_size(size)}, {SHARED_MEMORY}=0", found["chunks"], found["wool"]))
    return rows


def _megabytes_per_second(size: int) -> Callable[[float], float]:
    return lambda seconds: size / MB / seconds


def _size(size: int) -> str:
    return f"{size // MB} MB"


# -- nested work ------------------------------------------------------------------------------------------------------


async def measure_fib(lengths: Lengths) -> list[dict[str, Any]]:
    """Seconds of a recursion in which each call is a call to a worker: 67, 1,973 and 21,891 of them."""
    table.say("fib ...")
    async with lanes("ours", "wool") as opened:
        works = {f"fib({n})": (opened["ours"], {"work": "fib", "n": n}) for n in (8, 15, 20)}
        works["wool"] = (opened["wool"], {"work": "fib", "n": 8})
        found = await in_turns(lengths.fib, works, lambda seconds: seconds)
    peers: dict[str, tuple[Outcome, Bar]] = {"fib(8)": (found.pop("wool"), FIB)}
    return [compared(name, outcome, *peers.get(name, ())) for name, outcome in found.items()]


# -- small calls beside large ones ------------------------------------------------------------------------------------


async def measure_beside(lengths: Lengths) -> list[dict[str, Any]]:
    """Seconds of `add(1, 2)`, one after the other, while echoes go on in the same process and on the same workers."""
    table.say(f"small calls beside echoes of {_size(LARGE)} ...")
    bulk = {"work": "echo", "size": LARGE}
    cases: dict[str, tuple[str, dict[str, Any], Bar | None]] = {
        "nothing": ("ours", {}, None),
        f"echoes of {_size(LARGE)}": ("ours", bulk, P99_MS),
        f"echoes of {_size(LARGE)}, {SHARED_MEMORY}=0": ("chunks", bulk, P99_MS),
    }
    outcomes = {what: Outcome() for what in cases}
    async with lanes("ours", "chunks") as opened:
        for _ in range(lengths.beside.rounds):
            for what, (name, about, _) in cases.items():
                if outcomes[what].failed is not None:
                    continue
                try:
                    figures = await ask(opened[name], "beside", seconds=lengths.beside.seconds, **about)
                    outcomes[what].rounds.append(figures)
                except Failed as failed:
                    outcomes[what].failed = str(failed)
    return [beside_row(what, outcome, cases[what][2], lengths.beside.seconds) for what, outcome in outcomes.items()]


def beside_row(what: str, outcome: Outcome, bar: Bar | None, seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, "failed": outcome.failed, "rounds": outcome.rounds}
    if outcome.failed is not None:
        return row | judged(bar, None, failed=True)
    middle = {kind: median([one[kind] for one in outcome.rounds]) for kind in outcome.rounds[0]}
    row |= {f"{kind}_ms": 1e3 * middle[kind] for kind in ("p50", "p99", "longest")}
    row["echoed"] = middle["times"] * LARGE / MB / seconds
    return row | judged(bar, row["p99_ms"])


def show_beside(rows: Sequence[dict[str, Any]]) -> None:
    header = ("beside", "p50 ms", "p99 ms", "longest ms", "echoed MB/s", "must", "goal", "verdict")
    print_rows = []
    for row in rows:
        figures = [_cell(row.get(f"{kind}_ms"), "{:.2f}".format, row["failed"]) for kind in ("p50", "p99", "longest")]
        echoed = f"{row['echoed']:.0f}" if row.get("echoed") else "-"
        print_rows.append((row["what"], *figures, echoed, *_bar(row, "p99 at most {}")))
    table.print_table("headgate's small calls, one after the other, and what goes on beside", header, print_rows)
    print_failures([(row["what"], "ours", row["failed"]) for row in rows if row["failed"] is not None])


# -- memory -----------------------------------------------------------------------------------------------------------


async def measure_memory(lengths: Lengths) -> list[dict[str, Any]]:
    """The most that all processes of a contestant hold at a time during one call, as a multiple of its payload.

    The caller's own object is part of it. Each call has processes of its own: what an earlier one left in their heaps
    would hide what this one needs. Looked at from outside every few milliseconds, so the greatest figure counts.
    """
    if sys.platform != "linux":
        return []
    table.say(f"memory of {_size(HUGE)} ...")
    rows = []
    for work, bar in MEMORY.items():
        outcomes = {name: Outcome() for name in TITLES}
        for _ in range(lengths.memory):
            for name, outcome in outcomes.items():
                if outcome.failed is not None:
                    continue
                async with lane(name) as one:
                    try:
                        outcome.rounds.append(await _growth(one, work) / HUGE)
                    except Failed as failed:
                        outcome.failed = str(failed)
        for name, outcome in outcomes.items():
            most = None if outcome.failed is not None else max(outcome.rounds)
            row = {"what": work, "who": name, "most": most, "failed": outcome.failed, "rounds": outcome.rounds}
            bars = None if name == "wool" else bar
            rows.append(row | judged(bars, most, failed=outcome.failed is not None))
    return rows


async def _growth(one: Lane, work: str) -> int:
    await ask(one, "timed", work=work, size=1, count=8)  # all is imported, everywhere
    pids = await ask(one, "processes")
    before = _held(pids)
    most = before
    running = asyncio.ensure_future(ask(one, "timed", work=work, size=HUGE, count=1))
    while not running.done():
        start = time.perf_counter()
        most = max(most, _held(pids))
        await asyncio.wait({running}, timeout=max(0.002, time.perf_counter() - start))  # half of a core at most
    await running
    return most - before


def _held(pids: Sequence[int]) -> int:
    """Bytes: what the processes have mapped, pages that several share counted once, and open files without a name.

    Those are shared memory, mapped or not. What of it is mapped is not counted twice.
    """
    mapped = shared = 0
    nameless: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
            sizes = {words[0]: 1024 * int(words[1]) for words in lines if words[0] in ("Pss:", "Pss_Shmem:")}
            nameless |= _nameless(pid)
        except OSError:
            continue  # it has ended
        shared += sizes.get("Pss_Shmem:", 0)
        mapped += sizes["Pss:"] - sizes.get("Pss_Shmem:", 0)
    return mapped + max(shared, sum(nameless.values()))


def _nameless(pid: int) -> dict[tuple[int, int], int]:
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            about = path.stat()
        except OSError:
            continue  # closed meanwhile
        if stat.S_ISREG(about.st_mode) and about.st_nlink == 0:
            found[about.st_dev, about.st_ino] = 512 * about.st_blocks
    return found


def show_memory(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        print("\nMemory is measured on Linux only.")
        return
    print_rows = [
        (MOVED[row["what"]], TITLES[row["who"]], _cell(row["most"], times, row["failed"]), *_bar(row, "at most {}x"))
        for row in rows
    ]
    title = "Memory of all processes during one call, as a multiple of its payload (PSS and nameless files, growth)"
    table.print_table(title, ("what", "who", "payloads", "must", "goal", "verdict"), print_rows)
    print_failures([(MOVED[row["what"]], row["who"], row["failed"]) for row in rows if row["failed"] is not None])


# -- small calls, before and now --------------------------------------------------------------------------------------


async def measure_before(lengths: Lengths, folder: Path) -> list[dict[str, Any]]:
    """Judged by the median of ratios, one for each pair of turns: a few percent are asked about, and a machine drifts
    by more within a minute.

    Several launches, for where things happen to lie in memory makes a difference too. They take turns at going first.
    """
    table.say("small calls, now and before ...")
    latencies: dict[str, list[float]] = {"now": [], "before": []}
    rates: dict[str, list[float]] = {"now": [], "before": []}
    seconds = lengths.before.seconds
    for _ in range(lengths.launches):
        async with (
            started("headgate", "client.py", "ours", "serve") as now,
            started("the older headgate", "client.py", "ours", "serve", PYTHONPATH=first_on_path(folder)) as before,
        ):
            both = {"now": now, "before": before}
            many = {name: await one.ask("each", callers=1, seconds=seconds) for name, one in both.items()}
            each = {name: await one.ask("each", callers=SMALL_CALLERS, seconds=seconds) for name, one in both.items()}
            for number in range(lengths.before.rounds):
                order = sorted(both, reverse=number % 2 == 1)
                for name in order:
                    latencies[name].append((await both[name].ask("latency", calls=many[name]))["p50"])
                for name in order:
                    rates[name].append(await both[name].ask("calls", callers=SMALL_CALLERS, each=each[name]))
    milliseconds = {name: [1e3 * one for one in figures] for name, figures in latencies.items()}
    return [
        before_row("one call at a time, p50 ms", milliseconds, SLOWER) | {"bars": "at most {}x"},
        before_row(f"{SMALL_CALLERS} callers, calls /s", rates, FEWER) | {"bars": "{}x"},
    ]


def before_row(what: str, figures: Mapping[str, list[float]], bar: Bar) -> dict[str, Any]:
    ratios = [now / before for now, before in zip(figures["now"], figures["before"], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    row = compared(what, Outcome(figures["now"]), Outcome(figures["before"]))
    return row | {"ratio": ratio, "half": (low, high), "pairs": len(ratios)} | judged(bar, ratio)


def show_before(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        print("\nSmall calls beside an older headgate: with --before PATH.")
        return
    title = "Small calls, now and before; the ratio is the median of those of neighbouring turns"
    show_compared(title, rows, _short, "", peer="before")
    for row in rows:
        low, high = row["half"]
        print(f"{row['what']}: half of the {row['pairs']} ratios lie between {times(low)} and {times(high)}")


def _short(figure: float) -> str:
    return per_second(figure) if figure >= 1e3 else f"{figure:.3f}"


def first_on_path(folder: Path) -> str:
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def older(path: str) -> Path:
    """The folder to put first on the path, so that `import headgate` finds what lies there."""
    folder = Path(path).resolve()
    code = "import headgate; print(headgate.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": first_on_path(folder)},
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    where = Path(found.stdout.strip())
    if found.returncode != 0 or not where.is_relative_to(folder):
        raise SystemExit(
            f"--before takes the folder that an older `headgate` folder lies in (the src of a checkout).\n"
            f"With {folder} first on the path, headgate is {where if found.stdout else found.stderr}"
        )
    return folder


# -- verdicts ---------------------------------------------------------------------------------------------------------


def missed(results: dict[str, Any]) -> list[str]:
    """Every figure that missed its minimum, in words."""

    def ratio(row: dict[str, Any]) -> str:
        return _cell(row["ratio"], times, row["failed"].get("ours"))

    what: dict[str, Callable[[dict[str, Any]], str]] = {
        "streams": lambda row: f"stream, {row['what']}: {ratio(row)}, must {row['must']}x",
        "echo": lambda row: f"echo of {row['what']}: {ratio(row)} wool, must {row['must']}x",
        "fib": lambda row: f"{row['what']}: {ratio(row)} of wool's time, must {row['must']}x",
        "beside": lambda row: (
            f"small calls beside {row['what']}: p99 {_cell(row.get('p99_ms'), '{:.1f} ms'.format, row['failed'])}, "
            f"must {row['must']} ms"
        ),
        "memory": lambda row: (
            f"{TITLES[row['who']]}, memory of {MOVED[row['what']]}: {_cell(row['most'], times, row['failed'])}, "
            f"must {row['must']}x"
        ),
        "before": lambda row: f"{row['what']}: {ratio(row)} of before, must {row['must']}x",
    }
    return [words(row) for part, words in what.items() for row in results[part] if row.get("verdict") == MISSED]


async def measure(lengths: Lengths, before: Path | None) -> dict[str, Any]:
    return {
        "streams": await measure_streams(lengths),
        "echo": await measure_echo(lengths),
        "fib": await measure_fib(lengths),
        "beside": await measure_beside(lengths),
        "memory": await measure_memory(lengths),
        "before": await measure_before(lengths, before) if before is not None else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    parser.add_argument("--before", metavar="PATH", help="a folder with an older headgate, to compare small calls with")
    options = parser.parse_args()
    installed()
    compile_ours()
    before = older(options.before) if options.before is not None else None
    measured = asyncio.run(measure(QUICK if options.quick else FULL, before))
    results: dict[str, Any] = {"quick": options.quick, **measured}
    show_compared("One stream, items /s", results["streams"], per_second, "{}x")
    show_compared("Bytes there and back, one after the other, MB/s", results["echo"], "{:.0f}".format, "{}x")
    show_compared("Recursion, each call a nested call: seconds", results["fib"], "{:.3f}".format, "at most {}x")
    show_beside(results["beside"])
    show_memory(results["memory"])
    show_before(results["before"])
    path = table.keep("streams", results)
    print(f"\nMedians, in turns. Kept in {path.parent.parent.name}/results/{path.name}.")
    table.warn_if_busy()
    if words := missed(results):
        print("MISSED: " + "; ".join(words) + ".")
    else:
        print("Every must is reached.")


if __name__ == "__main__":
    main()
