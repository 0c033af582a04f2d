"""Small things many tests of stores need: entries, and disks that misbehave."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headgate.core.files import Files
from headgate.errors import StoreWriteFailed
from headgate.stores import Entry, Journal, JsonLinesStore, StoredTask
from headgate.testing.stores import end, submit

__all__ = ["FullDisk", "NoSync", "append", "end", "lives", "numbers", "open_journal", "statuses", "submit"]


def append(journal: Journal, *entries: Entry) -> list[StoreWriteFailed | None]:
    """Append these at once; the answer to each."""

    async def work() -> list[StoreWriteFailed | None]:
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in entries]
        for entry, answer in zip(entries, answers, strict=True):
            journal.append(entry, answer.set_result)
        return list(await asyncio.gather(*answers))

    return asyncio.run(work())


def lives(*numbers: int, **about: Any) -> list[Entry]:
    """Submit and end of these tasks; each holds a key if there is anything about it."""
    return [entry for number in numbers for entry in (submit(number, about), end(number, result=number))]


def open_journal(path: Path, *, keep: int = 1000, **options: Any) -> Journal:
    return JsonLinesStore(path, **options).open("p", {"name": "p"}, keep)


def numbers(tasks: Iterable[StoredTask]) -> list[int]:
    return [task["task"] for task in tasks]


def statuses(tasks: Iterable[StoredTask]) -> dict[int, str]:
    return {task["task"]: task["status"] for task in tasks}


class NoSync(Files):
    """For tests that open hundreds of journals and cut no power."""

    def sync(self, file: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class FullDisk(NoSync):
    """Room for `room` bytes more, and writes that are as short as they may be."""

    def __init__(self, room: float = float("inf"), *, most: int = 1 << 30) -> None:
        self.room = room
        self.most = most
        self.cuts_fail = 0
        self.syncs_fail = 0

    def write(self, file: int, data: memoryview) -> int:
        size = int(min(len(data), self.room, self.most))
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= size
        return super().write(file, data[:size])

    def sync(self, file: int) -> None:
        if self.syncs_fail:
            self.syncs_fail -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def truncate(self, file: int, size: int) -> None:
        if self.cuts_fail:
            self.cuts_fail -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.room += max(0, self.size(file) - size)
        super().truncate(file, size)
