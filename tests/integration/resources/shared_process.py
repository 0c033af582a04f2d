"""A process of the tests of shared health: reads commands on stdin, answers on stdout, one JSON line each."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from typing import Any

from headgate.resources import CooldownResource, DisableResource, PoolExhausted, Resource, ResourcePool
from headgate.stores.sqlite import SqliteStore


class Caller:
    """Makes calls of the pool to the upstream."""

    def __init__(self, port: int, pool: ResourcePool[str]) -> None:
        self.port = port
        self.pool = pool
        self.tasks: set[asyncio.Task[Any]] = set()

    async def call(self, key: Resource[str]) -> str:
        """One request; 429 cools the key, 401 disables it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: {key.value}\r\n\r\n".encode())
            answer = (await reader.read()).decode()
        finally:
            writer.close()
        code = int(answer.split()[1])
        if code == 429:
            raise CooldownResource(float(answer.rsplit("\r\n", 1)[1]), "429")
        if code == 401:
            raise DisableResource("401")
        return key.resource_id

    def watch(self, name: str, status: str) -> float:
        """When this key has this status: a moment on the clock that all processes of the machine share."""
        while self.pool.snapshot()[name]["status"] != status:
            time.sleep(0.0005)
        return time.monotonic()

    async def do(self, command: dict[str, Any]) -> Any:
        match command.pop("do"):
            case "run":
                try:
                    return await self.pool.run(self.call, retry_delay=0, **command)
                except PoolExhausted as error:
                    return error.reason
            case "many":
                number = command.pop("number")
                options = {"wait_for_capacity": True, "retry_delay": 0, "max_attempts": 100, **command}
                done = await asyncio.gather(*(self.pool.run(self.call, **options) for _ in range(number)))
                return len(done)
            case "begin":
                for _ in range(command.pop("number")):
                    task = asyncio.create_task(self.pool.run(self.call, wait_for_capacity=True))
                    self.tasks.add(task)
                return None
            case "watch":  # from which moment on a key is not offered
                name, status = command["key"], command["status"]
                return await asyncio.to_thread(self.watch, name, status)
            case "enable":
                await self.pool.enable(command["key"])
            case "disable":
                await self.pool.disable(command["key"])
            case "snapshot":
                return self.pool.snapshot()
        return time.monotonic()


def say(what: dict[str, Any]) -> None:
    """Write one line for the test to read."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main(path: str, port: int, limit: int | None, probe: bool, heartbeat: float) -> None:
    store = SqliteStore(path, heartbeat=heartbeat)
    keys = [Resource(name, f"planted-value-of-{name}", limit) for name in ("k1", "k2")]
    pool = ResourcePool(keys, name="keys", store=store, probe_on_recovery=probe)
    caller = Caller(port, pool)
    say({"pid": os.getpid()})
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    threading.Thread(target=read, daemon=True).start()
    running: set[asyncio.Task[None]] = set()

    async def answer(command: dict[str, Any]) -> None:
        number = command.pop("number_of_command")
        say({"answer": await caller.do(command), "number": number})

    while line := await lines.get():
        task = asyncio.create_task(answer(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(json.loads, sys.argv[2:])))
