"""Write `results/summary.md` from the newest results: the figures that the README states, each with its spread.

    make bench          runs this last

A ratio is the median of the ratios of neighbouring turns, because other load disturbs neighbouring turns alike. The
spread is the lowest and the highest of these ratios. The summary is committed, so that every figure of the README can
be traced to its run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import LATEST, median, times

SUMMARY = LATEST.with_name("summary.md")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the summary: what is measured, beside what, and one ratio for each pair of neighbouring turns."""

    what: str
    beside: str
    ratios: Sequence[float]
    must: str

    def cells(self) -> tuple[str, ...]:
        low, high = min(self.ratios), max(self.ratios)
        spread = f"{times(low)} to {times(high)}"
        return self.what, self.beside, times(median(self.ratios)), spread, str(len(self.ratios)), self.must


def ratios(ours: Sequence[float], other: Sequence[float]) -> list[float]:
    return [one / beside for one, beside in zip(ours, other, strict=True)]


def figures(results: dict[str, Any]) -> Iterator[Figure]:
    """The figures of the README, in its order."""
    yield from _resources(results["resources"])
    yield from _tasks(results["tasks"])
    yield from _dispatch(results["dispatch"])
    yield from _combined(results["combined"])
    yield from _shared(results["shared"])


def _resources(results: dict[str, Any]) -> Iterator[Figure]:
    for row in results["run"]:
        if row["must"] is None:
            continue
        what = f"ResourcePool.run among {row['resources']:,} resources, calls per second"
        yield Figure(what, "rotapool", ratios(row["rounds"]["ours"], row["rounds"]["peer"]), f"{row['must']:,}x")


def _tasks(results: dict[str, Any]) -> Iterator[Figure]:
    peers = {row["operation"]: row["rounds"] for row in results["rates"] if row["who"] == "TaskGroup + Semaphore"}
    for row in results["rates"]:
        if row["who"] == "fair_round_robin":
            what = f"TaskPool with fairness, task {row['operation']}, tasks per second"
            beside = ratios(row["rounds"], peers[row["operation"]])
            yield Figure(what, "TaskGroup + Semaphore", beside, f"{row['must']}x")


def _dispatch(results: dict[str, Any]) -> Iterator[Figure]:
    titles = {"wool": "wool", "executor": "ProcessPoolExecutor", "ray": "Ray tasks", "dask": "Dask"}
    rounds = {(row["callers"], row["who"]): row["rounds"] for row in results["rates"]}
    for row in results["rates"]:
        if row["who"] == "ours":
            what = f"WorkerPool of two, {row['callers']:,} callers, calls per second"
            beside = ratios(row["rounds"], rounds[row["callers"], row["beside"]])
            yield Figure(what, titles.get(row["beside"], row["beside"]), beside, f"{row['must']}x")


def _combined(results: dict[str, Any]) -> Iterator[Figure]:
    for row in (*results["rates"], *results["calls"]):
        if "must" in row:
            rounds = next(
                other["rounds"]
                for other in (*results["rates"], *results["calls"])
                if (other["what"], other["who"]) == (row["what"], row["beside"])
            )
            what = f"TaskPool with resources or workers: {row['what']}, {row['who']}"
            yield Figure(what, row["beside"], ratios(row["rounds"], rounds), f"{row['must']}x")


def _shared(results: dict[str, Any]) -> Iterator[Figure]:
    stores = {"sqlite": "SqliteStore", "postgres": "PostgresStore"}
    memory = next(row["rounds"] for row in results["alone"] if row["who"] == "memory")
    for row in results["alone"]:
        if "must" in row:
            what = f"TaskPool alone on a {stores[row['who']]}, tasks of 1 ms per second"
            yield Figure(what, "the same without a store", ratios(row["rounds"], memory), f"{row['must']}x")
    peers = {"dbos": "DBOS queue", "procrastinate": "procrastinate locks"}
    ours = next(row["rounds"] for row in results["grants"] if row["who"] == "postgres")
    for row in results["grants"]:
        if row["who"] in peers:
            what = "Four processes on one budget, PostgresStore, tasks per second"
            yield Figure(what, peers[row["who"]], ratios(ours, row["rounds"]), f"{row['must']}x")


def microseconds(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Absolute figures, for scale. They differ on other machines."""
    for row in results["resources"]["run"]:
        if row["resources"] in (3, 10_000):
            what = f"ResourcePool.run among {row['resources']:,}, operation {row['operation']}"
            yield what, f"{1e6 / row['ours']:.1f}"
    for part in ("rates", "calls"):
        for row in results["combined"][part]:
            yield f"{row['what']}, {row['who']}", f"{1e6 / row['rate']:.1f}"
    for row in results["http"]["transport"]:
        what = f"RotatingTransport, added to a request of httpx, answer with {row['what']}, at most {row['must']:.0f}"
        yield what, f"{row['added']:.1f}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = (header, ["---"] * len(header), *rows)
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def summary(results: dict[str, Any]) -> str:
    runs = [
        f"- {part}: {found['surroundings']['at']}, Python {found['surroundings']['python']}, "
        f"{found['surroundings']['cpus']} CPUs, load {found['surroundings']['load']:.1f} at its end"
        f"{', quick' if found.get('quick') else ''}"
        for part, found in results.items()
    ]
    lines = [
        "# The run that the figures of the README are from",
        "",
        "Made by `make bench`. Ratios are medians of neighbouring turns; the spread is their lowest and highest.",
        "",
        *_markdown(
            ("what", "beside", "ratio", "spread", "turns", "must"), [figure.cells() for figure in figures(results)]
        ),
        "",
        "Microseconds, for scale:",
        "",
        *_markdown(("what", "us"), list(microseconds(results))),
        "",
        "Runs:",
        "",
        *runs,
    ]
    return "\n".join(lines) + "\n"


def write(results: Path = LATEST, target: Path = SUMMARY) -> None:
    found = json.loads(results.read_text("utf-8"))
    if missing := {"resources", "tasks", "dispatch", "combined", "shared", "http"} - found.keys():
        raise SystemExit(f"{results.name} has no results of {', '.join(sorted(missing))}: run `make bench` first")
    target.write_text(summary(found), "utf-8")
    print(f"Summary in {target.parent.parent.name}/{target.parent.name}/{target.name}.")


if __name__ == "__main__":
    write()
