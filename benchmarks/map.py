"""`headgate map` beside a plain loop: a million records that need no work, and the memory that they take.

    python benchmarks/map.py            a minute
    python benchmarks/map.py --quick    seconds, with a tenth of the records

The loop reads a line, parses it, awaits the function, and writes the result: what a user writes first. It has no
journal, no order to keep, no failures and no progress. "must" is the minimum of the project's performance targets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import table
from table import Bar, median, per_second, say, times

RATE = Bar(0.5, 0.8)
MEMORY = Bar(1.2, 1.05, at_most=True)
"""Of the memory at the end to that after a tenth of the records."""

JOBS = """
async def noop(record):
    return record

def plain(record):
    return record
"""
LOOP = """
import asyncio, json, sys
from bench_jobs import noop

async def main():
    with open(sys.argv[1], encoding="utf-8") as source, open(sys.argv[2], "w", encoding="utf-8") as out:
        for line in source:
            out.write(json.dumps(await noop(json.loads(line))) + "\\n")

asyncio.run(main())
"""
CONTESTANTS = {
    "plain loop": [],
    "headgate map": ["noop"],
    "--unordered": ["noop", "--unordered"],
    "a plain function": ["plain"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the records")
    count, rounds = (100_000, 3) if parser.parse_args().quick else (1_000_000, 3)
    table.warn_if_busy()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bench_jobs.py").write_text(JOBS, "utf-8")
        (folder / "loop.py").write_text(LOOP, "utf-8")
        with (folder / "in.jsonl").open("w", encoding="utf-8") as file:
            for number in range(count):
                file.write(
                    json.dumps({"id": number, "text": f"hello world {number}", "tenant": f"t{number % 10}"}) + "\n"
                )
        seconds: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
        memory: dict[str, tuple[float, float]] = {}
        for _ in range(rounds):
            for contestant, options in CONTESTANTS.items():
                say(f"{contestant} ...")
                spent, memory[contestant] = run(folder, options)
                seconds[contestant].append(spent)
    report(count, {contestant: median(spent) for contestant, spent in seconds.items()}, memory)


def run(folder: Path, options: list[str]) -> tuple[float, tuple[float, float]]:
    """CPU seconds of one run, as of its children, and its memory in MB after a tenth and at its end."""
    out = folder / "out.jsonl"
    for path in folder.glob("out.jsonl*"):
        path.unlink()
    if options:
        command = ["-m", "headgate", "map", f"bench_jobs:{options[0]}", "in.jsonl", "-o", "out.jsonl", *options[1:]]
    else:
        command = ["loop.py", "in.jsonl", "out.jsonl"]
    before = os.times()
    process = subprocess.Popen([sys.executable, *command], cwd=folder, stderr=subprocess.DEVNULL)
    seen: list[tuple[int, float]] = []
    watch = threading.Thread(target=watch_memory, args=(process, out, seen))
    watch.start()
    code = process.wait()
    after = os.times()
    watch.join()
    assert code == 0, code
    size = out.stat().st_size
    assert size == (folder / "in.jsonl").stat().st_size
    tenth = next((used for written, used in seen if written >= size / 10), 0.0)
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return spent, (tenth, seen[-1][1] if seen else 0.0)


def watch_memory(process: subprocess.Popen[bytes], out: Path, seen: list[tuple[int, float]]) -> None:
    """Note the memory of a process, and how much it has written, ten times a second."""
    while process.poll() is None:
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            if pages:
                seen.append((out.stat().st_size, pages * os.sysconf("SC_PAGE_SIZE") / 1e6))
        except (OSError, IndexError):
            pass
        time.sleep(0.1)


def report(count: int, seconds: dict[str, float], memory: dict[str, tuple[float, float]]) -> None:
    rows, ratios = [], {}
    for contestant, spent in seconds.items():
        ratio = ratios[contestant] = seconds["plain loop"] / spent
        tenth, end = memory[contestant]
        verdict = RATE.verdict(ratio) if contestant != "plain loop" else ""
        rows.append([contestant, per_second(count / spent), times(ratio), verdict, f"{tenth:.0f} MB", f"{end:.0f} MB"])
    header = ["", "records/s", "ratio", "must 0.5x", "memory at 10 %", "at 100 %"]
    table.print_table(f"{count:,} records without work, CPU time", header, rows)
    tenth, end = memory["headgate map"]
    growth = end / tenth if tenth else 0.0
    print(f"\nmemory at the end beside that at 10 %: {times(growth)}, {MEMORY.verdict(growth)}")
    table.keep("map", {"records": count, "seconds": seconds, "ratios": ratios, "memory": memory, "growth": growth})


if __name__ == "__main__":
    main()
