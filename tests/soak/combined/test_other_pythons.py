"""The random schedules of cancellations on every other Python that is installed."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.pythons import interpreter
from tests.support.workers.support import ROOT


@pytest.mark.parametrize("minor", [12, 13, 14])
def test_r61_schedules_on_other_pythons(minor: int) -> None:
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"no Python 3.{minor} here")
    ran = subprocess.run(
        [python, "-m", "tests.integration.combined.schedules", "--seeds", "0:500"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr
    assert f"on Python 3.{minor}." in ran.stdout
