"""W87: a script of set, get and reset over several processes gives the trace of stdlib variables in one."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate
from tests.conftest import SCALE
from tests.integration.context import travel_jobs as far
from tests.integration.context.conftest import Apart
from tests.integration.context.travel_jobs import Op

pytestmark = pytest.mark.integration

BODIES = ("call", "call on a thread", "call in place", "fork")
PLAIN = ("call plainly", "to_thread")

names = st.sampled_from("aabc")
picks = st.integers(0, 5)
simple: st.SearchStrategy[Op] = st.one_of(
    st.tuples(st.just("set"), names, st.just(0)),
    st.tuples(st.just("set"), names, st.just(0)),
    st.tuples(st.just("reset"), names, picks),
    st.tuples(st.just("reset"), names, picks),
    st.tuples(st.just("get"), names),
    st.tuples(st.just("get or"), names),
    st.tuples(st.just("reset junk"), names),
    st.tuples(st.just("old"), names, picks),
    st.tuples(st.just("stow"), st.just("d")),
    st.tuples(st.just("take"), st.just("d")),
)


def bodies(ops: st.SearchStrategy[Op]) -> st.SearchStrategy[Op]:
    several = st.lists(ops, max_size=4)
    # `raise` ends a body, so it stands at the end
    body = st.tuples(several, st.sampled_from([[], [], [("raise",)]])).map(lambda both: both[0] + both[1])
    between = st.tuples(st.sampled_from(["next", "send", "throw"]), several)
    return st.one_of(
        simple,
        simple,
        st.tuples(st.sampled_from(BODIES), body),
        st.tuples(st.sampled_from(["call", "call bare"]), body),
        st.tuples(st.sampled_from(PLAIN), st.lists(simple, max_size=4)),
        st.tuples(
            st.just("stream"),
            st.lists(body, min_size=1, max_size=4),
            st.lists(between, max_size=3),
            st.sampled_from(["exhaust", "close"]),
        ),
    )


SCRIPTS = st.lists(bodies(bodies(bodies(simple))), min_size=2, max_size=8)


def numbered(ops: Any, numbers: Any = None) -> Any:
    """Each `set` gets a number of its own, which is its value and the name of its token."""
    numbers = numbers or itertools.count(1)
    if isinstance(ops, list):
        return [numbered(one, numbers) for one in ops]
    if not isinstance(ops, tuple):
        return ops
    if ops[0] == "set":
        return (*ops[:2], next(numbers))
    if ops[0] in far.SIMPLE:
        return ops
    return tuple(numbered(one, numbers) for one in ops)


async def trace_of(kind: str, ops: list[Op]) -> Any:
    try:
        return (await asyncio.create_task(far.body(kind, ops, {})))[1]
    except far.Halted as halted:
        return halted.args[1]


async def compare(ops: list[Op]) -> None:
    ops = numbered(ops)
    expected = await trace_of("local", ops)
    assert await trace_of("far", ops) == expected


@settings(
    max_examples=int(200 * SCALE),
)
@given(ops=SCRIPTS)
def test_w87_any_script_gives_the_trace_of_the_stdlib(shared: Apart, ops: list[Op]) -> None:
    shared(lambda: compare(ops))


@settings(max_examples=int(200 * SCALE))
@given(ops=SCRIPTS)
def test_w87_any_script_in_place(ops: list[Op]) -> None:
    """The same without a pool: `do_dispatch(False)` differs in nothing."""

    async def main() -> None:
        with headgate.do_dispatch(False):
            await compare(ops)

    asyncio.run(main())


def s(name: str) -> Op:
    return "set", name, 0


def g(name: str) -> Op:
    return "get", name


def r(name: str, index: int) -> Op:
    return "reset", name, index


def o(index: int) -> Op:
    return "old", "a", index


STOP: Op = ("raise",)
STOW: Op = ("stow", "d")
TAKE: Op = ("take", "d")

CHOSEN: dict[str, list[Op]] = {
    "there and back": [s("a"), ("call", [g("a"), s("a"), g("a")]), g("a")],
    "unset, default": [g("a"), g("b"), ("call", [g("a"), g("b"), ("get or", "a"), ("get or", "b")])],
    "their token here": [("call", [s("a")]), r("a", 0), g("a"), r("a", 0)],
    "my token there": [s("a"), s("a"), ("call", [r("a", 1), g("a")]), g("a"), r("a", 1), r("a", 0), r("a", 0)],
    "used there, then there": [s("a"), ("call", [r("a", 0)]), ("call", [r("a", 0)]), ("call plainly", [r("a", 0)])],
    "used here, then there": [s("a"), r("a", 0), ("call", [r("a", 0), r("b", 0)])],
    "wrong variable": [s("a"), r("b", 0), ("call", [r("b", 0), r("a", 0), r("b", 0)]), r("b", 0)],
    "order of checks": [
        s("a"),
        s("a"),
        ("fork", [r("b", 0), r("a", 0), ("call", [r("b", 0), r("a", 0)])]),
        r("a", 1),
        ("fork", [r("b", 1), r("a", 1), ("call", [r("b", 1), r("a", 1)])]),
        ("reset junk", "a"),
        ("call", [("reset junk", "a")]),
    ],
    "out of order": [s("a"), s("a"), s("a"), ("call", [r("a", 0), g("a"), r("a", 2)]), g("a"), r("a", 1), g("a")],
    "old values": [s("a"), s("a"), ("call", [o(0), o(1), s("a"), s("b")]), o(2), o(3), ("call", [o(2), o(3)])],
    "old value after use": [s("a"), s("a"), r("a", 1), o(1), ("call", [o(1), o(0)])],
    "raised": [s("a"), ("call", [s("a"), s("b"), STOP]), g("a"), r("b", 2), r("a", 1), r("a", 0)],
    "raised twice": [("call", [("call", [s("a"), STOP]), r("a", 0), s("a"), STOP]), g("a"), r("a", 1), g("a")],
    "unset there": [s("a"), ("call", [r("a", 0)]), g("a"), ("call", [g("a"), s("a")]), g("a")],
    "unset by a failure": [s("a"), s("b"), ("call", [r("a", 0), r("b", 1), STOP]), g("a"), g("b")],
    "nested": [
        s("a"),
        ("call", [s("a"), ("call", [r("a", 1), ("call", [r("a", 0), g("a"), s("c")]), r("a", 0)]), r("c", 2)]),
        g("c"),
        r("c", 2),
    ],
    "threads": [
        s("a"),
        ("call plainly", [s("a"), r("a", 0), g("a")]),
        ("call on a thread", [s("a"), ("call plainly", [r("a", 1), g("a")]), g("a")]),
        g("a"),
        r("a", 1),
        r("a", 2),
    ],
    "my token in a thread": [s("a"), ("call plainly", [r("a", 0)]), r("a", 0), ("call plainly", [s("b")]), r("b", 1)],
    "threads of a routine": [("call", [s("a"), ("to_thread", [g("a"), r("a", 0), s("a"), r("a", 1)]), r("a", 1)])],
    "threads have copies": [("call", [s("a"), ("to_thread", [s("a")]), g("a"), r("a", 1), r("a", 0)]), r("a", 1)],
    "tasks": [s("a"), ("fork", [r("a", 0), ("call", [r("a", 0), s("a")]), r("a", 1), g("a")]), g("a"), r("a", 1)],
    "tasks there": [s("a"), ("call", [("fork", [r("a", 0), s("a"), ("call", [r("a", 1)])]), r("a", 0)]), g("a")],
    "a task's token": [("fork", [s("a"), ("call", [s("a")])]), r("a", 0), ("call", [r("a", 1), r("a", 0)])],
    "a stream": [
        s("a"),
        ("stream", [[g("a"), s("a")], [g("a"), s("a")], [r("a", 0)]], [("next", [g("a"), s("a")])], "exhaust"),
        r("a", 1),
        r("a", 2),
    ],
    "tokens in a stream": [
        s("a"),
        (
            "stream",
            [[s("a")], [r("a", 2), r("a", 1)], [r("a", 0)], [g("a"), r("a", 0)]],
            [("send", [s("a")]), ("next", [r("a", 1)]), ("throw", [r("a", 0), s("b")])],
            "close",
        ),
        r("b", 3),
        g("c"),
    ],
    "a copy grows old in a stream": [
        s("a"),
        ("stream", [[g("a")], [r("a", 0)], [g("a")]], [("next", [r("a", 0), g("a")])], "exhaust"),
        g("a"),
    ],
    "a copy grows old here": [
        ("call", [s("a"), ("stream", [[g("a")], [r("a", 0)]], [("next", [])], "close"), g("a"), r("a", 0)]),
        r("a", 0),
    ],
    "a call in between": [
        s("a"),
        ("stream", [[s("a")], [r("a", 0), r("a", 1)]], [("next", [("call", [r("a", 0)]), g("a")])], "exhaust"),
        g("a"),
    ],
    "a stream that fails": [("stream", [[s("a")], [s("b"), STOP]], [("send", [s("a")])], "exhaust"), r("b", 2), g("a")],
    "a stream that is left": [
        ("call", [("stream", [[s("c")], [s("a")]], [("next", [r("c", 0), STOP])], "exhaust")]),
        g("c"),
        r("c", 0),
    ],
    "streams in streams": [
        (
            "stream",
            [[("stream", [[s("a")], [r("a", 0)]], [("next", [g("a")])], "exhaust"), s("a")], [("call", [r("a", 1)])]],
            [("next", [g("a"), s("b")])],
            "exhaust",
        ),
        g("a"),
        g("b"),
    ],
    "in place": [s("a"), ("call in place", [s("a"), ("call", [r("a", 1), g("a")]), STOP]), r("a", 0), g("a")],
    "in place there": [("call", [s("a"), ("call in place", [r("a", 0), s("b")]), g("b")]), r("a", 0), r("b", 1)],
    "stowed here, used there": [s("a"), STOW, ("call bare", [TAKE, r("a", 0), g("a")]), r("a", 0), g("a")],
    "stowed there, used here": [("call bare", [s("a"), STOW]), TAKE, r("a", 0), ("call bare", [TAKE, r("a", 0)])],
    "stowed two calls away": [("call bare", [("call bare", [s("a"), STOW]), s("a")]), TAKE, r("a", 0), g("a")],
    "stowed in a task": [
        ("fork", [s("a"), STOW, ("call bare", [TAKE, r("a", 0)])]),
        s("a"),
        STOW,
        ("fork", [r("a", 1)]),
    ],
    "stowed and raised": [("call bare", [s("a"), STOW, STOP]), TAKE, r("a", 0), r("a", 0)],
    "stowed in a stream": [
        ("stream", [[s("a"), STOW], [TAKE, r("a", 1)]], [("next", [("call bare", [TAKE, s("a"), STOW])])], "exhaust"),
        TAKE,
        r("a", 0),
        r("a", 1),
    ],
    "set again after use": [s("a"), ("call", [r("a", 0), s("a")]), r("a", 0), ("call", [r("a", 1)]), g("a"), r("a", 1)],
}


@pytest.mark.parametrize("name", CHOSEN)
def test_w87_scripts_that_matter(shared: Apart, name: str) -> None:
    shared(lambda: compare(CHOSEN[name]))


@pytest.mark.parametrize("name", CHOSEN)
def test_w87_scripts_that_matter_in_place(name: str) -> None:
    async def main() -> None:
        with headgate.do_dispatch(False):
            await compare(CHOSEN[name])

    asyncio.run(main())


def test_w87_the_oracle_can_tell(shared: Apart) -> None:
    """A trace holds values, errors of each class and what raised: or it would prove little."""

    async def main() -> None:
        [*trace] = await trace_of("local", numbered(CHOSEN["order of checks"]))
        text = repr(trace)
        for word in ("ValueError", "RuntimeError", "TypeError"):
            assert word in text
        assert "LookupError" in repr(await trace_of("local", numbered(CHOSEN["unset, default"])))
        assert "raised" in repr(await trace_of("far", numbered(CHOSEN["raised"])))
        assert "MISSING" in repr(await trace_of("far", numbered(CHOSEN["old values"])))

    shared(main)
