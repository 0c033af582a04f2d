"""What was tried to break context variables, and must not."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import importlib
import os
import pickle
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import ContextDecodeWarning, ContextVar, ContextVarCollision, InvalidType
from headgate.context import travel
from tests.integration.context import attack_jobs as far
from tests.integration.context.attack_jobs import page, thing
from tests.integration.context.conftest import Apart
from tests.integration.context.test_travel import script
from tests.support.workers.support import run


def recorded() -> Any:
    return warnings.catch_warnings(record=True)


# -- values that are not what they say --------------------------------------------------------------------------------


@pytest.mark.parametrize("routine", ["pretends", "pretends_in_a_list", "pretends_at_last"])
def test_w84_a_value_that_lies_about_its_class_costs_no_outcome(shared: Apart, routine: str) -> None:
    async def main() -> None:
        with recorded() as caught:
            warnings.simplefilter("always")
            if routine == "pretends":
                assert await far.pretends() == 42
            elif routine == "pretends_in_a_list":
                with pytest.raises(ValueError, match="planted"):
                    await far.pretends_in_a_list()
            else:
                assert [item async for item in far.pretends_at_last()] == [1, 2]
        assert {one.category for one in caught} == {ContextDecodeWarning}
        assert thing.get("unset") == "unset"
        assert await far.see() == "unset"

    shared(main)


@pytest.mark.parametrize("wrapped", [False, True])
def test_w84_at_a_call_it_is_named(shared: Apart, wrapped: bool) -> None:
    async def main() -> None:
        thing.set([far.Pretender()] if wrapped else far.Pretender())
        with pytest.raises(InvalidType, match="attack_thing"):
            await far.see()

    shared(main)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, SystemExit, StopIteration])
def test_w84_whatever_unpickling_raises_the_result_is_there(shared: Apart, kind: type[BaseException]) -> None:
    async def main() -> None:
        with recorded() as caught:
            warnings.simplefilter("always")
            assert await far.sets_raising(kind, os.getpid()) == 42
            assert [one.category for one in caught] == [ContextDecodeWarning]
        thing.set(far.Raising(kind, os.getpid(), False))
        assert await far.see() == "unset", "it could not be read there"

    shared(main)


def test_w42_what_a_routine_sets_is_bounded_by_max_payload() -> None:
    async def main() -> None:
        async with headgate.WorkerPool(spawn=1, max_payload=100_000):
            with recorded() as caught:
                warnings.simplefilter("always")
                assert await far.sets_long(200_000) == 42
            assert ["max_payload" in str(one.message) for one in caught] == [True]
            assert (thing.get("unset"), page.get()) == ("unset", 0)
            assert await far.see() == "unset", "the caller can go on calling"

    run(main)


@pytest.mark.parametrize(
    "frame",
    [
        (1, {}, (), "", "", (), ()),
        ({}, 1, (), "", "", (), ()),
        ({}, {}, 1, "", "", (), ()),
        ({}, {}, ([],), "", "", (), ()),
        ({}, {}, (), 1, "", (), ()),
        ({}, {}, (), "", "", 1, ()),
        ({}, {}, (), "", "", ([],), ()),
        ({}, {}, (), "", "", (), 1),
        ({}, {}, (), "", "", (), (1,)),
        ({1: 2}, {}, (), "", "", (), ()),
        ({},),
        (*({},) * 9,),
        None,
    ],
)
def test_w84_a_frame_that_says_nonsense_gives_an_empty_context(frame: Any) -> None:
    data = travel._FULL + pickle.dumps(frame)
    context = contextvars.copy_context()
    failures = context.run(travel.received, data, pickle.loads)
    assert len(failures) == (frame != ({},)), "what is left out is empty"
    assert context.run(thing.get, "unset") == "unset"


def test_w81_a_tangle_of_lists_is_looked_at_once() -> None:
    """Counted, not timed: each is as wide as can be, and holds the next so many times."""
    tangle: Any = [1] * 32
    for _ in range(6):
        tangle = [tangle] * 32
    itself: Any = []
    itself += [itself] * 32
    for value in (tangle, itself, [itself, tangle]):
        assert travel._kind(value) == travel._FULL


# -- leaks between calls ----------------------------------------------------------------------------------------------

HOOK = """
import asyncio
import headgate

tenant = headgate.ContextVar("tenant", default="unknown")

@headgate.routine
async def who():
    return tenant.get()

def hook(context):
    tenant.get()
    return False

def worker(*tags, credentials=None):
    return headgate.LocalWorker(*tags, credentials=credentials, backpressure=hook)

async def main():
    token = tenant.set("acme")
    async with headgate.WorkerPool(spawn=1, worker=worker):
        tenant.reset(token)
        print(await who(), await who())

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_w82_a_hook_by_value_brings_no_value_along(tmp_path: Path) -> None:
    done = script(HOOK, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "unknown unknown\n", "")


DEFAULTS = """
import asyncio
import headgate

class Config:
    pass

config = headgate.ContextVar("config", default=Config())
seen = headgate.ContextVar("seen", default=[])

@headgate.routine
async def look(deep):
    here = isinstance(config.get(), Config), len(seen.get())
    below = await look(deep - 1) if deep else []
    seen.get().append(1)
    return [here, *below]

async def main():
    async with headgate.WorkerPool(spawn=2):
        found = [one for _ in range(4) for one in await look(1)]
        print(set(found))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_w82_a_default_is_of_the_call_that_brought_it(tmp_path: Path) -> None:
    done = script(DEFAULTS, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{(True, 0)}\n", "")


def test_w32_what_a_hook_sets_is_seen_by_nobody() -> None:
    async def main() -> None:
        def worker(*tags: str, credentials: Any = None) -> headgate.LocalWorker:
            return headgate.LocalWorker(*tags, credentials=credentials, backpressure=far.hook_that_sets)

        async with headgate.WorkerPool(spawn=1, worker=worker):
            thing.set("mine")
            assert await far.see() == "mine"
            assert thing.get() == "mine"

    run(main)


def test_w82_calls_that_share_a_context_keep_what_both_set(shared: Apart) -> None:
    async def main() -> None:
        assert await far.two_in_one_context() == ("theirs", 9)

    shared(main)


def test_w81_leaving_a_generator_that_ran_ahead_brings_nothing_of_what_was_not_taken(shared: Apart) -> None:
    async def main() -> None:
        pages = far.pages()
        assert [await anext(pages), await anext(pages)] == [1, 2]
        await asyncio.sleep(0.05)  # the others are on their way
        await pages.aclose()
        assert page.get() == 2

    shared(main)


# -- memory -----------------------------------------------------------------------------------------------------------


class Body:
    """Something that can be watched."""


def test_w82_a_stream_that_many_tasks_read_keeps_none_of_their_contexts(shared: Apart) -> None:
    async def main() -> None:
        bodies: list[weakref.ref[Body]] = []
        numbers = far.numbers()

        async def request() -> int:
            private = contextvars.ContextVar[Body]("private")
            body = Body()
            private.set(body)
            bodies.append(weakref.ref(body))
            return await anext(numbers)

        for expected in range(1, 30):
            assert await asyncio.create_task(request()) == expected
        gc.collect()
        assert sum(body() is not None for body in bodies) <= 1
        await numbers.aclose()

    shared(main)


def test_w86_asking_for_an_id_leaves_nothing_for_the_collector() -> None:
    async def main() -> None:
        bodies: list[weakref.ref[Body]] = []
        ids = set()

        async def request() -> None:
            body = Body()
            thing.set(body)
            bodies.append(weakref.ref(body))
            ids.add(headgate.current_context().id)
            ids.add(headgate.current_context().id)

        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await asyncio.create_task(request())
            await asyncio.sleep(0)
            assert len(ids) == 20, "each has one, and the same when it asks again"
            assert [body() for body in bodies] == [None] * 20
        finally:
            gc.enable()

    run(main)


# -- declarations, and what is said -----------------------------------------------------------------------------------


def test_w80_a_module_that_is_loaded_again_has_the_same_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"headgate_again_{os.getpid()}"
    file = tmp_path / f"{name}.py"
    file.write_text("from headgate import ContextVar\nvar = ContextVar('again', default=1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    first = module.var
    try:
        assert importlib.reload(module).var is first
        file.write_text("from headgate import ContextVar\nvar = ContextVar('again', default=22)\n")
        importlib.invalidate_caches()
        with pytest.raises(ContextVarCollision, match="another name or namespace"):
            importlib.reload(module)
    finally:
        del sys.modules[name]


def test_w80_a_function_that_declares_twice_collides_with_itself() -> None:
    def make() -> Any:
        return ContextVar("made_twice", namespace="attack.again")

    first = make()
    with pytest.raises(ContextVarCollision, match="test_attacks"):
        make()
    assert first.key == "attack.again:made_twice"


def test_w86_a_task_may_be_made_in_the_context_it_is_made_from() -> None:
    async def main() -> None:
        async def body() -> str:
            thing.set("set")
            return headgate.current_context().id

        context = headgate.copy_context()
        task = context.run(lambda: headgate.create_task(body(), context=context))
        assert await task == context.id
        assert context[thing] == "set"

    run(main)


def test_w86_a_context_says_that_it_does_not_travel(shared: Apart) -> None:
    with pytest.raises(InvalidType, match="a Context cannot be pickled"):
        pickle.dumps(headgate.copy_context())


def test_w85_what_a_token_was_may_be_returned(shared: Apart) -> None:
    async def main() -> None:
        assert await far.what_it_was() is contextvars.Token.MISSING

    shared(main)


NATIVE = """
import asyncio
import contextvars
import headgate

tenant = contextvars.ContextVar("tenant")

@headgate.routine
async def who():
    return tenant.get()

async def main():
    async with headgate.WorkerPool(spawn=1):
        try:
            await who()
        except headgate.InvalidType as error:
            print("headgate.ContextVar goes along" in str(error))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_w80_who_takes_the_one_of_contextvars_is_told_of_ours(tmp_path: Path) -> None:
    done = script(NATIVE, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_w84_a_warning_of_a_task_names_the_routine(shared: Apart) -> None:
    """A task of nobody but the loop: there is no line of a user's that waits."""

    async def main() -> None:
        with recorded() as caught:
            warnings.simplefilter("always")
            await asyncio.gather(far.sets_raising(ValueError, os.getpid()), far.sets_raising(ValueError, os.getpid()))
        assert [one.filename.rpartition(".")[2] for one in caught] == ["sets_raising"] * 2

    shared(main)
