"""W84: values that cannot be read or written. They cost the variable and a warning, and never a result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import ContextDecodeWarning
from tests.integration.context import travel_jobs as far
from tests.integration.context.conftest import Apart
from tests.integration.context.travel_jobs import NOTHING, UNSET, Fragile, Planted, extra, region, tenant, values
from tests.integration.context.wiretap import Tap
from tests.support.workers.support import lines, script, until

pytestmark = pytest.mark.integration

KEY = "tests:travel_tenant"
HOME = os.getpid()
MODES = ["lenient", "recorded", "strict"]


def test_w84_the_warning_is_a_warning() -> None:
    assert issubclass(ContextDecodeWarning, Warning)
    assert ContextDecodeWarning is headgate.ContextDecodeWarning


@contextlib.contextmanager
def taking(mode: str) -> Iterator[list[warnings.WarningMessage]]:
    """How this process takes the warning: lenient is what Python does when nobody said anything."""
    with warnings.catch_warnings(record=mode == "recorded") as caught:
        if mode == "lenient":
            warnings.resetwarnings()
            warnings.showwarning = on_stderr  # pytest would keep it for its summary
        else:
            warnings.simplefilter("error" if mode == "strict" else "always", ContextDecodeWarning)
        yield caught if caught is not None else []


def on_stderr(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextDecodeWarning)
        yield


def about(said: object, cause: str) -> None:
    """It names the variable and the cause."""
    assert KEY in str(said)
    assert cause in str(said)


# -- on the caller ----------------------------------------------------------------------------------------------------


class Reach:
    """Brings a frame of a worker here: what went before it is sound."""

    def __init__(self, frame: str, kind: str) -> None:
        self.frame = frame
        self.kind = kind
        self.stream: Any = None

    async def before(self) -> None:
        if "yield" in self.frame or "generator" in self.frame:
            at = {"end of a generator": "end", "failure of a generator": "failure"}.get(self.frame, self.frame)
            self.stream = far.spoil_stream(self.kind, HOME, at)
            if self.frame != "first yield":
                assert await anext(self.stream) == "sound"

    async def __call__(self) -> Any:
        frame, stream = self.frame, self.stream
        if frame == "return":
            return await far.spoil_and_return(self.kind, HOME)
        if frame == "return of a thread":
            return await far.spoil_plainly_and_return(self.kind, HOME)
        if frame == "exception":
            return await far.spoil_and_fail(self.kind, HOME)
        if frame == "yield after send":
            return await stream.asend(1)
        if frame == "yield after throw":
            return await stream.athrow(Planted())
        if frame == "end of a generator":
            with contextlib.suppress(StopAsyncIteration):
                await anext(stream)
            return "result"
        return await anext(stream)

    async def after(self) -> None:
        if self.stream is not None:
            with silence():
                await self.stream.aclose()


FRAMES = [
    "return",
    "return of a thread",
    "exception",
    "first yield",
    "later yield",
    "yield after send",
    "yield after throw",
    "end of a generator",
    "failure of a generator",
]
KINDS = ["unreadable", "unwritable"]
CAUSES = {"unreadable": "planted for the caller", "unwritable": "planted for whoever writes it"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frame", FRAMES)
def test_w84_what_comes_from_a_worker(
    shared: Apart, capsys: pytest.CaptureFixture[str], frame: str, kind: str, mode: str
) -> None:
    fails = frame in ("exception", "failure of a generator")

    async def main() -> None:
        tenant.set("mine")
        reach = Reach(frame, kind)
        await reach.before()
        error: Any = None
        with taking(mode) as caught:
            try:
                assert await reach() == "result"
            except (Planted, ContextDecodeWarning) as raised:
                error = raised
            if mode == "lenient":
                said = capsys.readouterr().err
                assert said.count("ContextDecodeWarning") == 1
                about(said, CAUSES[kind])
            elif mode == "recorded":
                [found] = caught
                assert found.category is ContextDecodeWarning
                about(found.message, CAUSES[kind])
        if mode == "strict":
            assert type(error) is ContextDecodeWarning
            about(error, CAUSES[kind])
            assert (type(error.__cause__) is Planted) == fails
        else:
            assert (type(error) is Planted) == fails
            if fails:
                assert any(KEY in one for one in error.__notes__), error.__notes__
                assert "Remote traceback" in error.__notes__[-1] or any(
                    "Remote traceback" in n for n in error.__notes__
                )
            assert region.get() == "moved", "its neighbour in the same frame is sound"
        assert tenant.get() == "mine"
        await reach.after()
        assert tenant.get() == "mine"
        assert (await far.see())[0] == "mine", "all is well again"

    with silent_workers(shared):
        shared(main)


@contextlib.contextmanager
def silent_workers(shared: Apart, mode: str = "recorded") -> Iterator[None]:
    """The workers keep their warnings for themselves, or raise them."""

    async def listen(how: str) -> None:
        await shared.pool.broadcast(far.listen, how)

    shared(lambda: listen(mode))
    try:
        yield
    finally:
        shared(lambda: listen("recorded"))


async def heard(shared: Apart) -> list[str]:
    return [said for found in (await shared.pool.broadcast(far.heard)).values() for said in found]


def test_w84_the_caller_keeps_an_unset_variable_unset(shared: Apart) -> None:
    async def main() -> None:
        with taking("recorded") as caught:
            assert await far.spoil_and_return("unreadable", HOME) == "result"
        assert len(caught) == 1
        assert values() == (UNSET, "moved", UNSET)

    shared(main)


def test_w84_a_stream_goes_on_after_a_frame_that_cannot_be_read(shared: Apart) -> None:
    async def main() -> None:
        tenant.set("mine")
        async with aclosing(far.spoil_stream("unreadable", HOME, "later yield")) as stream:
            assert await anext(stream) == "sound"
            with taking("recorded") as caught:
                assert await anext(stream) == "result"
                assert await anext(stream) == "more"
                assert await anext(stream) == "more"
            assert 1 <= len(caught) <= 3
            assert tenant.get() == "mine"
            with silence():
                await stream.aclose()

    shared(main)


def test_w84_the_warning_is_issued_in_the_task_that_awaits(
    shared: Apart, monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    async def main() -> None:
        seen: list[Any] = []

        async def one(fn: Any, *args: Any) -> Any:
            return await fn(*args)

        with warnings.catch_warnings():
            warnings.simplefilter("always", ContextDecodeWarning)
            warnings.showwarning = lambda *rest: seen.append(asyncio.current_task())
            tasks = [
                asyncio.create_task(one(far.spoil_and_return, "unreadable", HOME)),
                asyncio.create_task(one(far.see)),
                asyncio.create_task(one(far.spoil_and_return, "unreadable", HOME)),
            ]
            assert await asyncio.gather(*tasks) == ["result", NOTHING, "result"]
        assert len(seen) == 2
        assert set(seen) == {tasks[0], tasks[2]}

    shared(main)


def test_w84_a_cancelled_end_that_cannot_be_read(shared: Apart, log: str) -> None:
    """The caller is cancelled all the same."""

    async def main() -> None:
        found: list[Any] = []

        async def caller() -> None:
            tenant.set("mine")
            try:
                await far.spoil_until_cancelled("unreadable", HOME, log)
            finally:
                found.append(values())

        with taking("recorded") as caught:
            task = asyncio.create_task(caller())
            await until(lambda: lines(log))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert found == [("mine", "moved", UNSET)]
        assert len(caught) == 1
        about(caught[0].message, CAUSES["unreadable"])

    shared(main)


@pytest.mark.parametrize("frame", ["return", "exception", "first yield", "later yield", "end of a generator"])
def test_w84_a_worker_warns_too_when_it_cannot_write(shared: Apart, frame: str) -> None:
    async def main() -> None:
        reach = Reach(frame, "unwritable")
        await reach.before()
        with taking("recorded") as caught:
            with contextlib.suppress(Planted):
                assert await reach() == "result"
        assert len(caught) == 1
        said = await heard(shared)
        assert len(said) == 1
        assert said[0].startswith("ContextDecodeWarning: ")
        about(said[0], CAUSES["unwritable"])
        await reach.after()
        await heard(shared)

    with silent_workers(shared):
        shared(main)


@pytest.mark.parametrize("frame", FRAMES)
def test_w84_not_even_a_strict_worker_loses_a_result_that_it_has(shared: Apart, frame: str) -> None:
    """What cannot be written never costs the result: the caller is told, and decides."""

    async def main() -> None:
        tenant.set("mine")
        reach = Reach(frame, "unwritable")
        await reach.before()
        with taking("recorded") as caught:
            with contextlib.suppress(Planted):
                assert await reach() == "result"
        assert len(caught) == 1
        about(caught[0].message, CAUSES["unwritable"])
        assert values() == ("mine", "moved", UNSET)
        await reach.after()
        assert (await far.see())[0] == "mine"

    with silent_workers(shared, "strict"):
        shared(main)


# -- on the worker ----------------------------------------------------------------------------------------------------


class Send:
    """Brings a frame of this process to a worker: what went before it is sound."""

    def __init__(self, frame: str, path: str) -> None:
        self.frame = frame
        self.path = path
        self.stream: Any = None

    async def before(self) -> None:
        if self.frame in ("first step", "next", "send", "throw"):
            self.stream = far.see_stream(self.path)
            if self.frame != "first step":
                assert await anext(self.stream) == values()

    async def __call__(self) -> Any:
        if self.frame == "call":
            return await far.see_and_note(self.path)
        if self.frame == "call that fails":
            return await far.fail_and_note(self.path)
        if self.frame == "send":
            return await self.stream.asend(1)
        if self.frame == "throw":
            return await self.stream.athrow(Planted())
        return await anext(self.stream)

    async def after(self) -> None:
        if self.stream is not None:
            with silence():
                await self.stream.aclose()


SENDS = ["call", "call that fails", "first step", "next", "send", "throw"]
LATER = ("next", "send", "throw")


@pytest.mark.parametrize("mode", ["recorded", "strict"])
@pytest.mark.parametrize("had", [pytest.param(False, marks=pytest.mark.soak), True], ids=["new", "had a value"])
@pytest.mark.parametrize("frame", SENDS)
def test_w84_what_comes_to_a_worker(shared: Apart, log: str, frame: str, had: bool, mode: str) -> None:
    async def main() -> None:
        if had:
            tenant.set("sound")
        send = Send(frame, log)
        await send.before()
        ran = len(lines(log))
        bad = Fragile("worker", HOME)
        tenant.set(bad)
        region.set("neighbour")
        found: Any
        try:
            found = await send()  # a warning of the worker's is not one of ours: here all are errors
        except Planted as error:
            assert frame == "call that fails"
            [found] = error.args
        except ContextDecodeWarning as error:
            assert mode == "strict"
            about(error, "planted for the worker")
            found = None
        if mode == "strict":
            assert found is None
            assert len(lines(log)) - lines(log).count("closed") == ran, "it did not run"
        else:
            # What a generator had from an earlier step it may still have; nothing else is there.
            assert found[0] in ((UNSET, "sound") if had and frame in LATER else (UNSET,))
            assert found[1:] == ("neighbour", UNSET)
            assert len(lines(log)) == ran + 1
        assert tenant.get() is bad, "what a worker could not read is still set here"
        tenant.set("sound again")
        if mode == "recorded":
            said = await heard(shared)
            assert len(said) == 1
            assert said[0].startswith("ContextDecodeWarning: ")
            about(said[0], "planted for the worker")
            if send.stream is not None:
                assert await anext(send.stream) == ("sound again", "neighbour", UNSET)
        await send.after()
        assert await far.see() == ("sound again", "neighbour", UNSET)
        await heard(shared)

    with silent_workers(shared, mode):
        shared(main)


def test_w84_a_worker_may_set_what_it_could_not_read(shared: Apart) -> None:
    async def main() -> None:
        tenant.set(Fragile("worker", HOME))
        region.set("neighbour")
        assert await far.replace_it() == (UNSET, "neighbour", UNSET)
        assert values() == ("replaced", "neighbour", UNSET)

    with silent_workers(shared):
        shared(main)


def test_w84_what_one_worker_cannot_hand_on(shared: Apart) -> None:
    """Nobody but this process could make it: the worker has nothing to hand on, and the nested call runs."""

    async def main() -> None:
        bad = Fragile("worker", HOME)
        tenant.set(bad)
        region.set("neighbour")
        assert await far.apply(far.see) == (UNSET, "neighbour", UNSET)
        assert tenant.get() is bad
        tenant.set("sound")
        assert len(await heard(shared)) == 1, "only the first of both warns"

    with silent_workers(shared):
        shared(main)


# -- frames that cannot be read at all --------------------------------------------------------------------------------


def garbled(context: bytes, how: str) -> bytes:
    if not context:
        return context
    return {"garbage": b"\xff\xfe\xfd garbage \x00", "cut": context[:-1], "no end": context[: len(context) // 2]}[how]


HOW = ["garbage", "cut", "no end"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("frame", SENDS)
def test_w84_a_frame_that_a_worker_cannot_read(shared: Apart, tap: Tap, log: str, frame: str, how: str) -> None:
    def alter(message: Any) -> None:
        for one in (*message.calls, *message.steps):
            if one.context:
                altered.append(one.number)
                one.context = garbled(one.context, how)

    async def main() -> None:
        send = Send(frame, log)
        await send.before()
        tenant.set("mine")
        region.set("neighbour")
        tap.alter_sent = alter
        found: Any
        try:
            found = await send()
        except Planted as error:
            [found] = error.args
        finally:
            tap.alter_sent = None
        assert found == NOTHING, "an empty context"
        assert values() == ("mine", "neighbour", UNSET)
        said = await heard(shared)
        assert said
        assert all(one.startswith("ContextDecodeWarning: ") for one in said)
        await send.after()
        assert await far.see() == ("mine", "neighbour", UNSET)
        await heard(shared)

    altered: list[int] = []
    with silent_workers(shared):
        shared(main)
    assert altered


SOUND_FRAMES = ["return", "exception", "yield", "end"]


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        pytest.param(how, mode, marks=() if how == "garbage" or mode == "recorded" else pytest.mark.soak)
        for how in HOW
        for mode in ("recorded", "strict")
    ],
)
@pytest.mark.parametrize("frame", SOUND_FRAMES)
def test_w84_a_frame_that_the_caller_cannot_read(shared: Apart, tap: Tap, frame: str, how: str, mode: str) -> None:
    def alter(message: Any) -> None:
        for one in (*message.results, *message.yields):
            if one.context:
                altered.append(one.number)
                one.context = garbled(one.context, how)

    async def call() -> Any:
        if frame == "return":
            return await far.swap(tenant="theirs")
        if frame == "exception":
            return await far.swap_and_fail(tenant="theirs")
        if frame == "yield":
            stream = far.converses()
            try:
                return (await anext(stream))[1]
            finally:
                tap.alter_received = None
                await stream.aclose()
        stream = far.ends_with(tenant="theirs")
        [item] = [item async for item in stream]
        return item

    async def main() -> None:
        tenant.set("mine")
        region.set("neighbour")
        tap.alter_received = alter
        error: Any = None
        try:
            with taking(mode) as caught:
                assert await call() == ("mine", "neighbour", UNSET)
        except (Planted, ContextDecodeWarning) as raised:
            error = raised
        finally:
            tap.alter_received = None
        assert values()[:2] == ("mine", "neighbour")
        if mode == "strict":
            assert type(error) is ContextDecodeWarning
            assert (type(error.__cause__) is Planted) == (frame == "exception")
        else:
            assert len(caught) == 1
            assert (type(error) is Planted) == (frame == "exception")
        assert (await far.see())[:2] == ("mine", "neighbour")

    altered: list[int] = []
    shared(main)
    assert len(altered) == 1


# -- workers that read PYTHONWARNINGS ---------------------------------------------------------------------------------


SCRIPT = """
import asyncio
import os
import sys
import warnings
from contextlib import aclosing

import headgate
from tests.integration.context import travel_jobs as far

MODE = {mode!r}
if MODE == "strict":
    os.environ["PYTHONWARNINGS"] = {option!r}

async def main():
    async with headgate.WorkerPool(spawn=1):
        far.region.set("neighbour")
        far.tenant.set(far.Fragile("worker", os.getpid()))
        try:
            print("found", await far.see())
        except headgate.ContextDecodeWarning as error:
            print("caught", type(error) is headgate.ContextDecodeWarning, far.tenant.key in str(error))
        try:
            async with aclosing(far.see_stream(os.devnull)) as stream:
                far.tenant.set("sound")
                print("first", await anext(stream))
                far.tenant.set(far.Fragile("worker", os.getpid()))
                print("later", (await anext(stream))[1:])
        except headgate.ContextDecodeWarning as error:
            print("caught later", far.tenant.key in str(error))
        far.tenant.set("sound")
        print("well", await far.see())

asyncio.run(main())
"""
OPTION = "error::headgate.ContextDecodeWarning"


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(OPTION, id="alone", marks=pytest.mark.soak),
        pytest.param(f"default::DeprecationWarning,{OPTION}", id="among others"),
    ],
)
def test_w84_workers_are_strict_by_the_environment(tmp_path: Path, option: str) -> None:
    done = script(SCRIPT.format(mode="strict", option=option), tmp_path)
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "caught True True",
        "first ('sound', 'neighbour', 'unset')",
        "caught later True",
        "well ('sound', 'neighbour', 'unset')",
    ]


def test_w84_the_option_is_in_the_environment_from_the_start(tmp_path: Path) -> None:
    """Python itself may say one line about it, of the program and not of a worker."""
    done = script(SCRIPT.format(mode="exported", option=OPTION), tmp_path, PYTHONWARNINGS=OPTION)
    alone = script("import sys", tmp_path, PYTHONWARNINGS=OPTION)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "caught True True"
    assert done.stdout.splitlines()[-1] == "well ('sound', 'neighbour', 'unset')"
    assert done.stderr == alone.stderr


def test_w84_lenient_workers_say_it_on_stderr(tmp_path: Path) -> None:
    done = script(SCRIPT.format(mode="lenient", option=""), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "found ('unset', 'neighbour', 'unset')"
    assert done.stdout.splitlines()[-1] == "well ('sound', 'neighbour', 'unset')"
    assert re.search(r"ContextDecodeWarning: .*" + re.escape(KEY), done.stderr)
    assert "planted for the worker" in done.stderr
    assert "Traceback" not in done.stderr


CALLER = """
import asyncio
import os

import headgate
from tests.integration.context import travel_jobs as far

async def main():
    async with headgate.WorkerPool(spawn=1):
        far.tenant.set("mine")
        print(await far.spoil_and_return("unreadable", os.getpid()), far.values())

asyncio.run(main())
"""


def test_w84_a_lenient_caller_gets_its_result(tmp_path: Path) -> None:
    done = script(CALLER, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "result ('mine', 'moved', 'unset')\n"
    assert done.stderr.count("ContextDecodeWarning") == 1
    about(done.stderr, CAUSES["unreadable"])


# -- what must not be touched -----------------------------------------------------------------------------------------


def test_w84_other_warnings_are_not_headgates(shared: Apart) -> None:
    """Sound values warn nobody, on either side."""

    async def main() -> None:
        tenant.set({"sound": [1, 2, 3]})
        extra.set(b"x" * 100_000)
        await far.swap(region="moved")
        async with aclosing(far.converses()) as stream:
            await anext(stream)
            await anext(stream)
        assert await heard(shared) == []

    with silent_workers(shared):
        shared(main)
