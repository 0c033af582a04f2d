"""Async generators that workers import by name, as they import a user's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

import headgate
from headgate import routine
from tests.support.workers import jobs
from tests.support.workers.jobs import KeywordOnly, SeveralArguments, note

_open = 0


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Counts the generators of this process that have begun and not ended."""
    global _open
    _open += 1
    try:
        yield
    finally:
        _open -= 1


@contextlib.contextmanager
def noting(path: str, name: str) -> Iterator[None]:
    """Notes the end, however it comes."""
    with counted():
        try:
            yield
        finally:
            note(path, f"{name} finally")


@routine
async def census() -> tuple[int, int, int]:
    """My pid, how many generators are open here, and how many tasks there are."""
    return os.getpid(), _open, len(asyncio.all_tasks())


# -- plain ones -------------------------------------------------------------------------------------------------------


@routine
async def count(n: int) -> AsyncGenerator[int, None]:
    """From 0 on."""
    for i in range(n):
        yield i


@routine
async def fib(n: int) -> AsyncGenerator[int, None]:
    a, b = 0, 1
    for _ in range(n):
        yield a
        a, b = b, a + b


@routine
async def here(n: int) -> AsyncGenerator[int, None]:
    with counted():
        for _ in range(n):
            yield os.getpid()


@routine
async def parameters(a: Any, b: Any = 2, *rest: Any, c: Any, **more: Any) -> AsyncGenerator[Any, None]:
    for value in (a, b, rest, c, more):
        yield value


@routine
async def gives(values: Sequence[Any]) -> AsyncGenerator[Any, None]:
    for value in values:
        yield value


@routine
async def steady(number: int, n: int, seconds: float) -> AsyncGenerator[tuple[int, int], None]:
    with counted():
        for i in range(n):
            await asyncio.sleep(seconds)
            yield number, i


@routine(prefetch=8)
async def steady_ahead(number: int, n: int, seconds: float) -> AsyncGenerator[tuple[int, int], None]:
    with counted():
        for i in range(n):
            await asyncio.sleep(seconds)
            yield number, i


@routine
async def noted(path: str, name: str) -> AsyncGenerator[int, None]:
    """Without end, and every step is noted."""
    with noting(path, name):
        for i in itertools.count():
            note(path, f"{name} {i}")
            yield i


@routine
async def waits(path: str, name: str, n: int = 0) -> AsyncGenerator[int, None]:
    """For ever, after so many."""
    with noting(path, name):
        for i in range(n):
            yield i
        note(path, f"{name} waits")
        await asyncio.sleep(3600)


@routine
async def slow_to_end(path: str, seconds: float) -> AsyncGenerator[int, None]:
    with counted():
        try:
            yield 1
            note(path, "waits")
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(seconds)
            note(path, "finally")


@routine
async def swallows(path: str) -> AsyncGenerator[str, None]:
    """Takes a cancelled step for a question."""
    with noting(path, "it"):
        while True:
            try:
                note(path, "waits")
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                yield "not now"


@routine
async def turns_it_into_an_error(path: str) -> AsyncGenerator[int, None]:
    with noting(path, "it"):
        try:
            note(path, "waits")
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ValueError("instead") from None
        yield 1


@routine
async def fails_after(n: int, make: Any, *args: Any, **more: Any) -> AsyncGenerator[int, None]:
    for i in range(n):
        yield i
    jobs.innermost(make(*args, **more))


@routine
async def exits(way: str) -> AsyncGenerator[int, None]:
    with counted():
        yield 1
        if way == "exit":
            sys.exit(3)
        await asyncio.sleep(0.01)
        raise KeyboardInterrupt


@routine
async def gives_a_lock(path: str) -> AsyncGenerator[Any, None]:
    with noting(path, "it"):
        yield 1
        yield threading.Lock()
        yield 3


@routine
async def gives_what_breaks(path: str, pid: int) -> AsyncGenerator[Any, None]:
    with noting(path, "it"):
        yield 1
        yield jobs.LoadsOnlyThere(pid)
        yield 3


@routine
async def hears(path: str) -> AsyncGenerator[str, Any]:
    """Tells the type of what it was sent."""
    with noting(path, "it"):
        got: Any = None
        while True:
            got = yield type(got).__name__


@routine
async def bounded_inside(seconds: float) -> AsyncGenerator[str, None]:
    """One timeout of the body's own, over several steps."""
    async with asyncio.timeout(seconds):
        yield "inside"
        yield "still"
        await asyncio.sleep(60)
        yield "never"


@routine
async def in_tasks(n: int) -> AsyncGenerator[bool, None]:
    for _ in range(n):
        await asyncio.sleep(0)
        yield isinstance(asyncio.current_task(), asyncio.Task)


# -- time -------------------------------------------------------------------------------------------------------------


@routine(timeout=1.0)
async def bounded(path: str, name: str, delays: Sequence[float]) -> AsyncGenerator[float, None]:
    with noting(path, name):
        for delay in delays:
            await asyncio.sleep(delay)
            yield delay


@routine(timeout=1.0, prefetch=4)
async def bounded_ahead(path: str, name: str, delays: Sequence[float]) -> AsyncGenerator[float, None]:
    with noting(path, name):
        for delay in delays:
            await asyncio.sleep(delay)
            yield delay


@routine(timeout=20)
async def own_timeout() -> AsyncGenerator[int, None]:
    yield 1
    raise TimeoutError("my own")


# -- bodies for scripts of random steps -------------------------------------------------------------------------------
# Each gives at most n values when nobody disturbs it, and notes what is done to it. It waits in `turn` alone.


async def turn(path: str) -> None:
    """Where a step can be cancelled: when there is a file that says hold, it waits here, once."""
    await asyncio.sleep(0)
    try:
        os.unlink(f"{path}.hold")
    except FileNotFoundError:
        return
    note(path, "held")
    await asyncio.sleep(3600)


def described(error: BaseException) -> str:
    return f"{type(error).__name__} {error} {getattr(error, 'field', None)}"


@routine
async def counts(path: str, n: int) -> AsyncGenerator[int, None]:
    for i in range(n):
        await turn(path)
        yield i
    note(path, "ended")


@routine
async def echoes(path: str, n: int) -> AsyncGenerator[Any, Any]:
    got: Any = "nothing yet"
    for _ in range(n):
        got = yield got
        note(path, f"got {got!r}")
        await turn(path)


@routine
async def catches(path: str, n: int) -> AsyncGenerator[Any, Any]:
    with noting(path, "it"):
        for i in range(n):
            try:
                await turn(path)
                got = yield i
                note(path, f"went on with {got!r}")
            except Exception as error:
                note(path, f"caught {described(error)}")
                got = yield "caught"
                note(path, f"went on with {got!r}, after it was caught")


@routine
async def ignores_exit(path: str, n: int) -> AsyncGenerator[Any, Any]:
    with noting(path, "it"):
        for i in range(n):
            try:
                await turn(path)
                yield i
            except GeneratorExit:
                note(path, "ignored")
                await turn(path)
                yield "ignored"


@routine
async def returns_on_exit(path: str, n: int) -> AsyncGenerator[Any, Any]:
    with noting(path, "it"):
        for i in range(n):
            try:
                await turn(path)
                yield i
            except GeneratorExit:
                note(path, "returns")
                return


@routine
async def fails_in_finally(path: str, n: int) -> AsyncGenerator[int, None]:
    try:
        for i in range(n):
            await turn(path)
            yield i
    finally:
        note(path, "finally")
        await turn(path)
        raise SeveralArguments(5, "in finally", {"n": n})


@routine
async def guarded(path: str, n: int) -> AsyncGenerator[int, None]:
    try:
        for i in range(n):
            try:
                await turn(path)
                yield i
            finally:
                note(path, f"inner finally {i}")
                await turn(path)
    finally:
        note(path, "outer finally")


@routine
async def catches_cancellation(path: str, n: int) -> AsyncGenerator[Any, Any]:
    with noting(path, "it"):
        for i in range(n):
            cancelled = False
            try:
                await turn(path)
            except asyncio.CancelledError:
                note(path, "cancelled")
                cancelled = True
            yield (i, cancelled)


@routine
async def fails_when_cancelled(path: str, n: int) -> AsyncGenerator[Any, Any]:
    with noting(path, "it"):
        for i in range(n):
            try:
                await turn(path)
                yield i
            except asyncio.CancelledError:
                note(path, "cancelled")
                break
        else:
            return
        raise ValueError("it was cancelled")


@routine
async def catches_everything(path: str, n: int) -> AsyncGenerator[Any, Any]:
    with noting(path, "it"):
        for i in range(n):
            try:
                await turn(path)
                yield i
            except BaseException as error:
                note(path, f"caught {described(error)}")
                yield type(error).__name__


@routine
async def replaces(path: str, n: int) -> AsyncGenerator[Any, Any]:
    with noting(path, "it"):
        try:
            for i in range(n):
                await turn(path)
                yield i
        except (Exception, GeneratorExit) as error:
            raise KeywordOnly(field=described(error), count=n) from error


@routine
async def ends_oddly(path: str, n: int) -> AsyncGenerator[Any, Any]:
    with noting(path, "it"):
        for i in range(n):
            await turn(path)
            yield i
        await turn(path)
        if n == 0:
            raise KeywordOnly(field="at once")
        if n == 1:
            raise StopAsyncIteration("its own")
        if n == 2:
            raise StopIteration("its own")
        if n == 3:
            sys.exit(3)
        raise GeneratorExit("its own")


@routine
async def delegates(path: str, n: int) -> AsyncGenerator[Any, Any]:
    """To an ordinary generator, on the same worker."""
    async with contextlib.aclosing(guarded.__wrapped__(path, n)) as inner:
        async for value in inner:
            yield "inner", value
    note(path, "after it")


# -- running ahead ----------------------------------------------------------------------------------------------------


@routine(prefetch=0)
async def noted_ahead_0(path: str, name: str) -> AsyncGenerator[int, None]:
    with noting(path, name):
        for i in itertools.count():
            note(path, f"{name} {i}")
            yield i


@routine(prefetch=1)
async def noted_ahead_1(path: str, name: str) -> AsyncGenerator[int, None]:
    with noting(path, name):
        for i in itertools.count():
            note(path, f"{name} {i}")
            yield i


@routine(prefetch=3)
async def noted_ahead_3(path: str, name: str) -> AsyncGenerator[int, None]:
    with noting(path, name):
        for i in itertools.count():
            note(path, f"{name} {i}")
            yield i


@routine(prefetch=64)
async def noted_ahead_64(path: str, name: str) -> AsyncGenerator[int, None]:
    with noting(path, name):
        for i in itertools.count():
            note(path, f"{name} {i}")
            yield i


async def _finite(path: str, n: int, fails: bool) -> AsyncGenerator[int, None]:
    with noting(path, "it"):
        for i in range(n):
            if i % 3 == 2:
                await asyncio.sleep(0)
            yield i
        if fails:
            raise KeywordOnly(field="at the end", count=n)


@routine(prefetch=1)
async def finite_ahead_1(path: str, n: int, fails: bool) -> AsyncGenerator[int, None]:
    async with contextlib.aclosing(_finite(path, n, fails)) as inner:
        async for value in inner:
            yield value


@routine(prefetch=3)
async def finite_ahead_3(path: str, n: int, fails: bool) -> AsyncGenerator[int, None]:
    async with contextlib.aclosing(_finite(path, n, fails)) as inner:
        async for value in inner:
            yield value


@routine(prefetch=64)
async def finite_ahead_64(path: str, n: int, fails: bool) -> AsyncGenerator[int, None]:
    async with contextlib.aclosing(_finite(path, n, fails)) as inner:
        async for value in inner:
            yield value


@routine(prefetch=64)
async def count_ahead(n: int) -> AsyncGenerator[int, None]:
    for i in range(n):
        yield i


@routine(prefetch=3)
async def catches_ahead(path: str) -> AsyncGenerator[Any, None]:
    with noting(path, "it"):
        for i in itertools.count():
            try:
                note(path, f"it {i}")
                yield i
            except ValueError as error:
                yield "caught", str(error), i


@routine(prefetch=3)
async def ignores_exit_ahead(path: str) -> AsyncGenerator[Any, None]:
    with noting(path, "it"):
        try:
            for i in itertools.count():
                yield i
        except GeneratorExit:
            yield "ignored"


@routine(prefetch=3)
async def fails_in_finally_ahead(path: str) -> AsyncGenerator[int, None]:
    try:
        for i in itertools.count():
            yield i
    finally:
        note(path, "it finally")
        raise KeywordOnly(field="in finally")


@routine(prefetch=5)
async def waits_ahead(path: str, name: str, n: int = 0) -> AsyncGenerator[int, None]:
    with noting(path, name):
        for i in range(n):
            yield i
        note(path, f"{name} waits")
        await asyncio.sleep(3600)


@routine(prefetch=64)
async def blocks_noted_ahead(path: str, size: int) -> AsyncGenerator[bytes, None]:
    """Without end."""
    with noting(path, "it"):
        for i in itertools.count():
            note(path, f"it {i}")
            yield block(i, size)


@routine(prefetch=64)
async def endless_blocks_ahead(path: str, size: int) -> AsyncGenerator[tuple[int, bytes], None]:
    with noting(path, "it"):
        for i in itertools.count():
            yield os.getpid(), block(i, size)


# -- size -------------------------------------------------------------------------------------------------------------


def block(number: int, size: int) -> bytes:
    """So many bytes, which are not those of another number."""
    return (number.to_bytes(8, "big") * (size // 8 + 1))[:size]


@routine
async def blocks(sizes: Sequence[int]) -> AsyncGenerator[bytes, None]:
    for number, size in enumerate(sizes):
        yield block(number, size)


@routine(prefetch=4)
async def blocks_ahead(sizes: Sequence[int]) -> AsyncGenerator[bytes, None]:
    for number, size in enumerate(sizes):
        yield block(number, size)


@routine
async def gives_back() -> AsyncGenerator[Any, Any]:
    with counted():
        got: Any = None
        while True:
            got = yield got


@routine
async def hears_and_gives_blocks(path: str, size: int) -> AsyncGenerator[Any, Any]:
    with noting(path, "it"):
        for number in itertools.count():
            got = yield block(number, size)
            note(path, f"it got {len(got or b'')}")


# -- methods ----------------------------------------------------------------------------------------------------------


class Shelf:
    """Methods of every kind, with the decorator above and below."""

    def __init__(self, *books: str) -> None:
        self.books = list(books)

    @routine
    async def read(self, prefix: str = "") -> AsyncGenerator[tuple[str, int], None]:
        """One after the other."""
        for book in self.books:
            yield prefix + book, os.getpid()
        self.books.clear()

    @routine(prefetch=2)
    async def read_ahead(self) -> AsyncGenerator[str, None]:
        for book in self.books:
            yield book

    @routine
    @classmethod
    async def class_above(cls, n: int) -> AsyncGenerator[tuple[str, int, int], None]:
        for i in range(n):
            yield cls.__name__, i, os.getpid()

    @classmethod
    @routine
    async def class_below(cls, n: int) -> AsyncGenerator[tuple[str, int, int], None]:
        for i in range(n):
            yield cls.__name__, i, os.getpid()

    @routine
    @staticmethod
    async def static_above(n: int) -> AsyncGenerator[tuple[int, int], None]:
        for i in range(n):
            yield i, os.getpid()

    @staticmethod
    @routine
    async def static_below(n: int) -> AsyncGenerator[tuple[int, int], None]:
        for i in range(n):
            yield i, os.getpid()


class Library(Shelf):
    """Inherits the routines, and calls one of them."""

    @routine
    async def read(self, prefix: str = "") -> AsyncGenerator[tuple[str, int], None]:
        async for book, _ in super().read(f"{prefix}our "):
            yield book, os.getpid()


# -- nested -----------------------------------------------------------------------------------------------------------


@routine
async def collects(function: Any, *args: Any) -> tuple[int, list[Any]]:
    """My pid, and all that a generator gives."""
    return os.getpid(), [value async for value in function(*args)]


@routine
async def relays(path: str) -> AsyncGenerator[tuple[int, int], None]:
    """What another routine gives, without closing it."""
    with noting(path, "outer"):
        async for value in noted(path, "inner"):
            yield os.getpid(), value


@routine
async def pids_of_leaves(n: int) -> AsyncGenerator[tuple[int, int], None]:
    for _ in range(n):
        yield os.getpid(), await jobs.pid()


@routine
async def walks(depth: int) -> AsyncIterator[int]:
    """A tree: every node is a generator of its own."""
    yield depth
    if depth:
        for _ in range(2):
            async for value in walks(depth - 1):
                yield value


@routine(timeout=20)
async def my_task(n: int) -> AsyncGenerator[tuple[dict[str, Any], dict[str, Any]], None]:
    """What the generator knows about itself, and what a call that it makes does."""
    for _ in range(n):
        yield jobs.task_fields(), await jobs.my_task()


@routine
async def is_outside(n: int) -> AsyncGenerator[tuple[bool, int], None]:
    for _ in range(n):
        yield headgate.current_task() is None, await jobs.pid()
