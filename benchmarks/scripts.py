"""A script, whose functions and classes are of `__main__`, beside the same code in a module; and files beside
ProcessPoolExecutor.

    make bench          a minute and a half
    make bench-quick    half a minute

The two take turns in one run, and only ratios count. Each has a process of its own with two workers
(`contestants/script_jobs.py`, `contestants/script_module.py`). "must" is the minimum of the project's performance
targets. The program prints MISSED for a figure that does not reach it, and exits with 0 all the same.

The files are 500 CSV files, which functions of `__main__` read with pandas. Pools are open, and every worker has
imported pandas, before it is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import random
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import table
from dispatch import FOLDER, Lane, compile_ours
from table import MISSED, Bar, Turns, median, per_second, times

CASES = (
    "numbers only",
    "a recursive routine",
    "uses a dataclass, an Enum and a function",
    "takes a dataclass",
    "returns a dataclass",
    "calls a routine with a dataclass",
)
SCRIPT = Bar(0.7)
FILES = Bar(1.1, at_most=True)
CALLERS = 100
KINDS = ("async def", "def")  # on the loop of a worker, and in its threads
FILE_COUNT, ROW_COUNT = 500, 1_500
FULL, QUICK = Turns(7, 0.5), Turns(3, 0.2)


@asynccontextmanager
async def lane(program: str) -> AsyncIterator[Lane]:
    with tempfile.TemporaryFile() as errors:
        command = (sys.executable, str(FOLDER / program))
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=errors)
        opened = Lane(program, process, errors)
        try:
            yield opened
        finally:
            await opened.close()


async def measure_calls(turns: Turns, script: Lane, module: Lane) -> list[dict[str, Any]]:
    """Calls per second of each case, in turns."""
    return [await _measure_case(case, turns, script, module) for case in CASES]


async def _measure_case(case: str, turns: Turns, script: Lane, module: Lane) -> dict[str, Any]:
    table.say(f"{case} ...")

    def contestant(lane: Lane) -> table.Contestant:
        async def work(count: int) -> None:
            await lane.ask("calls", case=case, each=count)

        return work

    lanes = {"script": script, "module": module}
    for one in lanes.values():  # each worker is to know the functions and classes
        await one.ask("calls", case=case, each=5)
    rounds = await table.in_turns(turns, {name: contestant(one) for name, one in lanes.items()})
    rounds = {name: [rate * CALLERS for rate in rates] for name, rates in rounds.items()}
    ratio = median([ours / beside for ours, beside in zip(rounds["script"], rounds["module"], strict=True)])
    return {
        "case": case,
        "rounds": rounds,
        "ratio": ratio,
        "must": SCRIPT.must,
        "verdict": SCRIPT.verdict(ratio),
    }


async def measure_files(rounds: int, script: Lane) -> list[dict[str, Any]]:
    """Seconds for all files, in turns."""
    if importlib.util.find_spec("pandas") is None:
        return []
    table.say(f"{FILE_COUNT} files ...")
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        spent: dict[str, list[float]] = {**{kind: [] for kind in KINDS}, "executor": []}
        for turn in range(rounds + 1):
            for who, figures in spent.items():
                done = await script.ask(who, folder=folder)
                assert done["rows"] == FILE_COUNT * ROW_COUNT, "every file was read"
                if turn:  # in the first, workers import pandas
                    figures.append(done["seconds"])
    return [_file_row(kind, spent[kind], spent["executor"]) for kind in KINDS]


def _file_row(kind: str, ours: list[float], executor: list[float]) -> dict[str, Any]:
    ratio = median([one / beside for one, beside in zip(ours, executor, strict=True)])
    return {
        "kind": kind,
        "rounds": {"ours": ours, "executor": executor},
        "ratio": ratio,
        "must": FILES.must,
        "verdict": FILES.verdict(ratio),
    }


def write_files(folder: Path) -> None:
    chance = random.Random(1)
    for number in range(FILE_COUNT):
        lines = [
            f"{row},item {row % 97},{chance.random() * 100:.2f},{chance.randrange(50)},2024-03-{row % 28 + 1:02d}"
            for row in range(ROW_COUNT)
        ]
        text = "\n".join(["id,name,price,count,day", *lines]) + "\n"
        (folder / f"{number:03d}.csv").write_text(text, "utf-8")


def show(results: dict[str, Any]) -> None:
    table.print_table(
        f"Calls per second, {CALLERS} callers, two workers",
        ("what the routine does", "in a module", "in __main__", "ratio", "must", "verdict"),
        [
            (
                row["case"],
                per_second(median(row["rounds"]["module"])),
                per_second(median(row["rounds"]["script"])),
                times(row["ratio"]),
                f"{row['must']}x",
                row["verdict"],
            )
            for row in results["calls"]
        ],
    )
    if not results["files"]:
        print("\npandas: not installed, and files are not measured.")
        return
    table.print_table(
        f"{FILE_COUNT} CSV files with pandas, by functions of __main__ on two workers",
        ("routine", "headgate", "ProcessPoolExecutor", "ratio", "must at most", "verdict"),
        [
            (
                row["kind"],
                f"{median(row['rounds']['ours']):.2f} s",
                f"{median(row['rounds']['executor']):.2f} s",
                times(row["ratio"]),
                f"{row['must']}x",
                row["verdict"],
            )
            for row in results["files"]
        ],
    )


def missed(results: dict[str, Any]) -> list[str]:
    """Every figure that missed its minimum, in words."""
    words = [
        f"{row['case']}: {times(row['ratio'])} of the rate in a module, must {row['must']}x"
        for row in results["calls"]
        if row["verdict"] == MISSED
    ]
    return words + [
        f"files by {row['kind']} take {times(row['ratio'])} of ProcessPoolExecutor's time, must {row['must']}x"
        for row in results["files"]
        if row["verdict"] == MISSED
    ]


async def measure(turns: Turns) -> dict[str, Any]:
    async with lane("script_jobs.py") as script, lane("script_module.py") as module:
        calls = await measure_calls(turns, script, module)
    async with lane("script_jobs.py") as script:
        return {"calls": calls, "files": await measure_files(turns.rounds, script)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    quick = parser.parse_args().quick
    compile_ours()
    results: dict[str, Any] = {"quick": quick, **asyncio.run(measure(QUICK if quick else FULL))}
    show(results)
    path = table.keep("scripts", results)
    print(f"Medians, in turns. Kept in {path.parent.parent.name}/results/{path.name}.")
    table.warn_if_busy()
    if words := missed(results):
        print("MISSED: " + "; ".join(words) + ".")
    else:
        print("Every must is reached.")


if __name__ == "__main__":
    main()
