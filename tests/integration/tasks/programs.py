"""Starts programs that use headgate as forks of an interpreter that has loaded it: that takes a tenth of the time.

At full length (`make soak`), and where a fork would not be like a program that is started, they are started.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import SCALE
from tests.warm_start import Template

LOADED = ["asyncio", "ctypes", "ssl", "json", "subprocess", "headgate.resources.pool", "headgate.tasks.pool"]
"""Without gRPC, which a program that needs it loads itself."""

_template: Template | None = None


@pytest.fixture(scope="session")
def warm_programs() -> Iterator[None]:
    """Let `Program` fork. It must be there before a test is checked for what it leaves behind."""
    global _template
    if SCALE >= 1 or sys.platform != "linux" or _template is not None:  # one for all folders that have this fixture
        yield
        return
    template = _template = Template([], LOADED)
    yield
    _template = None
    template.close()


class Program(subprocess.Popen[Any]):
    """A `Popen` that forks the template, if that makes the same process. It is in a session of its own."""

    def _execute_child(self, args: Any, *options: Any) -> None:
        command = [os.fspath(word) for word in args]
        cwd, env, shell = options[4], options[5], options[8]
        env = dict(os.environ) if env is None else env
        if _template is None or cwd is not None or shell or not _template.makes(command, env):
            super()._execute_child(args, *options)  # type: ignore[misc]
            return
        stdin, to_stdin, from_stdout, stdout, from_stderr, stderr = options[9:15]
        pipes = {0: (stdin, to_stdin), 1: (stdout, from_stdout), 2: (stderr, from_stderr)}
        self.pid = _template.fork(
            command, env, {number: number if fd == -1 else fd for number, (fd, _) in pipes.items()}
        )
        self._child_created = True
        for fd, end in pipes.values():
            if end != -1:  # a pipe that this one has made
                os.close(fd)
        self._closed_child_pipe_fds = True
