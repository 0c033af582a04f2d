"""G04-G24 with real processes: pools that share a budget over one SqliteStore, killed, stopped, forked, blocked.

Every process tells when each of its tasks starts and ends, by the clock that all processes have in common. The test
judges: at no moment may more of them run than the limit. See tests/tasks/shared_child.py for the processes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.shared_support import PATIENCE, ROOT, Nursery, World, eventually, most_at_once, Interval

pytestmark = pytest.mark.integration

SOON = 2.0
"""Seconds. The promise is 100 ms, on a machine that has nothing else to do."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.end()


@pytest.fixture
def world(nursery: Nursery) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="hg") as folder:  # a short path, for the socket
        with World(nursery, Path(folder)) as world:
            yield world


def test_the_judge_sees_an_overshoot() -> None:
    one, two, three = Interval(0, 2, "a", 1), Interval(2, 3, "b", 1), Interval(1, 4, "c", 2)
    assert most_at_once([one, two]) == 1
    assert most_at_once([one, two, three]) == 2
    assert most_at_once([one, Interval(0.5, float("inf"), "d", 3), three]) == 3


# -- the limit and the order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["fifo", "fair_round_robin"])
def test_g10_four_processes_never_run_more_than_the_limit(world: World, queue: str, scale: float) -> None:
    number = max(40, int(400 * scale))
    children = world.some(4, max_concurrent=3, queue=queue)
    asked = [
        child.send(
            "submit_all",
            [
                {"name": f"{child.pid}-{task}", "seconds": 0.001 * (task % 4), "key": f"tenant-{task % 2}"}
                for task in range(number)
            ],
        )
        for child in children
    ]
    for child, one in zip(children, asked, strict=True):
        child.answer(one)
    for child in children:
        child("drain")
    assert world.most() == 3
    started = world.started()
    assert len(started) == len(set(started)) == 4 * number
    assert len(world.told("end")) == 4 * number
    assert not any(child.stderr() for child in children)
