"""R60 to R64 under random schedules, on every Python there is (`schedules.py`: what is random, and what is judged)."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.core.cancellation import Steered
from tests.integration.resources import schedules
from tests.support.pythons import interpreter

ROOT = Path(__file__).parents[3]
SCALE = float(os.environ.get("HEADGATE_SCALE", "0.1"))


def scaled(at_a_tenth: int, at_full_length: int = 6000) -> int:
    """So many seeds: a few while working, all of them in `make soak`."""
    return max(1, round(at_a_tenth + (at_full_length - at_a_tenth) * (SCALE - 0.1) / 0.9))


def test_random_schedules_of_sibling_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headgate")  # else each cooldown of each world is formatted and kept
    asked = cancelled = 0
    for seed in range(scaled(40)):
        world = schedules.World(seed)
        try:
            world.run()
        except schedules.Violation as violation:
            trace = "\n".join(world.trace)
            pytest.fail(
                f"{trace}\nseed {seed}: {violation}\nagain: python {schedules.__file__} --seeds {seed}:{seed + 1}"
            )
        asked += world.sibling_cancels
        cancelled += world.outer_cancels
    assert asked
    assert cancelled


@pytest.mark.parametrize("broken", ["count", "asked"])
def test_the_judge_sees_a_broken_rule(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that never objects proves nothing: take half of the rule away, and some schedule must show it."""
    rules = {
        "count": lambda self: self.asked is not None,  # an outer cancellation in the same turn is lost
        "asked": lambda self: False,  # the caller sees the sibling's cancellation
    }
    monkeypatch.setattr(Steered, "is_ours", rules[broken])
    problems: list[str] = []
    for seed in range(100):
        world = schedules.World(seed)
        with contextlib.suppress(schedules.Violation):
            world.run()
        problems += [one for one in world.problems if one.startswith({"count": "R62", "asked": "R61"}[broken])]
        if problems:
            break
    assert problems


MINORS = [
    # This one has just been tested. Of the others one is tried each time, all in the soak.
    pytest.param(minor, marks=[pytest.mark.soak] if minor != 13 or minor == sys.version_info.minor else [])
    for minor in (11, 12, 13, 14)
]


@pytest.mark.integration
@pytest.mark.parametrize("minor", MINORS)
def test_schedules_on_every_installed_python(minor: int) -> None:
    python = interpreter(minor)
    if python is None:
        pytest.skip(
            f"no Python 3.{minor} here; get one with `pyenv install 3.{minor}` or `uv python install 3.{minor}`"
        )
    run = subprocess.run(
        [python, str(Path(schedules.__file__)), "--seeds", f"0:{scaled(10)}"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr
    assert f"on Python 3.{minor}." in run.stdout
    assert run.stderr == ""
