"""Resource pools beside rotapool 0.6.0: `await pool.run(op)`, calls per second.

    make bench          two to three minutes
    make bench-quick    under 40 seconds

Ours and the peer take turns in one run, and only ratios count. "must" and "goal" are the minimum and the goal of the
project's performance targets. The program prints MISSED for a figure that does not reach its minimum ("must"), and
exits with 0 all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import table
from table import MISSED, Bar, Contestant, Turns, in_turns, median, per_second, times

from headgate.resources import Pool, Resource

PEER = "0.6.0"
SIZES = (3, 100, 1_000, 10_000)
BARS = {3: Bar(4, 6), 100: Bar(12, 18), 1_000: Bar(80, 120), 10_000: Bar(600, 1_200)}
FLAT = Bar(1.3, at_most=True)
IMPORT_MS = Bar(60, at_most=True)

FULL, QUICK = Turns(11, 0.25, time.process_time), Turns(7, 0.1, time.process_time)  # nothing here waits

Operation = Callable[[Any], Awaitable[None]]


async def at_once(resource: Any) -> None:
    """An operation without work, so that only the cost of the pool is measured. Its figures are judged."""


async def suspending(resource: Any) -> None:
    """An operation that suspends for one turn of the loop, the least that real work does."""
    await asyncio.sleep(0)


OPERATIONS: dict[str, Operation] = {"returns at once": at_once, "suspends once": suspending}


# -- contestants ------------------------------------------------------------------------------------------------------


def peer_package() -> Any:
    """rotapool, in the version the figures are about."""
    try:
        import rotapool
    except ImportError:
        raise SystemExit(
            f"rotapool {PEER}, the peer to measure against, is not installed.\n"
            "Run `make bench` or `make bench-quick`: they install the `bench` extra first."
        ) from None
    if rotapool.__version__ != PEER:
        table.say(f"note: rotapool {rotapool.__version__} is installed; the targets are about {PEER}")
    return rotapool


def ours(size: int) -> Pool[int]:
    return Pool([Resource(f"key-{index}", index) for index in range(size)])


def theirs(size: int) -> Any:
    package = peer_package()
    return package.Pool([package.Resource(f"key-{index}", index) for index in range(size)])


def calls_of(pool: Any, operation: Operation) -> Contestant:
    run = pool.run

    async def work(count: int) -> None:
        for _ in range(count):
            await run(operation)

    return work


def tasks_of(operation: Operation) -> Contestant:
    """The upper limit for a pool that makes a Task for each call."""
    create_task = asyncio.create_task

    async def work(count: int) -> None:
        for _ in range(count):
            await create_task(operation(None))  # type: ignore[arg-type]

    return work


# -- blocks -----------------------------------------------------------------------------------------------------------


async def measure_rates(turns: Turns) -> list[dict[str, Any]]:
    rows = []
    for kind, operation in OPERATIONS.items():
        for size in SIZES:
            table.say(f"operation {kind}, {size:,} resources ...")
            contestants = {
                "ours": calls_of(ours(size), operation),
                "peer": calls_of(theirs(size), operation),
                "task": tasks_of(operation),
            }
            rates = await in_turns(turns, contestants)
            rows.append({"operation": kind, "resources": size, "rounds": rates} | _judged(kind, size, rates))
    return rows


def _judged(kind: str, size: int, rates: dict[str, list[float]]) -> dict[str, Any]:
    middle = {name: median(figures) for name, figures in rates.items()}
    ratio = middle["ours"] / middle["peer"]
    counts = kind == next(iter(OPERATIONS))
    verdict = {"must": BARS[size].must, "goal": BARS[size].goal, "verdict": BARS[size].verdict(ratio)}
    return middle | {"ratio": ratio} | (verdict if counts else {"must": None, "goal": None, "verdict": "-"})


def show_rates(rows: list[dict[str, Any]]) -> None:
    header = ("operation", "resources", "ours /s", "peer /s", "ratio", "must", "goal", "verdict", "a Task per call /s")
    print_rows = [
        (
            row["operation"],
            f"{row['resources']:,}",
            per_second(row["ours"]),
            per_second(row["peer"]),
            times(row["ratio"]),
            "-" if row["must"] is None else f"{row['must']:,}x",
            "-" if row["goal"] is None else f"{row['goal']:,}x",
            row["verdict"],
            per_second(row["task"]),
        )
        for row in rows
    ]
    table.print_table(f"await pool.run(op): headgate beside rotapool {PEER}", header, print_rows)


async def measure_flatness(turns: Turns) -> dict[str, Any]:
    """What one call costs among 10,000, beside what it costs among 3, again in turns."""
    table.say("10,000 resources beside 3 ...")
    small, large = SIZES[0], SIZES[-1]
    contestants = {str(size): calls_of(ours(size), at_once) for size in (small, large)}
    # The two are close, so noise could decide: many short slices instead of a few long ones.
    rates = await in_turns(replace(turns, rounds=4 * turns.rounds, seconds=turns.seconds / 2), contestants)
    cost = median(rates[str(small)]) / median(rates[str(large)])
    return {"cost": cost, "must": FLAT.must, "verdict": FLAT.verdict(cost)}


def measure_memory(size: int = 10_000) -> dict[str, float]:
    """Bytes per resource of a pool just made, its Resource objects included."""
    return {"ours": _bytes_of(ours, size) / size, "peer": _bytes_of(theirs, size) / size}


def _bytes_of(make: Callable[[int], Any], size: int) -> int:
    make(1)
    gc.collect()
    tracemalloc.start()
    pool = make(size)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del pool
    return used


IMPORT = """
import sys, time
start, start_cpu = time.perf_counter(), time.process_time()
import headgate
spent, spent_cpu = time.perf_counter() - start, time.process_time() - start_cpu
import json
print(json.dumps([spent, spent_cpu, [name for name in ("grpc", "asyncio") if name in sys.modules]]))
"""


def measure_import(repeats: int = 10) -> dict[str, Any]:
    """`import headgate` in fresh interpreters, and what must not come with it."""
    table.say("import headgate ...")
    answers = [json.loads(_python("-c", IMPORT).stdout) for _ in range(repeats)]
    spent, cpu = (1_000 * median([answer[which] for answer in answers]) for which in (0, 1))
    heavy = sorted({name for answer in answers for name in answer[2]})
    verdict = {"must": IMPORT_MS.must, "verdict": IMPORT_MS.verdict(spent)}
    return {"ms": spent, "cpu_ms": cpu, "heavy": heavy} | verdict | _dominant()


def _dominant(most: int = 6) -> dict[str, Any]:
    """What the import is spent on, as `python -X importtime` has it: our modules alone, and what they bring along."""
    trace = _python("-X", "importtime", "-c", "import sys; print('-- from here', file=sys.stderr); import headgate")
    lines = [line.split("|") for line in trace.stderr.partition("-- from here")[2].splitlines() if "|" in line]
    costs: dict[str, float] = {}
    above = {0: ""}  # by depth. The trace names a module after those it imports, so read it backwards
    for own, whole, name in ((int(own[12:]), int(whole), name) for own, whole, name in reversed(lines)):
        depth = (len(name) - len(name.lstrip())) // 2
        above[depth + 1] = module = name.strip()
        if module.startswith("headgate"):
            costs["headgate's own"] = costs.get("headgate's own", 0) + own / 1_000
        elif above[depth].startswith("headgate"):
            costs[module] = whole / 1_000
    ranked = sorted(costs.items(), key=lambda cost: -cost[1])
    return {"modules": len(lines), "dominant": [{"module": name, "ms": spent} for name, spent in ranked[:most]]}


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True)


def show_rest(flat: dict[str, Any], imported: dict[str, Any], memory: dict[str, float]) -> None:
    rows = [
        ("10,000 resources cost, of 3", times(flat["cost"]), f"at most {FLAT.must}x", flat["verdict"]),
        ("import headgate", _import_time(imported), f"under {IMPORT_MS.must:.0f} ms", imported["verdict"]),
        ("imported with it", ", ".join(imported["heavy"]) or "neither", "no grpc, no asyncio", _light(imported)),
        ("bytes per resource, of 10,000", f"{memory['ours']:,.0f}", f"(peer {memory['peer']:,.0f})", "-"),
    ]
    table.print_table("The other figures", ("what", "measured", "must", "verdict"), rows)
    slowest = ", ".join(f"{one['module']} {one['ms']:.1f} ms" for one in imported["dominant"])
    print(f"\nOf the import's {imported['modules']} modules (traced, so slower), most time goes to: {slowest}.")


def _import_time(imported: dict[str, Any]) -> str:
    return f"{imported['ms']:.1f} ms (CPU {imported['cpu_ms']:.1f})"


def _light(imported: dict[str, Any]) -> str:
    return MISSED if imported["heavy"] else "must reached"


def missed(rows: list[dict[str, Any]], flat: dict[str, Any], imported: dict[str, Any]) -> list[str]:
    """Every figure that missed its minimum, in words."""
    words = [
        f"{row['resources']:,} resources: {times(row['ratio'])}, must {row['must']:,}x"
        for row in rows
        if row["verdict"] == MISSED
    ]
    if flat["verdict"] == MISSED:
        words.append(f"10,000 resources cost {times(flat['cost'])} of 3, must {flat['must']}x")
    if imported["verdict"] == MISSED:
        words.append(f"import headgate takes {imported['ms']:.1f} ms, must {imported['must']:.0f} ms")
    if imported["heavy"]:
        words.append(f"import headgate imports {', '.join(imported['heavy'])}")
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    quick = parser.parse_args().quick
    peer_package()
    turns = QUICK if quick else FULL
    rows = asyncio.run(measure_rates(turns))
    flat = asyncio.run(measure_flatness(turns))
    imported, memory = measure_import(), measure_memory()
    show_rates(rows)
    show_rest(flat, imported, memory)
    results = {"quick": quick, "run": rows, "flat": flat, "import": imported, "bytes_per_resource": memory}
    path = table.keep("resources", results)
    print(f"\nMedians of {turns.rounds} rounds, in turns. Kept in {path.parent.parent.name}/results/{path.name}.")
    table.warn_if_busy()
    if words := missed(rows, flat, imported):
        print("MISSED: " + "; ".join(words) + ".")
    else:
        print("Every must is reached.")


if __name__ == "__main__":
    main()
