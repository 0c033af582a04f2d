"""Pools that live as long as an application: opened at its start-up, drained and closed at its shutdown."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from headgate.core.checks import checked_optional_seconds
from headgate.errors import InvalidType
from headgate.integrations.asgi.messages import App, Receive, Scope, Send
from headgate.resources.pool import ResourcePool
from headgate.tasks.pool import TaskPool
from headgate.workers.pool import WorkerPool

Pool = TaskPool | WorkerPool | ResourcePool[Any]
# What frameworks call with the application. It may give a mapping, which becomes the state of requests. Frameworks
# have a type for those that do and one for those that do not; Any fits both.
Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


def lifespan(*pools: Pool, inside: Lifespan | None = None, drain_timeout: float | None = None) -> Lifespan:
    """Return a lifespan that opens these pools at start-up and closes them at shutdown: ``FastAPI(lifespan=...)``.

    Worker pools are opened first and closed last, whatever the order here. At shutdown a TaskPool takes no more tasks
    and waits for those that it has; after `drain_timeout` seconds it cancels what is left. `inside` is a lifespan of
    the application's own: it begins when the pools are open, and ends before they close. If something cannot be
    opened, what was opened before is closed, and the error says which pool it was.

    Pools are opened once. For an application that starts several times in a process, as in tests, see `lifespan_from`.
    """
    kept = _checked(pools, "lifespan()")
    limit = checked_optional_seconds("drain_timeout", drain_timeout)

    @asynccontextmanager
    async def live(app: Any) -> AsyncIterator[Any]:
        async with _opened(kept, limit):
            if inside is None:
                yield None
                return
            async with inside(app) as state:
                yield state

    return live


def lifespan_from(
    make: Callable[[], Mapping[str, Pool]], *, inside: Lifespan | None = None, drain_timeout: float | None = None
) -> Lifespan:
    """Do what `lifespan` does, with pools that ``make()`` makes anew at each start-up.

    It returns them by name, and requests find them in their state: ``request.state.answers`` for
    ``{"answers": TaskPool(...)}``.
    """
    limit = checked_optional_seconds("drain_timeout", drain_timeout)

    @asynccontextmanager
    async def live(app: Any) -> AsyncIterator[Mapping[str, Any]]:
        made = make()
        if not isinstance(made, Mapping):
            raise InvalidType(
                f"lifespan_from() takes a function that returns pools by name, got {type(made).__name__} from it",
                remedy='Return something like {"answers": TaskPool("answers", max_concurrent=40)}.',
            )
        async with _opened(_checked(made.values(), "lifespan_from()"), limit):
            if inside is None:
                yield dict(made)
                return
            async with inside(app) as state:
                yield {**made, **(state or {})}

    return live


class WithLifespan:
    """Gives a lifespan to an ASGI application that has none: ``WithLifespan(app, asgi.lifespan(pool))``.

    The application itself is not told of start-up and shutdown. A framework that has lifespans takes one itself.
    """

    def __init__(self, app: App, lifespan: Lifespan) -> None:
        self._app = app
        self._lifespan = lifespan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the life of the application."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        stage = "startup"
        await receive()
        try:
            async with self._lifespan(self._app) as state:
                scope.setdefault("state", {}).update(state or {})
                await send({"type": "lifespan.startup.complete"})
                stage = "shutdown"
                await receive()
        except Exception as error:  # a server that gets an exception instead may take it for "no lifespan" and go on
            text = "".join(traceback.format_exception(error))
            await send({"type": f"lifespan.{stage}.failed", "message": text})
        else:
            await send({"type": "lifespan.shutdown.complete"})


def _checked(pools: Iterable[Any], what: str) -> list[Pool]:
    kept = list(pools)
    for pool in kept:
        if not isinstance(pool, (TaskPool, WorkerPool, ResourcePool)):
            raise InvalidType(
                f"{what} takes a TaskPool, a WorkerPool or a ResourcePool, got {type(pool).__name__}",
                remedy="Open everything else in a lifespan of your own, and pass that as inside=.",
            )
    return kept


@asynccontextmanager
async def _opened(pools: Iterable[Pool], drain_timeout: float | None) -> AsyncIterator[None]:
    """Open worker pools, then task pools. A ResourcePool needs neither opening nor closing."""
    tasks = [pool for pool in pools if isinstance(pool, TaskPool)]
    async with AsyncExitStack() as stack:
        for pool in tasks:  # frees the names also of those that are not reached, because another cannot be opened
            stack.push_async_callback(pool.close, "all")
        for workers in pools:
            if isinstance(workers, WorkerPool):
                await _enter(stack, workers, "The WorkerPool")
        for pool in tasks:
            await _enter(stack, _draining(pool, drain_timeout), f"The TaskPool {pool.name!r}")
        yield


async def _enter(stack: AsyncExitStack, pool: AbstractAsyncContextManager[Any], name: str) -> None:
    try:
        await stack.enter_async_context(pool)
    except Exception as error:
        error.add_note(
            f"{name} could not be opened at the start-up of the application. What was opened before it is closed. "
            "A pool is opened once: lifespan_from() makes new ones at each start-up."
        )
        raise


@asynccontextmanager
async def _draining(pool: TaskPool, timeout: float | None) -> AsyncIterator[None]:
    async with pool:  # cancels everything if the application is cancelled
        yield
        await pool.close(timeout=timeout)
