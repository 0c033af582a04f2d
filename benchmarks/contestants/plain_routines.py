"""The same as plain functions, for those who take nothing else."""

from __future__ import annotations

import os
import time


def add(a: int, b: int) -> int:
    return a + b


def pid() -> int:
    return os.getpid()


def hold(path: str) -> None:
    tell_pid(path)
    time.sleep(60)


def tell_pid(path: str) -> None:
    """Say which process has begun: only then is there something to kill."""
    with open(path, "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
