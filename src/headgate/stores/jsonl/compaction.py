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
from typing import Any, Final

from headgate.stores.jsonl.journal import End, forgettable
from headgate.stores.jsonl.lines import entry_line, is_intact

_BEGINNING: Final = re.compile(
    rb'\{"kind":"(submit|start|requeue|end|beat)","at":([^,}]+)'
    rb'(?:,"task":(\d+)(?:,"status":("[^"]*"))?(?:,"window":("[^"]*"|[^,}]+))?)?[,}]'
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
        kind, at, number, status, window = _read(line)
        numbers.append(number)
        if number is None:
            beat = len(numbers) - 1 if kind == _BEAT else beat
        elif kind == _SUBMIT:
            windows[number] = window
            ends.pop(number, None)
        elif kind == _END and number not in ends:
            known = windows.setdefault(number, None)
            ends[number] = End(number, str(status), at, known if window is None or known is None else window)
        else:
            windows.setdefault(number, None)
    forgotten = forgettable(ends.values(), keep, now) - {max(windows, default=0)}
    flags = [number is not None and number not in forgotten for number in numbers]
    if beat is not None:
        flags[beat] = True
    return flags


def what_and_whose(line: bytes) -> tuple[str, int | None]:
    """The kind of a line, and the number of its task."""
    kind, _, number, _, _ = _read(line)
    return kind.decode(), number


def _read(line: bytes) -> tuple[bytes, float, int | None, Any, Any]:
    """Its kind, its time, the number of its task, its status, and how long it holds its key."""
    try:
        if is_intact(line) is False:
            return b"", 0.0, None, None, None
        found = _BEGINNING.match(line)
        if found is None or (found[4 if found[1] == _END else 5] is None and _says_more(found[1], line)):
            # The slow way, for a line that others have written: another order of keys, spaces between them.
            found = _BEGINNING.match(entry_line(json.loads(line)))
        if found is not None:
            kind, at, number, status, window = found.groups()
            whose = None if number is None else int(number)
            return kind, float(at), whose, status and _said(status), window and _said(window)
    except Exception:
        pass  # a header, an opening, or a line that cannot be read
    return b"", 0.0, None, None, None


def _says_more(kind: bytes, line: bytes) -> bool:
    """Does a line say something, somewhere, that was not found where it usually is?"""
    return kind == _END or b'"idempotency_key"' in line
