"""Calls on two worker processes beside wool 0.15.7, ProcessPoolExecutor and bare grpc.aio: `await add(1, 2)`.

    make bench          three minutes
    make bench-quick    under a minute
    python benchmarks/dispatch.py --workers     the cost of a call on 1 to 16 workers alone: needs no other library

All contestants take turns in one run, and only ratios count. "must" and "goal" are the minimum and the goal of the
project's performance targets. The program prints MISSED for a figure that does not reach its minimum ("must"), and
exits with 0 all the same.

Each contestant has a client process of its own (`contestants/client.py`) that is open all the time and idle while it is
not its turn. Ray and Dask take part where they are installed; each makes the run half as long again.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import importlib.util
import json
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import table
from table import MISSED, Bar, Turns, in_turns, median, per_second, times

PEER = "0.15.7"
FOLDER = Path(__file__).parent / "contestants"
CALLERS = (16, 100, 1_000)
PATIENCE = 120.0

P50 = Bar(1 / 4, 1 / 7, at_most=True)
RATES = {16: {"wool": Bar(15, 35)}, 100: {"wool": Bar(30, 80), "executor": Bar(3, 8)}, 1_000: {"wool": Bar(30, 80)}}
TLS = Bar(0.8)
FIRST = Bar(0.6, 0.45, at_most=True)
FOUND = Bar(1.2, at_most=True)
WORKER = Bar(0.55, 0.4, at_most=True)
TOLD_MS = Bar(50, at_most=True)
STRANGERS = Bar(2.0, at_most=True)
WORKERS = (1, 2, 4, 8, 16)
EIGHT = Bar(2.5, 2.0, at_most=True)
NOTICED = {"local": Bar(20, at_most=True), "lan": Bar(3000, at_most=True)}


@dataclass(frozen=True, slots=True)
class Contestant:
    """How it is called in the tables, what is run, and the package without which it cannot be."""

    title: str
    program: tuple[str, str]
    package: str | None = None


CONTESTANTS = {
    "ours": Contestant("headgate", ("client.py", "ours"), "headgate"),
    "tcp": Contestant("headgate over TCP", ("client.py", "tcp"), "headgate"),
    "tls": Contestant("headgate over TCP, mutual TLS", ("client.py", "tls"), "cryptography"),
    "found": Contestant("headgate, announced by LocalDiscovery", ("client.py", "found"), "headgate"),
    "by value": Contestant("headgate, routine in __main__", ("in_main.py", "ours"), "headgate"),
    "wool": Contestant("wool", ("client.py", "wool"), "wool"),
    "executor": Contestant("ProcessPoolExecutor", ("client.py", "executor")),
    "raw": Contestant("raw grpc.aio, a message per call", ("client.py", "raw"), "grpc"),
    "ray": Contestant("Ray tasks", ("client.py", "ray"), "ray"),
    "dask": Contestant("Dask distributed", ("client.py", "dask"), "distributed"),
}
FRESH = ("ours", "found", "wool", "executor", "raw", "ray", "dask")
KILLED = ("ours", "wool", "executor")


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much is measured."""

    calls: Turns
    first: int
    killed: int
    on_workers: int


FULL = Lengths(calls=Turns(5, 1.0), first=9, killed=3, on_workers=10_000)
QUICK = Lengths(calls=Turns(3, 0.3), first=3, killed=1, on_workers=3_000)


def installed() -> dict[str, bool]:
    found = {name: one.package is None or _found(one.package) for name, one in CONTESTANTS.items()}
    if not found["wool"]:
        raise SystemExit(
            f"wool {PEER}, the peer to measure against, is not installed.\n"
            "Run `make bench` or `make bench-quick`: they install the `bench` extra first."
        )
    if version("wool") != PEER:
        table.say(f"note: wool {version('wool')} is installed; the targets are about {PEER}")
    return found


def _found(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# -- the processes ----------------------------------------------------------------------------------------------------


class Lane:
    """A contestant's process, from this side: questions go in, answers come out."""

    def __init__(self, name: str, process: Process, errors: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._errors = errors

    async def ask(self, measure: str, **about: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"measure": measure, **about}).encode() + b"\n")
        return await self.answer(f"{measure} {about}")

    async def answer(self, question: str) -> Any:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE)
        except TimeoutError:
            line = b""
        if not line:
            self._errors.seek(0)
            tail = self._errors.read()[-4_000:].decode(errors="replace")
            raise SystemExit(f"{tail}\n{self.name} did not answer ({question}): without it there are no ratios")
        return json.loads(line)

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 15)
        except TimeoutError:
            table.say(f"note: {self.name} did not end by itself")
            self._process.kill()
            await self._process.wait()


def lane(name: str, what: str) -> AbstractAsyncContextManager[Lane]:
    script, contestant = CONTESTANTS[name].program
    return program(name, script, contestant, what)


@asynccontextmanager
async def program(name: str, script: str, *arguments: str) -> AsyncIterator[Lane]:
    command = (sys.executable, str(FOLDER / script), *arguments)
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=errors)
        opened = Lane(name, process, errors)
        try:
            yield opened
        finally:
            await opened.close()


async def once(name: str, what: str) -> Any:
    """Start a new process of the contestant for one question, and return its answer."""
    async with lane(name, what) as opened:
        return await opened.answer(what)


# -- calls ------------------------------------------------------------------------------------------------------------


async def measure_calls(lengths: Lengths, names: list[str]) -> dict[str, Any]:
    """The same processes for all of it.

    Of their memory the end is judged: that is where the figures of the targets were taken, and what a pool once needed
    for a thousand callers it rarely gives back.
    """
    async with AsyncExitStack() as stack:
        lanes = {name: await stack.enter_async_context(lane(name, "serve")) for name in names}
        table.say("1,000 calls, and memory ...")
        for one in lanes.values():
            await one.ask("calls", callers=10, each=100)
        memory = memory_rows("after 1,000 calls, 10 at a time", await _memory(lanes), None)
        latency = latency_rows(await _latencies(lengths.calls, lanes))
        rates = []
        for callers in CALLERS:
            rates += rate_rows(callers, await _rates(lengths.calls, lanes, callers))
        memory += memory_rows("after all calls, 1,000 at a time", await _memory(lanes), WORKER)
        return {"latency": latency, "rates": rates, "memory": memory}


async def _memory(lanes: Mapping[str, Lane]) -> dict[str, dict[str, float]]:
    answers = {name: await one.ask("memory") for name, one in lanes.items()}
    return {name: figures for name, figures in answers.items() if figures is not None}


async def _latencies(turns: Turns, lanes: Mapping[str, Lane]) -> dict[str, list[dict[str, float]]]:
    table.say("one caller ...")
    many = {name: await one.ask("each", callers=1, seconds=turns.seconds) for name, one in lanes.items()}
    return await _in_turns(turns, lanes, lambda name: lanes[name].ask("latency", calls=many[name]))


async def _rates(turns: Turns, lanes: Mapping[str, Lane], callers: int) -> dict[str, list[float]]:
    table.say(f"{callers:,} callers ...")
    each = {name: await one.ask("each", callers=callers, seconds=turns.seconds) for name, one in lanes.items()}
    return await _in_turns(turns, lanes, lambda name: lanes[name].ask("calls", callers=callers, each=each[name]))


async def _in_turns(turns: Turns, lanes: Mapping[str, Lane], measure: Callable[[str], Any]) -> dict[str, list[Any]]:
    figures: dict[str, list[Any]] = {name: [] for name in lanes}
    for _ in range(turns.rounds):
        for name in lanes:
            figures[name].append(await measure(name))
    return figures


def latency_rows(rounds: Mapping[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    middle = {name: {kind: median([one[kind] for one in ones]) for kind in ones[0]} for name, ones in rounds.items()}
    return [
        {"who": name, **figures, **_beside(figures["p50"], middle, "wool", "p50", P50 if name == "ours" else None)}
        | {"rounds": rounds[name]}
        for name, figures in middle.items()
    ]


def rate_rows(callers: int, rounds: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """One row for each contestant, and one more for each further peer that ours is compared with."""
    middle = {name: {"rate": median(rates)} for name, rates in rounds.items()}
    rows = []
    for name, rates in rounds.items():
        rate, bars = middle[name]["rate"], RATES[callers] if name == "ours" else {"wool": None}
        if name in ("tcp", "tls"):
            bars = {"ours": TLS if (name, callers) == ("tls", 100) else None}
        for peer, bar in bars.items():
            row = {"callers": callers, "who": name, "rate": rate, "rounds": rates}
            rows.append(row | _beside(rate, middle, peer, "rate", bar))
    return rows


def memory_rows(when: str, memory: Mapping[str, dict[str, float]], bar: Bar | None) -> list[dict[str, Any]]:
    rows = []
    for name, figures in memory.items():
        row = {"when": when, "who": name, **figures, "client_ratio": figures["client"] / memory["wool"]["client"]}
        rows.append(row | _beside(figures["worker"], memory, "wool", "worker", bar if name == "ours" else None))
    return rows


def _beside(figure: float, middle: Mapping[str, Any], peer: str, kind: str, bar: Bar | None) -> dict[str, Any]:
    ratio = figure / middle[peer][kind]
    verdict = {"must": bar.must, "goal": bar.goal, "verdict": bar.verdict(ratio)} if bar is not None else {}
    return {"beside": peer, "ratio": ratio} | verdict


def show_latency(rows: list[dict[str, Any]]) -> None:
    header = ("who", "p50 ms", "p99 ms", "p50 ratio", "must", "goal", "verdict")
    print_rows = [
        (
            title_of(row["who"]),
            f"{1e3 * row['p50']:.3f}",
            f"{1e3 * row['p99']:.3f}",
            times(row["ratio"]),
            *_bar(row, "at most {:.2f}x"),
        )
        for row in rows
    ]
    table.print_table("One call at a time, beside wool", header, print_rows)


def show_rates(rows: list[dict[str, Any]]) -> None:
    header = ("callers", "who", "calls /s", "beside", "ratio", "must", "goal", "verdict")
    print_rows = [
        (
            f"{row['callers']:,}",
            title_of(row["who"]),
            per_second(row["rate"]),
            title_of(row["beside"]),
            times(row["ratio"]),
            *_bar(row, "{}x"),
        )
        for row in rows
    ]
    table.print_table("Many callers, each doing one call after the other", header, print_rows)


def show_memory(rows: list[dict[str, Any]]) -> None:
    if not rows:
        print("\nMemory is measured on Linux only.")
        return
    header = ("when", "who", "worker MB", "ratio", "must", "goal", "verdict", "client MB", "ratio", "others MB")
    print_rows = [
        (
            row["when"],
            title_of(row["who"]),
            _megabytes(row["worker"]),
            times(row["ratio"]),
            *_bar(row, "at most {}x"),
            _megabytes(row["client"]),
            times(row["client_ratio"]),
            _megabytes(row["others"]),
        )
        for row in rows
    ]
    title = (
        "Memory that no other process shares (USS): of one worker, of the client, of all others together; beside wool"
    )
    table.print_table(title, header, print_rows)


def _megabytes(figure: float) -> str:
    return f"{figure / 2**20:.1f}"


# -- many workers -----------------------------------------------------------------------------------------------------


async def measure_workers(lengths: Lengths) -> list[dict[str, Any]]:
    """CPU time of a call with 100 callers, of the client and of all workers, by the number of workers."""
    if sys.platform != "linux":
        return []
    table.say("100 callers on 1 to 16 workers ...")
    async with AsyncExitStack() as stack:
        lanes = {
            str(count): await stack.enter_async_context(program(f"{count} workers", "many_workers.py", str(count)))
            for count in WORKERS
        }
        turns = Turns(lengths.calls.rounds, 0.0)
        rounds = await _in_turns(
            turns, lanes, lambda name: lanes[name].ask("cpu", callers=100, calls=lengths.on_workers)
        )
    rows = []
    for count in WORKERS:
        ones = rounds[str(count)]
        row: dict[str, Any] = {kind: median([one[kind] for one in ones]) for kind in ones[0]}
        both = [_both(one) / _both(alone) for one, alone in zip(ones, rounds["1"], strict=True)]
        row |= {"workers_count": count, "ratio": median(both), "rounds": ones}
        if count == 8:
            row |= {"must": EIGHT.must, "goal": EIGHT.goal, "verdict": EIGHT.verdict(row["ratio"])}
        rows.append(row)
    return rows


def _both(figures: Mapping[str, float]) -> float:
    return figures["client"] + figures["workers"]


def show_workers(rows: list[dict[str, Any]]) -> None:
    if not rows:
        print("\nThe CPU time of workers is measured on Linux only.")
        return
    header = ("workers", "client us", "workers us", "both us", "ratio", "must", "goal", "verdict", "calls a message")
    print_rows = [
        (
            str(row["workers_count"]),
            *(f"{1e6 * figure:.0f}" for figure in (row["client"], row["workers"], _both(row))),
            times(row["ratio"]),
            *_bar(row, "at most {}x"),
            f"{row['batch']:.1f}",
        )
        for row in rows
    ]
    table.print_table("CPU time of one call with 100 callers, beside one worker", header, print_rows)


# -- the first result -------------------------------------------------------------------------------------------------


async def measure_first(lengths: Lengths, names: list[str]) -> list[dict[str, Any]]:
    table.say("the first result, in a new interpreter each time ...")
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(lengths.first + 1):
        for name in names:
            figures = await once(name, "first")
            if number:  # before that, files were read from the disk and compiled
                rounds[name].append(figures)
    middle = {
        name: {"first": median([one["first"] for one in ones]), "all": median([sum(one.values()) for one in ones])}
        for name, ones in rounds.items()
    }
    rows = []
    for kind, what in (("first", "from the making of the pool"), ("all", "and the import of the library")):
        for name, figures in middle.items():
            bar = {("first", "ours"): FIRST, ("first", "found"): FOUND}.get((kind, name))
            peer = "ours" if name == "found" else "wool"
            row = {"what": what, "who": name, "seconds": figures[kind]}
            rows.append(row | _beside(figures[kind], middle, peer, kind, bar) | {"rounds": rounds[name]})
    return rows


def show_first(rows: list[dict[str, Any]]) -> None:
    print_rows = [
        (
            row["what"],
            title_of(row["who"]),
            f"{1e3 * row['seconds']:.0f}",
            title_of(row["beside"]),
            times(row["ratio"]),
            *_bar(row, "at most {}x"),
        )
        for row in rows
    ]
    header = ("what", "who", "ms", "beside", "ratio", "must", "goal", "verdict")
    table.print_table("The first result, in a new interpreter", header, print_rows)


# -- a worker killed --------------------------------------------------------------------------------------------------


async def measure_killed(lengths: Lengths, names: list[str]) -> list[dict[str, Any]]:
    """Our caller must get our error in time, and our pool must have a new worker afterwards."""
    table.say("a worker is killed ...")
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(lengths.killed):
        for name in names:
            rounds[name].append(await once(name, "killed"))
    rows = []
    for name, ones in rounds.items():
        told = median([1e3 * one["told"] for one in ones])
        new = [one["respawned"] for one in ones]
        row = {"who": name, "told_ms": told, "error": ones[-1]["error"][0], "text": ones[-1]["text"], "rounds": ones}
        row["respawned_ms"] = None if None in new else 1e3 * median(new)
        if name == "ours":
            well = None not in new and all("headgate.WorkerLost" in one["error"] for one in ones)
            row |= {"must": TOLD_MS.must, "verdict": TOLD_MS.verdict(told) if well else MISSED}
        rows.append(row)
    return rows


def show_killed(rows: list[dict[str, Any]]) -> None:
    header = ("who", "caller told after ms", "error", "new worker after ms", "must", "goal", "verdict")
    print_rows = [
        (
            title_of(row["who"]),
            f"{row['told_ms']:.1f}",
            row["error"],
            "never" if row["respawned_ms"] is None else f"{row['respawned_ms']:.0f}",
            *_bar(row, "{} ms, WorkerLost, a new worker"),
        )
        for row in rows
    ]
    table.print_table("The worker of a running call is killed", header, print_rows)


# -- an announced worker killed ----------------------------------------------------------------------------------------


async def measure_noticed(lengths: Lengths) -> list[dict[str, Any]]:
    """How soon a subscriber of a discovery hears that the process which announced a worker was killed."""
    table.say("the process that announced a worker is killed ...")
    kinds = [kind for kind in NOTICED if kind != "lan" or _found("zeroconf")]
    rounds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(3 * lengths.killed):
        for kind in kinds:
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(FOLDER / "noticed.py"), kind, stdout=PIPE
            )
            told, _ = await process.communicate()
            rounds[kind].append(1e3 * json.loads(told))
    rows = []
    for kind, found in rounds.items():
        bar, worst = NOTICED[kind], max(found)
        row = {"discovery": kind, "told_ms": median(found), "worst_ms": worst, "rounds": found}
        rows.append(row | {"must": bar.must, "verdict": bar.verdict(median(found))})
    return rows


def show_noticed(rows: list[dict[str, Any]]) -> None:
    header = ("discovery", "told after ms", "worst ms", "must", "goal", "verdict")
    print_rows = [
        (row["discovery"], f"{row['told_ms']:.1f}", f"{row['worst_ms']:.1f}", *_bar(row, "{} ms")) for row in rows
    ]
    table.print_table("The process that announced a worker is killed", header, print_rows)


# -- strangers ---------------------------------------------------------------------------------------------------------


async def measure_strangers(lengths: Lengths) -> list[dict[str, Any]]:
    """One call at a time with mutual TLS, alone and beside 602 connections of strangers (see `strangers.py`)."""
    table.say("strangers connect ...")
    rounds = []
    for _ in range(lengths.calls.rounds):
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(FOLDER / "strangers.py"), str(2 * lengths.calls.seconds), stdout=PIPE
        )
        told, _ = await process.communicate()
        rounds.append(json.loads(told))
    rows = []
    for kind in ("p50", "p99"):
        ratio = median([one["beside"][kind] / one["alone"][kind] for one in rounds])
        times_of = {who: median([one[who][kind] for one in rounds]) for who in ("alone", "beside")}
        row: dict[str, Any] = {"what": kind, **times_of, "ratio": ratio, "rounds": rounds}
        rows.append(row | ({"must": STRANGERS.must, "verdict": STRANGERS.verdict(ratio)} if kind == "p99" else {}))
    return rows


def show_strangers(rows: list[dict[str, Any]]) -> None:
    header = ("", "alone ms", "beside strangers ms", "ratio", "must", "goal", "verdict")
    print_rows = [
        (
            row["what"],
            f"{1e3 * row['alone']:.3f}",
            f"{1e3 * row['beside']:.3f}",
            times(row["ratio"]),
            *_bar(row, "at most {}x"),
        )
        for row in rows
    ]
    table.print_table("One call at a time with mutual TLS, beside 602 connections of strangers", header, print_rows)


# -- the floor --------------------------------------------------------------------------------------------------------


async def measure_floor(lengths: Lengths) -> dict[str, Any]:
    """The same function in this process."""

    async def add(a: int, b: int) -> int:
        return a + b

    async def work(count: int) -> None:
        for _ in range(count):
            await add(1, 2)

    rates = await in_turns(Turns(lengths.calls.rounds, 0.1), {"await": work})
    return {"us": 1e6 / median(rates["await"]), "rounds": rates}


# -- verdicts ---------------------------------------------------------------------------------------------------------


def title_of(name: str) -> str:
    return CONTESTANTS[name].title


def _bar(row: dict[str, Any], form: str) -> tuple[str, str, str]:
    """The cells of must, goal and verdict."""
    must, goal = (form.format(row[name]) if row.get(name) is not None else "-" for name in ("must", "goal"))
    return must, goal, row.get("verdict", "-")


def missed(results: dict[str, Any]) -> list[str]:
    """Every figure that missed its minimum, in words."""
    what: dict[str, Callable[[dict[str, Any]], str]] = {
        "latency": lambda row: f"one call takes {times(row['ratio'])} of {row['beside']}'s time, must {row['must']}x",
        "rates": lambda row: (
            f"{row['callers']:,} callers: {times(row['ratio'])} {title_of(row['beside'])}, must {row['must']}x"
        ),
        "first": lambda row: (
            f"the first result takes {times(row['ratio'])} of {row['beside']}'s time, must {row['must']}x"
        ),
        "memory": lambda row: f"a worker takes {times(row['ratio'])} of wool's memory, must {row['must']}x",
        "workers": lambda row: (
            f"a call on {row['workers_count']} workers takes {times(row['ratio'])} the CPU time, must {row['must']}x"
        ),
        "killed": lambda row: (
            f"a killed worker: {row['error']} after {row['told_ms']:.0f} ms"
            f"{', no new worker' if row['respawned_ms'] is None else ''}, must {row['must']} ms"
        ),
        "strangers": lambda row: f"beside strangers a call takes {times(row['ratio'])} (p99), must {row['must']}x",
        "noticed": lambda row: (
            f"a killed publisher ({row['discovery']}) is noticed after {row['told_ms']:.0f} ms, must {row['must']} ms"
        ),
    }
    parts = ((words, results.get(part, ())) for part, words in what.items())
    return [words(row) for words, rows in parts for row in rows if row.get("verdict") == MISSED]


async def measure(lengths: Lengths, found: Mapping[str, bool]) -> dict[str, Any]:
    there = [name for name in CONTESTANTS if found[name]]
    return {
        "first": await measure_first(lengths, [name for name in FRESH if name in there]),
        "killed": await measure_killed(lengths, [name for name in KILLED if name in there]),
        "noticed": await measure_noticed(lengths),
        "strangers": await measure_strangers(lengths) if found["tls"] else [],
        **await measure_calls(lengths, [name for name in there if name != "found"]),
        "workers": await measure_workers(lengths),
        "floor": await measure_floor(lengths),
    }


def compile_ours() -> None:
    """Compile our sources once, as pip does when it installs; else each start would compile them."""
    spec = importlib.util.find_spec("headgate")
    assert spec is not None, "it is what is measured"
    for folder in spec.submodule_search_locations or ():
        compileall.compile_dir(folder, quiet=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    parser.add_argument("--workers", action="store_true", help="only the cost of a call on 1 to 16 workers")
    given = parser.parse_args()
    quick, lengths = given.quick, QUICK if given.quick else FULL
    if given.workers:
        show_workers(asyncio.run(measure_workers(lengths)))
        table.warn_if_busy()
        return
    found = installed()
    compile_ours()
    results: dict[str, Any] = {"quick": quick, **asyncio.run(measure(lengths, found))}
    show_latency(results["latency"])
    show_rates(results["rates"])
    show_workers(results["workers"])
    show_first(results["first"])
    show_memory(results["memory"])
    show_killed(results["killed"])
    show_noticed(results["noticed"])
    show_strangers(results["strangers"])
    print(f"\nFor scale: a bare await of the same function in this process takes {results['floor']['us']:.3f} us.")
    for name in ("ray", "dask"):
        if not found[name]:
            print(f"{title_of(name)}: not installed.")
    path = table.keep("dispatch", results)
    print(f"Medians, in turns. Kept in {path.parent.parent.name}/results/{path.name}.")
    table.warn_if_busy()
    if words := missed(results):
        print("MISSED: " + "; ".join(words) + ".")
    else:
        print("Every must is reached.")


if __name__ == "__main__":
    main()
