"""Keys kept busy at the speed that their provider allows: headgate, tenacity with aiolimiter, LiteLLM's Router.

    make bench          about seven minutes; writes results/quotas.md
    make bench-quick    under a minute

The upstreams (contestants/limited.py) are HTTP servers in their own processes that limit each key as real providers do:
buckets and windows, requests and tokens, three kinds of headers, headers that lie, and no headers. They log every
request. All contestants of a subject (contestants/quota_client.py) run at the same time, so that other load disturbs
them alike, each in its own process with its own keys, and with more work than the keys allow.

Figures cover the time after the first `per` seconds (bucket) or from the first whole window on.

- accepted / allowed: calls that the upstream accepted, divided by what it allows in that time. A bucket allows what
  flows in: calls that only use up what it had saved at the beginning do not count, nor does a call accepted twice.
- longest gap: the longest time without an accepted call of one key, while work waits.
- refused: the share of requests that the upstream answered with 429.
- urgent: from submitting a call with priority until the upstream accepts it. "must" is one call of a key later
  (1/rate + 50 ms), "goal" one call of all keys together.
- CPU: of the client's process, for each accepted call. SDK clients pay for httpx, the others for aiohttp.
- failed: calls that the contestant gave up. twice: calls that were accepted again after they had been accepted.

aiolimiter knows the true limit of each key. It starts with a full burst, which windows punish. LiteLLM's Router limits
by minutes of the wall clock only, so it takes part only where limits are per minute. H12 of the specification promises
the figures of one key in several processes. The program prints MISSED for a figure that does not reach its minimum
("must"), and exits with 0 anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "contestants"))

import table
from arrivals import Figures, Seen, figures, rate
from limited import WALL_CLOCK, Limits
from quota_client import TOKENS_PER_CALL, Job
from server import postgres_server
from table import Bar, Contestant, Turns, in_turns, median, times

from headgate import Quota, Resource, ResourcePool

FOLDER = Path(__file__).parent / "contestants"
PEERS = {"tenacity": "9.2.1", "aiolimiter": "1.3.0", "litellm": "1.106.2"}
REPORT = table.LATEST.with_name("quotas.md")
BATCH = 5000
TURNS = {False: Turns(11, 0.25, time.process_time), True: Turns(5, 0.1, time.process_time)}


@dataclass(frozen=True, slots=True)
class Load:
    """What one process does: run `at_a_time` calls of a batch at a time, or, if that is 0, one call each second."""

    at_a_time: int = 40


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant of a subject."""

    title: str
    contestant: str
    loads: tuple[Load, ...] = (Load(),)
    """One for each process."""
    store: str = ""

    @property
    def ours(self) -> bool:
        return self.contestant.startswith(("tasks", "sdk"))


@dataclass(frozen=True, slots=True)
class Subject:
    """An upstream, and the contestants that use it."""

    title: str
    limits: Limits
    entries: Sequence[Entry]
    keys: int = 5
    windows: int = 3
    """How many times `per` seconds count."""
    urgent_every: float = 0.0
    judged: Sequence[str] = ("accepted", "gap", "refused", "p99")
    """The figures that have a minimum."""
    by_window: bool = False
    """Print what happened in each window."""

    def keys_of(self, entry: Entry) -> list[str]:
        return [f"sk-{self.entries.index(entry)}-{number}" for number in range(self.keys)]

    def figures(self, seen: Mapping[str, Seen]) -> dict[str, Figures]:
        """The figures of all entries, by title."""
        return {entry.title: figures(self.limits, self.keys_of(entry), seen[entry.title]) for entry in self.entries}

    def described(self) -> str:
        limits = self.limits
        size = f"{limits.tokens} tokens" if limits.tokens else f"{limits.requests} requests"
        keys = f"{self.keys} keys" if self.keys > 1 else "one key"
        return f"{self.title}: {keys} with {size} in {limits.per:g} s, answers in {limits.latency:g} s"


TASKS = Entry("headgate, tasks with keys, learned", "tasks, learned")
SDK = Entry("headgate, SDK client in tasks, learned", "sdk, learned")
NO_QUOTA = Entry("headgate, tasks with keys, no quota", "tasks, no quota")
CONFIGURED = Entry("headgate, tasks with keys, Quota", "tasks, configured")
BY_HAND = Entry("tenacity + aiolimiter, priority queue", "tenacity + aiolimiter")
RETRIES = Entry("tenacity, no limiter", "tenacity")
LITELLM = Entry("LiteLLM Router, rpm", "litellm")
LITELLM_BY_USAGE = Entry("LiteLLM Router, rpm, usage-based routing", "litellm, usage-based")


def batches(quick: bool) -> list[Subject]:
    """Subjects with a batch and nothing else."""
    per = 2.0 if quick else 6.0
    many = int(10 * per)  # per key: 60 in 6 s have the shape of 60 in a minute, ten times as fast
    tokens = Limits("bucket", 100 * many, per, tokens=many * TOKENS_PER_CALL)
    silent_window, silent_bucket = (Limits(kind, many, per, headers="none") for kind in ("window", "bucket"))
    lying, slow = Limits("bucket", many, per, exaggeration=2.0), Limits("bucket", many, per, latency=2.0)
    ours = [TASKS] if quick else [TASKS, SDK]
    every = [
        Subject("Bucket", Limits("bucket", many, per), [*ours, BY_HAND]),
        Subject("Window", Limits("window", many, per), [TASKS, BY_HAND]),
        Subject("Bucket of tokens", tokens, [*ours, BY_HAND]),
        Subject("Nothing in headers, known limit, window", silent_window, [CONFIGURED, BY_HAND]),
        Subject("Headers say twice the limit, bucket", lying, [TASKS, BY_HAND]),
        # Without a quota and without headers limits are found by refusals, so these have no bound.
        Subject("No quota, bucket", Limits("bucket", many, per), [NO_QUOTA, RETRIES], judged=["accepted", "gap"]),
        Subject("Nothing in headers, unknown limit, bucket", silent_bucket, [TASKS, RETRIES], judged=["accepted"]),
        Subject("Nothing in headers, unknown limit, window", silent_window, [TASKS, RETRIES], judged=["accepted"]),
    ]
    if not quick:
        patient = [replace(entry, loads=(Load(200),)) for entry in (TASKS, BY_HAND)]
        every.append(Subject("Slow answers, bucket", slow, patient))
    return every


def urgent(quick: bool) -> list[Subject]:
    """Subjects with urgent calls beside a batch."""
    per = 2.0 if quick else 6.0
    bucket = Limits("bucket", int(10 * per), per)
    return [
        Subject("Urgent calls beside a batch, bucket", bucket, [TASKS, SDK, BY_HAND], urgent_every=0.1),
        Subject("Urgent calls beside a batch, known limit", bucket, [CONFIGURED, BY_HAND], urgent_every=0.1),
    ]


def by_minutes() -> list[Subject]:
    """Subjects with limits per minute, as real providers have them."""
    bucket, anthropic = (
        Limits("bucket", 60, 60.0, headers=headers, latency=0.5) for headers in ("openai", "anthropic")
    )
    ietf = Limits("window", 60, 60.0, headers="ietf", latency=0.5)
    return [
        Subject("Bucket, one minute", bucket, [TASKS, BY_HAND, LITELLM, LITELLM_BY_USAGE], windows=2),
        Subject("Bucket, one minute, Anthropic's headers", anthropic, [TASKS], windows=2),
        Subject("Window, one minute, IETF's headers", ietf, [TASKS], windows=2),
    ]


# -- one key of several processes -------------------------------------------------------------------------------------

BUSY, CALM = Load(20), Load(0)


def shared_subject(quick: bool, folder: str, postgres: str | None) -> Subject:
    limits = Limits("window", 50, 4.0 if quick else 5.0, latency=0.03)
    three = (BUSY,) * 3
    entries = [
        Entry("three processes, learned, SqliteStore", "tasks, learned", three, f"sqlite:///{folder}/seconds.db"),
        Entry("one process, learned", "tasks, learned", (BUSY,)),
    ]
    if postgres is not None:
        entries.append(Entry("three processes, learned, PostgresStore", "tasks, learned", three, postgres))
    return Subject("One key of several processes", limits, entries, keys=1, windows=2 if quick else 6, by_window=True)


def shared_bucket(folder: str) -> Subject:
    three = Entry(
        "three processes, learned, SqliteStore", "tasks, learned", (BUSY,) * 3, f"sqlite:///{folder}/bucket.db"
    )
    return Subject("One key of several processes, bucket", Limits("bucket", 50, 5.0), [three], keys=1, windows=6)


def shared_by_minutes(folder: str) -> Subject:
    three, uneven = (BUSY,) * 3, (BUSY, CALM, CALM)
    entries = [
        Entry("headgate, learned, SqliteStore", "tasks, learned", three, f"sqlite:///{folder}/minutes.db"),
        Entry("LiteLLM Router, rpm: the whole limit", "litellm", three),
        Entry("LiteLLM Router, rpm: a third of it", "litellm, a third", three),
        Entry("headgate, one of three is busy", "tasks, learned", uneven, f"sqlite:///{folder}/uneven.db"),
        Entry("LiteLLM, a third, one of three is busy", "litellm, a third", uneven),
    ]
    limits = Limits("window", 300, 60.0, latency=0.03)
    return Subject("One key of three processes, one minute", limits, entries, keys=1, windows=2, by_window=True)


# -- processes --------------------------------------------------------------------------------------------------------


class Ended(Exception):
    """A process ended before it was asked to."""


@asynccontextmanager
async def program(name: str, *arguments: object) -> AsyncIterator[tuple[Process, str]]:
    """Run a program of the contestants; yields the process and the first line that it printed."""
    with tempfile.TemporaryFile() as errors:
        command = (sys.executable, str(FOLDER / name), *map(str, arguments))
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=errors, limit=1 << 24)
        try:
            yield process, (await _line(process, 120)).strip()
        except Ended:
            errors.seek(0)
            table.say(errors.read()[-2_000:].decode(errors="replace"))
            raise
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _line(process: Process, seconds: float) -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), seconds)
    if not line:
        raise Ended(f"a process ended early, with code {await process.wait()}")
    return line.decode()


async def _tell(process: Process) -> dict[str, Any]:
    """Ask a contestant's process what it has done so far."""
    assert process.stdin is not None
    process.stdin.write(b"tell\n")
    told: dict[str, Any] = json.loads(await _line(process, 30))
    return told


async def measured(subject: Subject, ready: asyncio.Barrier) -> dict[str, Seen]:
    """Run all contestants of a subject at the same time; returns what was seen of each.

    They begin when those of the other subjects have started too, because starting costs much CPU.
    """
    limits = subject.limits
    async with AsyncExitStack() as stack:
        _, port = await stack.enter_async_context(program("limited.py", json.dumps(asdict(limits))))
        url = f"http://127.0.0.1:{port}"

        async def opened(entry: Entry, load: Load) -> Process:
            job = Job(
                url=url,
                keys=subject.keys_of(entry),
                requests=limits.requests,
                per=limits.per,
                tokens=limits.tokens,
                at_a_time=load.at_a_time or 1,
                batch=BATCH if load.at_a_time else 0,
                urgent_every=subject.urgent_every,
                store=entry.store,
            )
            what = (entry.contestant, json.dumps(asdict(job)))
            return (await stack.enter_async_context(program("quota_client.py", *what)))[0]

        starting = [opened(entry, load) for entry in subject.entries for load in entry.loads]
        processes = iter(await asyncio.gather(*starting))
        clients = {entry.title: [next(processes) for _ in entry.loads] for entry in subject.entries}
        await ready.wait()
        begin = await _start(limits, [process for group in clients.values() for process in group])
        end = begin + subject.windows * limits.per
        await _sleep_until(begin)
        before = {title: [await _tell(process) for process in group] for title, group in clients.items()}
        await _sleep_until(end)
        after = {title: [await _tell(process) for process in group] for title, group in clients.items()}
        reply = await asyncio.to_thread(urllib.request.urlopen, f"{url}/counts")
        counts = json.loads(reply.read())
    if counts["cpu"] > 0.5 * (end - begin):
        table.say(f"note: the upstream of {subject.title!r} was busy: its figures are about the upstream")
    return {
        entry.title: Seen(
            begin,
            end,
            [tuple(line) for line in counts["log"] if line[1] in subject.keys_of(entry) and line[0] < end],
            sum(told["cpu"] for told in after[entry.title]) - sum(told["cpu"] for told in before[entry.title]),
            sum(told["failed"] for told in after[entry.title]),
            {name: at for told in after[entry.title] for name, at in told["urgent"].items()},
        )
        for entry in subject.entries
    }


async def _start(limits: Limits, processes: Sequence[Process]) -> float:
    """Start all processes; returns the time at which figures begin to count."""
    left = limits.per - (time.monotonic() + WALL_CLOCK) % limits.per
    if limits.kind == "window" and left < min(5.0, limits.per / 2):
        await asyncio.sleep(left)  # the first window is for the warm-up, which takes some time
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
    now = time.monotonic()
    return now + limits.per if limits.kind == "bucket" else now + limits.per - (now + WALL_CLOCK) % limits.per


async def _sleep_until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - time.monotonic()))


# -- figures ----------------------------------------------------------------------------------------------------------


def bars(subject: Subject) -> dict[str, Bar]:
    """What the figures of a subject must reach."""
    every = {"accepted": Bar(0.97, 0.99), "refused": Bar(0.01, 0.0, at_most=True)}
    of_key = rate(subject.limits)
    if subject.limits.kind == "bucket":
        every["gap"] = Bar(2 / of_key + 0.2, 1 / of_key, at_most=True)
    if subject.urgent_every:
        every["p99"] = Bar(1 / of_key + 0.05, 1 / (of_key * subject.keys) + 0.05, at_most=True)
    return {name: bar for name, bar in every.items() if name in subject.judged}


FORMATS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "accepted": ("accepted / allowed", "{:.3f}".format),
    "gap": ("longest gap, s", "{:.2f}".format),
    "refused": ("refused", "{:.1%}".format),
    "p50": ("urgent p50, s", "{:.3f}".format),
    "p99": ("urgent p99, s", "{:.3f}".format),
    "cpu": ("CPU ms per call", lambda seconds: f"{seconds * 1000:.2f}"),
    "failed": ("failed", str),
    "twice": ("twice", str),
}


def verdict(found: Figures, wanted: dict[str, Bar]) -> str:
    """Which of "must" and "goal" all figures reach, or which of them do not reach "must"."""
    verdicts = {name: bar.verdict(getattr(found, name)) for name, bar in wanted.items()}
    if missed := [FORMATS[name][0].partition(",")[0] for name, one in verdicts.items() if one == table.MISSED]:
        return f"{table.MISSED}: {', '.join(missed)}"
    return "must reached" if "must reached" in verdicts.values() else "goal reached"


def described(subject: Subject, seen: Mapping[str, Seen]) -> str:
    """The table of one subject."""
    names = [name for name in FORMATS if subject.urgent_every or name not in ("p50", "p99")]
    wanted, found = bars(subject), subject.figures(seen)

    def row(title: str, values: Mapping[str, float | None], last: str = "") -> list[str]:
        cells = (FORMATS[name][1](value) if (value := values.get(name)) is not None else "" for name in names)
        return [title, *cells, last]

    rows = []
    for entry in subject.entries:
        one = found[entry.title]
        rows.append(row(entry.title, asdict(one), verdict(one, wanted) if entry.ours else ""))
    rows.append(row("must", {name: bar.must for name, bar in wanted.items()}))
    rows.append(row("goal", {name: bar.goal for name, bar in wanted.items()}))
    ours, peers = ([asdict(found[one.title]) for one in subject.entries if one.ours is own] for own in (True, False))
    if peers:
        ratios = (_ratio(ours[0][name], peers[0][name]) for name in names)
        rows.append(["first row / first peer", *ratios, ""])
    return table.formatted(subject.described(), ["", *(FORMATS[name][0] for name in names), ""], rows)


def _ratio(one: float, other: float) -> str:
    return times(one / other) if other else "-"


REFUSALS, USED = Bar(1, at_most=True), Bar(0.95)


def described_windows(subject: Subject, seen: Mapping[str, Seen]) -> str:
    """The table of one key that several processes share: what happened in each window."""
    limits, rows = subject.limits, []
    for entry in subject.entries:
        one = seen[entry.title]
        windows = [[0, 0] for _ in range(subject.windows)]
        for at, _, _, _, accepted in one.log:
            if at >= one.begin:
                windows[int((at - one.begin) / limits.per)][accepted] += 1
        refusals, used = [refused for refused, _ in windows], [served / limits.requests for _, served in windows]
        most, share = max(refusals), sum(used) / len(used)
        verdicts = (REFUSALS.verdict(most), USED.verdict(share)) if entry.ours else ("", "")
        rows.append([entry.title, f"{median(refusals):g}", f"{most}", "1", verdicts[0]])
        rows[-1] += [f"{share:.1%}", f"{min(used):.1%}", "95.0%", verdicts[1]]
    header = ["", "refused per reset", "most", "must (at most)", "", "used", "least", "must", ""]
    return table.formatted(f"{subject.described()}, {subject.windows} windows", header, rows)


# -- the cost of a call ------------------------------------------------------------------------------------------------


class Told:
    """An answer whose headers describe a limit that is never reached."""

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
    """An operation whose answer has rate-limit headers."""
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
            '"learn", answers with headers': calls("learn", tells),
        },
    )


def described_calls(rates: dict[str, list[float]]) -> str:
    base = rates["no quota"]
    rows = []
    for name, found in rates.items():
        ratio = median([one / other for one, other in zip(base, found, strict=True)])
        rows.append([name, f"{1e6 / median(found):.2f}", times(ratio)])
    return table.formatted("await pool.run(operation), one key", ["", "CPU us per call", "beside no quota"], rows)


# -- the whole run ----------------------------------------------------------------------------------------------------


def planned(quick: bool, folder: str, postgres: str | None) -> list[list[Subject]]:
    """All subjects. Those of one list run at the same time."""
    many, alone, shared = batches(quick), urgent(quick), shared_subject(quick, folder, postgres)
    if quick:
        return [many, [*alone, shared]]
    return [
        many[:4],
        many[4:],
        alone[:1],
        alone[1:],
        [shared, shared_bucket(folder)],
        [*by_minutes(), shared_by_minutes(folder)],
    ]


async def measured_together(group: Sequence[Subject]) -> list[dict[str, Seen]]:
    """What was seen of the contestants of each subject, in the order of the subjects."""
    seconds, ready = max((subject.windows + 2) * subject.limits.per for subject in group), asyncio.Barrier(len(group))
    async with asyncio.timeout(seconds + 180), asyncio.TaskGroup() as running:
        measuring = [running.create_task(measured(subject, ready)) for subject in group]
    return [task.result() for task in measuring]


async def run(quick: bool, only: str) -> tuple[dict[str, Any], list[str]]:
    """Measure everything and print it; returns the results and the tables."""
    results: dict[str, Any] = {"quick": quick, "subjects": []}
    texts = []
    if not only:
        results["calls"] = await measure_calls(TURNS[quick])
        texts.append(described_calls(results["calls"]))
        print(texts[0])
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        postgres = None if quick else stack.enter_context(postgres_server()).dsn()
        for every in planned(quick, folder, postgres):
            group = [subject for subject in every if only.lower() in subject.title.lower()]
            if not group:
                continue
            table.say("; ".join(subject.title for subject in group) + " ...")
            for subject, seen in zip(group, await measured_together(group), strict=True):
                texts.append((described_windows if subject.by_window else described)(subject, seen))
                print(texts[-1])
                found = {title: asdict(each) for title, each in subject.figures(seen).items()}
                results["subjects"].append({"subject": subject.described(), "figures": found})
    return results, texts


def check_peers() -> None:
    for name, wanted in PEERS.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            raise SystemExit(
                f"{name} {wanted}, a peer to measure against, is not installed.\n"
                "Run `make bench` or `make bench-quick`: they install the `bench` extra first."
            ) from None
        if found != wanted:
            table.say(f"note: {name} {found} is installed; the figures are about {wanted}")


def report(texts: Sequence[str]) -> str:
    """The contents of results/quotas.md."""
    assert __doc__ is not None
    _, _, explained = __doc__.partition("\n\nThe upstreams")
    peers = ", ".join(f"{name} {wanted}" for name, wanted in PEERS.items())
    lines = [
        "# Keys kept busy at the speed that their provider allows",
        "",
        f"Made by `make bench` with Python {platform.python_version()} on {os.cpu_count()} CPUs, beside {peers}.",
        "",
        f"The upstreams{explained.rstrip()}",
        *texts,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter windows, and without limits per minute")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only subjects whose titles contain it; keeps nothing"
    )
    given = parser.parse_args()
    check_peers()
    table.warn_if_busy()
    results, texts = asyncio.run(run(given.quick, given.only))
    if given.quick:
        print("\nLiteLLM's Router limits by minutes: it is measured in the full run.")
    elif not given.only:
        REPORT.write_text(report(texts), "utf-8")
    if not given.only:
        path = table.keep("quotas", results)
        print(f"Load {os.getloadavg()[0]:.1f} at the end. Kept in {path.parent.parent.name}/results/{path.name}.")


if __name__ == "__main__":
    main()
