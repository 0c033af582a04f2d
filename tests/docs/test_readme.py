"""README.md is short, shows code first, and the output that it shows is what the programs print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text("utf-8")


def test_it_is_short_and_shows_code_early() -> None:
    lines = TEXT.splitlines()
    assert len(lines) < 150
    assert next(number for number, line in enumerate(lines, 1) if line == "```python") < 30


EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)


def test_the_combined_pool_and_each_pool_alone_are_shown_with_their_output() -> None:
    pools = ("ResourcePool", "TaskPool", "WorkerPool")
    assert [all(pool in code for pool in pools) for code, _ in EXAMPLES] == [True, True]
    assert "resources=keys, workers=workers" in EXAMPLES[0][0]


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
@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=["combined", "each alone"])
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


def test_every_file_it_links_to_exists() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (README.parent / target).exists(), target
