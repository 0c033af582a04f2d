"""`headgate serve-keys` beside a plain pass-through of starlette and httpx: requests/s, first byte of a stream.

    python benchmarks/http_proxy.py            about a minute
    python benchmarks/http_proxy.py --quick    about 15 seconds

Both are processes of their own under uvicorn with h11, with one upstream (contestants/echo_upstream.py), and are
measured in turns by the same client: 32 connections with one request each at a time, then one stream after the other.
Ours has tokens, five keys and tenants that take turns; the other has none of these. The program prints MISSED for a
figure that does not reach its minimum ("must"), and exits with 0 all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import table
from table import Bar, Turns, median, per_second, times

HERE = Path(__file__).parent
CONNECTIONS = 32
RATE, LATER = Bar(0.7), Bar(1.0, at_most=True)
PROMPT = {"model": "m", "messages": [{"role": "user", "content": "hello " * 20}]}


@dataclass(frozen=True, slots=True)
class Length:
    """How long to measure."""

    turns: Turns
    streams: int
    """Streams in each turn."""


FULL = Length(Turns(rounds=9, seconds=2.0), streams=100)
QUICK = Length(Turns(rounds=3, seconds=1.0), streams=30)


@contextmanager
def program(*arguments: str) -> Iterator[str]:
    """A process that ends with the block; gives the line that it prints first."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextmanager
def ours(upstream: str) -> Iterator[tuple[int, str]]:
    """`headgate serve-keys` with five keys; gives its port and token."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text("[keys]\n" + "".join(f'key-{number} = "sk-{number}"\n' for number in range(5)), "utf-8")
        keys.chmod(0o600)
        command = ["-m", "headgate", "serve-keys", "--json", "--upstream", f"{upstream}/v1", "--keys", str(keys)]
        with program(*command) as line:
            told = json.loads(line)
            yield int(told["base_url"].rpartition(":")[2].partition("/")[0]), told["token"]


class Client:
    """Sends the same request again and again over connections that it keeps."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._token = token
        self._open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def _request(self, body: bytes) -> bytes:
        headers = {"host": f"127.0.0.1:{self._port}", "authorization": f"Bearer {self._token}"}
        headers |= {"content-type": "application/json", "content-length": str(len(body)), "user-agent": "bench"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n".encode() + body

    async def requests(self, count: int) -> None:
        """Make so many requests, over all connections at a time."""
        while len(self._open) < CONNECTIONS:
            self._open.append(await asyncio.open_connection("127.0.0.1", self._port))
        sent, left = self._request(json.dumps(PROMPT).encode()), count

        async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal left
            while left > 0:
                left -= 1
                writer.write(sent)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                at = head.index(b"content-length: ") + 16
                await reader.readexactly(int(head[at : head.index(b"\r", at)]))

        await asyncio.gather(*(repeat(*pair) for pair in self._open))

    async def first_byte(self) -> float:
        """Milliseconds from a request to the first event of its stream, over a connection that is kept."""
        if not self._open:
            self._open.append(await asyncio.open_connection("127.0.0.1", self._port))
        reader, writer = self._open[0]
        began = time.perf_counter()
        writer.write(self._request(json.dumps({**PROMPT, "stream": True}).encode()))
        await reader.readuntil(b"data: ")
        seconds = time.perf_counter() - began
        await reader.readuntil(b"\r\n0\r\n\r\n")
        return seconds * 1000


async def first_bytes(length: Length, clients: dict[str, Client]) -> dict[str, list[float]]:
    """The median of each turn, in milliseconds. Single streams take turns too, so that other load disturbs both."""
    found: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(length.turns.rounds):
        turn: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(length.streams):
            for name, client in clients.items():
                turn[name].append(await client.first_byte())
        for name, figures in turn.items():
            found[name].append(median(figures))
    return found


async def measured(length: Length, clients: dict[str, Client]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    rates = await table.in_turns(length.turns, {name: client.requests for name, client in clients.items()})
    return rates, await first_bytes(length, clients)


def proxy(length: Length) -> dict[str, dict[str, list[float]]]:
    """Measure both, print the table, and return the figures of all rounds."""
    with ExitStack() as stack:
        upstream = stack.enter_context(program(str(HERE / "contestants" / "echo_upstream.py")))
        url = f"http://127.0.0.1:{upstream}"
        port, token = stack.enter_context(ours(url))
        plain = stack.enter_context(program(str(HERE / "contestants" / "plain_proxy.py"), url))
        clients = {"headgate": Client(port, token), "starlette + httpx": Client(int(plain), "-")}
        rates, delays = asyncio.run(measured(length, clients))
    report(rates, delays)
    return {"requests": rates, "first_byte": delays}


def report(rates: dict[str, list[float]], delays: dict[str, list[float]]) -> None:
    rows = [[name, per_second(median(rates[name])), f"{median(delays[name]):.2f} ms"] for name in rates]
    title = f"A proxy with keys beside one without, {CONNECTIONS} connections, load {os.getloadavg()[0]:.1f}"
    table.print_table(title, ["", "requests/s", "first byte of a stream"], rows)
    own, other = rates.values()
    ratio = median([one / beside for one, beside in zip(own, other, strict=True)])
    mine, theirs = delays.values()
    later = median([one - beside for one, beside in zip(mine, theirs, strict=True)])
    judged = [
        ["requests/s", times(ratio), f"at least {times(RATE.must)}", RATE.verdict(ratio)],
        ["first byte later by", f"{later:.2f} ms", f"at most {LATER.must:g} ms", LATER.verdict(later)],
    ]
    table.print_table("headgate against the other", ["", "figure", "must", ""], judged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    length = QUICK if parser.parse_args().quick else FULL
    table.warn_if_busy()
    table.keep("http_proxy", proxy(length))


if __name__ == "__main__":
    main()
