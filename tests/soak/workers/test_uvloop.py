"""All integration tests of workers once more, under uvloop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.workers.support import ROOT


def test_w52_everything_under_uvloop() -> None:
    pytest.importorskip("uvloop", reason="pip install headgate[speed]")
    skipped = [f"--ignore=tests/integration/workers/{name}" for name in ("test_uvloop.py", "test_fork_server.py")]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-n",
            "0",
            "tests/integration/workers",
            *skipped,
        ],
        cwd=ROOT,
        env={**os.environ, "HEADGATE_TEST_LOOP": "uvloop", "HEADGATE_SCALE": "0.1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-8000:]
