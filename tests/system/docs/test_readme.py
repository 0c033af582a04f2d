"""README.md is short, shows code first, and what its programs and those of docs/discovery.md print is what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

README = Path(__file__).parents[3] / "README.md"
TEXT = README.read_text("utf-8")


def test_it_is_short_and_shows_code_early() -> None:
    lines = TEXT.splitlines()
    assert len(lines) < 150
    assert next(number for number, line in enumerate(lines, 1) if line == "```python") < 30


EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)


def test_a_batch_and_the_three_pools_are_shown_with_their_output() -> None:
    batch, pools = (code for code, _ in EXAMPLES)
    assert "pool.map(ask, prompts" in batch
    assert all(pool in pools for pool in ("ResourcePool", "TaskPool", "WorkerPool"))
    assert "resources=keys, workers=workers" in pools


CHANGING = {
    r"\b\d\d:\d\d:\d\d\.\d{3}\b": "<time>",
    r"\b\d+\.\d{3} s\b": "<seconds> s",
    r"\bcooling \d+\.\ds": "cooling <seconds>",
    r"\b(pool|w)-[0-9a-f]{10,}\b": r"\1-<id>",
}
"""What differs from run to run."""


def lasting(output: str) -> str:
    for changing, name in CHANGING.items():
        output = re.sub(changing, name, output)
    return output


@pytest.mark.alone
@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=["batch", "three pools"])
def test_an_example_prints_what_is_shown(code: str, output: str, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(code, "utf-8")
    out = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=30
    )
    assert lasting(out.stdout) == lasting(output)
    prose = " ".join(TEXT.split())
    for line in out.stderr.splitlines():
        assert f"`{line}`" in prose, "README.md quotes what the program writes to stderr"
    assert len(out.stderr.splitlines()) == (2 if "upstream" in code else 0)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hg-") as folder:
        yield Path(folder)


DISCOVERY = (README.parent / "docs" / "discovery.md").read_text("utf-8")
ELSEWHERE = DISCOVERY[DISCOVERY.index("## A worker started by hand") : DISCOVERY.index("## Namespaces")]


@pytest.mark.alone
def test_a_worker_started_by_hand_serves_a_program_that_finds_it(tmp_path: Path, short_path: Path) -> None:
    jobs, program = re.findall(r"```python\n(.*?)```", ELSEWHERE, re.DOTALL)
    [command] = re.findall(r"^\$ headgate (.*)$", ELSEWHERE, re.MULTILINE)
    (tmp_path / "jobs.py").write_text(jobs, "utf-8")
    (tmp_path / "program.py").write_text(program, "utf-8")
    env = {**os.environ, "XDG_RUNTIME_DIR": str(short_path)}  # nobody else's workers
    with subprocess.Popen(
        [sys.executable, "-m", "headgate", *command.split()], cwd=tmp_path, env=env, stdout=subprocess.PIPE
    ) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline().startswith(b"{")
            out = subprocess.run(
                [sys.executable, "program.py"], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=30
            )
            assert (out.stdout, out.stderr) == ("FOUND\n", "")
        finally:
            worker.terminate()


def test_every_file_it_links_to_exists() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (README.parent / target).exists(), target
