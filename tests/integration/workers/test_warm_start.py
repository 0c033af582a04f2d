"""Pools of tests start as forks of a loaded interpreter, unless they would differ from one that is started."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from headgate import WorkerPool, routine
from tests.conftest import SCALE
from tests.support.workers import jobs
from tests.support.workers.support import keeper_client_of, parent_of, pids, run, until
from tests.warm_start import Forked

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux" or SCALE >= 1, reason="pools start warm on Linux, and not in the soak"),
]


def started() -> tuple[type, bool]:
    """How the keeper of a pool was started, and whether the keeper is a child of ours, as it has to be."""

    async def main() -> tuple[type, bool]:
        async with WorkerPool(spawn=2) as pool:
            assert await jobs.add(1, 2) == 3
            keeper = keeper_client_of(pool)
            # One that was forked a moment ago still has the process that forked it as its parent.
            await until(lambda: {parent_of(pid) for pid in pids(pool)} == {keeper.pid})
            return type(keeper._process), parent_of(keeper.pid) == os.getpid()

    how: tuple[type, bool] = run(main)
    return how


def test_a_keeper_is_a_fork_and_a_child_of_this_process() -> None:
    assert started() == (Forked, True)


@routine
async def how_it_differs() -> dict[str, object]:
    """What a worker that was started has otherwise than one that was forked."""
    return {"exec": os.execv.__module__, "keeper": "keeper" in sys.modules, "arguments": sys.argv}


@pytest.mark.parametrize("start", ["warm", pytest.param("cold", marks=pytest.mark.cold)])
def test_the_template_leaves_no_trace_in_workers(start: str) -> None:
    async def main() -> dict[str, object]:
        async with WorkerPool(spawn=2):
            found: dict[str, object] = await how_it_differs()
            return found

    assert run(main) == {"exec": "posix", "keeper": False, "arguments": [""]}


@pytest.mark.cold
def test_what_is_marked_cold_starts_its_interpreters() -> None:
    assert started() == (subprocess.Popen, True)


@pytest.mark.parametrize(("name", "value"), [("PYTHONHASHSEED", "7"), ("GRPC_TRACE", "")])
def test_another_environment_of_the_interpreter_is_not_inherited(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert started() == (subprocess.Popen, True)


def test_other_limits_are_not_inherited() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert started() == (subprocess.Popen, True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
