"""One pool of two workers for all tests of this folder that need one, and what it takes to share it."""

from __future__ import annotations

import asyncio
import compileall
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import headgate
from tests.support.combined.combined_support import Apart, Line
from tests.support.workers import jobs
from tests.support.workers.support import what_grpc_opens

_open: list[Apart] = []


@pytest.fixture(scope="session")
def what_grpc_opens_once() -> None:
    compileall.compile_dir(Path(headgate.__file__).parent, quiet=2)  # once, and not by each worker
    what_grpc_opens()


@pytest.fixture(scope="module")
def shared(what_grpc_opens_once: None) -> Apart:
    """Two workers, connected and warm. They must be the same two afterwards, and idle: who kills has its own pool."""
    if not _open:
        shared = Apart(spawn=2, lazy=False)
        shared.open()

        async def warm() -> None:
            # One thread that is there before a test begins, and so is not left behind by it.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            await asyncio.to_thread(int)
            for _ in range(10):
                await jobs.pid()

        shared(warm)
        _open.append(shared)
    return _open[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """Close it before tests of other folders: some of them fork, and gRPC does not bear that while it is in use."""
    try:
        yield
    finally:
        if _open and (nextitem is None or Path(__file__).parent not in nextitem.path.parents):
            _open.pop().close()


@pytest.fixture(scope="module")  # so that the workers are there before a test is watched for what it leaves behind
def line(request: pytest.FixtureRequest) -> Line:
    """A line of the kind that the test is parametrized with (`indirect`)."""
    kind: str = request.param
    return Line(kind, request.getfixturevalue("shared") if kind in ("workers", "both") else None)


@pytest.fixture
def log(tmp_path: Path) -> str:
    """A file in which functions note what they did, wherever they run."""
    return str(tmp_path / "log")
