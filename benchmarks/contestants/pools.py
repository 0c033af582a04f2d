"""The contestants. Each function imports its library and returns what opens a pool of two workers.

The two steps are apart because a user who waits for a first result has imported the library long ago, or has not.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

WORKERS = 2


class Calls(NamedTuple):
    """What may be asked of an open pool."""

    add: Callable[[int, int], Awaitable[int]]
    pid: Callable[[], Awaitable[int]] | None = None
    """Of a worker, and in the end of each of them."""
    hold: Callable[[str], Awaitable[None]] | None = None
    """Runs for a minute, and says its process in a file as soon as it has begun."""


Opened = Callable[[], AbstractAsyncContextManager[Calls]]


def ours() -> Opened:
    import ours_routines

    import headgate

    @asynccontextmanager
    async def opened() -> AsyncIterator[Calls]:
        async with headgate.WorkerPool(spawn=WORKERS):
            yield Calls(ours_routines.add, ours_routines.pid, ours_routines.hold)

    return opened


def tcp() -> Opened:
    """Ours, through TCP sockets of this machine instead of Unix sockets."""
    return _over_tcp(secure=False)


def tls() -> Opened:
    """Ours, through TCP sockets of this machine with mutual TLS."""
    return _over_tcp(secure=True)


def _over_tcp(*, secure: bool) -> Opened:
    import ours_routines

    import headgate
    from headgate.certs import make_certificates

    def worker(*tags: str, credentials: Any = None) -> headgate.LocalWorker:
        return headgate.LocalWorker(*tags, credentials=credentials, host="127.0.0.1")

    @asynccontextmanager
    async def opened() -> AsyncIterator[Calls]:
        with tempfile.TemporaryDirectory() as folder:
            credentials = None
            if secure:
                made = Path(folder) / "certificates"
                make_certificates(made)
                paths = (made / "ca-cert.pem", made / "worker-key.pem", made / "worker-cert.pem")
                credentials = headgate.WorkerCredentials.from_files(*paths)
            async with headgate.WorkerPool(spawn=WORKERS, worker=worker, credentials=credentials):
                yield Calls(ours_routines.add, ours_routines.pid, ours_routines.hold)

    return opened


def found() -> Opened:
    """Ours, with workers that are announced to other programs of this machine."""
    import ours_routines

    import headgate

    @asynccontextmanager
    async def opened() -> AsyncIterator[Calls]:
        async with headgate.WorkerPool(spawn=WORKERS, discovery=headgate.LocalDiscovery()):
            yield Calls(ours_routines.add, ours_routines.pid, ours_routines.hold)

    return opened


def wool() -> Opened:
    import wool
    import wool_routines

    @asynccontextmanager
    async def opened() -> AsyncIterator[Calls]:
        async with wool.WorkerPool(spawn=WORKERS):
            yield Calls(wool_routines.add, wool_routines.pid, wool_routines.hold)

    return opened


def executor() -> Opened:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    import plain_routines

    @asynccontextmanager
    async def opened() -> AsyncIterator[Calls]:
        in_executor = asyncio.get_running_loop().run_in_executor
        with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as processes:
            yield Calls(
                lambda a, b: in_executor(processes, plain_routines.add, a, b),
                lambda: in_executor(processes, plain_routines.pid),
                lambda path: in_executor(processes, plain_routines.hold, path),
            )

    return opened


def raw() -> Opened:
    """One server: its client is what limits it."""
    import grpc.aio
    from raw import Stream

    @asynccontextmanager
    async def opened() -> AsyncIterator[Calls]:
        with tempfile.TemporaryDirectory() as folder:
            socket = str(Path(folder) / "raw")
            server = await asyncio.create_subprocess_exec(
                sys.executable, str(Path(__file__).with_name("raw.py")), socket, stdin=PIPE, stdout=PIPE
            )
            assert server.stdin is not None
            assert server.stdout is not None
            try:
                await server.stdout.readline()
                async with grpc.aio.insecure_channel(f"unix:{socket}") as channel, Stream(channel) as stream:
                    yield Calls(stream.add)
            finally:
                server.stdin.close()
                await server.wait()

    return opened


def ray() -> Opened:
    """Tasks, not actors: what a plain function becomes."""
    import plain_routines
    import ray

    @asynccontextmanager
    async def opened() -> AsyncIterator[Calls]:
        ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
        add, pid = ray.remote(plain_routines.add), ray.remote(plain_routines.pid)
        try:
            yield Calls(add.remote, pid.remote)
        finally:
            ray.shutdown()

    return opened


def dask() -> Opened:
    import plain_routines
    from distributed import Client, LocalCluster

    @asynccontextmanager
    async def opened() -> AsyncIterator[Calls]:
        options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": None, "asynchronous": True}
        async with LocalCluster(n_workers=WORKERS, **options) as cluster, Client(cluster, asynchronous=True) as client:

            async def add(a: int, b: int) -> int:
                return await client.submit(plain_routines.add, a, b, pure=False)

            async def pid() -> int:
                return await client.submit(plain_routines.pid, pure=False)

            yield Calls(add, pid)

    return opened


IMPORTED: dict[str, Callable[[], Opened]] = {
    "ours": ours,
    "tcp": tcp,
    "tls": tls,
    "found": found,
    "wool": wool,
    "executor": executor,
    "raw": raw,
    "ray": ray,
    "dask": dask,
}
