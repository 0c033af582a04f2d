"""What looking on costs: a program with 10,000 tasks a second, unobserved, and with everything that can look at it.

    python benchmarks/observe.py            six minutes
    python benchmarks/observe.py --quick    half a minute

Each contestant is a process of its own that is offered 10,000 tasks a second of 100 tenants, and is measured by the CPU
time that it takes, with all its threads; the page and Prometheus ask from another process. "slower" is that time beside
the time of the unobserved program. The last table is the page in Chromium, with 10,000 tenants, 1,000 keys and 100
workers: milliseconds of script for an update. "must" is the limit of the project's performance targets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import table
from table import Bar, median, say, times

RATE = 10_000
LIMITS: dict[str, Bar | None] = {
    "unobserved": None,
    "published, nobody looks": Bar(1.02, 1.01, at_most=True),
    "Prometheus and an open page": Bar(1.05, 1.03, at_most=True),
    "OpenTelemetry, sample=0.01": Bar(1.10, 1.05, at_most=True),
    "OpenTelemetry, 1 % by the SDK": None,
}
PAGE = Bar(50.0, 25.0, at_most=True)

PROGRAM = """
import asyncio, json, os, sys, time
from headgate import TaskPool, fair_round_robin

async def work():
    await asyncio.sleep(0)

async def main(seconds, rate):
    tenants = [f"tenant {number}" for number in range(100)]
    async with TaskPool("bench", max_concurrent=200, queue=fair_round_robin()) as pool:
        began, turn, sent = time.monotonic(), 0.01, 0
        cpu = time.process_time()
        while (gone := time.monotonic() - began) < seconds:
            while sent < gone * rate:
                pool.submit_nowait(work, key=tenants[sent % 100])
                sent += 1
            await asyncio.sleep(turn)
        await pool.drain()
        cpu = time.process_time() - cpu
        assert pool.snapshot(0).completed == sent
        print(json.dumps({"tasks": sent, "cpu": cpu}), flush=True)

how, seconds, rate = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
stops = []
if how == "published, nobody looks":
    import headgate.observe
    headgate.observe.publish()
elif how.startswith("Prometheus"):
    import headgate.dashboard
    page = headgate.dashboard.serve()
    print(page.url, flush=True)
    sys.stdin.readline()
elif how.startswith("OpenTelemetry"):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBasedTraceIdRatio
    from headgate.observe import opentelemetry
    ours = "SDK" not in how
    provider = TracerProvider(sampler=ALWAYS_ON if ours else ParentBasedTraceIdRatio(0.01))
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    opentelemetry.install(provider, sample=0.01 if ours else 1.0)
asyncio.run(main(seconds, rate))
os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    quick = parser.parse_args().quick
    seconds, rounds = (3.0, 2) if quick else (8.0, 7)
    table.warn_if_busy()
    spent: dict[str, list[float]] = {name: [] for name in LIMITS}
    for turn in range(rounds):
        for name in LIMITS:
            say(f"{name}, {turn + 1} of {rounds} ...")
            spent[name].append(run(name, seconds))
    report(spent, page_times(10 if quick else 40))


def run(name: str, seconds: float) -> float:
    """Microseconds of CPU for one task."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, str(seconds), str(RATE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        over = threading.Event()
        threads = []
        if name.startswith("Prometheus"):
            url, _, token = process.stdout.readline().strip().partition("#token=")
            threads = [threading.Thread(target=one, args=(url, token, over)) for one in (read_stream, scrape)]
            for thread in threads:
                thread.start()
            fetch_metrics(url, token)  # what is imported and made at the first scrape is no cost of looking on
            time.sleep(1.0)
            process.stdin.write("go\n")
            process.stdin.flush()
        told = json.loads(process.stdout.readline())
        over.set()
        process.wait()
        for thread in threads:
            thread.join()
    return 1e6 * float(told["cpu"]) / float(told["tasks"])


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
    from tests.observe.browser import Browser, missing
    from tests.observe.large_program import apply_big_updates

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


def report(spent: dict[str, list[float]], page: dict[str, list[float]]) -> None:
    rows, ratios = [], {}
    for name, figures in spent.items():
        ratio = ratios[name] = median([one / plain for one, plain in zip(figures, spent["unobserved"], strict=True)])
        limit = LIMITS[name]
        verdict = "" if limit is None else limit.verdict(ratio)
        more = median([one - plain for one, plain in zip(figures, spent["unobserved"], strict=True)]) * RATE / 1e4
        rows.append([name, f"{median(figures):.1f} us", f"{more:+.1f} %", times(ratio), verdict])
    header = ["", "CPU for a task", "more of a core", "beside unobserved", "must"]
    table.print_table(f"{RATE:,} tasks a second, CPU time of the process", header, rows)
    rows = [
        [view, f"{median(figures):.1f} ms", f"{max(figures):.1f} ms", PAGE.verdict(max(figures))]
        for view, figures in page.items()
    ]
    table.print_table(
        "The page: an update with 10,000 tenants, 1,000 keys, 100 workers", ["", "median", "most", "must 50 ms"], rows
    )
    results: dict[str, Any] = {
        "microseconds": spent,
        "ratios": ratios,
        "page_milliseconds": page,
        "load": os.getloadavg()[0],
    }
    table.keep("observe", results)


if __name__ == "__main__":
    main()
