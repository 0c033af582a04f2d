"""Compare two commits of headgate with each other, so that a change of structure is seen not to cost time.

    python benchmarks/commits.py v0.1.0 HEAD
    python benchmarks/commits.py main . --rounds 20      `.` is the working tree

Both run the same work in processes of their own, in turns. Compared is the CPU time of the client, which other load
disturbs less than the time on a clock; each turn gives its least, and a ratio is of the least of all turns. `--steps`
counts the instructions of the interpreter instead (Python 3.12 or newer): that does not depend on other load at all,
but weighs all instructions alike and sees nothing of C code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMES = 1_000
"""Operations of one measurement."""
REPEATS = 12
"""Measurements of one turn, of which the least counts."""

Work = Callable[[int], Awaitable[None]]


# -- what is measured: runs inside the process of one commit ----------------------------------------------------------


async def nothing(*_: object) -> int:
    return 1


async def measured(work: Work, steps: bool) -> float:
    """Return microseconds of CPU time, or steps of the interpreter, for one operation."""
    await work(TIMES)
    if steps:
        return await _steps(work) / TIMES
    least = float("inf")
    for _ in range(REPEATS):
        before = _cpu()
        await work(TIMES)
        least = min(least, _cpu() - before)
    return least / TIMES * 1e6


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _steps(work: Work) -> int:
    monitoring = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    tool, count = monitoring.PROFILER_ID, 0

    def step(*_: object) -> None:
        nonlocal count
        count += 1

    monitoring.use_tool_id(tool, "steps")
    monitoring.register_callback(tool, monitoring.events.INSTRUCTION, step)
    monitoring.set_events(tool, monitoring.events.INSTRUCTION)
    try:
        await work(TIMES)
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count


async def all_works(steps: bool) -> dict[str, float]:
    """Measure each kind of work."""
    from headgate import ResourcePool, TaskPool, WorkerPool, fair_share, routine

    there = routine(nothing)
    found: dict[str, float] = {}
    keys = ResourcePool({"a": 1, "b": 2, "c": 3})

    async def run(times: int) -> None:
        for _ in range(times):
            await keys.run(nothing)

    found["ResourcePool.run"] = await measured(run, steps)

    def submitting(pool: TaskPool, **options: str) -> Work:
        async def work(times: int) -> None:
            for handle in [await pool.submit(nothing, **options) for _ in range(times)]:
                await handle

        return work

    async with TaskPool(max_concurrent=100) as pool:
        found["TaskPool"] = await measured(submitting(pool), steps)
    async with TaskPool(max_concurrent=100, queue=fair_share("tenant_id")) as pool:
        found["TaskPool, fair_share"] = await measured(submitting(pool, key="ann"), steps)
    async with TaskPool(max_concurrent=100, resources=keys) as pool:
        found["TaskPool with keys"] = await measured(submitting(pool), steps)

    async def calls(times: int) -> None:
        async def caller() -> None:
            for _ in range(times // 100):
                await there()

        await asyncio.gather(*(caller() for _ in range(100)))

    async with WorkerPool(spawn=2):
        found["a call on two workers"] = await measured(calls, steps)
    async with WorkerPool(spawn=1) as workers:
        found["a call on a worker"] = await measured(calls, steps)
        async with TaskPool(max_concurrent=100, workers=workers) as pool:
            found["TaskPool on workers"] = await measured(submitting(pool), steps)
        async with TaskPool(max_concurrent=100, workers=workers, resources=keys) as pool:
            found["TaskPool on workers with keys"] = await measured(submitting(pool), steps)
    return found


# -- the two commits, in turns ----------------------------------------------------------------------------------------


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The sources of a revision, in a folder that is removed at the end; `.` is the working tree itself."""
    if revision == ".":
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "-c", "advice.detachedHead=false", "clone", "-q", str(ROOT), folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "-q", _hash(revision)], check=True)
        yield Path(folder)


def _hash(revision: str) -> str:
    found = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", f"{revision}^{{commit}}"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise SystemExit(f"{revision!r} is no commit of this repository: {found.stderr.strip()}")
    return found.stdout.strip()


def turn(sources: Path, steps: bool) -> dict[str, float]:
    """One turn of one commit, in a process of its own."""
    command = [sys.executable, __file__, "--inside", str(sources / "src"), *(["--steps"] if steps else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=sources)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(old: str, new: str, rounds: int, steps: bool) -> None:
    """Run both in turns, and print the least of each and their ratio."""
    with checked_out(old) as before, checked_out(new) as after:
        turns = [(turn(before, steps), turn(after, steps)) for _ in range(1 if steps else rounds)]
    unit = "steps" if steps else "us"
    print(f"{'':32}{old:>16}{new:>16}   ratio")
    for work in turns[0][0]:
        first, second = (min(one[side][work] for one in turns) for side in (0, 1))
        print(f"{work:32}{first:>13.2f} {unit}{second:>13.2f} {unit}   {second / first:.3f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", nargs="?", default="HEAD")
    parser.add_argument("new", nargs="?", default=".")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", action="store_true", help="count steps of the interpreter instead of CPU time")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps and sys.version_info < (3, 12):
        raise SystemExit("--steps needs Python 3.12 or newer: only there the interpreter counts its steps")
    if given.inside is not None:
        sys.path.insert(0, given.inside)
        print(json.dumps(asyncio.run(all_works(given.steps))))
    else:
        compare(given.old, given.new, given.rounds, given.steps)


if __name__ == "__main__":
    main()
