"""Which lines of a journal are still wanted.

Compaction copies the lines of the tasks that must be remembered, as they are, and leaves out the others. In a busy
journal every line passes here once before long, so what is asked of a line is read off its beginning, at a tenth of the
price of reading it whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, TypeAlias

from headgate.stores.journal import End, forgettable
from headgate.stores.lines import entry_line

_Words: TypeAlias = "re.Match[bytes] | None"

_BEGINNING: Final = re.compile(
    rb'\{"kind":"(submit|start|requeue|end|beat)","at":([^,}]+)'
    rb'(?:,"task":(\d+)(?:,"(?:status|window)":("[^"]*"|[^,}]+))?)?[,}]'
)
_SUBMIT, _END, _BEAT = b"submit", b"end", b"beat"

_said: Final = lru_cache(256)(json.loads)
"""The same few words stand in every line."""


def wanted(lines: Iterable[bytes], keep: int, now: float) -> list[bool]:
    """Must this line be kept? For each line of a journal. Headers and openings need not: they are written anew."""
    numbers: list[int | None] = []
    windows: dict[int, Any] = {}
    ends: dict[int, End] = {}
    beat = None
    for line in lines:
        found = _BEGINNING.match(line) or _read(line)
        kind, at, task, word = found.groups() if found is not None else (None, b"", None, None)
        number = None if task is None else int(task)
        numbers.append(number)
        if number is None:
            beat = len(numbers) - 1 if kind == _BEAT else beat
        elif kind == _SUBMIT:
            windows[number] = None if word is None else _said(word)
            ends.pop(number, None)
        elif kind == _END and number not in ends:
            ends[number] = End(number, str(_said(word or b"null")), float(at), windows.get(number))
        else:
            windows.setdefault(number, None)
    forgotten = forgettable(ends.values(), keep, now) - {max(windows.keys() | ends.keys(), default=0)}
    flags = [number is not None and number not in forgotten for number in numbers]
    if beat is not None:
        flags[beat] = True
    return flags


def _read(line: bytes) -> _Words:
    """The slow way, for a line that others have written: another order of keys, spaces between them."""
    try:
        return _BEGINNING.match(entry_line(json.loads(line)))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
