"""W85: a token that travels in a value, a closure, a default or an attribute can be reset, once, wherever it is."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import ContextVar, do_dispatch, routine
from headgate.context.travel import Exchange, outgoing
from headgate.workers.client.remote_stream import Stream
from tests.integration.context import token_jobs as far
from tests.integration.context.conftest import Apart
from tests.integration.context.token_jobs import Box, Boxed, found, held, holder, reset
from tests.integration.context.wiretap import Tap
from tests.support.workers.support import lines, run, until

pytestmark = pytest.mark.integration

Script = Callable[[], Awaitable[list[Any]]]


def both(shared: Apart, script: Script) -> list[Any]:
    """What the script says, which must be the same here as over workers: each in a task of its own."""

    async def main() -> list[Any]:
        with do_dispatch(False):
            local = await asyncio.create_task(script())  # type: ignore[arg-type]
        remote = await asyncio.create_task(script())  # type: ignore[arg-type]
        assert remote == local
        return list(remote)

    said: list[Any] = shared(main)
    return said


# -- there ------------------------------------------------------------------------------------------------------------

IN_VALUES = [far.reset_found, far.reset_found_plainly, far.reset_found_on_a_thread, far.reset_found_on_another]


@pytest.mark.parametrize("fn", IN_VALUES, ids=lambda fn: str(fn.__name__))
def test_w85_a_token_in_a_value_is_reset_on_a_worker(shared: Apart, fn: Any) -> None:
    async def script() -> list[Any]:
        held.set("first")
        holder.set(Box(held.set("second")))
        return [await fn(), held.get(), await fn(), reset(found()), holder.get().content is found()]

    assert both(shared, script) == ["reset, first", "first", "RuntimeError, first", "RuntimeError, first", True]


def test_w85_a_token_in_a_value_that_was_used_here_is_used_there(shared: Apart) -> None:
    async def script() -> list[Any]:
        holder.set(Box(held.set("mine")))
        return [reset(found()), await far.reset_found(), await far.reset_found_on_another()]

    assert both(shared, script) == ["reset, unset", "RuntimeError, unset", "RuntimeError, unset"]


def test_w85_used_says_whether_a_token_was_used_wherever_that_was(shared: Apart) -> None:
    async def script() -> list[Any]:
        token, other = held.set("mine"), held.set("other")
        said = [token.used, other.used, await far.is_used(other)]
        await far.reset_content(Box(other))
        said += [other.used, await far.is_used(other)]
        with pytest.raises(ValueError, match=r"."):
            holder.reset(token)
        said.append(token.used)
        held.reset(token)
        said += [token.used, await far.is_used(token)]
        await far.hold("theirs")
        theirs = found()
        said += [theirs.used, await far.reset_found_on_another(), theirs.used]
        return said

    said = both(shared, script)
    assert said == [False, False, False, True, True, False, True, True, False, "reset, unset", True]
    with pytest.raises(AttributeError):
        headgate.copy_context().run(held.set, "for a moment").used = True  # type: ignore[misc]


def test_w85_a_token_in_a_value_is_refused_in_another_task_on_a_worker(shared: Apart) -> None:
    async def script() -> list[Any]:
        holder.set(Box(held.set("mine")))
        there = await far.reset_found_in_a_task()
        forked = await asyncio.create_task(far.reset_found())
        return [there, forked, await far.reset_found()]

    assert both(shared, script) == ["ValueError, mine", "ValueError, mine", "reset, unset"]


def closure(token: Any) -> Any:
    @routine
    async def undo() -> str:
        return reset(token)

    return undo


def plain_closure(token: Any) -> Any:
    @routine
    def undo() -> str:
        return reset(token)

    return undo


def default(token: Any) -> Any:
    @routine
    async def undo(given: Any = token) -> str:
        return reset(given)

    return undo


def keyword_default(token: Any) -> Any:
    @routine
    async def undo(*, given: Any = token) -> str:
        return reset(given)

    return undo


def attribute_of_a_function(token: Any) -> Any:
    async def undo() -> str:
        return reset(undo.token)  # type: ignore[attr-defined]

    undo.token = token  # type: ignore[attr-defined]
    return routine(undo)


def function_in_a_closure(token: Any) -> Any:
    def inner(given: Any = token) -> str:
        return reset(given)

    @routine
    async def undo() -> str:
        return inner()

    return undo


def default_of_a_variable(token: Any) -> Any:
    variable: ContextVar[Any] = ContextVar(f"token_default_{id(token)}", default=Box(token))

    @routine
    async def undo() -> str:
        return reset(variable.get().content)

    return undo


def method(token: Any) -> Any:
    class Undoing:
        def __init__(self) -> None:
            self.token = token

        @routine
        async def undo(self) -> str:
            return reset(self.token)

    return Undoing().undo


def generator(token: Any) -> Any:
    @routine
    async def undoes() -> Any:
        yield reset(token)

    async def undo() -> Any:
        async with aclosing(undoes()) as stream:
            return await anext(stream)

    return undo


FUNCTIONS = [
    closure,
    plain_closure,
    default,
    keyword_default,
    attribute_of_a_function,
    function_in_a_closure,
    default_of_a_variable,
    method,
    generator,
]


@pytest.mark.parametrize("make", FUNCTIONS, ids=lambda fn: str(fn.__name__))
def test_w85_a_token_that_a_function_holds_is_reset_on_a_worker(shared: Apart, make: Any) -> None:
    async def script() -> list[Any]:
        held.set("first")
        token = held.set("second")
        undo = make(token)
        return [await undo(), held.get(), await undo(), reset(token)]

    assert both(shared, script) == ["reset, first", "first", "RuntimeError, first", "RuntimeError, first"]


def test_w85_tokens_in_arguments_and_in_what_they_hold(shared: Apart) -> None:
    async def script() -> list[Any]:
        first, second = held.set("first"), held.set("second")
        said = [await far.reset_content(Box(second)), await far.call(lambda: reset(first))]
        return [*said, reset(first), reset(second)]

    assert both(shared, script) == ["reset, first", "reset, unset", "RuntimeError, unset", "RuntimeError, unset"]


def test_w85_a_task_pool_calls_a_routine_that_finds_a_token_in_a_value(shared: Apart) -> None:
    """A task runs in a copy of the Context of its submit: a token from before is of another one, as in asyncio."""

    async def main() -> None:
        holder.set(Box(held.set("mine")))
        async with headgate.TaskPool(workers=shared.pool, max_concurrent=2) as pool:
            assert await (await pool.submit(far.reset_found)) == "ValueError, mine"
        assert await far.reset_found() == "reset, unset"

    shared(main)


# -- back -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [far.hold, far.hold_plainly, far.hold_on_another], ids=lambda fn: str(fn.__name__))
def test_w85_a_token_in_a_value_that_a_worker_set_is_reset_here(shared: Apart, fn: Any) -> None:
    async def script() -> list[Any]:
        held.set("mine")
        await fn("theirs")
        token = found()
        said = [held.get(), token.old_value, reset(token), await far.reset_found(), reset(token)]
        await fn("again")
        return [*said, await far.reset_found_on_another(), reset(found())]

    assert both(shared, script) == [
        *["theirs", "mine", "reset, mine", "RuntimeError, mine", "RuntimeError, mine"],
        *["reset, mine", "RuntimeError, mine"],
    ]


@pytest.mark.parametrize("fn", [far.hold_and_fail, far.fail_with, far.fail_with_a_cause], ids=lambda fn: fn.__name__)
def test_w85_a_token_that_comes_with_an_exception_is_reset_here(shared: Apart, fn: Any) -> None:
    async def script() -> list[Any]:
        try:
            await fn("theirs")
        except (Boxed, ValueError) as error:
            boxed: Any = error.__cause__ or error
        token = found() if fn is far.hold_and_fail else boxed.content
        return [held.get(), reset(token), reset(token), await far.reset_content(Box(token))]

    assert both(shared, script) == ["theirs", "reset, unset", "RuntimeError, unset", "RuntimeError, unset"]


def test_w85_a_token_in_a_value_of_a_call_that_was_cancelled(shared: Apart, tmp_path: Path) -> None:
    numbers = count()

    async def script() -> list[Any]:
        mark = str(tmp_path / f"started {next(numbers)}")
        me: Any = asyncio.current_task()

        async def cancel() -> None:
            await until(lambda: lines(mark))
            me.cancel()

        helper = asyncio.create_task(cancel())
        with pytest.raises(asyncio.CancelledError):
            await far.hold_until_cancelled(mark)
        me.uncancel()
        await helper
        return [held.get(), reset(found()), reset(found())]

    assert both(shared, script) == ["of a worker", "reset, unset", "RuntimeError, unset"]


def test_w85_a_token_in_a_function_that_a_worker_returned(shared: Apart) -> None:
    async def script() -> list[Any]:
        undo = await far.give_a_function("theirs")
        return [held.get(), *undo(), await far.call(undo)]

    assert both(shared, script) == [
        *["theirs", "reset, unset", "RuntimeError, unset"],
        ["RuntimeError, unset", "RuntimeError, unset"],
    ]


# -- generators -------------------------------------------------------------------------------------------------------


def test_w85_tokens_in_values_that_a_generator_finds(shared: Apart) -> None:
    async def script() -> list[Any]:
        async with aclosing(far.steps(5)) as stream:
            said = [await anext(stream)]
            holder.set(Box(held.set("second step")))
            said.append(await anext(stream))
            holder.set(Box(held.set("third")))
            said.append(await stream.asend("anything"))
            holder.set(Box(held.set("fourth")))
            said += [await stream.athrow(Boxed(held.set("thrown"))), held.get("unset")]
        return said

    assert both(shared, script) == [
        *["nothing", "reset, unset", "reset, unset", "thrown: reset, unset, reset, fourth", "fourth"],
    ]


def test_w85_a_token_in_a_value_goes_with_the_first_step(shared: Apart) -> None:
    async def script() -> list[Any]:
        holder.set(Box(held.set("mine")))
        async with aclosing(far.steps(2)) as stream:
            return [await anext(stream), await anext(stream), reset(found())]

    assert both(shared, script) == ["reset, unset", "RuntimeError, unset", "RuntimeError, unset"]


def test_w85_tokens_in_values_that_a_generator_set(shared: Apart) -> None:
    async def script() -> list[Any]:
        said = []
        async for item in far.holding_steps():
            said += [item, held.get(), reset(found()), await far.reset_found()]
        return [*said, held.get(), reset(found()), reset(found())]

    assert both(shared, script) == [
        *["step 0", "step 0", "reset, unset", "RuntimeError, unset"],
        *["step 1", "step 1", "reset, unset", "RuntimeError, unset"],
        *["end", "reset, unset", "RuntimeError, unset"],
    ]


def test_w85_a_worker_reads_a_generator_that_sets_tokens(shared: Apart) -> None:
    async def script() -> list[Any]:
        return [*await far.reads_holding_steps(), held.get("unset"), reset(found())]

    assert both(shared, script) == ["reset, unset", "reset, unset", "reset, unset", "unset", "RuntimeError, unset"]


# -- who names a chain ------------------------------------------------------------------------------------------------


def test_w85_two_generators_that_run_ahead_each_name_the_chain(shared: Apart) -> None:
    """Both make tokens before their consumer has heard of either."""

    async def script() -> list[Any]:
        async with aclosing(far.ahead_later("a")) as a, aclosing(far.ahead_later("b")) as b:
            first = [await anext(a), await anext(b)]
            await until_ahead(a, b)
            one, other = await anext(a), await anext(b)
            said = [first, reset(other).partition(",")[0], await far.reset_content(Box(one)), reset(one)]
            two, three = await anext(b), await anext(a)
            said += [(await far.reset_content(Box(token))).partition(",")[0] for token in (two, three)]
            return [*said, reset(two).partition(",")[0], reset(three).partition(",")[0]]

    assert both(shared, script) == [
        *[[None, None], "reset", "reset, unset", "RuntimeError, unset"],
        *["reset", "reset", "RuntimeError", "RuntimeError"],
    ]


async def until_ahead(*streams: Any) -> None:
    """Till the workers of generators that run ahead have sent more than was asked for; local ones do not."""
    for stream in streams:
        remote = next((one for one in vars_of(stream) if isinstance(one, Stream)), None)
        if remote is not None:
            await until(lambda remote=remote: len(remote._backlog) >= 2)


def vars_of(stream: Any) -> list[Any]:
    """What a generator holds while it is suspended."""
    return list(stream.ag_frame.f_locals.values())


def test_w85_a_consumer_names_the_chain_while_a_generator_runs_ahead(shared: Apart) -> None:
    async def script() -> list[Any]:
        async with aclosing(far.ahead_later("a")) as stream:
            mine = held.set("mine")
            await anext(stream)
            await until_ahead(stream)
            said = [await far.reset_content(Box(mine))]
            theirs = await anext(stream)
            said += [held.get(), reset(theirs).partition(",")[0], reset(theirs).partition(",")[0]]
            theirs = await anext(stream)
            return [*said, (await far.reset_found()).partition(",")[0], reset(theirs).partition(",")[0]]

    assert both(shared, script) == ["reset, unset", "a 0", "reset", "RuntimeError", "reset", "RuntimeError"]


def test_w85_a_generator_that_runs_ahead_of_two_tasks_names_the_chain_of_the_first(shared: Apart) -> None:
    async def main() -> None:
        stream = far.ahead_later("a")
        await anext(stream)
        await until_ahead(stream)

        async def other() -> list[str]:
            token = await anext(stream)
            return [token, reset(token)]

        token, said = await asyncio.create_task(other())
        assert said == "ValueError, a 0"  # it was made before: in the Context of the first step
        assert reset(token) == "reset, unset"
        await stream.aclose()
        assert await far.reset_content(Box(token)) == "RuntimeError, unset"

    shared(main)


def test_w85_somebody_asks_for_the_id_while_a_worker_makes_one(shared: Apart, tmp_path: Path) -> None:
    async def main() -> None:
        started, go_on = tmp_path / "started", tmp_path / "go on"
        context = headgate.current_context()

        async def ask() -> str:
            await until(lambda: lines(started))
            asked = context.id
            go_on.touch()
            return asked

        asking = asyncio.create_task(ask())
        await far.hold_when_told(str(started), str(go_on))
        assert context.id == await asking
        token = found()
        assert await far.reset_content(Box(token)) == "reset, unset"
        assert reset(token) == "RuntimeError, unset"
        assert reset(await far.same(held.set("mine"))) == "reset, unset"

    shared(main)


def test_w85_values_that_are_too_much_do_not_cost_the_tokens(what_grpc_opens_once: None) -> None:
    async def main() -> None:
        async with headgate.WorkerPool(spawn=1, max_payload=50_000):
            mine = held.set("mine")
            with pytest.warns(headgate.ContextDecodeWarning, match="max_payload is 50,000"):
                theirs = await far.use_and_set_too_much(mine, 60_000)
            assert holder.get() is None
            assert reset(mine).startswith("RuntimeError")
            assert reset(theirs).startswith("reset")
            with pytest.warns(headgate.ContextDecodeWarning, match="max_payload is 50,000"):
                await far.set_plainly_too_much(60_000)

    run(main)


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_w81_no_id_is_made_for_values_without_tokens(shared: Apart, tap: Tap) -> None:
    async def main() -> None:
        @routine
        async def undo() -> str:
            return "nothing to do"

        held.set("mine")
        holder.set(Box("no token"))
        assert await undo() == "nothing to do"
        chains = [frame_of(call.context)[3] for call in tap.calls if call.context]
        assert chains == [""]
        tap.forget()
        held.set("again")  # whoever keeps a token keeps it here
        kept = held.set("and again")
        await undo()
        assert [frame_of(call.context)[3] for call in tap.calls if call.context] == [""]
        reset(kept)

    shared(main)


def frame_of(data: bytes) -> tuple[Any, ...]:
    return tuple(pickle.loads(data[1:]))


def test_w85_the_id_is_told_in_the_frame_whose_value_holds_the_token() -> None:
    """Without workers: what is written down is pickled before the id is read, and the next frame has no news."""

    def main() -> None:
        assert outgoing() == b""
        holder.set(Box(held.set("mine")))
        exchange = Exchange("consumer")
        frame = frame_of(exchange.send(pickle.dumps))
        assert list(frame[1]) == [holder.key]
        assert frame[3] == headgate.current_context().id
        assert exchange.send(pickle.dumps) == b""

    headgate.copy_context().run(main)
