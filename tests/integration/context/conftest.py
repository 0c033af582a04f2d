"""Pools that several tests share, each test in a context of its own, and a look at what goes over the wire."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.context.wiretap import Tap
from tests.support.workers import jobs
from tests.support.workers.support import PATIENCE, Shared, what_grpc_opens
from tests.support.workers.warm_programs import programs_start_warm, template_of_programs  # noqa: F401 - fixtures


class Apart(Shared):
    """One pool for all tests of a module; what a test sets is gone when it ends."""

    folder: Path
    """Where a test may put modules that the workers can import."""

    def __call__(self, main: Callable[[], Coroutine[Any, Any, Any]], patience: float = PATIENCE) -> Any:
        async def forked() -> Any:
            return await asyncio.create_task(main())

        return super().__call__(forked, patience)


@pytest.fixture(scope="module", autouse=True)
def collected_once() -> None:
    """What the tests before have left in this process is not to be looked at by each `gc.collect()` of a module."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def what_grpc_opens_once() -> None:
    what_grpc_opens()


@pytest.fixture(scope="module")
def shared(what_grpc_opens_once: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """Two workers, connected and warm."""
    shared = Apart(spawn=2, lazy=False)
    shared.folder = tmp_path_factory.mktemp("modules")
    sys.path.insert(0, str(shared.folder))
    try:
        shared.open()

        async def warm() -> None:
            # One thread that is there before a test begins, and so is not left behind by it.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            await asyncio.to_thread(int)
            for _ in range(10):
                await jobs.pid()

        shared(warm)
        yield shared
        shared.close()
    finally:
        sys.path.remove(str(shared.folder))


@pytest.fixture
def tap(shared: Apart, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tap]:
    """All that goes over the wire between this process and the workers of the shared pool."""
    tap = Tap()
    tap.lay(monkeypatch)

    async def each_worker() -> None:
        await shared.pool.broadcast(jobs.pid)  # the read that is under way is not ours yet

    shared(each_worker)
    tap.forget()
    yield tap
    tap.close()


@pytest.fixture
def log(tmp_path: Path) -> str:
    """A file in which routines note what they did."""
    return str(tmp_path / "log")
