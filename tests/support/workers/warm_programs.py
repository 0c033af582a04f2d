"""Programs that tests run, as forks of an interpreter that has loaded gRPC and headgate.

``python main.py``, ``python -c`` and ``python -m headgate`` spend 0.3 s of CPU on imports, and a hundred tests run one.
Below full length `subprocess.Popen` has the template of `tests.warm_start` make those that would be alike. A program
with options for the interpreter, with another path or other limits is started as ever, and so is what tests marked
`cold` run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import warm_start
from tests.conftest import SCALE

ROOT = Path(__file__).parents[3]
LOADED = (
    *warm_start.KEEPER,
    "ssl",
    "headgate.workers.pool",
    "headgate.workers.client.dispatcher",
    "headgate.tasks.pool",
    "headgate.resources.pool",
    "headgate.discovery.local",
    "headgate.cli.main",
    "headgate.cli.batch.job",
)
KNOWN = {str(ROOT), str(ROOT / "src"), str(ROOT / "tests" / "system" / "cli")}
"""Folders that have no module of the name of one that is loaded."""
_AS_MODULE = "import runpy; runpy._run_module_as_main('headgate')"

_template: warm_start.Template | None = None
_usual: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def template_of_programs() -> Iterator[None]:
    """One for each process of pytest, whichever folder asks first."""
    global _template
    if SCALE >= 1 or sys.platform != "linux" or _template is not None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        _template = warm_start.Template([], LOADED)
    yield
    _template.close()
    _template = None


@pytest.fixture(scope="module", autouse=True)
def programs_start_warm(template_of_programs: None) -> Iterator[None]:
    """For the tests of a module; `warm_start.enabled` leaves out those that are marked `cold`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", _execute_child)
        yield


def _execute_child(self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *more: Any) -> None:
    """What `Popen` calls to start a process, with pipes and files that are open."""
    pass_fds, cwd, env, _, _, shell, *pipes = more[:12]
    others = more[13:17], more[18:]  # user, groups and mask; process group. Signals are restored, a session begun
    env = os.environ if env is None else env
    unusual = shell or executable or preexec_fn or pass_fds or others != _NONE
    given = None if _template is None or unusual or not warm_start.enabled else _alike(_template, args, env)
    if _template is None or given is None:
        _usual(self, args, executable, preexec_fn, close_fds, *more)
        return
    fds = {number: number if fd == -1 else fd for number, fd in enumerate((pipes[0], pipes[3], pipes[5]))}
    self.pid = _template.fork(given, env, fds, None if cwd is None else Path(os.fspath(cwd)))
    self._child_created = True
    self._close_pipe_fds(*pipes)


_LEFT_OUT = ("PYTHONPATH", "PYTHONUNBUFFERED")  # the one is made up for, and no test is to depend on the other
_NONE = (None, None, None, -1), (-1,)


def _alike(template: warm_start.Template, args: Any, env: Mapping[str, str]) -> list[str] | None:
    """The command for the template; None: a fork would differ from an interpreter that is started with this one."""
    usual = os.environ.get("PYTHONPATH", "")
    path = env.get("PYTHONPATH", "")
    if isinstance(args, (str, bytes)) or not path.endswith(usual) or not _folders(path) - _folders(usual) <= KNOWN:
        return None
    python, *rest = map(os.fspath, args)
    if rest[:2] == ["-m", "headgate"]:
        rest = ["-c", _AS_MODULE, *rest[2:]]
    elif not rest or (rest[0] != "-c" and not rest[0].endswith(".py")):
        return None
    alike = {name: env[name] for name in env if name not in _LEFT_OUT} | ({"PYTHONPATH": usual} if usual else {})
    return [python, *rest] if template.makes([python], alike) else None


def _folders(path: str) -> set[str]:
    return set(filter(None, path.split(os.pathsep)))
