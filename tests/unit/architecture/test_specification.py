"""Every line of `docs/spec/` has an id of its own and a test that names it, or is on the list of what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SPECIFICATION = ROOT / "docs" / "spec"

LINE = re.compile(r"^- ([A-Z]\d\d[a-z]?) ", re.MULTILINE)
NAME = re.compile(r"\bdef test_(\w+)")
ID = re.compile(r"(?<![a-z0-9])([a-z]\d\d[a-z]?)(?![a-z0-9])")

NOT_BUILT_YET: set[str] = set()
"""Lines whose features come later. An id that has a test must leave this list."""


def lines_of(pages: Iterable[str]) -> list[str]:
    """The ids of all lines, in order, repeated where the pages repeat them."""
    return [line for page in pages for line in LINE.findall(page)]


def ids_in(sources: Iterable[str]) -> set[str]:
    """The ids that names of tests contain: `test_t31_drop_oldest` has T31."""
    names = (name for source in sources for name in NAME.findall(source))
    return {found[0].upper() + found[1:] for name in names for found in ID.findall(name.replace("_", " "))}


def complaints(lines: Collection[str], tested: set[str], not_built: set[str]) -> Iterator[str]:
    """What is wrong between the lines, the tests, and the list of what is not built yet."""
    for line, times in Counter(lines).items():
        if times > 1:
            yield f"{line} stands on {times} lines: give each line an id of its own"
    for line in sorted(set(lines) - tested - not_built):
        yield f"{line} has no test: name one test_{line.lower()}_..., or add it to NOT_BUILT_YET"
    for line in sorted(not_built & tested):
        yield f"{line} has a test: take it off NOT_BUILT_YET"
    for line in sorted(not_built - set(lines)):
        yield f"{line} is on NOT_BUILT_YET and in no page of the specification"
    for line in sorted(tested - set(lines)):
        yield f"{line} is named by a test and is in no page of the specification"


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return lines_of(path.read_text("utf-8") for path in sorted(SPECIFICATION.glob("*.md")))


@pytest.fixture(scope="module")
def tested() -> set[str]:
    return ids_in(path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__))


def test_every_line_of_the_specification_has_a_test(lines: list[str], tested: set[str]) -> None:
    assert len(lines) > 100
    found = list(complaints(lines, tested, NOT_BUILT_YET))
    assert not found, "\n" + "\n".join(found)


def test_planted_faults_are_reported() -> None:
    lines = lines_of(
        ["- T01 [seed] one\n- T02a [ours] two\n", "- T01 again\n- T03 three\n- T04 four\ntext - T09 no line"]
    )
    tested = ids_in(
        ["def test_t02a_t03_it_works() -> None:\n    def test_of_t99x(): ...\nasync def test_r50_is_unknown()"]
    )
    assert tested == {"T02a", "T03", "T99x", "R50"}
    assert list(complaints(lines, tested, {"T03", "T08"})) == [
        "T01 stands on 2 lines: give each line an id of its own",
        "T01 has no test: name one test_t01_..., or add it to NOT_BUILT_YET",
        "T04 has no test: name one test_t04_..., or add it to NOT_BUILT_YET",
        "T03 has a test: take it off NOT_BUILT_YET",
        "T08 is on NOT_BUILT_YET and in no page of the specification",
        "R50 is named by a test and is in no page of the specification",
        "T99x is named by a test and is in no page of the specification",
    ]


def test_the_table_of_tests_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "spec", "--print"], capture_output=True, text=True, check=True
    )
    written = (SPECIFICATION / "tests.md").read_text("utf-8")
    assert made.stdout == written, "tests were added, moved or removed: run `make spec` and look at the difference"
