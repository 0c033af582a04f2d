"""What must type-check from outside. Never run: mypy --strict and pyright read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Container, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import Any, assert_type

import anthropic
import httpx
import httpx2
import openai
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware

import headgate
from headgate import (
    Adaptive,
    CooldownResource,
    Cost,
    PoolExhausted,
    Quota,
    Resource,
    ResourcePool,
    TaskHandle,
    TaskPool,
)
from headgate.integrations import asgi
from headgate.integrations.anthropic import client as anthropic_client
from headgate.integrations.httpx import RotatingSyncTransport, RotatingTransport
from headgate.integrations.openai import client as openai_client
from headgate.resources import (
    AdaptiveStats,
    Affinity,
    GuidedPicker,
    Learner,
    Member,
    Occasion,
    Picker,
    Pool,
    PoolStats,
    QuotaSnapshot,
    ResourceCooled,
    Strategy,
    least_latency,
    primary_backup,
    round_robin,
    sticky,
    weighted,
)
from headgate.stores import JsonLinesStore, Store
from headgate.tasks import PoolSnapshot, TaskSnapshot
from headgate.workers import WorkerView
from headgate.workers.model import Report

by_list = ResourcePool([Resource("a", "sk-aaa"), Resource("b", "sk-bbb", 4)])
assert_type(by_list, ResourcePool[str])
by_value: ResourcePool[str] = ResourcePool({"a": "sk-aaa"})
seed: Pool[int] = Pool(resources=[Resource(resource_id="a", value=1)], max_attempts=3, cooldown_table=(1.0, 2.0))
strategies: list[Strategy] = [weighted(), primary_backup(), least_latency(decay=5), sticky()]
picker: Picker = round_robin().picker()
guided: GuidedPicker = sticky().picker()
chosen = ResourcePool([Resource("a", 1)], strategy=weighted(), on_state_change=print, name="keys")
classified = ResourcePool({"a": "sk-aaa"}, classify=headgate.http_errors)
httpx.AsyncClient(transport=RotatingTransport(classified, hosts=["api.example"], wait_for_cooldown=True))
httpx2.AsyncClient(transport=RotatingTransport(classified, header="x-api-key"))
httpx.AsyncClient(transport=RotatingTransport(classified, affinity=lambda request: str(request.url.host)))
httpx.AsyncClient(transport=RotatingTransport(classified, affinity=("acme", 7)))
CooldownResource(60, "403", only_for="affinity")
httpx2.Client(transport=RotatingSyncTransport(classified, header=lambda resource: {"key": resource.value}))
assert_type(openai_client(classified), openai.AsyncOpenAI)
assert_type(anthropic_client(classified, timeout=5), anthropic.AsyncAnthropic)
assert_type(openai_client(Resource("a", "sk-aaa")), openai.AsyncOpenAI)
httpx.AsyncClient(transport=RotatingTransport(Resource("a", "sk-aaa")))
ResourcePool({"a": "sk-aaa"}, classify=None)
several = [Quota(requests=5, per=1), Quota(requests=1000, tokens=1_000_000, per=3600)]
limited = ResourcePool({"a": "sk-aaa"}, quota=several)
ResourcePool([Resource("a", "v", quota=tuple(several)), Resource("b", "v", quota="learn")], quota=several[0])
limited.run_sync(lambda key: key.spent(input=3, output=4.5), cost=Cost(input=1000, output=500))
limited.run_sync(lambda key: key.spent(30), cost=1500)
assert_type(limited.stats().resources["a"].quota, QuotaSnapshot | None)
service = FastAPI(lifespan=asgi.lifespan(TaskPool("web"), classified), exception_handlers=asgi.exception_handlers())
service.add_middleware(asgi.PoolErrors, status=429)
service.add_middleware(asgi.TenantHeader, source=lambda scope: scope["user"])
service.add_middleware(asgi.CancelOnDisconnect)
Starlette(lifespan=asgi.lifespan_from(lambda: {"answers": TaskPool("web")}), middleware=[Middleware(asgi.PoolErrors)])


class Roulette:
    """A strategy of one's own, which is its own picker."""

    def picker(self) -> Roulette:
        return Roulette()

    def offer(self, seat: Member) -> None:
        assert_type(seat.in_flight, int)

    def withdraw(self, seat: Member) -> None: ...

    def pick_for(self, skip: Container[str], occasion: Occasion) -> Member | None:
        assert_type(occasion.chance(), float)
        assert_type(occasion.affinity, Affinity | None)
        return None

    def learn(self, seat: Member, seconds: float, now: float, well: bool) -> None: ...


own = ResourcePool([Resource("a", 1)], strategy=Roulette())
learner: Learner = Roulette()


async def length(resource: Resource[str]) -> int:
    return len(resource.value)


async def chunks(resource: Resource[str]) -> AsyncIterator[bytes]:
    yield resource.value.encode()


@by_list.use(max_attempts=2, within=5.0, affinity=7)
async def fetch(resource: Resource[str], url: str, *, times: int = 1) -> bytes:
    return resource.value.encode() * times


def on_cooled(event: ResourceCooled) -> None:
    assert_type(event.seconds, float)


async def main() -> None:
    assert_type(await by_list.run(length), int)
    assert_type(await by_list.run(length, tags=["eu"], wait_for_capacity=True, request_id="r"), int)
    assert_type(await by_list.run(length, affinity=("acme", 7, b"x")), int)
    assert_type(await by_list.run(lambda resource: length(resource)), int)
    assert_type(await fetch("/x", times=3), bytes)
    async with by_list.lease(within=3) as resource:
        assert_type(resource, Resource[str])
        assert_type(resource.value, str)
    async for chunk in by_list.stream(chunks, timeout=3):
        assert_type(chunk, bytes)
    assert_type(by_list.run_sync(lambda resource: len(resource.value)), int)
    assert_type(by_list.stats(), PoolStats)
    assert_type(await by_list.add("c", "sk-ccc", max_in_flight=2), Resource[str])
    assert_type(await by_list.add("d", "sk-ddd", max_in_flight="adaptive"), Resource[str])
    found = ResourcePool([Resource("e", "sk-eee", Adaptive(most=50))], max_in_flight="adaptive")
    assert_type(found.snapshot()["e"]["max_in_flight"], int | None)
    assert_type(found.stats().resources["e"].adaptive, AdaptiveStats | None)
    await by_list.add(Resource("d", "sk-ddd"))
    await by_list.reconcile({"a": "sk-aaa"})
    try:
        raise CooldownResource(cooldown_seconds=5, reason="busy")
    except PoolExhausted as error:
        assert_type(error.retry_after, float | None)
    unsubscribe = headgate.subscribe(on_cooled, topic="resources.health")
    unsubscribe()


async def review(pr: int, thorough: bool = False) -> str:
    return f"{pr} {thorough}"


def count(text: str) -> int:
    return len(text)


store: Store = JsonLinesStore("journals")
tasks = TaskPool("reviews", max_concurrent=5, queue=headgate.fair_round_robin("tenant_id"), store=store)
draining = TaskPool("drains", max_concurrent=None, on_signal="drain")
by_name = headgate.pool_create(name="x", queue="fifo", backpressure={"kind": "queue", "max_depth": 10})


async def submit() -> None:
    handle = await tasks.submit(review, 3, True, tenant_id="acme", priority=10)
    same = assert_type(handle, TaskHandle[str])
    assert_type(await handle, str)
    number = assert_type(await tasks.submit(count, "abc"), TaskHandle[int])
    again = assert_type(tasks.submit_nowait(review, 3), TaskHandle[str])
    assert_type(handle.cancel(), bool)
    assert_type(handle.eta(), float | None)
    assert_type(handle.children(), list[TaskHandle[Any]])
    assert_type(await headgate.pool_wait(handle), TaskSnapshot)
    assert_type(await headgate.pool_wait([same, number, again]), list[TaskSnapshot])
    assert_type(tasks.snapshot(), PoolSnapshot)
    assert_type(tasks.snapshot().active, int)
    async for text in tasks.map(review, [1, 2], window=10, tenant_id="acme"):
        assert_type(text, str)
    async for text in tasks.map(review, [1, 2], idempotency_key=str, tenant_id=lambda pr: "acme"):
        assert_type(text, str)
    async for ended in tasks.map(review, [1, 2], return_handles=True, ordered=False):
        _ = assert_type(ended, TaskHandle[str])
    async for counted in tasks.map(count, ["a"], return_handles=True):
        _ = assert_type(counted, TaskHandle[int])
    assert_type(await tasks.run(review, 3, True, timeout=5), str)
    assert_type(await tasks.run(count, "abc"), int)
    assert_type(await tasks.submit_many([(review, (3,), {"priority": 1}), (count, ("abc",))]), list[TaskHandle[Any]])
    assert_type(
        await tasks.submit_many(review, [(3, True), (4,)], idempotency_key=lambda pr: pr), list[TaskHandle[str]]
    )
    assert_type(await tasks.submit_many(count, [("abc",)]), list[TaskHandle[int]])
    assert_type(headgate.pending(), list[TaskSnapshot])
    assert_type(tasks.snapshot().created_at, float)
    assert_type(tasks.drain_on_signals(), None)
    await tasks.close(cancel="queued", timeout=30)
    await tasks.close(True)
    try:
        _ = tasks.submit_nowait(review, 3)
    except (headgate.QueueFull, headgate.PoolBusy) as refused:
        assert_type(refused.retry_after, float | None)
        assert_type(refused.queued + refused.active, int)
    async with tasks as pool:
        assert_type(pool, TaskPool)


@headgate.routine
async def add(x: int, y: int = 0, *, loud: bool = False) -> int:
    return x + y


@headgate.routine(timeout=5, retries=2)
async def name_of(number: int) -> str:
    return str(number)


@headgate.routine
def crunch(text: str) -> float:
    return float(len(text))


@headgate.routine(thread=True)
def crunch_more(text: str) -> float:
    return float(len(text))


class Service:
    @headgate.routine
    async def greet(self, name: str) -> str:
        return name

    @classmethod
    @headgate.routine
    async def make(cls, name: str) -> bytes:
        return name.encode()

    @staticmethod
    @headgate.routine
    async def twice(number: int) -> int:
        return number * 2


@headgate.routine
async def tokens(prompt: str) -> AsyncGenerator[str, int]:
    number = yield prompt
    yield str(number + 1)


@headgate.routine(prefetch=8)
async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


class Busy:
    def order(self, task: headgate.Task, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
        return sorted(workers, key=lambda worker: worker.in_flight)

    def report(self, worker: WorkerView, report: Report) -> None:
        assert_type(worker.uid, str)


def full(context: headgate.BackpressureContext) -> bool:
    return context.active_task_count > 3


@asynccontextmanager
async def connected() -> AsyncIterator[str]:
    yield "connection"


async def load() -> list[int]:
    return []


async def bye() -> None: ...


async def call() -> None:
    balancer: headgate.LoadBalancerLike = Busy()
    hook: headgate.BackpressureLike = full
    async with headgate.WorkerPool("gpu", spawn=2, loadbalancer=balancer) as pool:
        assert_type(await add(1, 2, loud=True), int)
        assert_type(await name_of(3), str)
        assert_type(await crunch("a"), float)
        assert_type(await crunch_more("a"), float)
        assert_type(await Service().greet("ann"), str)
        assert_type(await Service.make("ann"), bytes)
        assert_type(await Service.twice(2), int)
        task = asyncio.create_task(add(1))
        assert_type(await task, int)
        assert_type(pool.workers(), list[WorkerView])
        await pool.resize(3)
        stream = tokens("a")
        assert_type(stream, AsyncGenerator[str, int])
        assert_type(await stream.asend(3), str)
        async for number in numbers(3):
            assert_type(number, int)
        async for text in headgate.map(name_of, [1, 2], window=3, ordered=False):
            assert_type(text, str)
        assert_type(await pool.broadcast(add, 1, 2), dict[str, Any])
    async with headgate.WorkerPool(
        worker=lambda *tags, credentials=None: headgate.LocalWorker(*tags, backpressure=hook)
    ):
        with headgate.do_dispatch(False), headgate.RuntimeContext(dispatch_timeout=1.5):
            assert_type(headgate.current_task(), headgate.Task | None)
    async with headgate.WorkerPool(
        max_tasks_per_worker=100, max_memory_per_worker="2GB", setup=connected, teardown=bye
    ):
        assert_type(headgate.setup_result(), Any)
    headgate.WorkerPool(placement=headgate.LocalPlacement(2), quorum=2)
    headgate.WorkerPool(placement=headgate.RayPlacement(4, num_gpus=1, resources={"tpu": 0.5}, runtime_env={"pip": []}))
    headgate.WorkerPool(max_memory_per_worker=2**30, setup=load, teardown=lambda: None, name="models")


tenant: headgate.ContextVar[str] = headgate.ContextVar("tenant", default="unknown")
depth = headgate.ContextVar("depth", default=0, namespace="app")
bare: headgate.ContextVar[bytes] = headgate.ContextVar("bare")


async def ambient() -> None:
    assert_type(tenant.get(), str)
    assert_type(depth, headgate.ContextVar[int])
    assert_type(bare.get(None), bytes | None)
    token = tenant.set("acme")
    assert_type(token, headgate.Token[str])
    assert_type(token.var, headgate.ContextVar[str])
    tenant.reset(token)
    assert_type(token.used, bool)
    context = headgate.copy_context()
    assert_type(context.run(len, "abc"), int)
    assert_type(context.id, str)
    task = headgate.create_task(add(1), name="one", context=context)
    assert_type(await task, int)
    headgate.install_task_factory(asyncio.get_running_loop())
    category: type[Warning] = headgate.ContextDecodeWarning
    assert issubclass(category, Warning)
    for var in headgate.current_context():
        assert_type(var.key, str)


async def reviewed(key: headgate.Resource[str], number: int) -> str:
    return f"{key.value} {number}"


async def lines(key: headgate.Resource[str], number: int) -> AsyncGenerator[str, None]:
    yield f"{key.value} {number}"


async def line(keys: headgate.ResourcePool[str], workers: headgate.WorkerPool) -> None:
    async with headgate.TaskPool("line", resources=keys, workers=workers) as pool:
        handle = await pool.submit(reviewed, 3, tags=["eu"], affinity="ada", max_attempts=5)
        assert_type(await handle, str)
        assert_type(await pool.submit_nowait(reviewed, 3), str)
        story: str = handle.story()
        assert story
        async for text in pool.map(reviewed, [1, 2]):
            assert_type(text, str)
        async for text in pool.stream(lines, 3):
            assert_type(text, str)
    executor: Executor = workers.as_executor(max_concurrent=4)
    assert_type(executor.submit(len, "abc"), Future[int])
    with headgate.TaskPool().as_executor(priority=3) as other:
        assert_type(other.submit(add, 3).result(), int)
        assert_type(other.submit(int, "3").result(), int)
    assert_type(headgate.pool_create(name="x", resources=keys), headgate.TaskPool)
