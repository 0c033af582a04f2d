"""Variables and routines that workers import by name, as they import a user's."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import importlib
import os
import signal
import warnings
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import headgate
from headgate import ContextVar, routine
from headgate.context import variables as registry
from tests.support.workers.jobs import note

UNSET = "unset"

tenant: ContextVar[Any] = ContextVar("travel_tenant")
region: ContextVar[Any] = ContextVar("travel_region", default="nowhere")
extra: ContextVar[Any] = ContextVar("travel_extra", namespace="travel.elsewhere")

BY_NAME = {"tenant": tenant, "region": region, "extra": extra}


def values() -> tuple[Any, Any, Any]:
    """What is set here; a default is not."""
    return tenant.get(UNSET), region.get(UNSET), extra.get(UNSET)


def change(changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        BY_NAME[name].set(value)


NOTHING = (UNSET, UNSET, UNSET)


class Planted(Exception):
    """What routines raise here."""


# -- calls ------------------------------------------------------------------------------------------------------------


@routine
async def see() -> tuple[Any, Any, Any]:
    return values()


@routine
async def see_with_defaults() -> tuple[Any, Any]:
    """As a user reads them: the error, and the default."""
    try:
        found = tenant.get()
    except LookupError as error:
        found = type(error).__name__
    return found, region.get()


@routine
async def swap(**changes: Any) -> tuple[Any, Any, Any]:
    """What was set before."""
    before = values()
    change(changes)
    return before


@routine
def swap_plainly(**changes: Any) -> tuple[Any, Any, Any]:
    before = values()
    change(changes)
    return before


@routine(thread=True)
async def swap_on_a_thread(**changes: Any) -> tuple[Any, Any, Any]:
    await asyncio.sleep(0)
    before = values()
    change(changes)
    return before


@routine
async def swap_and_fail(**changes: Any) -> None:
    change(changes)
    raise Planted("planted", values())


@routine
def swap_plainly_and_fail(**changes: Any) -> None:
    change(changes)
    raise Planted("planted", values())


@routine(thread=True)
async def swap_on_a_thread_and_fail(**changes: Any) -> None:
    change(changes)
    raise Planted("planted", values())


@routine
async def swap_and_exit(**changes: Any) -> None:
    change(changes)
    raise SystemExit(3)


@routine
async def appends(value: str) -> None:
    """Mutates what it got, and sets nothing."""
    tenant.get().append(value)


@routine
async def after_a_while(seconds: float, mark: str) -> list[Any]:
    """Looks several times, and changes what it sees in between."""
    seen = [tenant.get(UNSET)]
    for turn in range(3):
        await asyncio.sleep(seconds)
        seen.append(tenant.get(UNSET))
        tenant.set(f"{mark}.{turn}")
    return seen


@routine
async def crc() -> tuple[int, int]:
    data = tenant.get()
    return len(data), zlib.crc32(data)


@routine
async def crc_of_strings() -> tuple[int, int]:
    return zlib.crc32(tenant.get().encode()), zlib.crc32(region.get().encode())


@routine
async def enlarge(size: int) -> int:
    data = os.urandom(size)
    extra.set(data)
    return zlib.crc32(data)


@routine(timeout=0.2)
async def swap_and_time_out(**changes: Any) -> None:
    change(changes)
    await asyncio.sleep(60)


@routine
async def swap_until_cancelled(path: str, **changes: Any) -> None:
    change({"tenant": "begun"})
    note(path, "begun")
    try:
        await asyncio.sleep(3600)
    finally:
        change(changes)


@routine
async def swap_and_swallow(path: str, **changes: Any) -> str:
    note(path, "begun")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        change(changes)
    return "swallowed"


@routine(retries=2)
async def dies_once(path: str) -> list[Any]:
    """Changes what it has, and is killed the first time."""
    before = values()
    first = not os.path.exists(path)  # noqa: ASYNC240 - a file of one line
    note(path, before)
    tenant.set("first attempt" if first else "second attempt")
    if first:
        region.set("of the dead")
        os.kill(os.getpid(), signal.SIGKILL)
    return list(before)


@routine
async def apply(function: Any, *args: Any) -> Any:
    return await function(*args)


# -- threads and tasks ------------------------------------------------------------------------------------------------


@routine
async def through_to_thread() -> list[Any]:
    """What a thread sees, what it left here after it set something there, and what another sees."""

    def there() -> Any:
        before = values()
        tenant.set("of the thread")
        return before

    tenant.set("set before")
    first = await asyncio.to_thread(there)
    return [first, values(), await asyncio.to_thread(values)]


@routine
async def through_tasks() -> list[Any]:
    """What a task sees, and what is here after it set something there."""

    async def child(value: str) -> Any:
        before = values()
        tenant.set(value)
        await asyncio.sleep(0)
        assert tenant.get() == value
        inside = await swap(tenant=f"{value} far")
        assert inside[0] == value
        return before, tenant.get()

    tenant.set("parent")
    by_hand = await asyncio.create_task(child("one"))
    ours = await headgate.create_task(child("two"))
    async with asyncio.TaskGroup() as group:
        grouped = group.create_task(child("three"))
    return [by_hand, ours, grouped.result(), values()]


@routine
async def through_callbacks() -> list[Any]:
    loop = asyncio.get_running_loop()
    seen: list[Any] = []
    done = asyncio.Event()
    tenant.set("armed")
    loop.call_soon(lambda: seen.append(tenant.get()))
    loop.call_later(0.001, lambda: (seen.append(tenant.get()), done.set()))
    tenant.set("later")
    await done.wait()
    return seen


# -- nested -----------------------------------------------------------------------------------------------------------


@routine
async def relay(depth: int) -> list[Any]:
    """Each adds its number on the way down and takes it on the way up; pids, and what each saw on both ways."""
    down = tenant.get()
    tenant.set([*down, depth])
    below = await relay(depth - 1) if depth else []
    up = tenant.get()
    tenant.set([*up, -depth])
    return [(os.getpid(), down, up), *below]


@routine
async def relay_that_fails(depth: int) -> None:
    tenant.set([*tenant.get(), depth])
    if not depth:
        raise Planted("at the bottom")
    try:
        await relay_that_fails(depth - 1)
    finally:
        tenant.set([*tenant.get(), -depth])


@routine
async def fans_out(count: int) -> list[Any]:
    """Children in tasks: none sees another's, and their changes stay with them."""
    tenant.set("fan")
    before = await asyncio.gather(*(swap(tenant=f"child {number}") for number in range(count)))
    return [before, tenant.get()]


@routine
async def nested_here() -> list[Any]:
    with headgate.do_dispatch(False):
        before = await swap(tenant="in place")
    return [before, values(), await see()]


# -- the chain --------------------------------------------------------------------------------------------------------


def chain() -> str:
    return str(headgate.current_context().id)


@routine
async def my_chain() -> str:
    return chain()


@routine
def my_chain_plainly() -> str:
    return chain()


@routine(thread=True)
async def my_chain_on_a_thread() -> str:
    return chain()


@routine
async def chains(depth: int) -> list[str]:
    return [chain(), *(await chains(depth - 1) if depth else []), chain()]


@routine
async def chain_of_a_task() -> list[str]:
    async def child() -> str:
        return chain()

    return [chain(), await asyncio.create_task(child()), headgate.copy_context().id, chain()]


@routine
async def chain_stream() -> AsyncGenerator[str, None]:
    while True:
        yield chain()


# -- generators -------------------------------------------------------------------------------------------------------


@routine
async def converses(path: str = "") -> AsyncGenerator[Any, Any]:
    """Yields how it was woken and what it sees then, and leaves a mark each time."""
    turn = 0
    how: Any = "next"
    try:
        while True:
            seen = values()
            tenant.set(f"worker {turn}")
            turn += 1
            try:
                got = yield how, seen
                how = "next" if got is None else got
            except Planted as error:
                how = f"thrown {error.args[0]}"
    finally:
        if path:
            note(path, values())
        extra.set("closed")


@routine
async def holds_a_value() -> AsyncGenerator[Any, None]:
    """Sets once, and then only looks: whose value is it then?"""
    tenant.set("of the generator")
    while True:
        yield values()


@routine
async def ends_with(**changes: Any) -> AsyncGenerator[Any, None]:
    yield values()
    change(changes)


@routine
async def fails_with(**changes: Any) -> AsyncGenerator[Any, None]:
    yield values()
    change(changes)
    raise Planted("in the generator")


@routine
async def sets_while_cancelled(path: str) -> AsyncGenerator[Any, None]:
    yield values()
    tenant.set("begun")
    note(path, "begun")
    try:
        await asyncio.sleep(3600)
    finally:
        region.set("cancelled")


@routine(prefetch=4)
async def runs_ahead(path: str) -> AsyncGenerator[Any, None]:
    number = 0
    while True:
        tenant.set(number)
        note(path, number)
        yield number, region.get(UNSET)
        number += 1


@routine
async def delegates(count: int) -> AsyncGenerator[Any, None]:
    """A generator of which each item is a nested call, and an item of a nested generator."""
    async with aclosing(converses()) as inner:
        for number in range(count):
            before = await swap(region=f"nested {number}")
            _, seen = await anext(inner)
            yield before, seen, values()


@routine
async def reads_a_stream() -> list[Any]:
    """Both directions of a stream between two workers."""
    seen = []
    async with aclosing(converses()) as stream:
        for number in range(3):
            tenant.set(f"reader {number}")
            seen.append((await anext(stream), tenant.get()))
    return [seen, extra.get(UNSET)]


# -- tokens -----------------------------------------------------------------------------------------------------------


@routine
async def undo(token: Any) -> tuple[Any, Any, Any]:
    token.var.reset(token)
    return values()


@routine
def undo_plainly(token: Any) -> tuple[Any, Any, Any]:
    token.var.reset(token)
    return values()


@routine
async def undo_on_another(token: Any) -> tuple[Any, Any, Any]:
    """Goes one worker further."""
    await undo(token)
    return values()


@routine
async def make_token(value: Any) -> Any:
    return tenant.set(value)


@routine
async def fail_with_token(value: Any) -> Any:
    raise Planted(tenant.set(value))


@routine
async def same_token(token: Any) -> Any:
    return token


@routine
async def look_at_token(token: Any) -> list[Any]:
    missing = token.old_value is contextvars.Token.MISSING
    return [isinstance(token, headgate.Token), token.var is tenant, missing, missing or token.old_value]


@routine
async def keeps_a_token(token: Any) -> AsyncGenerator[Any, Any]:
    """Gives a token of its own, and resets the one it got in the next step."""
    yield tenant.set("of the generator")
    try:
        token.var.reset(token)
        yield "reset"
    except (RuntimeError, ValueError) as error:
        yield type(error).__name__


@routine
async def makes_and_undoes() -> AsyncGenerator[str, None]:
    """Tries in each step to reset what it made in the first."""
    token = tenant.set("made")
    yield "made"
    while True:
        try:
            tenant.reset(token)
            said = "undone"
        except (RuntimeError, ValueError) as error:
            said = type(error).__name__
        yield said


@routine
async def takes_tokens() -> AsyncGenerator[Any, Any]:
    """Resets what it is sent."""
    got = yield None
    while True:
        try:
            got.var.reset(got)
            got = yield values()
        except (RuntimeError, ValueError) as error:
            got = yield type(error).__name__


# -- variables that are not declared here -----------------------------------------------------------------------------


@routine
async def known(key: str) -> bool:
    gc.collect()
    return registry.known(key) is not None


@routine
async def import_late(module: str, key: str) -> list[Any]:
    """Known before its module is imported, the same object after, what it has, and what it says."""
    stub = registry.known(key)
    importlib.invalidate_caches()
    variable = importlib.import_module(module).late
    return [stub is not None, stub is variable, variable.get(UNSET), variable.name, variable.namespace, variable.key]


@routine
async def import_late_and_set(module: str, value: Any) -> Any:
    importlib.invalidate_caches()
    variable = importlib.import_module(module).late
    before = variable.get()
    variable.set(value)
    return before


@routine
async def get_late(module: str) -> Any:
    importlib.invalidate_caches()
    return importlib.import_module(module).late.get()


@routine
async def stream_late(module: str) -> AsyncGenerator[Any, None]:
    """Imports in its second step what came with the first, and sets in the third."""
    yield "begun"
    importlib.invalidate_caches()
    variable = importlib.import_module(module).late
    yield variable.get()
    variable.set("third")
    yield variable.get()


# -- refusing ---------------------------------------------------------------------------------------------------------


def refuses_tenants(context: headgate.BackpressureContext) -> bool:
    return bool(tenant.get(UNSET) == "refused")


async def refuses_tenants_later(context: headgate.BackpressureContext) -> bool:
    await asyncio.sleep(0.001)
    return bool(tenant.get(UNSET) == "refused")


# -- values that cannot be read, or written ---------------------------------------------------------------------------


class Unreadable(Exception):
    """What the values below raise."""


class Fragile:
    """Can be pickled anywhere, and not be unpickled on one side: in the process `home`, or in any other."""

    def __init__(self, side: str, home: int) -> None:
        self.side = side
        self.home = home

    def __reduce__(self) -> Any:
        return _restore, (self.side, self.home)


def _restore(side: str, home: int) -> Fragile:
    here = "caller" if os.getpid() == home else "worker"
    if here == side:
        raise Unreadable(f"planted for the {side}")
    return Fragile(side, home)


class Unwritable:
    """Cannot be pickled at all."""

    def __reduce__(self) -> Any:
        raise Unreadable("planted for whoever writes it")


_heard: list[str] = []


@routine
async def listen(mode: str) -> None:
    """How this worker takes warnings from now on."""
    _heard.clear()
    warnings.resetwarnings()
    if mode == "strict":
        warnings.simplefilter("error", headgate.ContextDecodeWarning)
    else:
        warnings.simplefilter("always", headgate.ContextDecodeWarning)
        warnings.showwarning = lambda message, *rest: _heard.append(f"{type(message).__name__}: {message}")


@routine
async def heard() -> list[str]:
    found = list(_heard)
    _heard.clear()
    return found


def spoil(kind: str, home: int) -> None:
    """Set one variable to what will not arrive, and its neighbour to what will."""
    tenant.set(Unwritable() if kind == "unwritable" else Fragile("caller", home))
    region.set("moved")


@routine
async def spoil_and_return(kind: str, home: int) -> str:
    spoil(kind, home)
    return "result"


@routine
def spoil_plainly_and_return(kind: str, home: int) -> str:
    spoil(kind, home)
    return "result"


@routine
async def spoil_and_fail(kind: str, home: int) -> None:
    spoil(kind, home)
    raise Planted("planted")


@routine
async def spoil_until_cancelled(kind: str, home: int, path: str) -> str:
    note(path, "begun")
    try:
        await asyncio.sleep(3600)
    finally:
        spoil(kind, home)
    return "not reached"


@routine
async def spoil_stream(kind: str, home: int, at: str) -> AsyncGenerator[str, Any]:
    """Sound until the frame that is named."""
    if at == "first yield":
        spoil(kind, home)
        yield "result"
        return
    try:
        yield "sound"
    except Planted:
        pass
    spoil(kind, home)
    if at == "end":
        return
    if at == "failure":
        raise Planted("planted")
    yield "result"
    while True:
        yield "more"


@routine
async def replace_it(path: str = "") -> tuple[Any, Any, Any]:
    """Runs all the same, and sets what it could not read."""
    before = values()
    if path:
        note(path, "ran")
    tenant.set("replaced")
    return before


@routine
async def see_and_note(path: str) -> tuple[Any, Any, Any]:
    note(path, "ran")
    return values()


@routine
async def fail_and_note(path: str) -> None:
    note(path, "ran")
    raise Planted(values())


@routine
async def see_stream(path: str) -> AsyncGenerator[Any, Any]:
    try:
        while True:
            note(path, "ran")
            try:
                yield values()
            except Planted:
                pass
    finally:
        note(path, "closed")


@routine
async def dispatches_what_cannot_be_written() -> str:
    token = tenant.set(Unwritable())
    try:
        await see()
    except headgate.InvalidType as error:
        return str(error)
    finally:
        tenant.reset(token)
    return "sent"


# -- the oracle's scripts ---------------------------------------------------------------------------------------------
#
# One interpreter plays a script with stdlib variables in one process, or with headgate's over several. Tokens are known
# by the number of the `set` that made them; a call gets all that its caller has and gives back those that are new, and
# a step of a generator brings in both directions only what is new. So old copies stay where they are and are used.
# Tokens may also be stowed in the value of a variable and taken from there: a bare call has no others.

Op = tuple[Any, ...]
Tokens = dict[int, Any]
VARIABLES: dict[str, dict[str, Any]] = {
    "local": {
        "a": contextvars.ContextVar("a"),
        "b": contextvars.ContextVar("b", default="default"),
        "c": contextvars.ContextVar("c"),
        "d": contextvars.ContextVar("d"),
    },
    "far": {
        "a": ContextVar("oracle_a"),
        "b": ContextVar("oracle_b", default="default"),
        "c": ContextVar("oracle_c"),
        "d": ContextVar("oracle_d"),
    },
}
ERRORS = (LookupError, TypeError, RuntimeError, ValueError)
SIMPLE = ("set", "get", "get or", "reset", "reset junk", "old", "stow", "take")


class Stop(Exception):
    """The script says so."""


class Halted(Exception):
    """A routine that was stopped: its tokens and its trace."""


class Poke(Exception):
    """Thrown into a generator, with tokens."""


class Stow:
    """Tokens in the value of a variable."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens


def shown(value: Any) -> Any:
    """A value for the trace, which itself travels: without tokens."""
    return sorted(value.tokens) if isinstance(value, Stow) else value


def named(error: Exception) -> list[str]:
    return [kind.__name__ for kind in ERRORS if isinstance(error, kind)]


def simple(kind: str, op: Op, tokens: Tokens, trace: list[Any]) -> None:
    """One of those that neither wait nor call."""
    variables = VARIABLES[kind]
    what, variable = op[0], variables[op[1]]
    said: Any
    try:
        if what == "set":
            tokens[op[2]] = variable.set(op[2])
            said = "ok"
        elif what == "get":
            said = variable.get()
        elif what == "get or":
            said = variable.get("given")
        elif what == "reset junk":
            said = variable.reset("no token")
        elif what == "stow":
            variable.set(Stow(dict(tokens)))
            said = "ok"
        elif what == "take":
            tokens.update(variable.get().tokens)
            said = sorted(tokens)
        else:
            token: Any = tokens[sorted(tokens)[op[2] % len(tokens)]] if tokens else "no token"
            if what == "reset":
                said = variable.reset(token)
            elif tokens:
                owner = next(name for name, one in variables.items() if one is token.var)
                said = owner, "MISSING" if token.old_value is contextvars.Token.MISSING else token.old_value
            else:
                said = "none"
    except ERRORS as error:
        said = named(error)
    trace.append((op, said, [shown(one.get("unset")) for one in variables.values()]))


async def play(kind: str, ops: list[Op], tokens: Tokens, trace: list[Any]) -> None:
    for op in ops:
        if op[0] in SIMPLE:
            simple(kind, op, tokens, trace)
        elif op[0] == "raise":
            raise Stop
        elif op[0] == "stream":
            await stream_it(kind, op, tokens, trace)
        else:
            try:
                new, inner = await WAYS[kind][op[0]](op[1], dict(tokens))
                tokens.update(new)
                trace.append((op[0], inner))
            except Halted as halted:
                new, inner = halted.args
                tokens.update(new)
                trace.append((op[0], "raised", inner))
            simple(kind, ("get", "a"), tokens, trace)


async def stream_it(kind: str, op: Op, tokens: Tokens, trace: list[Any]) -> None:
    _, segments, betweens, ending = op
    make: Any = generator_far if kind == "far" else generator_far.__wrapped__
    try:
        async with aclosing(make(kind, segments, dict(tokens))) as stream:
            new, inner = await anext(stream)
            for how, ops in betweens:
                trace.append(("item", inner))
                tokens.update(new)
                simple(kind, ("get", "a"), tokens, trace)
                before = set(tokens)
                await play(kind, ops, tokens, trace)
                fresh = {label: tokens[label] for label in tokens if label not in before}
                if how == "throw":
                    new, inner = await stream.athrow(Poke(fresh))
                elif fresh or how == "send":
                    new, inner = await stream.asend(fresh)
                else:
                    new, inner = await anext(stream)
            trace.append(("item", inner))
            tokens.update(new)
            if ending == "exhaust":
                async for new, inner in stream:
                    tokens.update(new)
                    trace.append(("item", inner))
                    simple(kind, ("get", "a"), tokens, trace)
    except Halted as halted:
        new, inner = halted.args
        tokens.update(new)
        trace.append(("item", "raised", inner))
    except StopAsyncIteration:
        trace.append("ended")
    simple(kind, ("get", "c"), tokens, trace)


async def body(kind: str, ops: list[Op], tokens: Tokens) -> tuple[Tokens, list[Any]]:
    had = set(tokens)
    trace: list[Any] = []
    try:
        await play(kind, ops, tokens, trace)
    except Stop:
        raise Halted({label: tokens[label] for label in tokens if label not in had}, trace) from None
    return {label: tokens[label] for label in tokens if label not in had}, trace


def plain_body(kind: str, ops: list[Op], tokens: Tokens) -> tuple[Tokens, list[Any]]:
    had = set(tokens)
    trace: list[Any] = []
    for op in ops:
        simple(kind, op, tokens, trace)
    return {label: tokens[label] for label in tokens if label not in had}, trace


@routine
async def generator_far(kind: str, segments: list[list[Op]], tokens: Tokens) -> AsyncGenerator[Any, Any]:
    had = set(tokens)
    try:
        for ops in segments:
            trace: list[Any] = []
            try:
                await play(kind, ops, tokens, trace)
            except Stop:
                raise Halted({label: tokens[label] for label in tokens if label not in had}, trace) from None
            try:
                got = yield {label: tokens[label] for label in tokens if label not in had}, trace
            except Poke as poke:
                [got] = poke.args
            tokens.update(got or {})
            had = set(tokens)
    finally:
        VARIABLES[kind]["c"].set("closed")


@routine
async def body_far(ops: list[Op], tokens: Tokens) -> tuple[Tokens, list[Any]]:
    return await body("far", ops, tokens)


@routine(thread=True)
async def body_on_a_thread(ops: list[Op], tokens: Tokens) -> tuple[Tokens, list[Any]]:
    return await body("far", ops, tokens)


@routine
async def bare_body_far(ops: list[Op]) -> list[Any]:
    return await bare_body("far", ops)


async def bare_body(kind: str, ops: list[Op]) -> list[Any]:
    """Without any tokens but those that it finds in values."""
    trace: list[Any] = []
    try:
        await play(kind, ops, {}, trace)
    except Stop:
        trace.append("stopped")
    return trace


async def _bare_far(ops: list[Op], _: Tokens) -> tuple[Tokens, list[Any]]:
    return {}, await bare_body_far(ops)


async def _bare_local(ops: list[Op], _: Tokens) -> tuple[Tokens, list[Any]]:
    return {}, await bare_body("local", ops)


@routine
def body_plainly(ops: list[Op], tokens: Tokens) -> tuple[Tokens, list[Any]]:
    return plain_body("far", ops, tokens)


Way = Callable[[list[Op], Tokens], Awaitable[tuple[Tokens, list[Any]]]]


async def _body_in_place(ops: list[Op], tokens: Tokens) -> tuple[Tokens, list[Any]]:
    with headgate.do_dispatch(False):
        return await body_far(ops, tokens)


async def _body_awaited(ops: list[Op], tokens: Tokens) -> tuple[Tokens, list[Any]]:
    return await body("local", ops, tokens)


async def _plain_body_called(ops: list[Op], tokens: Tokens) -> tuple[Tokens, list[Any]]:
    return plain_body("local", ops, tokens)


def _forked(kind: str) -> Way:
    async def way(ops: list[Op], tokens: Tokens) -> tuple[Tokens, list[Any]]:
        return await asyncio.create_task(body(kind, ops, tokens))

    return way


def _in_a_thread(kind: str) -> Way:
    async def way(ops: list[Op], tokens: Tokens) -> tuple[Tokens, list[Any]]:
        return await asyncio.to_thread(plain_body, kind, ops, tokens)

    return way


WAYS: dict[str, dict[str, Way]] = {
    "local": {
        "call": _body_awaited,
        "call bare": _bare_local,
        "call on a thread": _body_awaited,
        "call plainly": _plain_body_called,
        "call in place": _body_awaited,
        "fork": _forked("local"),
        "to_thread": _in_a_thread("local"),
    },
    "far": {
        "call": body_far,
        "call bare": _bare_far,
        "call on a thread": body_on_a_thread,
        "call plainly": body_plainly,
        "call in place": _body_in_place,
        "fork": _forked("far"),
        "to_thread": _in_a_thread("far"),
    },
}
