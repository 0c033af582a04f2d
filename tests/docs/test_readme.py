"""The front door: short, code first, and its output is what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text("utf-8")


def test_it_is_short_and_shows_code_early() -> None:
    lines = TEXT.splitlines()
    assert len(lines) < 150
    assert next(number for number, line in enumerate(lines, 1) if line == "```python") < 30


def test_the_first_example_prints_what_is_shown(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.S)
    assert found is not None
    program = tmp_path / "example.py"
    program.write_text(found[1], "utf-8")
    out = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert out.stdout == found[2]


def test_every_file_it_links_to_exists() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (README.parent / target).exists(), target
