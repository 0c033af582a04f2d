"""The ids of records that were begun: a table of hashes, 32 bytes for each id. Pure."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

ENTRY = 16
"""Bytes of an entry in the file of ids: the hash, and the line of the record."""


class Ids:
    """Which ids there were, and on which line. (A dict would take four times the memory.)"""

    def __init__(self) -> None:
        self._count = 0
        self._table = array("Q", bytes(16 * 1024))  # hash and line in turn; hash 0: free

    def __len__(self) -> int:
        return self._count

    def add(self, hashed: int, line: int) -> int | None:
        """Note an id; returns the line of the record that has it already."""
        place = self._find(hashed)
        if self._table[place]:
            return self._table[place + 1]
        self._table[place], self._table[place + 1] = hashed, line
        self._count += 1
        if self._count * 4 > len(self._table):  # half of the places are taken
            self._grow()
        return None

    def _find(self, hashed: int) -> int:
        table = self._table
        last = len(table) // 2 - 1  # the number of places is a power of two
        place = hashed & last
        while table[2 * place] not in (0, hashed):
            place = (place + 1) & last
        return 2 * place

    def _grow(self) -> None:
        old = self._table
        self._table = array("Q", bytes(8 * 2 * len(old)))
        for place in range(0, len(old), 2):
            if old[place]:
                found = self._find(old[place])
                self._table[found], self._table[found + 1] = old[place], old[place + 1]


def hash_of(name: Any) -> int:
    """The hash of an id: 64 bits, so that two of a million ids are taken for one in 1 of 30 million runs."""
    text = json.dumps(name, sort_keys=True, default=str)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") or 1


def entry(hashed: int, line: int) -> bytes:
    """An id as it stands in the file of ids."""
    return hashed.to_bytes(8, "little") + line.to_bytes(8, "little")


def entries(data: bytes) -> Iterator[tuple[int, int]]:
    """Read the ids of a file: hashes and lines."""
    for start in range(0, len(data) - len(data) % ENTRY, ENTRY):
        yield int.from_bytes(data[start : start + 8], "little"), int.from_bytes(data[start + 8 : start + 16], "little")
