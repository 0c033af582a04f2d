"""An engine without an engine: each place is a host that is a child of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from headgate.workers.processes.engine_keepers import OnPlace, OnTrouble
from headgate.workers.processes.host_process import HostProcess


class Subprocesses:
    """Hosts as children of this process. `holds` keeps places from being told."""

    module_remedy = "Take it along."
    keeps_places = True

    def __init__(self, workers: int = 1) -> None:
        self.hosts: dict[str, HostProcess] = {}
        self.where: dict[str, dict[str, Any]] = {}
        self.dropped: list[str] = []
        self.fails = ""
        self._workers = workers
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.settings = b""
        self._on_place: OnPlace
        self.on_trouble: OnTrouble

    async def open(self, settings: bytes, on_place: OnPlace, on_trouble: OnTrouble) -> int:
        if self.fails:
            raise ConnectionError(self.fails)
        self.settings, self._on_place, self.on_trouble = settings, on_place, on_trouble
        return self._workers

    def want(self, workers: int) -> Collection[str]:
        while len(self.hosts) < workers:
            self._number += 1
            key = f"place-{self._number}"
            self.hosts[key] = HostProcess(self.settings, "127.0.0.1")
            self.look(key)
        return list(self.hosts)

    def look(self, key: str) -> None:
        self._do(self._find(key))

    async def _find(self, key: str) -> None:
        host = self.hosts.get(key)
        if host is not None:
            self.where[key] = await asyncio.to_thread(host.where)
            if key in self.hosts:
                self._on_place(key, self.where[key]["address"])

    def drop(self, key: str) -> None:
        self.dropped.append(key)
        self._do(self._end(self.hosts.pop(key)))

    async def _end(self, host: HostProcess) -> None:
        await asyncio.to_thread(host.end)

    async def close(self) -> None:
        await asyncio.gather(*self._tasks)
        hosts, self.hosts = self.hosts, {}
        await asyncio.gather(*(self._end(host) for host in hosts.values()))

    def abandon(self) -> None:
        for host in self.hosts.values():
            host.end()

    def _do(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
