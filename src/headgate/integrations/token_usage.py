"""How many tokens a request to a language model may use, and how many its answer says it used. Pure.

Providers count a request before they run it: by its text, and by the length of answer that it allows. What was really
used stands in the answer, at its end, and of Anthropic's streams at the beginning too.
"""

from __future__ import annotations

import json
import re
from typing import Final

from headgate.resources.costs import Cost, Spent

_LONGEST_PARSED: Final = 1 << 20  # bytes of a request that are parsed; of a longer one only the length counts
_CHARACTERS_PER_TOKEN: Final = 4
_ANSWER_LENGTHS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_MOST: Final = 1e9

_COUNT = re.compile(
    rb'"(total_tokens|prompt_tokens|input_tokens|completion_tokens|output_tokens)"\s{0,8}:\s{0,8}(\d{1,9})(?!\d)'
)


def estimated_cost(body: bytes) -> Cost:
    """How many tokens a request with this body may use: its text, and the longest answer that it allows."""
    return Cost(len(body) / _CHARACTERS_PER_TOKEN, _longest_answer(body))


def _longest_answer(body: bytes) -> float:
    if body.lstrip()[:1] != b"{" or len(body) > _LONGEST_PARSED:
        return 0.0
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return 0.0
    answer = next((number for name in _ANSWER_LENGTHS if (number := _number(fields.get(name)))), 0.0)
    return answer * max(1.0, _number(fields.get("n")))


def used_tokens(text: bytes) -> Spent | None:
    """The tokens that an answer says it used, of which this is the beginning and the end, or None if it does not say.

    An answer that reports one part and no total, such as one of embeddings, has used nothing of the other. A total
    without parts counts in full as both.
    """
    counts = {name: float(number) for name, number in _COUNT.findall(text)}  # the last of each counts
    total = counts.get(b"total_tokens")
    read = counts.get(b"input_tokens", counts.get(b"prompt_tokens"))
    written = counts.get(b"output_tokens", counts.get(b"completion_tokens"))
    if read is None and written is None:
        return None if total is None else Spent(total, total, total)
    known = (read or 0.0) + (written or 0.0)
    if total is None:
        return Spent(known, read or 0.0, written or 0.0)
    total = max(total, known)
    return Spent(total, total - known if read is None else read, total - known if written is None else written)


class UsageReader:
    """Keeps as much of an answer as is needed to find what it says it used."""

    _PART: Final = 4096

    def __init__(self) -> None:
        self._first = b""
        self._last = b""

    def feed(self, chunk: bytes) -> None:
        """Look at another part of the answer."""
        if len(self._first) < self._PART:
            self._first += chunk[: self._PART]
        self._last = (self._last + chunk)[-self._PART :] if len(chunk) < self._PART else chunk[-self._PART :]

    def spent(self) -> Spent | None:
        """The tokens that the answer says it used, or None if it does not say, or cannot be read."""
        return used_tokens(self._first + b"\n" + self._last)


def _number(value: object) -> float:
    return min(float(value), _MOST) if type(value) in (int, float) and value > 0 else 0.0  # type: ignore[operator, arg-type]
