"""How a pool looks in a notebook: a line of facts and a table, as HTML. Text of users is escaped, and redacted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from headgate.core.redaction import redact

_MOST = 50  # rows that are shown
_WIDEST = 200  # characters of one cell
_CELL = "padding: 0 1em 0 0; text-align: left"


def card(described: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, more: int = 0) -> str:
    """Return the HTML of a pool: its repr, and a table of what it has. `more`: how many rows are not given."""
    all_rows = list(rows)
    shown, hidden = all_rows[:_MOST], more + max(0, len(all_rows) - _MOST)
    kind, _, facts = described.strip("<>").partition(" ")
    table = ""
    if shown:
        head = "".join(f'<th style="{_CELL}">{_text(column)}</th>' for column in columns)
        body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in shown)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    rest = f"<div>... and {hidden:,} more</div>" if hidden else ""
    return f"<div><b>{_text(kind)}</b> {_text(facts)}{table}{rest}</div>"


def _cell(value: object) -> str:
    return f'<td style="{_CELL}">{"" if value is None else _text(value)}</td>'


def _text(value: object) -> str:
    text = redact(str(value))
    return escape(text if len(text) <= _WIDEST else text[:_WIDEST] + "...")
