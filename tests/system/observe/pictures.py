"""`make pictures`: the pictures of docs/observe.md, of a small program with tenants, keys and workers.

The program is in this process, so that it can be stopped in the middle of something worth seeing.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from pathlib import Path

from headgate import Quota, ResourcePool, TaskPool, WorkerPool, fair_round_robin
from headgate.core.clock import clock
from headgate.dashboard import serve
from tests.system.observe.browser import Browser, missing
from tests.system.observe.picture_jobs import ask

IMAGES = Path(__file__).parents[3] / "docs" / "images"
VIEWS = {"overview": "1", "tasks": "2", "resources": "3", "workers": "4", "events": "5"}
SHOWN = (
    ("overview", 1280, 800),
    ("tasks", 1280, 1240),
    ("resources", 1280, 900),
    ("workers", 1280, 700),
    ("overview", 390, 844),
    ("tasks", 390, 844),
)
SECONDS = 45


async def work(over: asyncio.Event) -> None:
    """Three tenants, one of which submits too much, until it is over."""
    values = {f"key-{n}": f"sk-picture-{n}" for n in range(1, 9)}
    keys = ResourcePool(values, name="keys", max_in_flight=4, quota=Quota(requests=300, per=60.0))
    async with WorkerPool(spawn=3) as workers:
        pool = TaskPool(
            "calls", max_concurrent=18, resources=keys, workers=workers, queue=fair_round_robin(), keep_failed=50
        )
        number = 0
        while not over.is_set():
            number += 1
            for tenant, many in (("acme batch", 14), ("blue bank", 5), ("cat food", 4), ("dune labs", 2)):
                for turn in range(many if pool.size() < 140 or tenant != "acme batch" else 0):
                    await pool.submit(ask, 10 * number + turn, key=tenant)
            await asyncio.sleep(0.6)
        await pool.close(cancel=True)


def main() -> int:
    if missing():
        sys.stderr.write(f"{missing()}\n")
        return 1
    logging.disable(logging.ERROR)
    IMAGES.mkdir(exist_ok=True)
    sys.argv[0], sys.modules["__main__"].__spec__ = "answer_questions.py", None  # what the page calls the program
    loop, over = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(work(over),))
    thread.start()
    browser = Browser()
    try:
        with serve() as page:
            browser.size(1280, 800)
            browser.open(page.url)
            browser.until("return window.headgate?.applied.updates > 0")
            clock.sleep(SECONDS)
            for theme in ("light", "dark"):
                browser.run("document.documentElement.dataset.theme = arguments[0]", theme)
                for view, width, height in SHOWN:
                    browser.size(width, height)
                    browser.press(VIEWS[view])
                    clock.sleep(1.0)
                    path = IMAGES / f"dashboard-{view}-{width}-{theme}.png"
                    path.write_bytes(browser.picture())
                    sys.stdout.write(f"{path.name}\n")
    finally:
        browser.close()
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
