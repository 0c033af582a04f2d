"""One quota of one key, used by several processes: refusals at each reset, and how much of the quota is used.

    make bench          about five minutes
    make bench-quick    under a minute

The upstream (contestants/limited.py, a process of its own) keeps fixed windows for each key, and counts. Each
contestant has a key and processes of its own (contestants/quota_client.py) with more to do than the quota allows; all
of them run at the same time. Windows count from the second on, in which everybody was at work from the beginning.

LiteLLM's Router limits requests in minutes of the wall clock only. So it has a part of its own, in the full run, with
windows of 60 s that begin when its minutes do: any other beginning would be worse for it. It has no Redis. The figures
are promises of the specification (H12). The program prints MISSED for a figure that does not reach its minimum
("must"), and exits with 0 all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import table
from server import postgres_server
from table import Bar, Contestant, Turns, in_turns, median, times

from headgate import Quota, Resource, ResourcePool

FOLDER = Path(__file__).parent / "contestants"
PEER = ("litellm", "1.106.2")

REFUSED = Bar(1, at_most=True)
USED = Bar(0.95)


@dataclass(frozen=True, slots=True)
class Load:
    """What one process asks for."""

    at_a_time: int
    pause: float = 0.0
    """Seconds after each request."""


BUSY, CALM = Load(20), Load(1, 1.0)


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant: what its processes are, and what each is told."""

    title: str
    name: str
    detail: str = ""
    loads: Sequence[Load] = (BUSY, BUSY, BUSY)
    judged: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run: the quota, and the windows that count."""

    limit: int
    window: float
    windows: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What the upstream counted of one contestant, window by window."""

    served: list[int]
    refused: list[int]

    def used(self, limit: int) -> float:
        return sum(self.served) / (limit * len(self.served))


FULL, QUICK = Part(limit=50, window=5.0, windows=12), Part(limit=50, window=4.0, windows=4)
MINUTES = Part(limit=300, window=60.0, windows=1)
TURNS = {False: Turns(11, 0.25, time.process_time), True: Turns(5, 0.1, time.process_time)}


def entries(sqlite: str, postgres: str) -> list[Entry]:
    return [
        Entry("three processes, learned, SqliteStore", "learned", f"sqlite:///{sqlite}", judged=True),
        Entry("three processes, learned, PostgresStore", "learned", postgres, judged=True),
        Entry("one process, learned", "learned", loads=[BUSY], judged=True),
        Entry("one process, no quota (cools at each 429)", "without", loads=[BUSY]),
    ]


def entries_by_minutes(sqlite: str, limit: int) -> list[Entry]:
    uneven = [BUSY, CALM, CALM]
    third = str(limit // 3)
    return [
        Entry("headgate, learned, SqliteStore", "learned", f"sqlite:///{sqlite}", judged=True),
        Entry("LiteLLM Router, rpm: the whole limit", "litellm", str(limit)),
        Entry("LiteLLM Router, rpm: a third of it", "litellm", third),
        Entry("headgate, one of three is busy", "learned", f"sqlite:///{sqlite}-uneven", uneven, judged=True),
        Entry("LiteLLM, a third, one of three is busy", "litellm", third, uneven),
    ]


# -- processes --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def program(name: str, *arguments: object) -> AsyncIterator[tuple[Process, str]]:
    """A process of the folder of contestants, and the first line that it printed."""
    with tempfile.TemporaryFile() as errors:
        command = (sys.executable, str(FOLDER / name), *map(str, arguments))
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=errors)
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), 120)
            if not line:
                errors.seek(0)
                raise SystemExit(f"{name} did not start:\n{errors.read()[-2_000:].decode(errors='replace')}")
            yield process, line.decode().strip()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def measured(part: Part, contestants: Sequence[Entry]) -> dict[str, Seen]:
    """Let all contestants ask at the same time, and return what was counted of each."""
    async with AsyncExitStack() as stack:
        _, port = await stack.enter_async_context(program("limited.py", part.limit, part.window))
        url = f"http://127.0.0.1:{port}"

        async def opened(entry: Entry, load: Load) -> Process:
            what = (entry.name, url, entry.title, entry.detail, load.at_a_time, load.pause)
            return (await stack.enter_async_context(program("quota_client.py", *what)))[0]

        processes = await asyncio.gather(*(opened(entry, load) for entry in contestants for load in entry.loads))
        left = part.window - time.time() % part.window
        if left < min(5.0, part.window / 2):
            await asyncio.sleep(left)  # the first window is for the warm-up, which takes some time
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        first = int(time.time() // part.window) + 1
        await asyncio.sleep((first + part.windows) * part.window - time.time())
        if gone := [process.returncode for process in processes if process.returncode is not None]:
            raise SystemExit(f"{len(gone)} processes ended before the end: {gone}")
        reply = await asyncio.to_thread(urllib.request.urlopen, f"{url}/counts")
        counts = json.loads(reply.read())
    return {entry.title: _seen(counts.get(entry.title, {}), first, part.windows) for entry in contestants}


def _seen(windows: dict[str, list[int]], first: int, many: int) -> Seen:
    pairs = [windows.get(str(number), [0, 0]) for number in range(first, first + many)]
    return Seen([served for served, _ in pairs], [refused for _, refused in pairs])


# -- the cost of a call ------------------------------------------------------------------------------------------------


class Told:
    """An answer that tells of a limit that nobody reaches."""

    def __init__(self) -> None:
        self.status_code = 200
        self.headers = {
            "x-ratelimit-limit-requests": "1000000000",
            "x-ratelimit-remaining-requests": "900000000",
            "x-ratelimit-reset-requests": "60s",
        }


async def at_once(resource: Any) -> None:
    """An operation without work."""


async def tells(resource: Any) -> Told:
    """An operation whose answer tells of its limits."""
    return _TOLD


_TOLD = Told()


async def measure_calls(turns: Turns) -> dict[str, list[float]]:
    """Calls per second of `run`, in one process and without a network."""

    def calls(quota: Any, operation: Any = at_once, **options: Any) -> Contestant:
        pool = ResourcePool([Resource("key", "key", quota=quota)])

        async def work(count: int) -> None:
            for _ in range(count):
                await pool.run(operation, **options)

        return work

    many = 10**9
    return await in_turns(
        turns,
        {
            "no quota": calls(None),
            "Quota(requests=)": calls(Quota(requests=many)),
            "Quota(requests=, tokens=), cost=": calls(Quota(requests=many, tokens=many), cost=10),
            '"learn", answers without headers': calls("learn"),
            '"learn", answers that tell': calls("learn", tells),
        },
    )


# -- the whole run ----------------------------------------------------------------------------------------------------


def show(title: str, part: Part, contestants: Sequence[Entry], seen: dict[str, Seen]) -> None:
    """Print refusals and the part of the quota that was used."""
    rows = []
    for entry in contestants:
        one = seen[entry.title]
        worst, used = max(one.refused), one.used(part.limit)
        verdicts = ("-", "-")
        if entry.judged:
            verdicts = (REFUSED.verdict(worst), USED.verdict(used))
        lowest = min(one.served) / part.limit
        rows.append([entry.title, f"{median(one.refused):g}", f"{worst}", "1", verdicts[0]])
        rows[-1] += [f"{used:.1%}", f"{lowest:.1%}", "95%", verdicts[1]]
    header = ["", "refused per reset", "most", "must (at most)", "", "used", "least", "must", ""]
    windows = f"{part.windows} windows" if part.windows > 1 else "one window"
    table.print_table(f"{title}: {part.limit} requests in {part.window:g} s, {windows}", header, rows)


def show_calls(rates: dict[str, list[float]]) -> None:
    base = rates["no quota"]
    rows = []
    for name, figures in rates.items():
        ratio = median([one / other for one, other in zip(base, figures, strict=True)])
        rows.append([name, f"{1e6 / median(figures):.2f}", times(ratio)])
    table.print_table("await pool.run(operation), one key", ["", "us per call", "beside no quota"], rows)


async def run(quick: bool) -> dict[str, Any]:
    """Measure everything, and print it."""
    results: dict[str, Any] = {"quick": quick, "parts": []}
    rates = await measure_calls(TURNS[quick])
    show_calls(rates)
    results["calls"] = rates
    with tempfile.TemporaryDirectory() as folder, postgres_server() as server:
        plan = [("One quota", QUICK if quick else FULL, entries(f"{folder}/seconds.db", server.dsn()))]
        if not quick:
            plan.append(("Beside LiteLLM", MINUTES, entries_by_minutes(f"{folder}/minutes.db", MINUTES.limit)))
        for title, part, contestants in plan:
            table.say(f"{title}: {part.window * (part.windows + 1):g} s at most, and the start of processes ...")
            seen = await measured(part, contestants)
            show(title, part, contestants, seen)
            counted = {name: {"served": one.served, "refused": one.refused} for name, one in seen.items()}
            results["parts"].append({"limit": part.limit, "window": part.window, "counted": counted})
    return results


def check_peer() -> None:
    name, wanted = PEER
    try:
        found = version(name)
    except PackageNotFoundError:
        raise SystemExit(
            f"{name} {wanted}, a peer to measure against, is not installed.\n"
            "Run `make bench` or `make bench-quick`: they install the `bench` extra first."
        ) from None
    if found != wanted:
        table.say(f"note: {name} {found} is installed; the figures are about {wanted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer windows, and without LiteLLM, which counts minutes")
    quick = parser.parse_args().quick
    if not quick:
        check_peer()
    table.warn_if_busy()
    results = asyncio.run(run(quick))
    print("\nLiteLLM's Router limits by minutes: it is measured in the full run." if quick else "")
    path = table.keep("quotas", results)
    print(f"Load {os.getloadavg()[0]:.1f} at the end. Kept in {path.parent.parent.name}/results/{path.name}.")


if __name__ == "__main__":
    main()
