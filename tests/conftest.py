"""What every test gets: a scale for the long ones, and a check that it leaves no thread and no open file behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest

from headgate import registry
from headgate.workers.client import lifetime
from tests import warm_start

pytest_plugins = ["headgate.testing.plugin"]

_GRACE = 3.0  # real seconds
_KNOWN = pytest.StashKey[set[int]]()
"""Numbers of pools that a test need not end: those of earlier tests, and of fixtures that tests share."""
SCALE = float(os.environ.get("HEADGATE_SCALE", "0.1"))

# While working, Hypothesis tries the same examples in every run: what fails is due to the change at hand. In the soak
# it looks for new ones, and remembers those that failed.
hypothesis.settings.register_profile(
    "work",
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    derandomize=True,
    database=None,
    max_examples=60,
)
hypothesis.settings.register_profile(
    "soak", deadline=None, suppress_health_check=list(hypothesis.HealthCheck), max_examples=1000
)
hypothesis.settings.load_profile("soak" if SCALE >= 1 else "work")

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # started in the background of a shell: Ctrl-C is tested all the same
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `soak`, except at full length: it tries what other tests try, in more ways."""
    if SCALE < 1:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    if seed := os.environ.get("HEADGATE_ORDER"):
        items[:] = _shuffled(items, int(seed))


def _shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Shuffle the files, and the tests in each. Tests of a file stay together: they share what takes long to start."""
    chance, files = random.Random(seed), defaultdict(list)
    for item in items:
        files[item.path].append(item)
    groups = list(files.values())
    chance.shuffle(groups)
    for group in groups:
        chance.shuffle(group)
    return [item for group in groups for item in group]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector pass over the modules and the thousands of tests.

    While they are made nothing of them is garbage, and looking for it took a third of the time. Later many tests
    collect, and each collection took 0.2 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


MAY_BE_SKIPPED = (
    "this Python was installed without its own tests",
    "eager tasks came with Python 3.12",
    "pools start warm on Linux, and not in the soak",
)
"""Reasons for which CI may skip a test. Everything else must be installed there: see .ci/run."""


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what was not shown, and what to install to show it."""
    if left_out := _skipped(terminalreporter):
        reasons = "; ".join(f"{reason} ({count})" for reason, count in sorted(left_out.items()))
        terminalreporter.write_line(f"not shown, because something is missing: {reasons}")


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Fail in CI if a test was skipped that CI must run."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and os.environ.get("CI") and _skipped(reporter) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


def _skipped(reporter: Any) -> Counter[str]:
    """How many tests were skipped, by reason, without those that may be."""
    reasons = (report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", ()))
    return Counter(reason for reason in reasons if not reason.startswith(MAY_BE_SKIPPED))


def seeds(count: int, at_a_tenth: int) -> range:
    """Return the seeds of a test by chance: a few while working, all of them in `make soak`."""
    return range(count if SCALE >= 1 else at_a_tenth)


@pytest.fixture
def scale() -> float:
    """How much of a long test to run: 0.1 in `make check`, 1 in `make soak`."""
    return SCALE


@pytest.fixture(scope="session", autouse=True)
def sessions_stay_open() -> Iterator[None]:
    """Sessions of pools that tests share do not close after a minute: the next one would be a leak of some test."""
    before, lifetime.IDLE = lifetime.IDLE, 3600.0
    yield
    lifetime.IDLE = before


@pytest.fixture(scope="session", autouse=True)
def pools_start_warm() -> Iterator[None]:
    """Fork the interpreters of pools, except at full length and in what is marked `cold`."""
    if SCALE >= 1 or sys.platform != "linux":
        yield
        return
    template = warm_start.install()
    yield
    warm_start.uninstall(template)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    warm_start.enabled = item.get_closest_marker("cold") is None


@pytest.fixture(autouse=True)
def leaves_nothing_behind(headgate_leaks: None) -> None:
    """Every test is checked."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test whose pools are still live: they would show in the `top`, metrics and snapshots of later tests.

    Most often an exception that somebody keeps holds the frames that hold the pool. This is no fixture, because pytest
    holds what fixtures give until all of them have ended.
    """
    known = {pool.number for pool in registry.pools()}
    item.config.stash[_KNOWN] = known
    failed = item.session.testsfailed
    result = yield
    if item.session.testsfailed == failed and _pools_besides(known):  # else its own exception keeps them
        logs = item.config.pluginmanager.get_plugin("logging-plugin")
        if logs is not None:  # it keeps what was logged while fixtures ended, until the next test begins
            logs.caplog_handler.reset()
            logs.report_handler.reset()
        if left := _left_after_a_while(known):
            words = f"pools left behind: {', '.join(left)}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "teardown")
            item.ihook.pytest_runtest_logreport(report=report)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Leave pools alone that several tests share."""
    before = {pool.number for pool in registry.pools()}
    result = yield
    if fixturedef.scope != "function":
        request.config.stash[_KNOWN].update({pool.number for pool in registry.pools()} - before)
    return result


def _left_after_a_while(known: set[int]) -> list[str]:
    """The new pools that stay. Loops in other threads, which tests share, drop the last reference a moment later."""
    limit = time.monotonic() + _GRACE
    gc.collect()
    while (left := _pools_besides(known)) and time.monotonic() < limit:
        time.sleep(0.02)
        gc.collect()
    if not _pools_besides(set()):
        # What has survived stays: reports, caches, modules imported late. Without this each collection looks at all of
        # it again, a third of the CPU time of tests/unit. A pool that is frozen could never be collected.
        gc.freeze()
    return left


def _pools_besides(known: set[int]) -> list[str]:
    """The pools of resources and tasks that are new. Tests share pools of workers."""
    found = (pool for pool in registry.pools() if pool.kind != "workers" and pool.number not in known)
    return [f"{pool.kind} {pool.name!r}" for pool in found]
