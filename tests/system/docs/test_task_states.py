"""The table of states in docs/tasks.md has the same transitions as the code."""

from __future__ import annotations

import re
from pathlib import Path

from headgate.tasks.scheduling.states import TRANSITIONS

GUIDE = Path(__file__).parents[3] / "docs" / "tasks.md"
ROW = re.compile(r"^\| (\w+) \| (\w+) \| (\S.*) \|$", re.MULTILINE)


def rows_of(text: str) -> list[tuple[str, str]]:
    """The cells "from" and "to" of each row below the heading "States"."""
    section = re.search(r"^### States\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, "there is no section 'States'"
    return [(was, becomes) for was, becomes, _ in ROW.findall(section[1]) if was != "from"]


def moves_of(transitions: dict[str, frozenset[str]]) -> list[tuple[str, str]]:
    return sorted((was, becomes) for was, allowed in transitions.items() for becomes in allowed)


def test_the_table_has_every_move_once_and_no_other() -> None:
    assert sorted(rows_of(GUIDE.read_text("utf-8"))) == moves_of({**TRANSITIONS})


def test_the_text_names_every_final_state() -> None:
    section = GUIDE.read_text("utf-8").partition("### States\n")[2].partition("\n#")[0].lower()
    for status, allowed in TRANSITIONS.items():
        assert status in section
        if not allowed:
            assert status in section.partition("there are no other moves.")[2]


def test_a_row_too_many_or_missing_is_seen() -> None:
    head = "### States\n\n| from | to | when |\n|---|---|---|\n"
    table = f"{head}| a | b | so |\n| b | a | then |\n\n## Next\n| c | d | no |\n"
    assert sorted(rows_of(table)) == moves_of({"a": frozenset("b"), "b": frozenset("a")})
    assert sorted(rows_of(table)) != moves_of({"a": frozenset("b"), "b": frozenset()})
    assert sorted(rows_of(table.replace("| b | a | then |\n", ""))) == [("a", "b")]
