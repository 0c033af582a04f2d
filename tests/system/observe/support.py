"""Polling, what is planted to be searched for, and programs that can be seen."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tests.support.cli.support import environment

T = TypeVar("T")
PATIENCE = 20.0
SECRET = "sk-planted-observed-0c1d2e"


def eventually(look: Callable[[], T], patience: float = PATIENCE) -> T:
    """Look again and again until there is something to see, and return that."""
    limit = time.monotonic() + patience
    while True:
        seen = look()
        if seen or time.monotonic() > limit:
            assert seen, "it did not come"
            return seen
        time.sleep(0.02)


@contextmanager
def published_program(code: str, *arguments: str) -> Iterator[int]:
    """A program that can be seen, from its first line of output on, until it is killed. Gives its pid."""
    command = [sys.executable, "-c", code, *arguments]
    env = {**environment(), "HEADGATE_OBSERVE": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()
