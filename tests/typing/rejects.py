"""What must not type-check: each line is wrong, and a checker that stops saying so fails on the unused comment."""

from __future__ import annotations

import headgate
from headgate import CooldownResource, Resource, ResourcePool, TaskPool

pool: ResourcePool[str] = ResourcePool([Resource("a", "sk-aaa")])

ResourcePool([Resource("a", 1)], max_attempts="3")  # type: ignore[call-overload]
ResourcePool([Resource("a", 1)], strategy=headgate.Resource)  # type: ignore[call-overload]
Resource(1, "value")  # type: ignore[arg-type]
Resource("a", "value", "adaptiv")  # type: ignore[arg-type]
Resource("a", "value", status="ill")  # type: ignore[arg-type]
Resource("a", "value", quota=60)  # type: ignore[arg-type]
Resource("a", "value", quota=["learn"])  # type: ignore[list-item]
Resource("a", "value").spent("many")  # type: ignore[arg-type]
headgate.Cost(words=5)  # type: ignore[call-arg]
CooldownResource("soon")  # type: ignore[arg-type]
CooldownResource(60, only_for="shop.example")  # type: ignore[arg-type]


async def on_int(resource: Resource[int]) -> int:
    return resource.value


@pool.use()
async def fetch(resource: Resource[str], url: str) -> bytes:
    return resource.value.encode()


async def main() -> None:
    await pool.run(on_int)  # type: ignore[arg-type]
    await pool.run(lambda resource: 3)  # type: ignore[arg-type, return-value]
    await pool.run(fetch, max_attempt=3)  # type: ignore[call-arg, arg-type]
    await fetch(3)  # type: ignore[arg-type]
    await fetch(Resource("a", "v"), "/x")  # type: ignore[arg-type, call-arg]
    pool.use(request_id="r")  # type: ignore[call-arg]
    pool.run_sync(lambda resource: 1, timeout=3)  # type: ignore[call-arg]
    pool.run_sync(lambda resource: 1, cost="many")  # type: ignore[arg-type]
    pool.run_sync(lambda resource: 1, affinity=1.5)  # type: ignore[arg-type]
    pool.lease(affinity=["acme"])  # type: ignore[arg-type]
    await pool.add("c", 3)  # type: ignore[call-overload]
    await pool.reconcile({"a": 1})  # type: ignore[arg-type]
    headgate.Nonsense  # type: ignore[attr-defined]  # noqa: B018


async def review(pr: int) -> str:
    return str(pr)


tasks = TaskPool("reviews", max_concurrent="5")  # type: ignore[arg-type]
TaskPool(scope="galaxy")  # type: ignore[arg-type]
TaskPool(on_signal="explode")  # type: ignore[arg-type]
headgate.backpressure_queue(10, "explode")  # type: ignore[arg-type]


async def submit() -> None:
    _ = await tasks.submit(review, "three")  # type: ignore[arg-type]
    _ = await tasks.submit(review(3))  # type: ignore[call-overload]
    tasks.map(review, ["three"])  # type: ignore[arg-type]
    await tasks.run(review, "three")  # type: ignore[arg-type]
    await tasks.submit_many(review, 3)  # type: ignore[call-overload]
    await tasks.submit_many([(review, (3,))], priority=1)  # type: ignore[call-overload]
    await tasks.close(cancel="some")  # type: ignore[arg-type]


@headgate.routine
async def add(x: int, y: int) -> int:
    return x + y


headgate.WorkerPool(spawn="two")  # type: ignore[arg-type]
headgate.WorkerPool(placement=4)  # type: ignore[arg-type]
headgate.RayPlacement(num_gpus="one")  # type: ignore[arg-type]
headgate.WorkerPool(setup="load")  # type: ignore[arg-type]
headgate.WorkerPool(teardown=lambda client: None)  # type: ignore[arg-type,misc]
headgate.routine(timeout="5")  # type: ignore[call-overload]


async def call() -> None:
    await add(1)  # type: ignore[call-arg]
    await add(1, "two")  # type: ignore[arg-type]
    add(1, 2) + 3  # type: ignore[operator]


tenant: headgate.ContextVar[str] = headgate.ContextVar("tenant", default="unknown")
number: int = tenant.get()  # type: ignore[assignment]
tenant.set(3)  # type: ignore[arg-type]
headgate.ContextVar(3)  # type: ignore[call-overload]
