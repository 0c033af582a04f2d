"""A large program, as the server of the page tells of it: 10,000 tenants, 1,000 keys and 100 workers."""

from __future__ import annotations

import time
from typing import Any

from tests.system.observe.browser import Browser


def tenant(n: int, turn: int) -> dict[str, Any]:
    name = f"tenant {(n * 7 + turn) % 10_000}"
    return {"tenant": name, "queued": n, "active": 1, "lag": 50.0 - n, "started": 3, "p50": 0.1, "p99": 0.2}


def task(n: int, turn: int) -> dict[str, Any]:
    about = {"what": "call", "status": "running", "seconds": 1.0, "attempt": 1, "resource": "key-1", "worker": "w-1"}
    return {"id": f"p/{turn}-{n}", "number": turn * 50 + n, "tenant": f"t{n}", **about}


def key(n: int, turn: int) -> dict[str, Any]:
    counts = {"consecutive_cooldown": 1, "acquires": 9, "successes": 7, "cooldowns": 2, "disables": 0, "refusals": 2}
    use = {"in_flight": 1, "max_in_flight": 4, "cooldown": 30.0}
    return {"id": f"key-{(n * 3 + turn) % 1000}", "status": "cooling_down", **use, **counts}


def worker(n: int, turn: int) -> dict[str, Any]:
    about = {
        "address": "a",
        "host": "h",
        "most": 32,
        "memory": 9_000_000,
        "tags": [],
        "version": "1",
        "replaced_because": "",
    }
    return {"uid": f"w-{n}", "pid": n, "state": "ready", "in_flight": turn % 7, **about}


def look(turn: int) -> dict[str, Any]:
    """What is seen at one moment: the first rows of each list, as the server sends them. Most are new each time."""
    at = time.time()
    ends = dict.fromkeys(("rejected", "cancelled", "expired", "stale", "blocked_submitters", "waiting"), 0)
    point: dict[str, Any] = {"t": at, "done": 10_000.0, "failed": 0.0, "queued": 90_000, "active": 500, "lag": 50.0}
    point["tenants"] = {f"tenant {n}": [n, 1.0] for n in range(6)}
    tasks = {"kind": "tasks", "name": "big", "number": 1, "id": "p", "state": "open", "max_concurrent": 500, **ends}
    tasks |= {"active": 500, "queued": 90_000 + turn, "completed": turn * 5000, "failed": 3, "queue": "fair"}
    tasks |= {"max_queued": None, "waiting_for": None, "jain": 0.99, "lag": 50.0, "tenant_count": 10_000, "held": None}
    tasks |= {"tenants": [tenant(n, turn) for n in range(50)], "running": [task(n, turn) for n in range(50)]}
    tasks |= {"oldest": [task(n + 50, turn) for n in range(50)], "failures": [], "shared": None, "point": point}
    health = {"in_flight": 50, "healthy": 400, "cooling_down": 600, "disabled": 0, "waiting": 0}
    keys = {"kind": "resources", "name": "keys", "number": 2, "eligible": 1, "saturated": 0, "held": None, **health}
    keys |= {"attempts": 9, "successes": 7, "cooldowns": 2, "disables": 0, "refusals": 2, "resource_count": 1000}
    keys |= {"resources": [key(n, turn) for n in range(50)]}
    keys["point"] = {"t": at, "ok": 9000.0, "refused": 10.0, "used": 1.0, **health}
    states = dict.fromkeys(("starting", "cooling", "blocked", "lost", "stopping", "losses"), 0)
    workers = {"kind": "workers", "name": "workers-1", "number": 3, "state": "open", "size": 100, "worker_count": 100}
    workers |= {**states, "expected": 100, "in_flight": 500, "ready": 100, "memory": 9e8, "held": None}
    workers |= {"workers": [worker(n, turn) for n in range(50)]}
    workers["point"] = {"t": at, "lost": 0.0, "in_flight": 500, "ready": 100, "blocked": 0, "memory": 9e8}
    about = {"schema": 1, "version": "1", "pid": 1, "program": "big.py", "started_at": at, "at": at, "pause": 1.0}
    return {**about, "pools": [tasks, keys, workers]}


MEASURE = """
const [messages, tab, done] = [arguments[0], arguments[1], arguments[arguments.length - 1]];
window.headgate.stop();
window.headgate.state.program = 'big';
document.body.dispatchEvent(new KeyboardEvent('keydown', { key: tab, bubbles: true }));
const times = [];
const next = () => {
  const message = messages[times.length];
  if (!message) return done(times);
  requestAnimationFrame(() => {
    window.headgate.received(message);
    times.push(window.headgate.applied.last);
    setTimeout(next, 30);
  });
};
next();
"""


def apply_big_updates(page: Browser, tab: str, count: int) -> list[float]:
    """Milliseconds of script for each update of a large program, on one view; without the first, which makes it."""
    past = [view["point"] for view in look(0)["pools"]]
    history = {str(n + 1): [{**past[n], "t": past[n]["t"] - 150 + i / 2} for i in range(299)] for n in range(3)}
    told = {"alive": ["big"], "budgets": [], "looking": 0}
    first = {**told, "programs": [{"id": "big", "look": look(0), "events": [], "history": history}]}
    rest = [{**told, "programs": [{"id": "big", "look": look(n), "events": []}]} for n in range(1, count + 1)]
    times: list[float] = page.run_async(MEASURE, [first, *rest], tab)
    return times[1:]
