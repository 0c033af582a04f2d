"""What is placed on workers by the tests of the line: imported there by name, as a user's functions are."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

import headgate
from headgate import (
    ContextVar,
    CooldownResource,
    DisableResource,
    Resource,
    ResourcePool,
    RetryOperation,
    routine,
)
from tests.support.workers.jobs import note

Seen = dict[str, Any]
"""What a function saw where it ran: see `seen`."""


def split(args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The id of the resource that came first ("" if none did), and the other arguments."""
    if args and isinstance(args[0], Resource):
        return args[0].resource_id, args[1:]
    return "", args


def seen(args: tuple[Any, ...], **more: Any) -> Seen:
    key, rest = split(args)
    return {
        "key": key,
        "value": args[0].value if key else None,
        "args": rest,
        "more": more,
        "pid": os.getpid(),
        "thread": threading.current_thread() is not threading.main_thread(),
        "loop": asyncio._get_running_loop() is not None,
    }


# -- functions of every kind: with a resource or without ---------------------------------------------------------------


async def show(*args: Any, **more: Any) -> Seen:
    return seen(args, **more)


def show_plainly(*args: Any, **more: Any) -> Seen:
    return seen(args, **more)


class Client:
    """Its methods may be placed too: it travels with them."""

    def __init__(self, base: str) -> None:
        self.base = base

    async def ask(self, *args: Any, **more: Any) -> Seen:
        return seen(args, base=self.base, **more)

    def ask_plainly(self, *args: Any, **more: Any) -> Seen:
        return seen(args, base=self.base, **more)

    async def __call__(self, *args: Any, **more: Any) -> Seen:
        return seen(args, base=self.base, **more)

    @classmethod
    async def of_the_class(cls, *args: Any) -> Seen:
        return seen(args, cls=cls.__name__)

    @routine
    async def ask_by_routine(self, *args: Any) -> Seen:
        return seen(args, base=self.base)

    async def words(self, *args: Any) -> AsyncGenerator[str, None]:
        key, _ = split(args)
        yield self.base
        yield key


@routine
async def show_by_routine(*args: Any, **more: Any) -> Seen:
    return seen(args, **more)


@routine
def show_by_plain_routine(*args: Any, **more: Any) -> Seen:
    return seen(args, **more)


def task_fields() -> dict[str, Any]:
    task = headgate.current_task()
    assert task is not None
    return {"id": task.id, "caller": task.caller, "tenant": task.tenant, "tag": task.tag}


async def my_task(*args: Any) -> dict[str, Any]:
    return task_fields()


def my_task_plainly(*args: Any) -> dict[str, Any]:
    return task_fields()


@routine
async def my_task_by_routine(*args: Any) -> dict[str, Any]:
    key, rest = split(args)
    if rest:
        note(rest[0], f"ran {key}")
    return task_fields()


async def number(key: Resource[str], n: int) -> int:
    await asyncio.sleep(0)
    return n


async def stormy(key: Resource[str], n: int) -> int:
    """Every tenth has trouble with the first key."""
    await asyncio.sleep(0)
    if n % 10 == 0 and key.resource_id == "a":
        raise CooldownResource(0.01, f"trouble of {n}")
    return n


# -- signals -----------------------------------------------------------------------------------------------------------


class QuotaGone(CooldownResource):
    """A subclass with a constructor and a field of its own."""

    def __init__(self, account: str, *, retry: float) -> None:
        super().__init__(retry, f"quota of {account} is gone")
        self.account = account


class Revoked(DisableResource):
    def __init__(self, *, by: str) -> None:
        super().__init__(f"revoked by {by}")
        self.by = by


class Hiccup(RetryOperation):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


Outcomes = dict[str, tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]]


def decide(key: str, outcomes: Outcomes) -> str:
    """Raise what is planned for this key; otherwise the key's id."""
    if key in outcomes:
        kind, args, more = outcomes[key]
        raise kind(*args, **more)
    return key


async def by_key(key: Resource[Any], outcomes: Outcomes, path: str = "") -> str:
    if path:
        note(path, key.resource_id)
    return decide(key.resource_id, outcomes)


def by_key_plainly(key: Resource[Any], outcomes: Outcomes, path: str = "") -> str:
    if path:
        note(path, key.resource_id)
    return decide(key.resource_id, outcomes)


@routine
async def by_key_by_routine(key: Resource[Any], outcomes: Outcomes, path: str = "") -> str:
    if path:
        note(path, key.resource_id)
    return decide(key.resource_id, outcomes)


async def in_a_group(key: Resource[Any], outcomes: Outcomes) -> str:
    async with asyncio.TaskGroup() as group:
        group.create_task(by_key(key, outcomes))
        group.create_task(asyncio.sleep(0))
    return key.resource_id


async def fails(*args: Any) -> NoReturn:
    raise LookupError("not found")


async def fails_until(*args: Any) -> str:
    """Fails so many times, as a file counts them."""
    key, (path, times) = split(args)
    note(path, "ran")
    with open(path) as file:  # noqa: ASYNC230 - short
        if file.read().count("ran") <= times:
            raise LookupError("not yet")
    return key


# -- time and cancellation ---------------------------------------------------------------------------------------------


async def told(path: str, word: str = "go") -> None:
    """Till there is a file that says so."""
    while not os.path.exists(f"{path}.{word}"):  # noqa: ASYNC110, ASYNC240 - nobody here could set an event
        await asyncio.sleep(0.005)


async def endless(*args: Any) -> None:
    key, (path,) = split(args)
    note(path, f"begun {key}")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        note(path, f"cancelled {key}")
        raise
    finally:
        note(path, f"ended {key}")


async def elder(key: Resource[Any], path: str, seconds: float = 60.0) -> str:
    """Finds out, when it is told to, that the key "a" is overloaded."""
    note(path, f"elder begun {key.resource_id}")
    await told(path)
    if key.resource_id == "a":
        raise CooldownResource(seconds, "too many")
    return key.resource_id


async def younger(key: Resource[Any], path: str) -> str:
    """Sleeps on the key "a" until it is cancelled."""
    note(path, f"younger begun {key.resource_id}")
    if key.resource_id != "a":
        return key.resource_id
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        note(path, "younger cancelled")
        raise
    return "not cancelled"


async def younger_that_swallows(key: Resource[Any], path: str) -> str:
    note(path, f"younger begun {key.resource_id}")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        note(path, "younger cancelled")
        return f"swallowed on {key.resource_id}"
    return "not cancelled"


def younger_plainly(key: Resource[Any], path: str) -> str:
    """In a thread: nobody can interrupt it."""
    note(path, f"younger begun {key.resource_id}")
    while not os.path.exists(f"{path}.end"):
        time.sleep(0.005)
    return key.resource_id


async def once_told(*args: Any) -> str:
    key, (path,) = split(args)
    note(path, f"begun {key}")
    await told(path)
    return key


# -- deaths ------------------------------------------------------------------------------------------------------------


async def dies(*args: Any) -> NoReturn:
    key, (path,) = split(args)
    note(path, f"ran {key}")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


async def dies_once(*args: Any) -> str:
    key, (path,) = split(args)
    note(path, "ran")
    with open(path) as file:  # noqa: ASYNC230 - short
        if file.read().count("ran") == 1:
            os._exit(3)
    return f"alive {key}"


# -- what cannot travel ------------------------------------------------------------------------------------------------


async def returns_a_lock(*args: Any) -> Any:
    return threading.Lock()


# -- context -----------------------------------------------------------------------------------------------------------

tenant: ContextVar[str] = ContextVar("line_tenant", default="nobody")


async def swap_tenant(*args: Any) -> str:
    """What was set before; the last argument is set."""
    before = tenant.get()
    tenant.set(args[-1])
    return before


def swap_tenant_plainly(*args: Any) -> str:
    before = tenant.get()
    tenant.set(args[-1])
    return before


async def tenants(*args: Any) -> AsyncGenerator[str, None]:
    """What is set at each step, and changed in between."""
    for n in range(3):
        yield tenant.get()
        tenant.set(f"step {n}")


# -- nested calls ------------------------------------------------------------------------------------------------------


@routine
async def leaf() -> tuple[int, dict[str, Any]]:
    return os.getpid(), task_fields()


async def branches(*args: Any) -> tuple[int, dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    """Where I am, who I am, and the same of so many routines that I called."""
    return os.getpid(), task_fields(), list(await asyncio.gather(*(leaf() for _ in range(args[-1]))))


# -- @keys.use() above @headgate.routine -------------------------------------------------------------------------------

module_keys: ResourcePool[str] = ResourcePool(
    {"m-a": "secret-m-a", "m-b": "secret-m-b"}, strategy="primary_backup", name="module keys"
)
headgate.registry.unregister(module_keys)  # this module stays loaded: dashboards of other tests would show them first


@module_keys.use(retry_delay=0)
@routine
async def ask(key: Resource[str], q: str, *, times: int = 1) -> Seen:
    """Ask it."""
    return seen((key, q), times=times)


@module_keys.use(retry_delay=0)
@routine
async def ask_by_key(key: Resource[str], outcomes: Outcomes) -> str:
    return decide(key.resource_id, outcomes)


@module_keys.use(retry_delay=0)
@routine
def ask_plainly(key: Resource[str], q: str) -> Seen:
    return seen((key, q))


@module_keys.use(retry_delay=0)
@routine
async def ask_and_swap_tenant(key: Resource[str], value: str) -> str:
    before = tenant.get()
    tenant.set(value)
    return before


@module_keys.use(retry_delay=0)
@routine
async def ask_endlessly(key: Resource[str], path: str) -> None:
    await endless(key, path)


# -- generators --------------------------------------------------------------------------------------------------------

Item = tuple[str, int]


async def counts(*args: Any) -> AsyncGenerator[Item, None]:
    """So many items, each with the key; what it does is noted."""
    key, (path, count) = split(args)
    note(path, f"begun {key}")
    try:
        for n in range(count):
            note(path, f"item {n}")
            yield key, n
    finally:
        note(path, f"finally {key}")


@routine
async def counts_by_routine(*args: Any) -> AsyncGenerator[Item, None]:
    key, (path, count) = split(args)
    note(path, f"begun {key}")
    note(path, f"caller {task_fields()['caller']}")
    for n in range(count):
        yield key, n


async def where(*args: Any) -> AsyncGenerator[Seen, None]:
    yield seen(args)


async def stalls(*args: Any) -> AsyncGenerator[Item, None]:
    """Stands still after so many items."""
    key, (path, count) = split(args)
    note(path, f"begun {key}")
    try:
        for n in range(count):
            yield key, n
        note(path, f"stalled {key}")
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        note(path, f"cancelled {key}")
        raise
    finally:
        note(path, f"finally {key}")


async def breaks(*args: Any) -> AsyncGenerator[Item, None]:
    """Raises after so many items what it is told to."""
    key, (path, count, kind, words) = split(args)
    note(path, f"begun {key}")
    try:
        for n in range(count):
            yield key, n
        raise kind(*words)
    finally:
        note(path, f"finally {key}")


async def breaks_by_key(*args: Any) -> AsyncGenerator[Item, None]:
    """Raises after so many items what is planned for its key; otherwise gives one item more."""
    key, (path, count, outcomes) = split(args)
    note(path, f"begun {key}")
    for n in range(count):
        yield key, n
    decide(key, outcomes)
    yield key, count


async def breaks_until(*args: Any) -> AsyncGenerator[Item, None]:
    """Fails before its first item so many times, as a file counts them."""
    key, (path, times) = split(args)
    note(path, "ran")
    with open(path) as file:  # noqa: ASYNC230 - short
        if file.read().count("ran") <= times:
            raise LookupError("not yet")
    yield key, 0


async def waits_to_begin(key: Resource[Any], path: str) -> AsyncGenerator[Item, None]:
    """On the key "a" no item ever comes; on others at once."""
    note(path, f"waits on {key.resource_id}")
    try:
        if key.resource_id == "a":
            await asyncio.sleep(3600)
        yield key.resource_id, 0
    except asyncio.CancelledError:
        note(path, "waiting one cancelled")
        raise


async def waits_to_go_on(key: Resource[Any], path: str) -> AsyncGenerator[Item, None]:
    """Its second item comes when it is told."""
    yield key.resource_id, 0
    try:
        await told(path, "on")
    except asyncio.CancelledError:
        note(path, "open one cancelled")
        raise
    yield key.resource_id, 1


def plain_generator(*args: Any) -> Any:
    yield 1


async def rests(resource: Resource[str], seconds: float) -> str:
    resource.rest(seconds, "the quota is used up")
    return resource.resource_id


@routine
async def rests_for_a_reason(resource: Resource[str], reason: Any) -> str:
    resource.rest(300.0, reason)
    return resource.resource_id


@routine
async def learns_a_lot(resource: Resource[str]) -> str:
    """Tell of headers that no provider sends: an id, names and values that are no text, and megabytes of them."""
    resource.learn({f"x-ratelimit-\udc80-{number}": "9" * 4096 for number in range(2000)})
    object.__setattr__(resource, "resource_id", "half of a character: \udc80")
    resource.rest(1.0)
    return "learned"


def rests_in_a_thread(resource: Resource[str], seconds: float) -> str:
    resource.rest(seconds)
    return resource.resource_id


async def rests_and_fails(resource: Resource[str], seconds: float) -> NoReturn:
    resource.rest(seconds)
    raise LookupError("nothing there")


async def rests_and_streams(resource: Resource[str], seconds: float) -> AsyncGenerator[int, None]:
    resource.rest(seconds)
    yield 1
    yield 2


async def asks(key: Resource[str], client: str) -> str:
    """Raises the errors of httpx2 or of the OpenAI SDK for some keys, as these clients do."""
    import httpx2

    if key.resource_id not in ("revoked", "limited"):
        return "fine"
    request = httpx2.Request("POST", "https://api.example")
    refused = httpx2.Response(401, request=request)
    if key.resource_id == "limited":
        refused = httpx2.Response(429, headers={"retry-after": "60"}, request=request)
    if client == "httpx2":
        refused.raise_for_status()
    import openai

    error = openai.AuthenticationError if key.resource_id == "revoked" else openai.RateLimitError
    raise error("no", response=refused, body=None)


async def spends(key: Resource[str], tokens: float) -> str:
    """Tell twice how many tokens it has used."""
    key.spent(tokens / 2)
    await asyncio.sleep(0)
    key.spent(tokens / 2)
    return key.resource_id


def spends_in_a_thread(key: Resource[str], tokens: float) -> str:
    """The same, as a plain function."""
    key.spent(tokens)
    return key.resource_id


async def spends_both(key: Resource[str], read: float, written: float) -> str:
    """Report its input first and its output in two parts, as streams do."""
    key.spent(input=read)
    await asyncio.sleep(0)
    key.spent(output=written / 2)
    key.spent(output=written / 2)
    return key.resource_id


def spends_both_in_a_thread(key: Resource[str], read: float, written: float) -> str:
    """The same at once, as a plain function."""
    key.spent(input=read, output=written)
    return key.resource_id


@routine
async def spends_as_a_routine(key: Resource[str], tokens: float) -> str:
    """The same, for somebody who has the key."""
    key.spent(tokens)
    return key.resource_id


async def spends_in_parts(key: Resource[str], tokens: float, calls: bool) -> str:
    """Use tokens in a Task of its own, in a thread and, if it `calls`, in a routine on another worker."""
    await asyncio.create_task(spends(key, tokens))
    await asyncio.to_thread(key.spent, tokens)
    return await spends_as_a_routine(key, tokens) if calls else key.resource_id


async def spends_and_fails(key: Resource[str], tokens: float) -> None:
    """Tell how many tokens it has used, and fail."""
    key.spent(tokens)
    raise LookupError("nothing there")
