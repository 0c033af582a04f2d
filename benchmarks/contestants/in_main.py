"""Ours, with a routine that workers cannot import: it is defined in `__main__`, and travels by value."""

from __future__ import annotations

import client

import headgate


@headgate.routine
async def add(a: int, b: int) -> int:
    return a + b


if __name__ == "__main__":
    client.main(add)
