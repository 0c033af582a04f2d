"""A pipeline that is to be killed: ``python pipeline_child.py folder image items``.

It submits every item under its own key, by twenty submitters at once, and says on stdout what it was told: "S" when a
submit was acknowledged, "R" when a body ran, "C" when a result was seen. What it says is one small write, so that it is
either said or not. With `image` it also keeps, beside the journal, what a power cut would leave of it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from headgate import TaskPool
from headgate.core.files import Files
from headgate.stores import JsonLinesStore

KINDS = 5


def expected(item: int) -> Any:
    """Results of many types, so that each must come back as it was."""
    made: list[Any] = [
        item,
        (item, str(item)),
        {item: {"odd": item % 2 == 1}},
        b"%d" % item,
        datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=item),
    ]
    return made[item % KINDS]


class Image(Files):
    """Copies a file to ``<name>.image`` when it is synced, and makes the new name stand when its folder is."""

    def __init__(self) -> None:
        self._names: dict[int, Path] = {}
        self._renamed: list[tuple[Path, Path]] = []

    def open(self, path: Path, *, empty: bool = False) -> int:
        file = super().open(path, empty=empty)
        self._names[os.fstat(file).st_ino] = path
        return file

    def sync(self, file: int) -> None:
        super().sync(file)
        inode = os.fstat(file).st_ino
        _copy(file, self._names[inode])

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self._names[os.stat(target).st_ino] = target
        self._renamed.append((source, target))

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        for source, target in self._renamed:
            os.replace(_image(source), _image(target))
        self._renamed.clear()


def _image(path: Path) -> Path:
    return path.with_name(path.name + ".image")


def _copy(file: int, path: Path) -> None:
    fresh = path.with_name(path.name + ".fresh")
    fresh.write_bytes(os.pread(file, os.fstat(file).st_size, 0))
    os.replace(fresh, _image(path))  # whole or not at all, also when this process is killed here


def say(what: str, item: int) -> None:
    os.write(1, f"{what} {item}\n".encode())


async def work(item: int) -> Any:
    say("R", item)
    await asyncio.sleep(0.0005 * (item % 4))
    return expected(item)


async def feed(pool: TaskPool, items: range) -> None:
    for item in items:
        handle = await pool.submit(work, item, idempotency_key=f"item-{item}", key=f"tenant-{item % 3}")
        say("S", item)
        result = await handle
        assert (type(result), result) == (type(expected(item)), expected(item)), item
        say("C", item)


async def main(folder: str, image: bool, items: int) -> None:
    store = JsonLinesStore(folder, files=Image() if image else Files())
    async with TaskPool("line", scope="pipeline", pipeline_id="p", store=store, max_concurrent=8, keep=100) as pool:
        await asyncio.gather(*(feed(pool, range(first, items, 20)) for first in range(20)))
    say("E", items)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] == "image", int(sys.argv[3])))
