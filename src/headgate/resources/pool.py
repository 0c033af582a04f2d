"""The resource pool: what callers see. The mechanics are in `shell`, the decisions in `rotation`."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from importlib.resources import files
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    Never,
    NoReturn,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    get_type_hints,
    overload,
)

from headgate.core.cancellation import Steered
from headgate.core.checks import (
    checked_attempts,
    checked_classifier,
    checked_flag,
    checked_hook,
    checked_stream,
    checked_table,
    named_options,
    refuse_awaitable,
    refuse_on_loop,
)
from headgate.core.clock import clock
from headgate.errors import InvalidType
from headgate.resources import events
from headgate.resources.engine import Classifier, Engine, bounded, bury, set_handle, turn
from headgate.resources.members import Member, Use
from headgate.resources.model import PoolStats, Resource, ResourceSnapshot, resources_of
from headgate.resources.reporting import StateChange
from headgate.resources.rotation import Rotation
from headgate.resources.run_options import (
    LeaseOptions,
    Plan,
    RunOptions,
    StreamOptions,
    SyncOptions,
    UseOptions,
    plan_of,
)
from headgate.resources.strategies import Strategy, strategy_of

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

# Sequences, not iterables: a mapping is an iterable of its keys, and would pass for anything.
Resources = Sequence[Resource[T]] | Mapping[str, Resource[T]] | Sequence[T] | Mapping[str, T]

DEFAULT_COOLDOWN_TABLE: Final = (30.0, 120.0, 300.0, 600.0)

_names = itertools.count(1)
_MISSING: Any = ...
_END: Any = object()


class PoolSettings(TypedDict, total=False):
    """What a pool may be told by keyword: see `ResourcePool`."""

    on_state_change: StateChange | None
    cancel_siblings: bool
    probe_on_recovery: bool
    classify: Classifier | None
    name: str | None


class ResourcePool(Engine[T], Generic[T]):
    """A set of interchangeable resources that learns their health from every call.

    `run` gives an operation the best resource, and the operation tells by raising what it learned: CooldownResource
    rests the resource, DisableResource takes it out, RetryOperation blames neither; each is tried again elsewhere. A
    return or any other exception means the resource is fine. Usable from several event loops and threads at once.
    """

    # Checkers cannot solve for T in a union of these four, so the constructor is declared three times.
    @overload
    def __init__(
        self,
        resources: Iterable[Resource[T]] | Mapping[str, Resource[T]],
        max_attempts: int = ...,
        cooldown_table: Iterable[float] = ...,
        strategy: str | Strategy = ...,
        **settings: Unpack[PoolSettings],
    ) -> None: ...

    @overload
    def __init__(
        self,
        resources: Mapping[str, T],
        max_attempts: int = ...,
        cooldown_table: Iterable[float] = ...,
        strategy: str | Strategy = ...,
        **settings: Unpack[PoolSettings],
    ) -> None: ...

    @overload
    def __init__(
        self,
        resources: Iterable[T],
        max_attempts: int = ...,
        cooldown_table: Iterable[float] = ...,
        strategy: str | Strategy = ...,
        **settings: Unpack[PoolSettings],
    ) -> None: ...

    @named_options
    def __init__(
        self,
        resources: Any,
        max_attempts: int = 3,
        cooldown_table: Iterable[float] = DEFAULT_COOLDOWN_TABLE,
        strategy: str | Strategy = "round_robin",
        *,
        on_state_change: StateChange | None = None,
        cancel_siblings: bool = True,
        probe_on_recovery: bool = False,
        classify: Classifier | None = None,
        name: str | None = None,
    ) -> None:
        """`resources`: Resource objects or plain values, in a sequence or by id; order is kept.

        `max_attempts` bounds the attempts of one call. `cooldown_table` gives the seconds of the first, second, ...
        cooldown in a row. `on_state_change(id, old, new, seq)` is told of each change. `cancel_siblings=False` lets
        younger uses of a failing resource run on: for operations that must not run twice. `probe_on_recovery=True`
        lets one use at a time try a rested resource until one succeeds, then 2, 4, 8 and so on. `classify(exception or
        result)` may turn either into a signal. `name` is how events and logs call the pool.
        """
        super().__init__()
        members = resources_of(resources)
        self._plan = Plan(checked_attempts(max_attempts))
        self._on_state_change = checked_hook(on_state_change)
        self._classify = checked_classifier(classify)
        self.name: str = name or f"resources-{next(_names)}"
        table, chosen = checked_table(cooldown_table), strategy_of(strategy)
        cancels = checked_flag("cancel_siblings", cancel_siblings)
        probes = checked_flag("probe_on_recovery", probe_on_recovery)
        with turn:
            self._rotation = Rotation(
                members,
                strategy=chosen,
                cooldown_table=table,
                cancel_siblings=cancels,
                probe_on_recovery=probes,
                chance=_chance,
                owner=self,
            )
        for resource in members:
            resource._hide()

    # -- using resources ----------------------------------------------------------------------------------------------

    async def run(self, operation: Callable[[Resource[T]], Awaitable[R]], **options: Unpack[RunOptions]) -> R:
        """Await ``operation(resource)`` on the best resource; on a signal try again elsewhere.

        The operation runs in the caller's task and context. Options: see `headgate.resources.RunOptions`. Raises
        PoolExhausted when nothing could serve the call; any other exception of the operation as it is.
        """
        return await self._run(operation, self._planned("run", RunOptions, options) if options else self._plan)

    def use(
        self, *misused: Never, **options: Unpack[UseOptions]
    ) -> Callable[[Callable[Concatenate[Resource[T], P], Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """A decorator: every call of the function goes through `run`, its first argument is the resource."""
        if misused:
            raise InvalidType("use() takes options by name only", remedy="Write @pool.use() with parentheses.")
        plan = self._planned("use", UseOptions, options) if options else self._plan

        def decorate(
            function: Callable[Concatenate[Resource[T], P], Awaitable[R]],
        ) -> Callable[P, Coroutine[Any, Any, R]]:
            if not callable(function):
                raise InvalidType(
                    f"use() decorates a function, got {type(function).__name__}",
                    remedy="Write @pool.use() above an async def that takes the resource first.",
                )

            @functools.wraps(function)
            async def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
                return await self._run(lambda resource: function(resource, *args, **kwargs), plan)

            return wrapper

        return decorate

    def lease(self, **options: Unpack[LeaseOptions]) -> AbstractAsyncContextManager[Resource[T]]:
        """``async with pool.lease() as resource:`` for work that is not one call.

        A signal raised in the block updates the resource's health and propagates; nothing is retried or cancelled.
        """
        return _Lease(self, self._planned("lease", LeaseOptions, options))

    async def stream(
        self, operation: Callable[[Resource[T]], AsyncIterator[R]], **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[R, None]:
        """``async for item in pool.stream(operation)``: fails over until the first item, never after it.

        `operation` is an async generator function. Its resource is held until the stream ends or is closed.
        """
        call = self._enter(self._planned("stream", StreamOptions, options))
        flight = None
        try:
            while True:
                flight = await self._take(call)
                opening: _Opening[R] = _Opening(flight, call.plan.timeout)
                try:
                    try:
                        item = await opening.first_item(operation)
                        while item is not _END:
                            yield item
                            item = await _next(opening.items)
                    finally:
                        await opening.close()  # the resource is in use until its clean-up is over
                except BaseException as error:
                    signal = self._fail(flight, error, opening.steered, call.plan)
                    if signal is None or opening.is_open:
                        raise
                else:
                    break
                if pause := self._note_failure(call, flight, signal):
                    await asyncio.sleep(pause)
        except BaseException as error:
            self._finish_badly(call, error, flight)
            raise
        self._done(call, flight)

    def run_sync(self, function: Callable[[Resource[T]], R], **options: Unpack[SyncOptions]) -> R:
        """`run` for code without an event loop: calls ``function(resource)`` in this thread, and blocks."""
        plan = self._planned("run_sync", SyncOptions, options)
        refuse_on_loop()
        call = self._enter(plan)
        result: R = _MISSING
        flight = None
        try:
            while True:
                flight = self._take_sync(call)
                try:
                    resource = flight.seat.resource
                    result = copy_context().run(function, resource) if plan.isolate else function(resource)
                    refuse_awaitable(result)
                except BaseException as error:
                    signal = self._fail(flight, error, None, plan)
                    if signal is None:
                        raise
                else:
                    signal = None if self._classify is None else self._classified(result)
                    if signal is None:
                        break
                    self._end(flight, signal)
                if pause := self._note_failure(call, flight, signal):
                    clock.sleep(pause)
        except BaseException as error:
            self._finish_badly(call, error, flight)
            raise
        self._done(call, flight)
        return result

    # -- looking ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, ResourceSnapshot]:
        """How each resource stands, by id. From any thread."""
        bury()
        with turn:
            return {
                seat.resource.resource_id: {
                    "status": status,
                    "in_flight": len(seat.resource._flights),
                    "max_in_flight": seat.resource.max_in_flight,
                    "consecutive_cooldown": seat.resource.consecutive_cooldown,
                    "cooldown_seconds_remaining": left,
                    "last_acquired_at": seat.resource.last_acquired_at,
                }
                for seat, status, left in self._rotation.look(clock.now())
            }

    def stats(self) -> PoolStats:
        """Gauges and counters, for metrics. From any thread."""
        bury()
        with turn:
            return self._rotation.stats(
                clock.now(),
                retries=self._retries,
                runs_ok=self._runs_ok,
                runs_exhausted=self._runs_exhausted,
                runs_error=self._runs_error,
                runs_cancelled=self._runs_cancelled,
            )

    def __repr__(self) -> str:
        seen = self.snapshot().values()
        statuses = [one["status"] for one in seen]
        soonest = min((one["cooldown_seconds_remaining"] for one in seen if one["status"] == "cooling_down"), default=0)
        cooling = f"{statuses.count('cooling_down')} cooling{f' {soonest:.1f}s' if soonest else ''}"
        in_flight = sum(one["in_flight"] for one in seen)
        return (
            f"<ResourcePool {self.name!r} {statuses.count('healthy')} healthy, {cooling}, "
            f"{statuses.count('disabled')} disabled | {in_flight} in flight>"
        )

    def __reduce__(self) -> NoReturn:
        raise InvalidType(
            "a ResourcePool cannot be pickled: its resources' health belongs to this process",
            remedy="Make one where it is used, or send the resource's value.",
        )

    # -- steering -----------------------------------------------------------------------------------------------------

    @overload
    async def add(self, resource: Resource[T], /) -> Resource[T]: ...

    @overload
    async def add(
        self,
        resource_id: str,
        value: T,
        *,
        max_in_flight: int | None = None,
        tags: Iterable[str] = (),
        weight: float = 1.0,
    ) -> Resource[T]: ...

    async def add(self, resource_id: Any, value: Any = _MISSING, **fields: Any) -> Resource[T]:
        """Add a resource, last in order: ``add(Resource(...))`` or ``add("key-4", "sk-ddd", max_in_flight=2)``."""
        if isinstance(resource_id, Resource):
            if value is not _MISSING or fields:
                raise InvalidType(
                    "add() takes a Resource alone, or an id and a value",
                    remedy="With a Resource do not pass value or other fields: it has them.",
                )
            resource: Resource[T] = resource_id
        elif value is _MISSING:
            raise InvalidType("add() takes a Resource, or an id and a value", remedy='Write add("key-4", "sk-ddd").')
        else:
            resource = Resource(resource_id, value, **fields)
        with turn:
            effects = self._rotation.add(resource, clock.now())
        resource._hide()
        self._report_member(events.ResourceAdded, resource.resource_id)
        self._carry_out(effects)
        self._watch()
        return resource

    async def remove(self, resource_id: str) -> None:
        """Forget a resource at once. What is in flight drains, and counts against a successor of the same id."""
        with turn:
            effects = self._rotation.remove(resource_id, clock.now())
        self._report_member(events.ResourceRemoved, resource_id)
        self._carry_out(effects)
        self._tell_followers()

    async def enable(self, resource_id: str) -> None:
        """Declare a resource usable: ends its cooldown or its being disabled, and starts counting anew."""
        with turn:
            effects = self._rotation.enable(resource_id, clock.now())
        self._carry_out(effects)

    async def disable(self, resource_id: str) -> None:
        """Take a resource out of use until `enable`. Cancels nothing that is in flight."""
        with turn:
            effects = self._rotation.disable(resource_id, clock.now())
        self._carry_out(effects)

    async def reconcile(self, resources: Resources[T]) -> None:
        """Make the pool hold exactly these, in this order, and keep the health of those that stay.

        One stays when its id and its value are the same. Its limit, tags and weight are taken from the Resource that is
        given, and stay as they are where only a value is given. The same id with another value is another resource.
        """
        described = dict(resources) if isinstance(resources, Mapping) else list(resources)
        wanted = resources_of(described)
        plain = {id(item) for item in wanted} - {id(item) for item in _items(described)}
        rotation = self._rotation
        fresh: list[Resource[T]] = []
        removed: list[str] = []
        with turn:
            staying = {r.resource_id: r for r in wanted if _stays(rotation.seats.get(r.resource_id), r)}
            for resource_id in [known for known in rotation.seats if known not in staying]:
                rotation.drop(resource_id)
                removed.append(resource_id)
            for resource in wanted:
                if resource.resource_id not in staying:
                    rotation.admit(resource)
                    fresh.append(resource)
                elif id(resource) not in plain:
                    rotation.retag(rotation.seats[resource.resource_id].resource, resource)
            rotation.reorder([resource.resource_id for resource in wanted])
            effects = rotation.settle(clock.now())
        for resource in fresh:
            resource._hide()
        for resource_id in removed:
            self._report_member(events.ResourceRemoved, resource_id)
        for resource in fresh:
            self._report_member(events.ResourceAdded, resource.resource_id)
        self._carry_out(effects)
        self._watch()
        self._tell_followers()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _planned(self, method: str, kind: type, options: Mapping[str, Any]) -> Plan:
        return plan_of(options, method=method, allowed=_allowed(kind), max_attempts=self._plan.max_attempts)

    @classmethod
    def __agent_notes__(cls) -> str:
        """Notes for coding agents (`python -m agent_readable headgate.ResourcePool`)."""
        return files("headgate.resources").joinpath("agent_notes.md").read_text("utf-8")


class _Lease(AbstractAsyncContextManager[Resource[T]]):
    """One use of a resource, as long as a block lasts."""

    def __init__(self, pool: ResourcePool[T], plan: Plan) -> None:
        self._pool = pool
        self._plan = plan
        self._flight: Use | None = None

    async def __aenter__(self) -> Resource[T]:
        if self._flight is not None:
            raise InvalidType("a lease is entered once", remedy="Call pool.lease() for each block.")
        self._flight = await self._pool._take(self._pool._enter(self._plan))
        return self._flight.seat.resource

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._flight is not None
        if error is None:
            self._pool._succeed(self._flight)
        else:
            self._pool._fail(self._flight, error, None, self._plan)


class _Opening(Generic[R]):
    """A stream on its way to its first item: until then it may be cancelled and tried elsewhere."""

    def __init__(self, flight: Use, timeout: float | None) -> None:
        self._flight = flight
        self._timeout = timeout
        self.items: AsyncIterator[R] = _NO_ITEMS
        self.steered: Steered[Any] | None = None
        self.is_open = False
        """An item is out: nothing can be retried from here on."""

    async def first_item(self, operation: Callable[[Resource[Any]], AsyncIterator[R]]) -> R:
        """The first item, or _END."""
        items = self.items = checked_stream(operation(self._flight.seat.resource))
        step = _next(items)
        try:
            suspended_on = step.send(None)
        except StopIteration as done:
            item: R = done.value
        else:
            self.steered = Steered(step, suspended_on)
            set_handle(self._flight, self.steered)
            item = await (self.steered if self._timeout is None else bounded(self.steered, self._timeout))
        self._flight.handle = self.steered = None
        self.is_open = True
        return item

    async def close(self) -> None:
        """Let the generator run its ``finally`` blocks."""
        close = getattr(self.items, "aclose", None)
        if close is not None:
            await close()


async def _next(items: AsyncIterator[R]) -> R:
    """The next item, or _END. (``anext(items, default)`` crashes CPython when ``__anext__`` raises at once.)"""
    try:
        return await items.__anext__()
    except StopAsyncIteration:
        end: R = _END
        return end


async def _nothing() -> AsyncGenerator[Any, None]:
    return
    yield


_NO_ITEMS: AsyncIterator[Any] = _nothing()


def _chance() -> float:
    return clock.uniform(0.0, 1.0)


@functools.cache
def _allowed(kind: type) -> frozenset[str]:
    return frozenset(get_type_hints(kind))


def _items(described: Mapping[str, Any] | list[Any]) -> Iterable[Any]:
    return described.values() if isinstance(described, Mapping) else described


def _stays(seat: Member | None, wanted: Resource[Any]) -> bool:
    if seat is None:
        return False
    known = seat.resource
    if known is wanted or known.value is wanted.value:
        return True
    try:
        return bool(known.value == wanted.value)
    except Exception:
        return False  # values that cannot be compared are not the same


Pool = ResourcePool
"""Its name in the package it succeeds."""
