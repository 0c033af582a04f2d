"""What the tests of cancellation interrupt: bodies that wait on the key "a" in many ways, here and on workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from headgate import CooldownResource, Resource, ResourcePool
from tests.integration.combined.combined_jobs import told
from tests.support.workers.jobs import note

try:
    import anyio
except ImportError:  # it is no dependency of ours
    anyio = None  # type: ignore[assignment]

LONG = 3600.0


async def replaces() -> None:
    try:
        await asyncio.sleep(LONG)
    except asyncio.CancelledError:
        raise asyncio.CancelledError from None


async def renames() -> None:
    try:
        await asyncio.sleep(LONG)
    except asyncio.CancelledError as error:
        raise asyncio.CancelledError("closed by its peer") from error


async def cleans_up() -> None:
    try:
        await asyncio.sleep(LONG)
    finally:
        await asyncio.sleep(0.01)


async def spins() -> None:
    while True:
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)


async def waits_for() -> None:
    await asyncio.wait_for(asyncio.sleep(LONG), LONG * 2)


async def has_a_timeout() -> None:
    async with asyncio.timeout(LONG * 2):
        await replaces()


async def has_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(replaces())
        group.create_task(asyncio.sleep(LONG))


async def gathers() -> None:
    await asyncio.gather(replaces(), asyncio.sleep(LONG))


async def has_a_child() -> None:
    await asyncio.create_task(renames())


async def shields() -> None:
    inner = asyncio.create_task(asyncio.sleep(LONG))
    try:
        await asyncio.shield(inner)
    finally:
        inner.cancel()


async def runs_with_another_key() -> None:
    async def operation(key: Resource[str]) -> None:
        await replaces()

    await ResourcePool({"inner": "value"}).run(operation)


async def anyio_group() -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep, LONG)
        await anyio.sleep(LONG)


async def anyio_race() -> None:
    """As `anyio.connect_tcp` does: attempts in a group, and the first one ends it."""
    event = anyio.Event()
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(anyio.sleep, LONG)
            with anyio.move_on_after(LONG):
                await event.wait()


async def anyio_timeout() -> None:
    with anyio.fail_after(LONG * 2):
        await anyio.sleep(LONG)


async def anyio_shielded() -> None:
    try:
        await anyio.sleep(LONG)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0)


WAYS: dict[str, Callable[[], Awaitable[None]]] = {
    fn.__name__: fn
    for fn in (
        replaces,
        renames,
        cleans_up,
        spins,
        waits_for,
        has_a_timeout,
        has_a_group,
        gathers,
        has_a_child,
        shields,
        runs_with_another_key,
    )
}
ANYIO: dict[str, Callable[[], Awaitable[None]]] = {
    fn.__name__: fn for fn in (anyio_group, anyio_race, anyio_timeout, anyio_shielded)
}


async def victim(key: Resource[Any], path: str, way: str) -> str:
    """On the key "a" it waits until it is interrupted; on others it returns at once."""
    note(path, f"begun {key.resource_id} {way}")
    if key.resource_id != "a":
        return key.resource_id
    await {**WAYS, **ANYIO}[way]()
    return "not interrupted"


async def swallows(key: Resource[Any], path: str) -> str:
    note(path, f"begun {key.resource_id} swallows")
    try:
        await replaces()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        note(path, "swallowed")
    await told(path, "end")
    return f"swallowed on {key.resource_id}"


async def wraps(key: Resource[Any], path: str) -> str:
    note(path, f"begun {key.resource_id} wraps")
    try:
        await replaces()
    except asyncio.CancelledError as error:
        raise LookupError("wrapped") from error
    return "not interrupted"


# -- random bodies -----------------------------------------------------------------------------------------------------


async def random_body(key: Resource[Any], number: int) -> int:
    """Waits in random ways for a short while; some find that their key is overloaded."""
    ways = [*SHORT.values(), *(SHORT_ANYIO.values() if anyio is not None else ())]
    for _ in range(random.randint(1, 3)):
        await random.choice(ways)(random.choice((0.0, 0.002, 0.005, 0.01)))
        if random.random() < 0.15:
            raise CooldownResource(random.choice((0, 0.005)), "too many")
    return number


async def short_replaces(seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        raise asyncio.CancelledError("another one") from None


async def short_swallows(seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()


async def short_wait_for(seconds: float) -> None:
    try:
        await asyncio.wait_for(asyncio.sleep(seconds), 0.004)
    except TimeoutError:
        pass


async def short_timeout(seconds: float) -> None:
    try:
        async with asyncio.timeout(0.004):
            await short_replaces(seconds)
    except TimeoutError:
        pass


async def short_group(seconds: float) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(short_replaces(seconds))
        await asyncio.sleep(seconds / 2)


async def short_shield(seconds: float) -> None:
    await asyncio.shield(asyncio.sleep(seconds))


async def short_anyio_group(seconds: float) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep, seconds)
        await anyio.sleep(seconds / 2)


async def short_anyio_move_on(seconds: float) -> None:
    with anyio.move_on_after(0.004):
        await anyio.sleep(seconds)


SHORT: dict[str, Callable[[float], Awaitable[None]]] = {
    fn.__name__: fn for fn in (short_replaces, short_swallows, short_wait_for, short_timeout, short_group, short_shield)
}
SHORT_ANYIO: dict[str, Callable[[float], Awaitable[None]]] = {
    fn.__name__: fn for fn in (short_anyio_group, short_anyio_move_on)
}
