"""What looking on costs: a program with 10,000 tasks a second, unobserved, and with everything that can look at it.

    python benchmarks/observe.py            ten minutes
    python benchmarks/observe.py --quick    two minutes

One process runs tasks of 100 tenants, for a second while nobody looks on, for two seconds observed in one way, for a
second while nobody looks on, for two seconds observed in the next way, and so on. What counts is the CPU time that a
task takes, with all threads of the process, beside its time in the seconds before and after in which nobody looked on.
"unobserved too" shows how far equal turns are apart on this machine. The page and Prometheus ask from another process;
spans go to an exporter that throws them away. One subscriber of all events does nothing with them.

The first table is a program that fills a core with 10,000 tasks a second: each task computes so long that it takes 100
microseconds, all included. In the second, tasks do nothing, at the same rate. What a task of the pool itself takes is
three tenths of that time, so what looking on adds weighs more. The last table is the page in Chromium, with 10,000
tenants, 1,000 keys and 100 workers: milliseconds of script for an update. "must" is the limit of the project's
performance targets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import table
from table import Bar, median, say, times

RATE = 10_000
LIMITS: dict[str, Bar | None] = {
    "unobserved too": None,
    "published, nobody looks": Bar(1.02, 1.01, at_most=True),
    "Prometheus and an open page": Bar(1.05, 1.03, at_most=True),
    "one subscriber": None,
    "OpenTelemetry, sample=0.01": Bar(1.10, 1.05, at_most=True),
    "OpenTelemetry, 1 % by the SDK": None,
}
PAGE = Bar(50.0, 25.0, at_most=True)

PROGRAM = """
import asyncio, json, os, sys, time
import headgate.dashboard, headgate.observe
from headgate import TaskPool, fair_round_robin
from headgate.observe import opentelemetry
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBasedTraceIdRatio

class Away(SpanExporter):
    def export(self, spans):
        return SpanExportResult.SUCCESS

def provider(sampler):
    made = TracerProvider(sampler=sampler)
    made.add_span_processor(BatchSpanProcessor(Away()))
    return made

always, some = provider(ALWAYS_ON), provider(ParentBasedTraceIdRatio(0.01))
page = None

def look(how):
    global page
    if how.startswith("unobserved"):
        return lambda: None
    if how.startswith("published"):
        return headgate.observe.publish().close
    if how.startswith("Prometheus"):
        page = headgate.dashboard.serve()
        return page.close
    if how == "one subscriber":
        return headgate.subscribe(lambda event: None)
    if "SDK" in how:
        return opentelemetry.install(some)
    return opentelemetry.install(always, sample=0.01)

async def work(loops):
    for _ in range(loops):
        pass
    await asyncio.sleep(0)

async def offer(pool, seconds, loops):
    began, sent, cpu = time.monotonic(), 0, time.process_time()
    while (gone := time.monotonic() - began) < seconds:
        for _ in range(100 if loops else int(gone * RATE) - sent):
            last = pool.submit_nowait(work, loops, key=TENANTS[sent % 100])
            sent += 1
        await (last if loops else asyncio.sleep(0.01))
    await pool.drain()
    return (time.process_time() - cpu) / sent

async def loops_for(pool):
    took = [await offer(pool, 0.5, loops) for _ in range(3) for loops in (1, 2000)]
    short, long = sorted(took[::2])[1], sorted(took[1::2])[1]
    return max(1, round(2000 * (1 / RATE - short) / (long - short)))

TENANTS = [f"tenant {number}" for number in range(100)]
RATE = int(sys.argv[1])

async def main():
    loop = asyncio.get_running_loop()
    async with TaskPool("bench", max_concurrent=200, queue=fair_round_robin()) as pool:
        full = await loops_for(pool)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            how, seconds, fills = json.loads(line)
            stop = look(how)
            if page is not None:
                print(page.url, flush=True)
                await loop.run_in_executor(None, sys.stdin.readline)
            loops = full if fills else 0
            await offer(pool, seconds / 8, loops)
            print(1e6 * await offer(pool, seconds, loops), flush=True)
            await loop.run_in_executor(None, end, stop)

def end(stop):
    global page
    stop()
    page = None

asyncio.run(main())
os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    quick = parser.parse_args().quick
    table.warn_if_busy()
    filled, empty = measure(3 if quick else 15)
    report(filled, empty, page_times(10 if quick else 40))


@dataclass
class Costs:
    """Microseconds of CPU for a task: of each contestant, turn for turn, and of the unobserved turns around each."""

    spent: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LIMITS})
    beside: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LIMITS})


def measure(rounds: int) -> tuple[Costs, Costs]:
    """The costs of tasks that fill a core, and of tasks that do nothing."""
    filled, empty = Costs(), Costs()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(RATE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for turn in range(rounds):
            say(f"turn {turn + 1} of {rounds} ...")
            for fills, costs in ((True, filled), (False, empty)):
                before = run(process, "unobserved", 1.0, fills)
                for name in LIMITS:
                    costs.spent[name].append(run(process, name, 2.0, fills))
                    after = run(process, "unobserved", 1.0, fills)
                    costs.beside[name].append((before + after) / 2)
                    before = after
        assert process.stdin is not None
        process.stdin.close()
    return filled, empty


def run(process: subprocess.Popen[str], name: str, seconds: float, fills: bool) -> float:
    """Microseconds of CPU for one task."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([name, seconds, fills]), file=process.stdin, flush=True)
    over = threading.Event()
    threads = []
    if name.startswith("Prometheus"):
        url, _, token = process.stdout.readline().strip().partition("#token=")
        threads = [threading.Thread(target=one, args=(url, token, over)) for one in (read_stream, scrape)]
        for thread in threads:
            thread.start()
        fetch_metrics(url, token)  # what is imported and made at the first scrape is no cost of looking on
        print("go", file=process.stdin, flush=True)
    told = process.stdout.readline()
    over.set()
    for thread in threads:
        thread.join()
    return float(told)


def read_stream(url: str, token: str, over: threading.Event) -> None:
    """Do what an open page does."""
    request = urllib.request.Request(f"{url}api/stream", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            while not over.is_set() and answer.readline():
                pass
    except OSError:
        pass


def scrape(url: str, token: str, over: threading.Event) -> None:
    """Do what Prometheus does, and oftener than it usually does."""
    while not over.wait(5.0):
        try:
            fetch_metrics(url, token)
        except OSError:
            pass


def fetch_metrics(url: str, token: str) -> None:
    request = urllib.request.Request(f"{url}metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert b"headgate_observe_look_seconds" in answer.read()


def page_times(updates: int) -> dict[str, list[float]]:
    """Milliseconds of script for each update of a large program, on each view of the page; nothing without Chromium."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.system.observe.browser import Browser, missing
    from tests.system.observe.large_program import apply_big_updates

    if missing():
        say(missing())
        return {}
    from headgate.dashboard import serve

    views = {"overview": "1", "tasks": "2", "resources": "3", "workers": "4"}
    browser = Browser()
    try:
        with serve() as page:
            browser.size(1280, 900)
            browser.open(page.url)
            browser.until("return window.headgate?.applied.updates > 0")
            return {view: apply_big_updates(browser, key, updates) for view, key in views.items()}
    finally:
        browser.close()


def report(filled: Costs, empty: Costs, page: dict[str, list[float]]) -> None:
    ratios = print_costs("A program that fills a core with 10,000 tasks a second", filled, LIMITS)
    empty_ratios = print_costs("Tasks that do nothing, 10,000 a second", empty, {})
    rows = [
        [view, f"{median(figures):.1f} ms", f"{max(figures):.1f} ms", PAGE.verdict(max(figures))]
        for view, figures in page.items()
    ]
    table.print_table(
        "The page: an update with 10,000 tenants, 1,000 keys, 100 workers", ["", "median", "most", "must 50 ms"], rows
    )
    results: dict[str, Any] = {
        "microseconds": filled.spent,
        "ratios": ratios,
        "empty_microseconds": empty.spent,
        "empty_ratios": empty_ratios,
        "page_milliseconds": page,
        "load": os.getloadavg()[0],
    }
    table.keep("observe", results)


def print_costs(title: str, costs: Costs, limits: dict[str, Bar | None]) -> dict[str, float]:
    """Print what a task takes with each contestant, and beside unobserved. Returns the ratios."""
    rows, ratios = [], {}
    for name, figures in costs.spent.items():
        pairs = list(zip(figures, costs.beside[name], strict=True))
        ratio = ratios[name] = median([one / plain for one, plain in pairs])
        limit = limits.get(name)
        more = median([one - plain for one, plain in pairs])
        verdict = "" if limit is None else limit.verdict(ratio)
        rows.append([name, f"{median(figures):.1f} us", f"{more:+.1f} us", times(ratio), verdict])
    table.print_table(title, ["", "CPU for a task", "more", "beside unobserved", "must"], rows)
    return ratios


if __name__ == "__main__":
    main()
