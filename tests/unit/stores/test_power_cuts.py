"""T62: what was acknowledged is there after a power cut, wherever it comes.

`Image` is a disk and, beside it, what would be left of it without power: the content of a file as it was at its last
sync, the names of a folder as they were at its last sync. What was done since may have reached the disk or not, whole
or in part, so each cut draws one of these.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from headgate.core.files import Files
from headgate.stores.jsonl import writer
from tests.support.stores.support import NoSync, end, open_journal, submit


class Cut(NamedTuple):
    acknowledged: dict[int, str]
    ending: set[int]
    """Tasks whose end was appended, and may be on the disk although nobody was told."""
    files: dict[str, bytes]


class Image(Files):
    """Real files in one folder, and what a power cut would leave of them."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder = folder
        self.chance = chance
        self.acknowledged: dict[int, str] = {}
        self.ending: set[int] = set()
        self.cuts: list[Cut] = []
        self.steps: set[str] = set()
        self._synced: dict[int, bytes] = {}
        self._names: dict[str, int] = {}
        self._handles: dict[int, int] = {}  # held, so that no inode is used again

    def close_all(self) -> None:
        for handle in self._handles.values():
            os.close(handle)

    # -- the disk ---------------------------------------------------------------------

    def open(self, path: Path, *, empty: bool = False) -> int:
        self._may_cut("open")
        file = super().open(path, empty=empty)
        inode = os.fstat(file).st_ino
        if inode not in self._handles:
            self._handles[inode] = os.open(path, os.O_RDONLY)
            self._synced[inode] = b""
        return file

    def write(self, file: int, data: memoryview) -> int:
        self._may_cut("write")
        return super().write(file, data[: max(1, self.chance.randrange(len(data) + 1))])

    def sync(self, file: int) -> None:
        self._may_cut("sync")
        inode = os.fstat(file).st_ino
        self._synced[inode] = self._content(inode)

    def truncate(self, file: int, size: int) -> None:
        self._may_cut("truncate")
        super().truncate(file, size)

    def replace(self, source: Path, target: Path) -> None:
        self._may_cut("replace")
        super().replace(source, target)
        self._may_cut("replaced")

    def sync_folder(self, folder: Path) -> None:
        self._may_cut("sync_folder")
        if folder == self.folder:
            self._names = self._names_now()

    # -- what is left of it -----------------------------------------------------------

    def _may_cut(self, step: str) -> None:
        if self.chance.random() < 0.5 or step.startswith(("replace", "sync_folder")):
            self.steps.add(step)
            names = self.chance.choice([self._names, self._names_now()])
            files = {name: self._left_of(inode) for name, inode in names.items()}
            self.cuts.append(Cut(dict(self.acknowledged), set(self.ending), files))

    def _left_of(self, inode: int) -> bytes:
        synced, now = self._synced[inode], self._content(inode)
        if not now.startswith(synced):  # cut, or cut and written anew
            return self.chance.choice([synced, now])
        lost = len(now) - len(synced)
        some = self.chance.randrange(lost + 1)
        return synced + self.chance.choice([b"", now[len(synced) :], now[len(synced) :][:some], b"\0" * some])

    def _content(self, inode: int) -> bytes:
        return os.pread(self._handles[inode], 1 << 30, 0)

    def _names_now(self) -> dict[str, int]:
        return {entry.name: entry.inode() for entry in os.scandir(self.folder)}


async def work(folder: Path, files: Image, tasks: int) -> None:
    """Submit and end so many tasks, ten at a time, and note what was acknowledged."""
    journal = open_journal(folder, keep=4, files=files)
    loop = asyncio.get_running_loop()

    async def one(number: int) -> None:
        about = {"idempotency_key": str(number)} if number % 4 == 0 else {}
        for entry, status in ((submit(number, about), "queued"), (end(number, result=number), "completed")):
            answer = loop.create_future()
            if entry["kind"] == "end":
                files.ending.add(number)
            journal.append(entry, answer.set_result)
            assert await answer is None
            files.acknowledged[number] = status
            await asyncio.sleep(0)

    for first in range(1, tasks, 10):
        await asyncio.gather(*(one(number) for number in range(first, first + 10)))
    journal.close()


@pytest.mark.parametrize("seed", range(6))
def test_t62_what_was_acknowledged_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, scale: float
) -> None:
    monkeypatch.setattr(writer, "_MANY_LINES", 10)
    chance = random.Random(seed)
    folder = tmp_path / "disk"
    folder.mkdir()
    files = Image(folder, chance)
    try:
        asyncio.run(work(folder, files, tasks=60))
    finally:
        files.close_all()
    assert files.steps >= {"write", "sync", "replace", "replaced", "sync_folder"}
    most = max(60, int(600 * scale))
    for number, cut in enumerate(chance.sample(files.cuts, min(most, len(files.cuts)))):
        after = tmp_path / f"after-{number}"
        after.mkdir()
        for name, content in cut.files.items():
            (after / name).write_bytes(content)
        journal = open_journal(after, keep=4, files=NoSync())
        journal.close()
        found = {task["task"]: task["status"] for task in journal.tasks}
        wanted = {task for task in cut.acknowledged if task % 4 == 0 or task not in cut.ending}
        assert wanted <= set(found), f"lost {wanted - set(found)} at cut {number}"
        for task, status in cut.acknowledged.items():
            assert found.get(task, status) in (status, "completed")
        assert max(found, default=0) >= max(cut.acknowledged, default=0)  # no number is given twice
        assert os.listdir(after) == ["p.jsonl"]
