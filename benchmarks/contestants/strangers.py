"""What strangers cost those who may call: the time of one call, alone and beside connections that are up to no good.

    python strangers.py SECONDS     a line of JSON: p50 and p99 of one call at a time, in seconds, alone and beside them

The worker listens on TCP with mutual TLS. The strangers: 500 connections that say nothing, 100 that send a byte a
second, one that sends a megabyte of random bytes, and one that begins a TLS handshake and never ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import ours_routines

import headgate
from headgate.certs import make_certificates


async def measure(seconds: float) -> dict[str, float]:
    spent, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        await ours_routines.add(1, 2)
        spent.append(time.perf_counter() - start)
    spent.sort()
    return {"p50": spent[len(spent) // 2], "p99": spent[len(spent) * 99 // 100]}


async def drip(writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(1.0)
    except OSError:
        pass  # the worker has had enough of it


def half_a_handshake() -> bytes:
    """The first message of a TLS client."""
    out = ssl.MemoryBIO()
    try:
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    except ssl.SSLWantReadError:
        pass
    return out.read()


async def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "certificates"
        make_certificates(made)
        paths = (made / "ca-cert.pem", made / "worker-key.pem", made / "worker-cert.pem")
        credentials = headgate.WorkerCredentials.from_files(*paths)

        def worker(*tags: str, credentials: headgate.WorkerCredentials | None = None) -> headgate.LocalWorker:
            return headgate.LocalWorker(*tags, credentials=credentials, host="127.0.0.1")

        async with headgate.WorkerPool(spawn=1, worker=worker, credentials=credentials) as pool:
            await measure(seconds / 2)
            alone = await measure(seconds)
            host, _, port = pool.workers()[0].address.rpartition(":")
            strangers = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "connect", host, port, stdout=PIPE
            )
            try:
                assert strangers.stdout is not None
                await asyncio.wait_for(strangers.stdout.readline(), 20)
                beside = await measure(seconds)
            finally:
                strangers.kill()
                await strangers.wait()
    print(json.dumps({"alone": alone, "beside": beside}))


async def connect(host: str, port: str) -> None:
    """Be the strangers, until killed."""
    writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(602)]
    tasks = [asyncio.ensure_future(drip(writer)) for writer in writers[500:600]]
    writers[600].write(os.urandom(1_000_000))
    writers[601].write(half_a_handshake())
    print("connected", flush=True)
    await asyncio.gather(*tasks)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(connect(*sys.argv[2:]) if sys.argv[1] == "connect" else main(float(sys.argv[1])))
