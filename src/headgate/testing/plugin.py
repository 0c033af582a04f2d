"""A plugin for pytest: tests on the virtual loop, captured events, leak checks.

pytest loads it by itself where headgate is installed (the entry point in pyproject.toml). It is imported in every run
of pytest then, so it imports nothing of headgate before a test asks for something.

    async def test_an_hour(headgate_loop):          # or @pytest.mark.headgate_loop(seed=3)
        await asyncio.sleep(3600)                   # takes no time

    def test_what_happened(headgate_events): ...    # the events of this test, as `capture_events` gives them

    def test_tidy(headgate_leaks): ...              # fails if it leaves tasks, threads, files or child processes behind
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from headgate.testing.capture import Captured

R = TypeVar("R")

_LOOP = "headgate_loop"
_LEAKS = "headgate_leaks"


class LoopFixture:
    """What the fixture `headgate_loop` gives: the virtual loop of an async test, or a way to use one in another."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def run(self, main: Callable[[], Coroutine[Any, Any, R]] | Coroutine[Any, Any, R], **options: Any) -> R:
        """Do what `headgate.testing.run` does, with the options of the mark. For tests that are not async."""
        from headgate.testing.running import run

        return run(main, **{**self._options, **options})

    def time(self) -> float:
        """Return the virtual time, in seconds since the test began (or since `start=`)."""
        import asyncio

        return asyncio.get_running_loop().time()

    async def settle(self) -> None:
        """Let everything run that is ready. The time stands meanwhile."""
        from headgate.testing.running import settle

        await settle()


@pytest.fixture
def headgate_loop(request: pytest.FixtureRequest) -> LoopFixture:
    """An event loop with virtual time, on which an async test runs: hours take milliseconds, and hangs fail."""
    return LoopFixture(_options_of(request.node, _LOOP))


@pytest.fixture
def headgate_events() -> Iterator[Captured]:
    """The events that headgate's pools emit during this test, in order: `.names`, `.last`, `.of(Type)`."""
    from headgate.testing.capture import capture_events

    with capture_events() as events:
        yield events


@pytest.fixture
def headgate_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if tasks, threads, open files or child processes are left behind."""
    from headgate.testing.leaks import no_leaks

    with no_leaks(**_options_of(request.node, _LEAKS)):
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known."""
    for line in (
        f"{_LOOP}(**options): run this async test on headgate's virtual loop; options as of headgate.testing.run",
        f"{_LEAKS}(**options): options of the fixture {_LEAKS}, as of headgate.testing.no_leaks",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Put an async test that asks for it on a virtual loop. pytest itself then calls it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return
    if _LOOP in pyfuncitem.fixturenames or pyfuncitem.get_closest_marker(_LOOP) is not None:
        from headgate.testing.running import virtual

        pyfuncitem.obj = virtual(**_options_of(pyfuncitem, _LOOP))(pyfuncitem.obj)


def _options_of(item: pytest.Item, mark: str) -> Any:
    """The options that marks of this name give; the nearest mark wins."""
    options: dict[str, Any] = {}
    for found in item.iter_markers(mark):
        if found.args:
            raise pytest.UsageError(f"@pytest.mark.{mark} takes options by name, got {found.args[0]!r}")
        options = {**found.kwargs, **options}
    return options
