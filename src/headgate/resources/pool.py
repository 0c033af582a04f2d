"""ResourcePool, the public class: it checks arguments and hands the work to its engine."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import Token, copy_context
from enum import Enum
from importlib.resources import files
from types import EllipsisType, TracebackType
from typing import (
    Any,
    Concatenate,
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

from headgate import registry
from headgate.calls.retry_budget import checked_retry_budget
from headgate.core.cancellation import Steered
from headgate.core.checks import (
    checked_attempts,
    checked_flag,
    checked_hook,
    checked_seconds,
    checked_shared_name,
    checked_stream,
    checked_table,
    named_options,
    refuse_awaitable,
    refuse_on_loop,
)
from headgate.core.clock import clock
from headgate.core.html import card
from headgate.core.views import ResourcePoolView
from headgate.errors import InvalidType
from headgate.gate.adaptive import MaxInFlight, checked_max_in_flight
from headgate.resources import events
from headgate.resources.classification import Classification, Classifier
from headgate.resources.cooldowns import DEFAULT_COOLDOWN_TABLE
from headgate.resources.current_use import begin_use, end_use
from headgate.resources.engine import Engine, bounded, end_abandoned, lock, set_handle
from headgate.resources.members import Member, Use
from headgate.resources.model import Defaults, PoolStats, Resource, ResourceSnapshot, hide_value, resources_of
from headgate.resources.quota import AnyQuota, checked_quota
from headgate.resources.reporting import Reporter, StateChange
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
from headgate.resources.stats import pool_snapshot, pool_stats, pool_view
from headgate.resources.strategies import Strategy, strategy_of
from headgate.sharing.states import SharedState

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

# Sequences, not iterables: a mapping is an iterable of its keys, and would pass for anything.
Resources = Sequence[Resource[T]] | Mapping[str, Resource[T]] | Sequence[T] | Mapping[str, T]


_names = itertools.count(1)


class PoolSettings(TypedDict, total=False):
    """The keyword arguments of `ResourcePool`, which documents them."""

    on_state_change: StateChange | None
    cancel_siblings: bool
    probe_on_recovery: bool
    classify: Classifier | None
    name: str | None
    store: SharedState | str | bool | None
    max_in_flight: MaxInFlight | None
    quota: AnyQuota | None
    retry_budget: float | None


class ResourceFields(TypedDict, total=False):
    """The keyword arguments of `ResourcePool.add`: fields of the `Resource` that it makes."""

    max_in_flight: MaxInFlight | None
    tags: Iterable[str]
    weight: float
    quota: AnyQuota | None
    quota_group: str | None


class _End(Enum):
    """What `_next` gives at the end of a stream, where an item may be any object."""

    END = 0


class ResourcePool(Generic[T]):
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
        resources: Iterable[Resource[T]] | Mapping[str, Resource[T]] | Iterable[T] | Mapping[str, T],
        max_attempts: int = 3,
        cooldown_table: Iterable[float] = DEFAULT_COOLDOWN_TABLE,
        strategy: str | Strategy = "round_robin",
        *,
        on_state_change: StateChange | None = None,
        cancel_siblings: bool = True,
        probe_on_recovery: bool = False,
        classify: Classifier | EllipsisType | None = ...,
        name: str | None = None,
        store: SharedState | str | bool | None = None,
        max_in_flight: MaxInFlight | None = None,
        quota: AnyQuota | None = None,
        retry_budget: float | None = None,
    ) -> None:
        """`resources`: Resource objects or plain values, in a sequence or by id; order is kept.

        `max_attempts` bounds the attempts of one call. `cooldown_table` gives the seconds of the first, second, ...
        cooldown in a row. `on_state_change(id, old, new, seq)` is told of each change. `cancel_siblings=False` lets
        younger uses of a failing resource run on: for operations that must not run twice. `probe_on_recovery=True` lets
        one use at a time try a rested resource until one succeeds, then 2, 4, 8 and so on. `classify(exception or
        result)` may turn either into a signal. If it is left out, errors of HTTP clients and SDKs that tasks of a
        TaskPool raise are taken as `headgate.http_errors` does; with None nothing is. `name` is how events and logs
        call the pool. `max_in_flight` and `quota` are those of all resources that have none of their own; each has its
        own count. With "adaptive", or an `Adaptive`, each finds how many calls at a time its provider takes.
        `retry_budget=0.2` allows one retry for five first attempts, over 60 s and at least 10: so calls that all fail
        are not multiplied. Inside a task whose pool has a retry budget, that one counts.

        `store` shares cooldowns, disables, `max_in_flight` and probes with all pools of the same `name` on the same
        store, in any number of processes: a store, or its address such as "sqlite:///health.db", or True for the
        address in the environment variable HEADGATE_STORE. The constructor waits up to 10 s for the store.
        """
        shared_name = None if store is None or store is False else checked_shared_name(name)
        self._defaults = Defaults(checked_max_in_flight(max_in_flight), checked_quota(quota))
        members = resources_of(resources, self._defaults)
        plan = Plan(checked_attempts(max_attempts))
        reporter = Reporter(name or f"resources-{next(_names)}", checked_hook(on_state_change))
        classification = Classification(classify)
        table, chosen = checked_table(cooldown_table), strategy_of(strategy)
        cancels = checked_flag("cancel_siblings", cancel_siblings)
        probes = checked_flag("probe_on_recovery", probe_on_recovery)
        budget = checked_retry_budget(retry_budget)
        with lock:
            rotation = Rotation(
                members,
                strategy=chosen,
                cooldown_table=table,
                cancel_siblings=cancels,
                probe_on_recovery=probes,
                chance=_chance,
            )
        self._engine: Engine[T] = Engine(rotation, reporter, plan, classification)
        if budget is not None:
            self._engine.retry_budget, self._engine.quick = budget, None
        for resource in members:
            hide_value(resource)
        if shared_name is not None:
            from headgate.resources.shared_health import SharedHealth, checked_store  # no other pool needs it

            shared = SharedHealth(self._engine, checked_store(store), shared_name)
            shared.start()
            self._engine.shared = shared
        registry.register(self, "resources", ResourcePool.snapshot, view=ResourcePool._view)

    @property
    def name(self) -> str:
        """The pool's name in events and logs."""
        return self._engine.reporter.name

    @name.setter
    def name(self, name: str) -> None:
        self._engine.reporter.name = name

    # -- using resources ----------------------------------------------------------------------------------------------

    async def run(self, operation: Callable[[Resource[T]], Awaitable[R]], **options: Unpack[RunOptions]) -> R:
        """Await ``operation(resource)`` on the best resource; on a signal try again elsewhere.

        The operation runs in the caller's task and context. Options: see `headgate.resources.RunOptions`. Raises
        PoolExhausted when nothing could serve the call; any other exception of the operation as it is.
        """
        engine = self._engine
        return await engine.run(operation, self._planned("run", RunOptions, options) if options else engine.plan)

    def use(
        self, *misused: Never, **options: Unpack[UseOptions]
    ) -> Callable[[Callable[Concatenate[Resource[T], P], Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """A decorator: every call of the function goes through `run`, its first argument is the resource."""
        if misused:
            raise InvalidType("use() takes options by name only", remedy="Write @pool.use() with parentheses.")
        engine = self._engine
        plan = self._planned("use", UseOptions, options) if options else engine.plan

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
                return await engine.run(lambda resource: function(resource, *args, **kwargs), plan)

            return wrapper

        return decorate

    def lease(self, **options: Unpack[LeaseOptions]) -> AbstractAsyncContextManager[Resource[T]]:
        """``async with pool.lease() as resource:`` for work that is not one call.

        A signal raised in the block updates the resource's health and propagates; nothing is retried or cancelled.
        """
        return _Lease(self._engine, self._planned("lease", LeaseOptions, options))

    async def stream(
        self, operation: Callable[[Resource[T]], AsyncIterator[R]], **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[R, None]:
        """``async for item in pool.stream(operation)``: fails over until the first item, never after it.

        `operation` is an async generator function. Its resource is held until the stream ends or is closed.
        """
        engine = self._engine
        call = engine.enter(self._planned("stream", StreamOptions, options))
        use = None
        try:
            while True:
                use = await engine.take(call)
                opening: _Opening[R] = _Opening(use, call.plan.timeout)
                try:
                    try:
                        item = await opening.first_item(operation)
                        while item is not _End.END:
                            yield item
                            item = await opening.next_item()
                    finally:
                        await opening.close()  # the resource is in use until its clean-up is over
                except BaseException as error:
                    if opening.is_open:
                        engine.fail(use, error, opening.steered, call.plan)
                        raise
                    pause = engine.failed_attempt(call, use, error, opening.steered)
                    if pause is None:
                        raise
                else:
                    break
                if pause:
                    await asyncio.sleep(pause)
        except BaseException as error:
            engine.failed(call, error, use)
            raise
        engine.done(call, use)

    def run_sync(self, function: Callable[[Resource[T]], R], **options: Unpack[SyncOptions]) -> R:
        """`run` for code without an event loop: calls ``function(resource)`` in this thread, and blocks."""
        plan = self._planned("run_sync", SyncOptions, options)
        refuse_on_loop()
        engine = self._engine
        call = engine.enter(plan)
        result: R
        use = None
        try:
            while True:
                use = engine.take_sync(call)
                try:
                    resource = use.member.resource
                    belonging = None if use.reservation is None else begin_use(use)
                    try:
                        result = copy_context().run(function, resource) if plan.isolate else function(resource)
                    finally:
                        if belonging is not None:
                            end_use(belonging)
                    refuse_awaitable(result)
                except BaseException as error:
                    pause = engine.failed_attempt(call, use, error)
                    if pause is None:
                        raise
                else:
                    pause = engine.judged_result(call, use, result)
                    if pause is None:
                        break
                if pause:
                    clock.sleep(pause)
        except BaseException as error:
            engine.failed(call, error, use)
            raise
        engine.done(call, use)
        return result

    # -- reading ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, ResourceSnapshot]:
        """The state of each resource, by id. From any thread."""
        end_abandoned()
        with lock:
            return pool_snapshot(self._engine.rotation, clock.now())

    def stats(self) -> PoolStats:
        """Gauges and counters, for metrics. From any thread."""
        end_abandoned()
        with lock:
            return pool_stats(self._engine.rotation, clock.now(), self._engine.reporter.counts())

    def _view(self, rows: int) -> ResourcePoolView:
        """Return what pages, terminals and metrics show."""
        return pool_view(self.stats(), self._engine.reporter.tokens, rows)

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

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the state of each resource, without its value."""
        rows = [
            (
                resource_id,
                one["status"].replace("_", " "),
                one["in_flight"],
                one["max_in_flight"],
                f"{one['cooldown_seconds_remaining']:.1f} s" if one["cooldown_seconds_remaining"] else "",
            )
            for resource_id, one in self.snapshot().items()
        ]
        return card(repr(self), ("resource", "status", "in flight", "at most", "cools for"), rows)

    def __reduce__(self) -> NoReturn:
        raise InvalidType(
            "a ResourcePool cannot be pickled: its resources' health belongs to this process",
            remedy="Make one where it is used, or send the resource's value.",
        )

    # -- changing the resources ---------------------------------------------------------------------------------------

    @overload
    async def add(self, resource: Resource[T], /) -> Resource[T]: ...

    @overload
    async def add(self, resource_id: str, value: T, **fields: Unpack[ResourceFields]) -> Resource[T]: ...

    async def add(
        self, resource_id: str | Resource[T], value: T | EllipsisType = ..., **fields: Unpack[ResourceFields]
    ) -> Resource[T]:
        """Add a resource, last in order: ``add(Resource(...))`` or ``add("key-4", "sk-ddd", max_in_flight=2)``."""
        if isinstance(resource_id, Resource):
            if value is not ... or fields:
                raise InvalidType(
                    "add() takes a Resource alone, or an id and a value",
                    remedy="With a Resource do not pass value or other fields: it has them.",
                )
            resource: Resource[T] = resource_id
        elif isinstance(value, EllipsisType):
            raise InvalidType("add() takes a Resource, or an id and a value", remedy='Write add("key-4", "sk-ddd").')
        else:
            resource = Resource(resource_id, value, **fields)
        given = {name: None for name in self._defaults._fields if name in fields}
        self._defaults._replace(**given).give([resource])
        rotation = self._engine.rotation
        with lock:
            rotation.admit(resource)
            self._engine.follow_members()
            effects = rotation.leases_changed(rotation.members[resource.resource_id], clock.now())
        hide_value(resource)
        self._engine.reporter.membership(events.ResourceAdded, resource.resource_id)
        self._engine.carry_out(effects)
        self._engine.watch()
        self._engine.members_changed()
        return resource

    async def remove(self, resource_id: str) -> None:
        """Forget a resource at once. What is in flight drains, and counts against a successor of the same id."""
        with lock:
            effects = self._engine.rotation.remove(resource_id, clock.now())
            self._engine.follow_members()
        self._engine.reporter.membership(events.ResourceRemoved, resource_id)
        self._engine.carry_out(effects)
        self._engine.tell_followers()
        self._engine.members_changed()

    async def enable(self, resource_id: str) -> None:
        """Declare a resource usable: ends its cooldown or its being disabled, and starts counting anew."""
        with lock:
            effects = self._engine.rotation.enable(resource_id, clock.now())
        self._engine.carry_out(effects)

    async def disable(self, resource_id: str) -> None:
        """Take a resource out of use until `enable`. Cancels nothing that is in flight."""
        with lock:
            effects = self._engine.rotation.disable(resource_id, clock.now())
        self._engine.carry_out(effects)

    def pause(self, resource_id: str) -> None:
        """Begin no call with a resource until `resume`. What is in flight continues, and its status is as it was.

        Calls that wait go on waiting for it; those that do not wait are refused if nothing else is free. From any
        thread.
        """
        with lock:
            effects = self._engine.rotation.pause(resource_id, clock.now())
        self._engine.carry_out(effects)

    def resume(self, resource_id: str) -> None:
        """Let a paused resource be used again. From any thread."""
        with lock:
            effects = self._engine.rotation.resume(resource_id, clock.now())
        self._engine.carry_out(effects)

    async def cool(self, resource_id: str, seconds: float, reason: str | None = None) -> None:
        """Let a resource rest for so many seconds, from now on. Cancels nothing that is in flight."""
        seconds = checked_seconds("seconds of cool() must be finite and >= 0", seconds)
        engine = self._engine
        with lock:
            effects = engine.rotation.rest(resource_id, seconds, reason, clock.now())
        engine.carry_out(effects)

    async def reconcile(self, resources: Resources[T]) -> None:
        """Make the pool hold exactly these, in this order, and keep the health of those that stay.

        One stays when its id and its value are the same. Its limit, tags and weight are taken from the Resource that is
        given, and stay as they are where only a value is given. The same id with another value is another resource.
        """
        described = dict(resources) if isinstance(resources, Mapping) else list(resources)
        wanted = resources_of(described, self._defaults)
        plain = {id(item) for item in wanted} - {id(item) for item in _items(described)}
        engine, rotation = self._engine, self._engine.rotation
        fresh: list[Resource[T]] = []
        removed: list[str] = []
        with lock:
            staying = {r.resource_id: r for r in wanted if _stays(rotation.members.get(r.resource_id), r)}
            for resource_id in [known for known in rotation.members if known not in staying]:
                rotation.drop(resource_id)
                removed.append(resource_id)
            for resource in wanted:
                if resource.resource_id not in staying:
                    rotation.admit(resource)
                    fresh.append(resource)
                elif id(resource) not in plain:
                    rotation.retag(rotation.members[resource.resource_id].resource, resource)
            rotation.reorder([resource.resource_id for resource in wanted])
            engine.follow_members()
            effects = rotation.settle(clock.now())
        for resource in fresh:
            hide_value(resource)
        for resource_id in removed:
            engine.reporter.membership(events.ResourceRemoved, resource_id)
        for resource in fresh:
            engine.reporter.membership(events.ResourceAdded, resource.resource_id)
        engine.carry_out(effects)
        engine.watch()
        engine.tell_followers()
        engine.members_changed()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _planned(self, method: str, kind: type, options: Mapping[str, Any]) -> Plan:
        return plan_of(options, method=method, allowed=_allowed(kind), max_attempts=self._engine.plan.max_attempts)

    def __engine__(self) -> Engine[T]:
        """Return the engine, for other packages of headgate: see `headgate.resources.engine.engine_of`."""
        return self._engine

    @classmethod
    def __agent_notes__(cls) -> str:
        """Notes for coding agents (`python -m agent_readable headgate.ResourcePool`)."""
        return files("headgate.resources").joinpath("agent_notes.md").read_text("utf-8")


class _Lease(AbstractAsyncContextManager[Resource[T]]):
    """The context manager of `lease`: one use of a resource while its block runs."""

    def __init__(self, engine: Engine[T], plan: Plan) -> None:
        self._engine = engine
        self._plan = plan
        self._use: Use | None = None
        self._belonging: Token[tuple[Use, ...]] | None = None

    async def __aenter__(self) -> Resource[T]:
        if self._use is not None:
            raise InvalidType("a lease is entered once", remedy="Call pool.lease() for each block.")
        self._use = await self._engine.take(self._engine.enter(self._plan))
        if self._use.reservation is not None:
            self._belonging = begin_use(self._use)
        return self._use.member.resource

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._use is not None
        if self._belonging is not None:
            end_use(self._belonging)
        if error is None:
            self._engine.succeed(self._use)
        else:
            self._engine.fail(self._use, error, None, self._plan)


class _Opening(Generic[R]):
    """A stream before its first item: until then it may be cancelled and tried elsewhere."""

    def __init__(self, use: Use, timeout: float | None) -> None:
        self._use = use
        self._timeout = timeout
        self.items: AsyncIterator[R] = _NO_ITEMS
        self.steered: Steered[Any] | None = None
        self.is_open = False
        """An item is out: nothing can be retried from here on."""

    async def first_item(self, operation: Callable[[Resource[Any]], AsyncIterator[R]]) -> R | _End:
        """Await the first item; `_End.END` if there is none."""
        items = self.items = checked_stream(operation(self._use.member.resource))
        step = _next(items) if self._use.reservation is None else _next_of(self._use, items)
        try:
            suspended_on = step.send(None)
        except StopIteration as done:
            item: R | _End = done.value
        else:
            self.steered = Steered(step, suspended_on)
            set_handle(self._use, self.steered)
            item = await (self.steered if self._timeout is None else bounded(self.steered, self._timeout))
        self._use.handle = self.steered = None
        self.is_open = True
        return item

    async def next_item(self) -> R | _End:
        """Await another item; `_End.END` if there is none."""
        return await (_next(self.items) if self._use.reservation is None else _next_of(self._use, self.items))

    async def close(self) -> None:
        """Let the generator run its ``finally`` blocks."""
        close = getattr(self.items, "aclose", None)
        if close is not None:
            await close()


async def _next(items: AsyncIterator[R]) -> R | _End:
    """The next item, or `_End.END`. (``anext(items, default)`` crashes CPython when ``__anext__`` raises at once.)"""
    try:
        return await items.__anext__()
    except StopAsyncIteration:
        return _End.END


async def _next_of(use: Use, items: AsyncIterator[R]) -> R | _End:
    """`_next`, and let what the generator does until then belong to a use."""
    belonging = begin_use(use)
    try:
        return await _next(items)
    finally:
        end_use(belonging)


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


def _stays(member: Member | None, wanted: Resource[Any]) -> bool:
    if member is None:
        return False
    known = member.resource
    if known is wanted or known.value is wanted.value:
        return True
    try:
        return bool(known.value == wanted.value)
    except Exception:
        return False  # values that cannot be compared are not the same


Pool = ResourcePool
"""Its name in the package it succeeds."""
