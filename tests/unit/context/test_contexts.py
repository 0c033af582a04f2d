"""W82 and W86 in one process: contexts, their ids, tasks that fork or are bound to one, callbacks, timers, threads."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any

import pytest

import headgate
from headgate import TaskPool, pool_list
from tests.support.context.local_support import LOOPS, apart, declare, error_of, on, on_each_loop
from tests.support.workers.support import bounded

Create = Callable[..., "asyncio.Task[Any]"]


def through_the_loop(coro: Coroutine[Any, Any, Any], *, context: Any = None) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coro, context=context)


SPELLINGS: dict[str, Create] = {
    "headgate": headgate.create_task,
    "asyncio": asyncio.create_task,
    "loop": through_the_loop,
}
each_spelling = pytest.mark.parametrize("spelling", list(SPELLINGS))


async def id_here() -> str:
    await asyncio.sleep(0)
    return headgate.current_context().id


# -- a Context --------------------------------------------------------------------------------------------------------


@apart
def test_w86_a_copy_is_a_copy() -> None:
    var = declare(default="default")
    var.set("before")
    ctx = headgate.copy_context()
    assert isinstance(ctx, headgate.Context)
    var.set("after")
    assert ctx[var] == "before"
    assert ctx.run(var.get) == "before"
    ctx.run(var.set, "inside")
    assert ctx[var] == "inside"
    assert var.get() == "after"


@apart
def test_w86_run_passes_everything_on() -> None:
    ctx = headgate.copy_context()

    def told(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert ctx.run(told) == ((), {})
    assert ctx.run(told, 1, 2, fn=3, self=4) == ((1, 2), {"fn": 3, "self": 4})
    with pytest.raises(ZeroDivisionError):
        ctx.run(divmod, 1, 0)
    assert ctx.run(told, 1) == ((1,), {})
    with pytest.raises(TypeError):
        ctx.run()  # type: ignore[call-arg]


@apart
def test_w86_run_keeps_what_was_set_even_when_it_raises() -> None:
    var = declare()
    ctx = headgate.copy_context()

    def sets_and_raises() -> None:
        var.set("set")
        raise KeyError("x")

    with pytest.raises(KeyError):
        ctx.run(sets_and_raises)
    assert ctx[var] == "set"
    assert var.get(None) is None
    assert headgate.current_context().id != ctx.id


@apart
def test_w86_a_context_is_not_entered_twice() -> None:
    ctx = headgate.copy_context()
    assert ctx.run(error_of, lambda: ctx.run(int)) == "RuntimeError"
    assert ctx.run(int) == 0
    assert ctx.run(lambda: ctx.copy().run(int)) == 0


@apart
def test_w86_a_context_reads_as_a_mapping_of_what_is_set() -> None:
    one, two, unset = declare("one"), declare("two", default=2), declare("unset", default="default")
    stdlib = contextvars.ContextVar[int]("stdlib")
    stdlib.set(0)
    assert dict(headgate.copy_context()) == {}
    one.set(1)
    two.set(None)
    ctx = headgate.copy_context()
    assert isinstance(ctx, Mapping)
    assert dict(ctx) == {one: 1, two: None}
    assert len(ctx) == 2
    assert set(ctx) == set(ctx.keys()) == {one, two}
    assert sorted(ctx.values(), key=str) == [1, None]
    assert dict(ctx.items()) == {one: 1, two: None}
    assert one in ctx
    assert two in ctx
    assert unset not in ctx  # a default is not set
    assert (ctx[one], ctx[two]) == (1, None)
    with pytest.raises(KeyError):
        ctx[unset]
    assert ctx.get(unset) is None
    assert ctx.get(unset, 5) == 5
    assert ctx.get(two, 5) is None


class Unequal:
    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError("it cannot be compared")

    __hash__ = None  # type: ignore[assignment]


@apart
def test_w86_contexts_compare_by_content_as_those_of_the_stdlib() -> None:
    def script(var: Any, other: Any, copy: Callable[[], Any]) -> list[Any]:
        empty = copy()
        said = [empty == copy(), empty != copy(), empty == 1, empty == {}, empty == {var: 1}, empty is not copy()]
        one, two = copy(), copy()
        one.run(var.set, 1)
        said += [one == two, one != two]
        two.run(var.set, 1.0)
        said += [one == two, one != two, two == one]
        two.run(other.set, 1)
        said += [one == two, two == one]
        one.run(other.set, 2)
        said += [one == two, one.copy() == one, two.copy() == one]
        nan = float("nan")
        one.run(other.set, nan)
        two.run(other.set, nan)
        said.append(one == two)  # what is identical is equal
        one.run(other.set, Unequal())
        two.run(other.set, Unequal())
        for compared in (one, two):
            try:
                said.append(one == compared)
            except ZeroDivisionError:
                said.append("raised")
        for refused in (lambda: hash(one), lambda: {one}, lambda: one < two):
            said.append(error_of(refused))
        return said

    theirs = [contextvars.ContextVar("one"), contextvars.ContextVar("other"), contextvars.copy_context]
    assert script(declare("one"), declare("other"), headgate.copy_context) == script(*theirs)  # type: ignore[arg-type]


@apart
def test_w86_the_current_context_compares_by_what_is_set_now() -> None:
    var = declare()
    current, copy = headgate.current_context(), headgate.copy_context()
    assert current == copy
    assert current.id != copy.id
    token = var.set(1)
    assert current != copy
    copy.run(var.set, 1)
    assert current == copy
    var.reset(token)
    assert current != copy


@apart
def test_w86_our_contexts_and_those_of_the_stdlib_are_never_equal() -> None:
    assert headgate.copy_context() != contextvars.copy_context()
    assert headgate.copy_context() != contextvars.Context()


@pytest.mark.parametrize("name", ["ContextVar", "Context", "Token"])
def test_w80_the_classes_are_no_bases_as_in_contextvars(name: str) -> None:
    with pytest.raises(TypeError) as theirs:
        type("Mine", (getattr(contextvars, name),), {})
    with pytest.raises(headgate.InvalidType) as ours:
        type("Mine", (getattr(headgate, name),), {})
    assert str(theirs.value).replace("_contextvars", "headgate") in str(ours.value)
    assert f"type 'headgate.{name}' is not an acceptable base type" in str(ours.value)


@pytest.mark.parametrize("name", ["ContextVar", "Token"])
def test_w80_a_parametrised_class_is_no_base_either(name: str) -> None:
    with pytest.raises(headgate.InvalidType, match="not an acceptable base type"):

        class Mine(getattr(headgate, name)[int]):  # type: ignore[misc]
            pass


@apart
def test_w86_what_was_reset_to_unset_is_not_in_the_mapping() -> None:
    var = declare()
    outer = var.set(1)
    inner = var.set(2)
    ctx = headgate.copy_context()
    var.reset(inner)
    assert dict(headgate.copy_context()) == {var: 1}
    var.reset(outer)
    assert dict(headgate.copy_context()) == {}
    assert dict(headgate.current_context()) == {}
    assert dict(ctx) == {var: 2}


@apart
def test_w86_the_mapping_cannot_be_written() -> None:
    var = declare()
    var.set(1)
    ctx: Any = headgate.copy_context()
    with pytest.raises(TypeError):
        ctx[var] = 2
    with pytest.raises(TypeError):
        del ctx[var]
    assert dict(ctx) == {var: 1}


@apart
def test_w86_copy_is_another_context_with_the_same_values() -> None:
    var = declare()
    var.set(1)
    ctx = headgate.copy_context()
    twin = ctx.copy()
    assert isinstance(twin, headgate.Context)
    assert twin.id != ctx.id
    assert dict(twin) == dict(ctx) == {var: 1}
    twin.run(var.set, 2)
    assert (twin[var], ctx[var], var.get()) == (2, 1, 1)


@apart
def test_w86_a_copy_of_here_inside_run_is_a_copy_of_that() -> None:
    var = declare()
    ctx = headgate.copy_context()
    ctx.run(var.set, "inside")
    inner = ctx.run(headgate.copy_context)
    assert inner[var] == "inside"
    assert inner.id not in (ctx.id, headgate.current_context().id)


@apart
def test_w86_stdlib_variables_are_copied_too() -> None:
    stdlib = contextvars.ContextVar[int]("stdlib", default=0)
    stdlib.set(1)
    ctx = headgate.copy_context()
    stdlib.set(2)
    assert ctx.run(stdlib.get) == 1
    ctx.run(stdlib.set, 3)
    assert ctx.copy().run(stdlib.get) == 3
    assert stdlib.get() == 2


# -- ids --------------------------------------------------------------------------------------------------------------


@apart
def test_w86_every_context_has_an_id_of_its_own() -> None:
    here = headgate.current_context().id
    assert isinstance(here, str)
    assert here
    ids = [headgate.copy_context().id for _ in range(1000)]
    assert all(isinstance(one, str) for one in ids)
    assert len({here, *ids}) == 1001
    assert headgate.current_context().id == here


@apart
def test_w86_the_id_of_a_context_stays() -> None:
    var = declare()
    ctx = headgate.copy_context()
    before = ctx.id
    ctx.run(var.set, 1)
    assert ctx.id == before
    assert ctx.run(lambda: headgate.current_context().id) == before
    assert ctx.run(lambda: headgate.current_context().id) == before
    here = headgate.current_context().id
    token = var.set(1)
    assert headgate.current_context().id == here
    var.reset(token)
    assert headgate.current_context().id == here


@apart
def test_w86_the_current_context_is_that_of_here() -> None:
    var = declare(default="default")
    assert isinstance(headgate.current_context(), headgate.Context)
    assert var not in headgate.current_context()
    var.set(1)
    assert headgate.current_context()[var] == 1
    var.set(2)
    assert headgate.current_context()[var] == 2
    ctx = headgate.copy_context()
    ctx.run(var.set, 3)
    assert ctx.run(lambda: headgate.current_context()[var]) == 3
    assert headgate.current_context()[var] == 2


@on_each_loop
def test_w86_an_id_stays_over_awaits_and_is_new_in_each_fork(loop: str) -> None:
    async def main(early: bool, factory: bool) -> None:
        here = asyncio.get_running_loop()
        if factory:
            headgate.install_task_factory(here)
        mine = headgate.current_context().id if early else None  # asked for before there is a child, or after

        async def awaited() -> str:
            return await id_here()

        async def with_grandchildren() -> list[str]:
            first = headgate.current_context().id
            below = await asyncio.gather(*[asyncio.create_task(id_here()) for _ in range(2)])
            assert headgate.current_context().id == first
            return [first, *below]

        children = await asyncio.gather(
            asyncio.create_task(with_grandchildren()),
            asyncio.create_task(with_grandchildren()),
            headgate.create_task(with_grandchildren()),
            here.create_task(with_grandchildren()),
            with_grandchildren(),
        )
        mine = mine or headgate.current_context().id
        below = [one for child in children for one in child]
        assert len({mine, *below}) == 16
        assert await awaited() == mine
        await asyncio.sleep(0.001)
        assert headgate.current_context().id == mine

    for early in (True, False):
        for factory in (True, False):
            on(loop, functools.partial(main, early, factory))


# -- W82: forks -------------------------------------------------------------------------------------------------------


@on_each_loop
@each_spelling
@pytest.mark.parametrize("factory", [False, True])
def test_w82_create_task_forks_a_copy(loop: str, spelling: str, factory: bool) -> None:
    async def main() -> None:
        if factory:
            headgate.install_task_factory(asyncio.get_running_loop())
        create = SPELLINGS[spelling]
        var, late = declare(), declare(default="default")
        var.set("parent")

        async def child() -> tuple[Any, Any]:
            first = var.get(), late.get()
            var.set("child")
            late.set("child")
            await asyncio.sleep(0)
            assert (var.get(), late.get()) == ("child", "child")
            return first

        task = create(child())
        var.set("parent, later")  # after the fork, before the child runs
        late.set("parent, later")
        assert await task == ("parent", "default")
        assert (var.get(), late.get()) == ("parent, later", "parent, later")

    on(loop, main)


@on_each_loop
def test_w82_concurrent_tasks_never_see_each_other(loop: str) -> None:
    async def main() -> None:
        var, other = declare(), declare()
        var.set("parent")

        async def work(number: int) -> None:
            assert var.get() == "parent"
            assert other.get(None) is None
            for turn in range(5):
                token = var.set((number, turn))
                other.set(number)
                await asyncio.sleep(0.001 * (number % 3))
                assert var.get() == (number, turn)
                assert other.get() == number
                assert await asyncio.to_thread(var.get) == (number, turn)
                if turn % 2:
                    var.reset(token)
                    assert var.get() == (number, turn - 1)

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(work(number))
            ours = [headgate.create_task(work(number)) for number in range(10, 20)]
            await asyncio.gather(*ours, *[work(number) for number in range(20, 30)])
        assert var.get() == "parent"
        assert other.get(None) is None

    on(loop, main)


@on_each_loop
def test_w82_what_a_child_of_a_task_group_sets_stays_there(loop: str) -> None:
    async def main() -> None:
        var = declare(default=0)

        async def child(number: int) -> int:
            seen = var.get()
            var.set(number)
            await asyncio.sleep(0)
            return seen if var.get() == number else -1

        async with asyncio.TaskGroup() as group:
            first = group.create_task(child(1))
            var.set(5)
            second = group.create_task(child(2))
            bound = headgate.copy_context()
            third = group.create_task(child(3), context=bound)  # type: ignore[arg-type]
        assert [first.result(), second.result(), third.result()] == [0, 5, 5]
        assert var.get() == 5
        assert bound[var] == 3

    on(loop, main)


# -- W86: a task bound to a Context -----------------------------------------------------------------------------------


@on_each_loop
@each_spelling
def test_w86_a_task_runs_in_the_context_it_is_given(loop: str, spelling: str) -> None:
    async def main() -> None:
        create = SPELLINGS[spelling]
        var = declare()
        stdlib = contextvars.ContextVar[str]("stdlib", default="none")
        var.set("copied")
        ctx = headgate.copy_context()
        var.set("here")

        async def work(value: str) -> tuple[Any, str]:
            seen = var.get()
            var.set(value)
            stdlib.set(value)
            await asyncio.sleep(0)
            assert var.get() == value
            return seen, await id_here()

        assert await create(work("first"), context=ctx) == ("copied", ctx.id)
        assert ctx[var] == "first"
        assert ctx.run(stdlib.get) == "first"
        assert await create(work("second"), context=ctx) == ("first", ctx.id)
        assert dict(ctx) == {var: "second"}
        assert var.get() == "here"
        assert stdlib.get() == "none"

    on(loop, main)


@on_each_loop
@each_spelling
def test_w86_a_bound_task_is_a_task(loop: str, spelling: str) -> None:
    async def main() -> None:
        create = SPELLINGS[spelling]
        ctx = headgate.copy_context()

        async def me() -> Any:
            return asyncio.current_task()

        async def fails() -> None:
            raise KeyError("x")

        task = create(me(), context=ctx)
        assert isinstance(task, asyncio.Task)
        assert await task is task
        with pytest.raises(KeyError):
            await create(fails(), context=ctx)
        fork = create(me())
        assert isinstance(fork, asyncio.Task)
        assert await fork is fork

    on(loop, main)


@on_each_loop
def test_w86_create_task_takes_a_name(loop: str) -> None:
    async def main() -> None:
        ctx = headgate.copy_context()
        tasks = [
            headgate.create_task(id_here(), name="forked"),
            headgate.create_task(id_here(), name="bound", context=ctx),
            asyncio.create_task(id_here(), name="theirs", context=ctx.copy()),  # type: ignore[arg-type]
            headgate.create_task(id_here()),
        ]
        assert [one.get_name() for one in tasks[:3]] == ["forked", "bound", "theirs"]
        assert tasks[3].get_name()
        await asyncio.gather(*tasks)
        positional: Any = headgate.create_task
        coro = id_here()
        with pytest.raises(TypeError):
            positional(coro, "name")
        coro.close()

    on(loop, main)


def test_w86_create_task_needs_a_running_loop() -> None:
    coro = id_here()
    with pytest.raises(RuntimeError):
        headgate.create_task(coro)
    coro.close()


@on_each_loop
@each_spelling
def test_w86_a_fork_of_a_bound_task_is_a_fork(loop: str, spelling: str) -> None:
    async def main() -> None:
        create = SPELLINGS[spelling]
        var = declare()
        ctx = headgate.copy_context()

        async def child() -> str:
            assert var.get() == "bound"
            var.set("child")
            return await id_here()

        async def work() -> str:
            token = var.set("bound")
            theirs = await create(child())
            assert var.get() == "bound"
            var.reset(token)
            return theirs

        assert await create(work(), context=ctx) not in (ctx.id, headgate.current_context().id)
        assert dict(ctx) == {}

    on(loop, main)


# -- W86: one task per Context ----------------------------------------------------------------------------------------


@on_each_loop
@pytest.mark.parametrize("first", list(SPELLINGS))
@pytest.mark.parametrize("second", list(SPELLINGS))
@pytest.mark.parametrize("started", [False, True])
def test_w86_a_second_task_on_a_context_is_refused_when_it_is_made(
    loop: str, first: str, second: str, started: bool
) -> None:
    async def main() -> None:
        ctx = headgate.copy_context()
        go = asyncio.Event()
        ran: list[str] = []

        async def waits() -> str:
            await go.wait()
            return "first"

        async def intruder() -> None:
            ran.append("intruder")

        task = SPELLINGS[first](waits(), context=ctx)
        if started:
            await asyncio.sleep(0.001)
        for _ in range(2):
            coro = intruder()
            with pytest.raises(RuntimeError):
                SPELLINGS[second](coro, context=ctx)
            coro.close()
        await SPELLINGS[second](intruder(), context=ctx.copy())  # its copy is free
        assert ran == ["intruder"]
        go.set()
        assert await task == "first"
        await SPELLINGS[second](intruder(), context=ctx)
        assert ran == ["intruder", "intruder"]

    on(loop, main)


@on_each_loop
@each_spelling
def test_w86_a_context_is_free_however_its_task_ended(loop: str, spelling: str) -> None:
    async def main() -> None:
        create = SPELLINGS[spelling]
        ctx = headgate.copy_context()

        async def returns() -> int:
            return 1

        async def fails() -> None:
            raise KeyError("x")

        async def forever() -> None:
            await asyncio.Event().wait()

        for _ in range(2):
            assert await create(returns(), context=ctx) == 1
            with pytest.raises(KeyError):
                await create(fails(), context=ctx)
            started = create(forever(), context=ctx)
            await asyncio.sleep(0.001)
            started.cancel()
            with pytest.raises(asyncio.CancelledError):
                await started
            unstarted = create(forever(), context=ctx)
            unstarted.cancel()
            with pytest.raises(asyncio.CancelledError):
                await unstarted

    on(loop, main)


@on_each_loop
@each_spelling
@pytest.mark.parametrize("bound", [False, True])
def test_w86_a_task_cancelled_before_it_began_says_nothing(loop: str, spelling: str, bound: bool) -> None:
    """As with asyncio: the coroutine counts as begun, and Python does not complain that nobody awaited it."""

    async def main() -> None:
        headgate.install_task_factory(asyncio.get_running_loop())
        task = SPELLINGS[spelling](id_here(), context=headgate.copy_context() if bound else None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on(loop, main)
        gc.collect()
    assert [str(one.message) for one in caught] == []


@on_each_loop
def test_w86_a_task_that_is_being_cancelled_is_not_done(loop: str) -> None:
    async def main() -> None:
        ctx = headgate.copy_context()
        go = asyncio.Event()

        async def stubborn() -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await go.wait()
            return "ended"

        task = headgate.create_task(stubborn(), context=ctx)
        await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0.001)
        coro = id_here()
        with pytest.raises(RuntimeError):
            headgate.create_task(coro, context=ctx)
        coro.close()
        go.set()
        assert await task == "ended"
        assert await headgate.create_task(id_here(), context=ctx) == ctx.id

    on(loop, main)


@on_each_loop
def test_w86_a_context_is_held_against_another_loop_too(loop: str) -> None:
    async def main() -> None:
        ctx = headgate.copy_context()
        go = asyncio.Event()
        task = headgate.create_task(go.wait(), context=ctx)

        async def elsewhere() -> str:
            coro = id_here()
            said = error_of(lambda: headgate.create_task(coro, context=ctx))
            coro.close()
            return said

        said: list[str] = []
        thread = threading.Thread(target=lambda: said.append(on(loop, elsewhere)))
        thread.start()
        await asyncio.to_thread(thread.join)
        assert said == ["RuntimeError"]
        go.set()
        await task

    on(loop, main)


@on_each_loop
def test_w86_of_two_loops_that_bind_at_the_same_time_one_is_refused(loop: str) -> None:
    """While a factory is still making the first task, there is no task to ask whether it is done."""
    ctx = contextvars.Context().run(headgate.copy_context)
    inside, go = threading.Event(), threading.Event()
    said: list[str] = []

    async def first() -> None:
        def slow(loop: Any, coro: Any, **options: Any) -> asyncio.Task[Any]:
            inside.set()
            assert go.wait(10)
            return asyncio.Task(coro, loop=loop, **options)

        asyncio.get_running_loop().set_task_factory(slow)
        said.append(await headgate.create_task(id_here(), context=ctx))

    async def second() -> None:
        coro = id_here()
        try:
            task = headgate.create_task(coro, context=ctx)
        except RuntimeError:
            coro.close()
            said.append("refused")
        else:
            said.append(f"bound too: {await task}")

    thread = threading.Thread(target=lambda: on(loop, first))
    thread.start()
    try:
        assert inside.wait(10)
        on(loop, second)
    finally:
        go.set()
        thread.join()
    assert said == ["refused", ctx.id]


# -- W86: the task factory --------------------------------------------------------------------------------------------


@on_each_loop
def test_w86_copy_context_outside_of_a_loop_and_the_factory_installed_by_hand(loop: str) -> None:
    var = declare()

    def made() -> headgate.Context:
        var.set("outside")
        return headgate.copy_context()

    ctx = contextvars.Context().run(made)

    async def work() -> Any:
        return var.get(), headgate.current_context().id

    async def plainly() -> None:
        assert await asyncio.create_task(work(), context=ctx) == ("outside", ctx.id)  # type: ignore[arg-type]

    async def by_ours() -> None:
        assert await headgate.create_task(work(), context=ctx) == ("outside", ctx.id)

    here = LOOPS[loop]()
    try:
        headgate.install_task_factory(here)  # before it runs
        here.run_until_complete(bounded(plainly))
    finally:
        here.close()
    on(loop, by_ours)  # on a loop where nothing was installed by hand


@on_each_loop
def test_w86_installing_twice_is_installing_once(loop: str) -> None:
    async def main() -> None:
        here = asyncio.get_running_loop()
        made: list[Any] = []

        def theirs(loop: Any, coro: Any, **options: Any) -> asyncio.Task[Any]:
            made.append(coro)
            return asyncio.Task(coro, loop=loop, **options)

        here.set_task_factory(theirs)
        headgate.install_task_factory(here)
        ours = here.get_task_factory()
        assert ours is not None
        assert ours is not theirs
        for _ in range(3):
            headgate.install_task_factory(here)
            headgate.copy_context()
        assert here.get_task_factory() is ours
        await asyncio.create_task(id_here())
        assert len(made) == 1

    on(loop, main)


@on_each_loop
def test_w86_an_existing_factory_is_wrapped(loop: str) -> None:
    """It makes every task, it can make its own kind, and what it is given is what asyncio would give it."""

    class Own(asyncio.Task):  # type: ignore[type-arg]
        pass

    async def main() -> None:
        here = asyncio.get_running_loop()
        given: list[Any] = []

        def theirs(loop: Any, coro: Any, **options: Any) -> asyncio.Task[Any]:
            given.append(options.get("context"))
            return Own(coro, loop=loop, **options)

        here.set_task_factory(theirs)
        ctx = headgate.copy_context()
        var = declare()

        async def work() -> str:
            var.set("set")
            return await id_here()

        stdlib = contextvars.copy_context()
        tasks = [
            headgate.create_task(work(), context=ctx),
            asyncio.create_task(work(), context=ctx.copy(), name="named"),  # type: ignore[arg-type]
            asyncio.create_task(work(), context=stdlib),
            asyncio.create_task(work()),
            headgate.create_task(work()),
        ]
        assert [type(one) for one in tasks] == [Own] * 5
        assert tasks[1].get_name() == "named"
        assert len(given) == 5
        assert all(one is None or isinstance(one, contextvars.Context) for one in given)
        assert given[2] is stdlib
        ids = await asyncio.gather(*tasks)
        assert ids[0] == ctx.id
        assert len({headgate.current_context().id, *ids}) == 6
        assert ctx[var] == "set"
        assert stdlib.run(var.get) == "set"
        assert var.get(None) is None

    on(loop, main)


@on_each_loop
def test_w86_a_factory_set_later_is_wrapped_with_the_next_copy(loop: str) -> None:
    async def main() -> None:
        here = asyncio.get_running_loop()
        headgate.install_task_factory(here)
        made: list[Any] = []

        def theirs(loop: Any, coro: Any, **options: Any) -> asyncio.Task[Any]:
            made.append(coro)
            return asyncio.Task(coro, loop=loop, **options)

        here.set_task_factory(theirs)
        for number, create in enumerate(SPELLINGS.values(), 1):
            ctx = headgate.copy_context()
            assert await create(id_here(), context=ctx) == ctx.id
            assert len(made) == number
        here.set_task_factory(None)
        ctx = headgate.copy_context()
        assert await asyncio.create_task(id_here(), context=ctx) == ctx.id  # type: ignore[arg-type]

    on(loop, main)


@on_each_loop
def test_w86_a_factory_that_wraps_ours_binds_a_context_once(loop: str) -> None:
    async def main() -> None:
        here = asyncio.get_running_loop()
        headgate.install_task_factory(here)
        ours: Any = here.get_task_factory()

        def around(loop: Any, coro: Any, **options: Any) -> Any:
            return ours(loop, coro, **options)

        here.set_task_factory(around)
        for create in SPELLINGS.values():
            ctx = headgate.copy_context()
            for _ in range(2):
                assert await create(id_here(), context=ctx) == ctx.id
            assert await create(id_here()) not in (ctx.id, headgate.current_context().id)

    on(loop, main)


@on_each_loop
def test_w86_with_the_factory_stdlib_contexts_work_as_before(loop: str) -> None:
    async def main() -> None:
        headgate.install_task_factory(asyncio.get_running_loop())
        var = declare()
        var.set("here")
        empty, copied = contextvars.Context(), contextvars.copy_context()

        async def work(value: str) -> Any:
            seen = var.get(None)
            var.set(value)
            await asyncio.sleep(0)
            return seen

        assert await asyncio.create_task(work("a"), context=empty) is None
        assert await asyncio.create_task(work("b"), context=copied) == "here"
        assert (empty.run(var.get), copied.run(var.get), var.get()) == ("a", "b", "here")
        first, second = (asyncio.create_task(work("c"), context=empty) for _ in range(2))  # no guard on these
        assert await asyncio.gather(first, second) == ["a", "c"]

    on(loop, main)


# -- callbacks, timers, threads ---------------------------------------------------------------------------------------


@on_each_loop
@pytest.mark.parametrize("factory", [False, True])
def test_w86_callbacks_timers_and_threads_see_what_stdlib_variables_show(loop: str, factory: bool) -> None:
    async def main() -> None:
        here = asyncio.get_running_loop()
        if factory:
            headgate.install_task_factory(here)
        ours, theirs = declare(default="default"), contextvars.ContextVar("theirs", default="default")
        seen: dict[str, tuple[Any, Any]] = {}

        def note(what: str, *_: Any) -> None:
            seen[what] = ours.get(), theirs.get()
            ours.set(what)
            theirs.set(what)

        def both(value: str) -> None:
            ours.set(value)
            theirs.set(value)

        both("first")
        future = here.create_future()
        here.call_soon(note, "call_soon")
        here.call_later(0.001, note, "call_later")
        here.call_at(here.time(), note, "call_at")
        here.call_soon_threadsafe(note, "call_soon_threadsafe")
        future.add_done_callback(functools.partial(note, "future"))
        elsewhere = contextvars.Context()
        here.call_soon(functools.partial(note, "elsewhere"), context=elsewhere)
        both("second")
        task = asyncio.create_task(asyncio.sleep(0))
        task.add_done_callback(functools.partial(note, "task"))
        both("third")
        future.set_result(None)
        await task
        await asyncio.to_thread(note, "to_thread")
        await here.run_in_executor(None, note, "executor")
        while len(seen) < 9:  # noqa: ASYNC110 - bounded by the runner
            await asyncio.sleep(0.001)
        assert {what: pair[0] for what, pair in seen.items()} == {what: pair[1] for what, pair in seen.items()}
        assert seen["call_soon"] == ("first", "first")
        assert seen["call_later"] == ("first", "first")
        assert seen["future"] == ("first", "first")
        assert seen["task"] == ("second", "second")
        assert seen["to_thread"] == ("third", "third")
        assert seen["elsewhere"] == ("default", "default")
        assert elsewhere.run(ours.get) == "elsewhere"
        assert (ours.get(), theirs.get()) == ("third", "third")

    on(loop, main)


@on_each_loop
@each_spelling
def test_w86_reading_from_to_thread_just_works(loop: str, spelling: str) -> None:
    async def main() -> None:
        var, bare = declare(default="default"), declare()

        def look() -> tuple[Any, Any, int]:
            return var.get(), bare.get("unset"), len(headgate.current_context())

        assert await asyncio.to_thread(look) == ("default", "unset", 0)
        var.set("here")
        assert await asyncio.to_thread(look) == ("here", "unset", 1)
        bare.set(1)
        assert await asyncio.to_thread(look) == ("here", 1, 2)

        def change() -> str:
            inner = var.set("thread")
            assert var.get() == "thread"
            var.reset(inner)
            var.set("again")
            copied = headgate.copy_context()  # no loop runs in this thread
            assert copied[var] == "again"
            return copied.run(var.get)

        async def inside() -> Any:
            assert await asyncio.to_thread(change) == "again"
            return await asyncio.to_thread(look)

        assert await SPELLINGS[spelling](inside()) == ("here", 1, 2)
        assert await SPELLINGS[spelling](inside(), context=headgate.copy_context()) == ("here", 1, 2)
        assert var.get() == "here"

    on(loop, main)


# -- a task of a TaskPool ---------------------------------------------------------------------------------------------


@pytest.fixture
def leaves_no_pool_behind() -> Iterator[None]:
    yield
    assert pool_list() == []


@on_each_loop
@pytest.mark.usefixtures("leaves_no_pool_behind")
def test_w82_a_task_of_a_pool_runs_in_the_context_of_its_submitter(loop: str) -> None:
    async def main() -> None:
        var = declare(default="default")

        def plainly() -> Any:
            return var.get()

        async def look() -> Any:
            first = var.get()
            await asyncio.sleep(0)
            return first if var.get() == first else "changed"

        async with TaskPool(max_concurrent=1) as pool:
            gate = asyncio.Event()
            blocker = await pool.submit(gate.wait)

            async def submitter(number: int) -> list[Any]:
                var.set(number)
                handles = [await pool.submit(look), await pool.submit(plainly), pool.submit_nowait(look)]
                var.set("after the submit")
                await asyncio.sleep(0.001)
                return [await handle for handle in handles]

            submitters: list[Awaitable[list[Any]]] = [asyncio.create_task(submitter(number)) for number in range(5)]
            unset = await pool.submit(look)
            await asyncio.sleep(0.01)
            gate.set()
            assert await asyncio.gather(*submitters) == [[number] * 3 for number in range(5)]
            assert await unset == "default"
            assert await blocker is True

    on(loop, main)


@on_each_loop
@pytest.mark.usefixtures("leaves_no_pool_behind")
def test_w82_tasks_of_a_pool_never_see_each_other(loop: str) -> None:
    async def main() -> None:
        var = declare()
        token = var.set("submitter")

        async def work(number: int) -> Any:
            assert var.get() == "submitter"
            assert error_of(lambda: var.reset(token)) == "ValueError"  # a copy: another Context
            own = var.set(number)
            await asyncio.sleep(0.001 * (number % 3))
            assert var.get() == number
            assert await asyncio.to_thread(var.get) == number
            var.reset(own)
            assert var.get() == "submitter"
            var.set("left")
            return headgate.current_context().id

        def in_a_thread(number: int) -> Any:
            assert var.get() == "submitter"
            var.set(number)
            return var.get()

        async with TaskPool(max_concurrent=4) as pool:
            handles = [await pool.submit(work, number) for number in range(12)]
            threads = [await pool.submit(in_a_thread, number) for number in range(6)]
            ids = [await handle for handle in handles]
            assert [await handle for handle in threads] == list(range(6))
        assert len({headgate.current_context().id, *ids}) == 13
        assert var.get() == "submitter"
        var.reset(token)

    on(loop, main)
