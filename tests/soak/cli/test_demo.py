"""`headgate demo` at full length, and as short as it can be, with every warning an error."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.cli.support import PATIENCE

DEMO = [sys.executable, "-X", "dev", "-W", "error", "-m", "headgate", "demo"]


def quiet(stderr: str) -> str:
    """Without what asyncio's debug mode says of a machine that is busy."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("Executing <"))


def test_c01_a_reader_that_leaves_ends_it_in_silence() -> None:
    with subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        assert demo.stdout.readline().startswith("headgate: ")
        demo.stdout.close()
        assert quiet(demo.stderr.read()) == ""
        assert demo.wait(PATIENCE) == 1


def test_c02_one_call_and_one_slot_are_enough() -> None:
    options = ["--calls", "1", "--slots", "1"]
    ran = subprocess.run([*DEMO, *options], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ran.returncode, quiet(ran.stderr)) == (0, ""), ran.stdout
    assert re.search(r"^  answered +1\b", ran.stdout, re.MULTILINE), ran.stdout
    assert re.search(r"^  lost results +0\b", ran.stdout, re.MULTILINE), ran.stdout
