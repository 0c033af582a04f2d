"""Watch a pool: events as they happen, a snapshot of its state, and counters for metrics."""

import asyncio
import json

import headgate
from headgate import CooldownResource, ResourcePool, RetryOperation

pool = ResourcePool({"key-1": "sk-aaa", "key-2": "sk-bbb"}, name="search")
troubles = [CooldownResource(0.5, "429"), RetryOperation("502")]


async def ask(key):
    if troubles:
        raise troubles.pop(0)
    return "found"


async def main():
    unsubscribe = headgate.subscribe(on_event, "resources")
    print(await pool.run(ask, request_id="req-1", retry_delay=0))
    await asyncio.sleep(0.6)
    print(await pool.run(ask, request_id="req-2"))
    unsubscribe()

    print(json.dumps(pool.snapshot()["key-1"]))
    stats = pool.stats()
    print(f"{stats.attempts} attempts, {stats.runs_ok} calls, {stats.cooldowns} cooldown, {stats.retries} retry")
    print(f"key-2 has served {stats.resources['key-2'].successes}")


def on_event(event):
    """Print an event. Events are frozen and contain no secret; `to_dict()` is for logs and dashboards."""
    facts = event.to_dict()
    usage = facts.get("usage") or {}
    which = facts.get("resource_id") or usage.get("resource_id") or facts.get("request_id")
    print(f"{event.topic}: {event.name} {which} {facts.get('outcome', '')}".rstrip())


asyncio.run(main())
