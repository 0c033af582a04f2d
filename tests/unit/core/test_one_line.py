"""Text of others in one line: nothing in it moves a cursor or begins another line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.one_line import one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 \\n", "plain é 漢 \\n"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b[2J\x85\u2028", r"\x1b[2J\x85\u2028"),
        ("\u202e\ud800\U000e0001", r"\u202e\ud800\U000e0001"),
    ],
)
def test_o10_what_cannot_be_printed_is_escaped_and_the_rest_stays(text: str, shown: str) -> None:
    assert one_line(text) == shown


@given(st.text(alphabet=st.characters(codec=None)))
def test_o10_any_text_becomes_one_line_that_can_be_printed(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1
    assert one_line(shown) == shown
