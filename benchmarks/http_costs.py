"""What headgate costs in front of HTTP: the transport on top of httpx.

    make bench          about 20 seconds
    make bench-quick    about 3 seconds

The same client sends the same requests with and without `RotatingTransport`, in turns. Answers come from
memory and nothing waits, so the difference of CPU time is what the transport costs. The program prints MISSED for a
figure that does not reach its minimum ("must"), and exits with 0 all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
import table
from table import MISSED, Bar, Contestant, Turns, median

import headgate
from headgate.integrations.httpx import RotatingTransport

FULL = Turns(rounds=45, seconds=0.1, clock=time.process_time)
QUICK = Turns(rounds=11, seconds=0.05, clock=time.process_time)

PER_REQUEST = Bar(60.0, at_most=True)  # microseconds
KEYS = {f"key-{number}": f"sk-{number}" for number in range(1, 4)}
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "What is scarce?"}]}
BODY = b'{"id": "1", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Keys."}}]}'
FEW = {"content-type": "application/json", "content-length": str(len(BODY))}
MANY = {
    **FEW,
    "date": "Tue, 17 Nov 2026 12:00:00 GMT",
    "server": "upstream",
    "connection": "keep-alive",
    "x-request-id": "req_1",
    "openai-version": "2020-10-01",
    "openai-processing-ms": "12",
    "vary": "Origin",
    "x-ratelimit-limit-requests": "10000",
    "x-ratelimit-limit-tokens": "2000000",
    "x-ratelimit-remaining-requests": "9999",
    "x-ratelimit-remaining-tokens": "1999980",
    "x-ratelimit-reset-requests": "6ms",
    "x-ratelimit-reset-tokens": "0s",
}


class Stream(httpx.AsyncByteStream):
    """A body of one chunk."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield BODY

    async def aclose(self) -> None:
        pass


class FromMemory(httpx.AsyncBaseTransport):
    """Answers at once, with headers as they come from the network."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers=self._headers, stream=Stream())


def posting(client: httpx.AsyncClient) -> Contestant:
    async def post(times: int) -> None:
        for _ in range(times):
            reply = await client.post("https://api.example.com/v1/chat/completions", json=QUESTION)
            assert reply.status_code == 200

    return post


async def measure_transport(turns: Turns) -> list[dict[str, Any]]:
    """Microseconds of one request with the transport and without it, and their difference."""
    rows = []
    for what, headers in (("2 headers", FEW), ("OpenAI's headers", MANY)):
        table.say(f"transport, answers with {what} ...")
        inner, pool = FromMemory(headers), headgate.ResourcePool(KEYS)
        async with (
            httpx.AsyncClient(transport=inner) as plain,
            httpx.AsyncClient(transport=RotatingTransport(pool, transport=inner)) as rotating,
        ):
            rates = await table.in_turns(turns, {"plain": posting(plain), "rotating": posting(rotating)})
        micros = {name: [1e6 / rate for rate in rounds] for name, rounds in rates.items()}
        added = [ours - theirs for ours, theirs in zip(micros["rotating"], micros["plain"], strict=True)]
        rows.append({"what": what, "rounds": micros, "added": median(added), "must": PER_REQUEST.must})
        rows[-1]["verdict"] = PER_REQUEST.verdict(rows[-1]["added"])
    return rows


def show_transport(rows: list[dict[str, Any]]) -> None:
    shown = [
        (
            row["what"],
            *(f"{median(row['rounds'][who]):.1f}" for who in ("plain", "rotating")),
            *(f"{row['added']:.1f}", f"at most {row['must']:.0f}", row["verdict"]),
        )
        for row in rows
    ]
    header = ("answers with", "httpx, us", "with keys, us", "added, us", "must", "verdict")
    table.print_table("RotatingTransport on top of httpx, CPU time of one request", header, shown)


Part = tuple[str, Callable[[Turns], Any], Callable[[list[dict[str, Any]]], None]]
PARTS: tuple[Part, ...] = (("transport", measure_transport, show_transport),)
"""Each part: its name in the results, what measures it, and what prints it. Rows have `what` and `verdict`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    quick = parser.parse_args().quick
    turns = QUICK if quick else FULL
    results: dict[str, Any] = {"quick": quick}
    for name, measure, show in PARTS:
        results[name] = asyncio.run(measure(turns))
        show(results[name])
    path = table.keep("http", results)
    print(f"\nMedians of {turns.rounds} rounds, in turns. Kept in {path.parent.parent.name}/results/{path.name}.")
    table.warn_if_busy()
    words = [f"{name}, {row['what']}" for name, *_ in PARTS for row in results[name] if row["verdict"] == MISSED]
    print(f"{MISSED}: {'; '.join(words)}." if words else "Every must is reached.")


if __name__ == "__main__":
    main()
