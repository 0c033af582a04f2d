"""What tests of the line share: workers, with a context of its own for each test, and the four kinds of a line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import headgate
from headgate import ResourcePool, testing
from headgate import tasks as rooms
from tests.support.workers.support import PATIENCE, Shared, lines, until

KINDS = ["plain", "resources", "workers", "both"]


class Apart(Shared):
    """One pool for all tests of this folder; what a test sets is gone when it ends."""

    def __call__(self, main: Callable[[], Coroutine[Any, Any, Any]], patience: float = PATIENCE) -> Any:
        async def forked() -> Any:
            return await asyncio.create_task(main())

        return super().__call__(forked, patience)


class Line:
    """One of the four combinations: what makes pools of it, and runs tests of it on virtual time where that can be."""

    def __init__(self, kind: str, shared: Apart | None) -> None:
        self.kind = kind
        self.shared = shared
        self.leases = kind in ("resources", "both")
        self.places = kind in ("workers", "both")

    def pool(self, keys: ResourcePool[Any] | None = None, **options: Any) -> Any:
        """A pool of this kind; `keys` are left out where it has none."""
        options.setdefault("max_concurrent", 1)  # else as many as the workers take
        if self.kind == "plain":
            return rooms.TaskPool(**options)
        if self.leases:
            options["resources"] = keys if keys is not None else ResourcePool({"a": "secret-a"})
        if self.places:
            assert self.shared is not None
            options["workers"] = self.shared.pool
        return headgate.TaskPool(**options)

    def key(self, name: str = "a") -> str:
        """What a function sees of its resource here."""
        return name if self.leases else ""

    def __call__(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        if self.places:
            assert self.shared is not None
            self.shared(main)
        else:
            testing.run(main)


async def noted(path: Path | str, line: str, count: int = 1) -> None:
    """Wait till this was noted so many times."""
    await until(lambda: lines(path).count(line) >= count)


def tell(path: Path | str, word: str = "go") -> None:
    """What waits in `combined_jobs.told` may go on."""
    Path(f"{path}.{word}").touch()
