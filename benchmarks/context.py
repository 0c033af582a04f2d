"""What context variables cost: calls on two worker processes with none set and with ten, and the size of a call.

    make bench          a minute and a half
    make bench-quick    half a minute
    python benchmarks/context.py --before PATH     calls with none set too, beside an older headgate in that folder

The contestants take turns in one run, and only ratios count. The program prints MISSED for a figure that does not reach
its minimum ("must"), and exits with 0 all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streams
import table
from dispatch import compile_ours
from table import MISSED, Bar, Turns, median, per_second, times

CALLERS = 100
VARIABLES = 10
VALUES = {
    "texts": "texts, the same for all calls",
    "new": "texts, one of them set before each call",
    "objects": "tuples",
}

SET = Bar(1.5, at_most=True)
EMPTY = Bar(0, at_most=True)
AS_SMALL = Bar(1.0, at_most=True)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much of everything is measured. `before` is that of streams.py, with which the older one is measured."""

    values: Turns
    launches: int
    before: streams.Lengths


FULL = Lengths(values=Turns(12, 0.3), launches=3, before=streams.FULL)
QUICK = Lengths(values=Turns(10, 0.15), launches=2, before=streams.QUICK)


# -- calls with values and without ------------------------------------------------------------------------------------


async def measure_values(lengths: Lengths) -> list[dict[str, Any]]:
    """In one process and on the same workers, which take turns at having values and having none.

    Judged by the median of ratios, one for each pair of turns. A ratio says how many times as long a call takes.
    """
    table.say(f"small calls, {VARIABLES} values set and none ...")
    seconds, kinds = lengths.values.seconds, ("none", *VALUES)
    latencies: dict[str, list[float]] = {kind: [] for kind in kinds}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(lengths.launches):
        async with streams.started("headgate", "context_client.py", "serve") as lane:
            alone = {kind: await lane.ask("each", values=kind, callers=1, seconds=seconds) for kind in kinds}
            each = {kind: await lane.ask("each", values=kind, callers=CALLERS, seconds=seconds) for kind in kinds}
            for number in range(lengths.values.rounds):
                order = kinds if number % 2 else kinds[::-1]
                for kind in order:
                    latencies[kind].append((await lane.ask("latency", values=kind, calls=alone[kind]))["p50"])
                for kind in order:
                    rates[kind].append(await lane.ask("calls", values=kind, callers=CALLERS, each=each[kind]))
    milliseconds = {kind: [1e3 * spent for spent in figures] for kind, figures in latencies.items()}
    alone_rows = [
        values_row("one call at a time, p50 ms", kind, milliseconds[kind], milliseconds["none"], longer=True)
        for kind in VALUES
    ]
    rate_rows = [
        values_row(f"{CALLERS} callers, calls /s", kind, rates[kind], rates["none"], longer=False) for kind in VALUES
    ]
    return alone_rows + rate_rows


def values_row(what: str, kind: str, ten: Sequence[float], none: Sequence[float], *, longer: bool) -> dict[str, Any]:
    """`longer`: the greater figure is the worse one."""
    pairs = zip(ten, none, strict=True)
    ratios = [with_values / without if longer else without / with_values for with_values, without in pairs]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    row: dict[str, Any] = {"what": what, "values": kind, "ten": median(ten), "none": median(none), "ratio": ratio}
    row |= {"half": (low, high), "pairs": len(ratios), "rounds": {"ten": list(ten), "none": list(none)}}
    return row | {"must": SET.must, "verdict": SET.verdict(ratio)}


def show_values(rows: Sequence[dict[str, Any]]) -> None:
    def short(figure: float) -> str:
        return per_second(figure) if figure >= 1e3 else f"{figure:.3f}"

    header = ("what", "values", "set", "none", "time", "half of the ratios", "must", "verdict")
    print_rows = [
        (
            row["what"],
            VALUES[row["values"]],
            short(row["ten"]),
            short(row["none"]),
            times(row["ratio"]),
            " to ".join(map(times, row["half"])),
            f"at most {row['must']}x",
            row["verdict"],
        )
        for row in rows
    ]
    title = f"Small calls with {VARIABLES} small values set and with none; the time is the median of neighbouring turns"
    table.print_table(title, header, print_rows)


# -- the size of a call -----------------------------------------------------------------------------------------------


async def measure_frames() -> list[dict[str, Any]]:
    """Bytes of a small call and of its answer, as they are written to the stream."""
    table.say("frames ...")
    async with streams.started("headgate", "context_client.py", "frames") as lane:
        found = await lane.answer("frames")
    rows = [{"what": what, **sizes} for what, sizes in found.items()]
    nothing, once, often, _kept, _ten, there_once, there_often = rows
    nothing |= _judged(EMPTY, nothing["call_context"] + nothing["result_context"], "no byte")
    often |= _judged(AS_SMALL, often["call"] / once["call"], "as once")
    there_often |= _judged(AS_SMALL, there_often["result"] / there_once["result"], "as once")
    return rows


def _judged(bar: Bar, figure: float, must: str) -> dict[str, Any]:
    return {"figure": figure, "must": must, "verdict": bar.verdict(figure)}


def show_frames(rows: Sequence[dict[str, Any]]) -> None:
    header = ("what is set", "call", "of it context", "answer", "of it context", "must", "verdict")
    sizes = ("call", "call_context", "result", "result_context")
    print_rows = [
        (row["what"], *(f"{row[size]:,}" for size in sizes), row.get("must", "-"), row.get("verdict", "-"))
        for row in rows
    ]
    table.print_table("Bytes of one small call and of its answer; each value has 14 letters", header, print_rows)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def missed(results: dict[str, Any]) -> list[str]:
    """Every figure that missed its minimum, in words."""
    values = [
        f"{row['what']}, {VALUES[row['values']]}: {times(row['ratio'])} the time, must {row['must']}x"
        for row in _those(results["values"])
    ]
    frames = [f"bytes, {row['what']}: must be {row['must']}" for row in _those(results["frames"])]
    before = [
        f"{row['what']}: {times(row['ratio'])} of before, must {row['must']}x" for row in _those(results["before"])
    ]
    return values + frames + before


def _those(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row.get("verdict") == MISSED]


async def measure(lengths: Lengths, before: Path | None) -> dict[str, Any]:
    return {
        "frames": await measure_frames(),
        "values": await measure_values(lengths),
        "before": await streams.measure_before(lengths.before, before) if before is not None else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    parser.add_argument("--before", metavar="PATH", help="a folder with an older headgate, to compare small calls with")
    options = parser.parse_args()
    compile_ours()
    before = streams.older(options.before) if options.before is not None else None
    measured = asyncio.run(measure(QUICK if options.quick else FULL, before))
    results: dict[str, Any] = {"quick": options.quick, **measured}
    show_frames(results["frames"])
    show_values(results["values"])
    streams.show_before(results["before"])
    path = table.keep("context", results)
    print(f"\nMedians, in turns. Kept in {path.parent.parent.name}/results/{path.name}.")
    table.warn_if_busy()
    if words := missed(results):
        print("MISSED: " + "; ".join(words) + ".")
    else:
        print("Every must is reached.")


if __name__ == "__main__":
    main()
