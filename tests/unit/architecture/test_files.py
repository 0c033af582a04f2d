"""Rules for files that no linter has: modules have a docstring, and no file names somebody's machine."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src" / "headgate"

# A directory of one person or one machine. After a letter or a dot it is part of a longer path or of a URL.
_PRIVATE_PATH = re.compile(r"(?<![\w.~-])/(?:root|home|work|Users)/")

Texts = Mapping[str, str]


def without_docstring(sources: Texts) -> Iterator[str]:
    for path, text in sources.items():
        is_private = any(part.startswith("_") and part != "__init__.py" for part in Path(path).parts)
        if not is_private and not text.startswith('"""') and ast.get_docstring(ast.parse(text, path)) is None:
            yield f"{path} has no docstring: say in one line what it is for"


def naming_a_machine(texts: Texts) -> Iterator[str]:
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if found := _PRIVATE_PATH.search(line):
                yield f"{path}:{number} contains {found[0]}: it exists on one machine only"


@pytest.fixture(scope="module")
def sources() -> Texts:
    return {path.relative_to(SRC).as_posix(): path.read_text("utf-8") for path in sorted(SRC.rglob("*.py"))}


@pytest.fixture(scope="module")
def repository() -> Texts:
    """All files that git tracks or would track after `git add`, so that a fault is found before it is committed."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8", "replace") for path in paths if path.is_file()}


def test_every_public_module_says_what_it_is(sources: Texts) -> None:
    assert list(without_docstring(sources)) == []


def test_no_file_names_a_machine(repository: Texts) -> None:
    assert repository
    assert list(naming_a_machine(repository)) == []


def test_breaches_are_reported() -> None:
    planted = {"pool.py": "x = 1\n", "core/__init__.py": '"""Said."""', "_private.py": ""}
    assert list(without_docstring(planted)) == ["pool.py has no docstring: say in one line what it is for"]


@pytest.mark.parametrize("name", ["root", "home", "work", "Users"])
def test_a_planted_path_is_reported(name: str) -> None:
    private = f"/{name}/"
    assert list(naming_a_machine({"README.md": f"fine\ncd {private}me"})) == [
        f"README.md:2 contains {private}: it exists on one machine only"
    ]
    assert list(naming_a_machine({"README.md": f"https://example.org{private}page and docs{private}page"})) == []
