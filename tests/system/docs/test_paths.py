"""The pages for contributors name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "src"
FOLDERS = (ROOT, SOURCES, SOURCES / "headgate")
PATH = re.compile(r"(?<![\w/.])((?:[a-z_]+/)*[a-z_]+\.(?:py|proto)|(?:[a-z_]+/)+)(?![\w/])")


def named_in(page: str) -> set[str]:
    """Paths of files and folders in the code of a page."""
    code = " ".join([*re.findall(r"```\n(.*?)```", page, re.DOTALL), *re.findall(r"`([^`\n]+)`", page)])
    return set(PATH.findall(code))


@pytest.mark.parametrize("page", ["architecture.md", "journey.md"])
def test_every_path_that_a_page_names_exists(page: str) -> None:
    named = named_in((ROOT / "docs" / page).read_text("utf-8"))
    assert len(named) > 20
    missing = [path for path in named if not any((folder / path).exists() for folder in FOLDERS)]
    assert not missing, missing


def test_a_path_that_does_not_exist_is_seen() -> None:
    assert named_in("`tasks/scheduler.py`, `pool.py` and `queues/`\n\n```\n  tasks/door.py   x\n```") == {
        "tasks/scheduler.py",
        "pool.py",
        "queues/",
        "tasks/door.py",
    }
