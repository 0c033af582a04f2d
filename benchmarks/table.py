"""What all benchmarks share: measuring in turns, judging ratios, printing tables, storing results.

Absolute figures differ between machines and from hour to hour; ratios that are measured side by side do not. So the
contestants take turns, in slices so short that other load disturbs all of them alike, and the median of each counts.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LATEST = Path(__file__).parent / "results" / "latest.json"

MISSED = "MISSED"

Contestant = Callable[[int], Awaitable[None]]
"""An async function that does its work so many times."""


@dataclass(frozen=True, slots=True)
class Turns:
    """How long to measure: `rounds` turns for each contestant, of about `seconds` each.

    `clock` may be `time.process_time` for work that never waits: the same on an idle machine, steadier on a busy one.
    """

    rounds: int
    seconds: float
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class Bar:
    """The minimum (`must`) and the goal of a figure. With `at_most` they are upper limits."""

    must: float
    goal: float | None = None
    at_most: bool = False

    def verdict(self, figure: float) -> str:
        """Say which of the two is reached, or MISSED."""
        if self.goal is not None and self._holds(figure, self.goal):
            return "goal reached"
        return "must reached" if self._holds(figure, self.must) else MISSED

    def _holds(self, figure: float, bound: float) -> bool:
        return figure <= bound if self.at_most else figure >= bound


async def in_turns(turns: Turns, contestants: Mapping[str, Contestant]) -> dict[str, list[float]]:
    """Times per second of each contestant, one figure per round: a, b, a, b, ..."""
    counts = {name: await _how_many(work, turns) for name, work in contestants.items()}
    return await so_many_each(counts, turns, contestants)


async def so_many_each(
    counts: Mapping[str, int], turns: Turns, contestants: Mapping[str, Contestant]
) -> dict[str, list[float]]:
    """The same with a given number of times for each turn. `turns.seconds` is not used."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns.rounds):
        for name, work in contestants.items():
            gc.collect()  # so that no contestant pays for the garbage of another
            rates[name].append(counts[name] / await _timed(work, counts[name], turns.clock))
    return rates


async def _how_many(work: Contestant, turns: Turns) -> int:
    """How many times fit into one turn. This is also the warm-up."""
    count, spent = 4, 0.0
    while spent < turns.seconds / 4:
        count *= 2
        spent = await _timed(work, count, turns.clock)
    return max(1, int(count * turns.seconds / spent))


async def _timed(work: Contestant, count: int, clock: Callable[[], float]) -> float:
    start = clock()
    await work(count)
    return clock() - start


def median(figures: Sequence[float]) -> float:
    """The median, because a burst of other load changes it little."""
    return statistics.median(figures)


def per_second(rate: float) -> str:
    """1234567 as 1.23M, 51600 as 51.6k, 258 as 258."""
    for bound, unit in ((1e6, "M"), (1e3, "k")):
        if rate >= bound:
            return f"{rate / bound:.3g}{unit}" if rate < 1000 * bound else f"{rate / bound:.0f}{unit}"
    return f"{rate:.0f}"


def times(ratio: float) -> str:
    """How many times as much: 4.02x, 86x, 1,234x."""
    return f"{ratio:,.0f}x" if ratio >= 20 else f"{ratio:.2f}x"


def formatted(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that is readable as text and as Markdown, figures aligned to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = (
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (header, ["-" * (width - 1) + ":" for width in widths], *rows)
    )
    return "\n".join([f"\n{title}\n", *lines])


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as `formatted` makes it."""
    print(formatted(title, header, rows))


def warn_if_busy() -> None:
    """Warn if the machine is busy: other programs share caches and clock rates even on other cores."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load > cpus:
        print(
            f"note: the load is {load:.1f} on {cpus} CPUs: these figures are coarse, an idle machine gives better ones"
        )


def say(text: str) -> None:
    """Print progress to stderr; it is not part of the result."""
    print(text, file=sys.stderr, flush=True)


def keep(benchmark: str, results: Mapping[str, Any]) -> Path:
    """Write the results of one benchmark to `LATEST`; those of the other benchmarks stay."""
    try:
        kept = json.loads(LATEST.read_text("utf-8"))
    except (OSError, ValueError):
        kept = {}
    kept[benchmark] = {"surroundings": surroundings(), **results}
    LATEST.parent.mkdir(exist_ok=True)
    LATEST.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")
    return LATEST


def surroundings() -> dict[str, Any]:
    """Machine, Python and load: what a reader of the figures should know."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
