"""Pools that several tests share: starting workers takes longer than most of what is asked of them."""

from __future__ import annotations

import compileall
import gc
import importlib
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate
from tests.support.workers import jobs
from tests.support.workers.support import Shared, what_grpc_opens
from tests.support.workers.warm_programs import programs_start_warm, template_of_programs  # noqa: F401 - fixtures


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Have what workers import compiled once, and not by each of them.

    Hundreds of interpreters are started here. Where PYTHONDONTWRITEBYTECODE is set, none of them keeps what it
    compiled, and each needs up to a tenth of a second more for modules that were edited.
    """
    compileall.compile_dir(Path(headgate.__file__).parent, quiet=2)
    for path in (*Path(__file__).parent.glob("*jobs.py"), *Path(jobs.__file__).parent.glob("*.py")):
        compileall.compile_file(path, quiet=2)


@pytest.fixture(scope="session", autouse=True)
def collected_once() -> None:
    """The modules of all tests are not to be looked at again by each of the thousands of `gc.collect()` to come."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def what_grpc_opens_once(compiled: None) -> None:
    what_grpc_opens()


_open: list[Shared] = []


@pytest.fixture(scope="module")
def shared() -> Shared:
    """Two workers, connected and warm, for all tests of this folder that this process runs one after the other.

    They must be the same two afterwards, and idle: who kills, stops or resizes has a pool of its own (`test_failures`
    puts one in the place of this one).
    """
    if not _open:
        shared = Shared(spawn=2, lazy=False)
        shared.open()

        async def warm() -> None:
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


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of its own for sockets and the like, with a short name: a socket's path has room for 100 bytes."""
    tmp_path_factory.getbasetemp()  # that of all tests, not in the folder that is removed
    folder = Path(tempfile.mkdtemp(prefix="hg-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder.chmod(0o700)
    assert tempfile.gettempdir() == os.fspath(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def told_soon(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have callers whose worker does not keep a timeout told of it sooner than 5 s later, except at full length."""
    if scale < 1:
        for module in ("dispatcher", "connection"):
            monkeypatch.setattr(f"headgate.workers.client.{module}.CONFIRMATION", 2.0)


@pytest.fixture
def log(tmp_path: Path) -> str:
    """A file in which routines note what they did."""
    return str(tmp_path / "log")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Make a module with a backpressure hook whose import does something in workers, and import it here."""
    monkeypatch.setenv("HEADGATE_TEST_PARENT", str(os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def plant(body: str) -> Any:
        name = f"headgate_planted_{len(names)}_{tmp_path.name}"
        names.append(name)
        code = f"""
            import os, sys, time
            FLAG = {str(tmp_path / "flag")!r}
            COUNT = {str(tmp_path / "count")!r}
            if os.environ["HEADGATE_TEST_PARENT"] != str(os.getpid()):
                with open(COUNT, "a") as file:
                    file.write("import\\n")
                {body}
            def hook(context):
                return False
            def worker(*tags, credentials=None):
                import headgate
                return headgate.LocalWorker(*tags, credentials=credentials, backpressure=hook)
        """
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        module = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return plant
