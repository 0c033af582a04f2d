"""Results of tasks, for tests of what is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Answer:
    text: str
    tokens: int = 0


class Handle:
    """Something that no store keeps."""


RUNS: list[Any] = []


async def answer(text: str) -> Answer:
    RUNS.append(text)
    return Answer(text, len(text))


async def opaque(number: int) -> Handle:
    RUNS.append(number)
    return Handle()
