"""Webhook events become tasks of a named pool, with its order and its limits. A bad event does not stop the others."""

import asyncio

from headgate import TaskPool, fair_round_robin, spawn_to_pool

EVENTS = [
    {"pull": {"title": "a1", "labels": [{"priority": "3"}]}, "tenant": "acme"},
    {"pull": {"title": "a2", "labels": []}, "tenant": "acme"},
    {"pull": {"title": "a3", "labels": []}, "tenant": "acme"},
    {"pull": None, "tenant": "acme"},
    {"pull": {"title": "b1", "labels": []}, "tenant": "bolt"},
]
gate = asyncio.Event()


async def review(title):
    await gate.wait()
    print("reviewed", title)


def task_for(event):
    title = event["pull"]["title"]  # may raise: then consume() continues with the next event
    return lambda: review(title)


on_pull = spawn_to_pool("reviews", task_for, priority_from="pull.labels.0.priority", key_from="tenant")


async def webhooks():
    for event in EVENTS:
        yield event


async def main():
    async with TaskPool("reviews", max_concurrent=1, queue=fair_round_robin()) as pool:
        count = await on_pull.consume(webhooks(), on_error=lambda event, error: print("refused:", error))
        print(count, "submitted:", [(task.key, task.priority) for task in reversed(pool.snapshot().tasks)])
        gate.set()


asyncio.run(main())
