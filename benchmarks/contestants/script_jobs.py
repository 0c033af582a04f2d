"""What `scripts.py` measures: the same code as a script, whose functions are of `__main__`, and as a module.

python script_jobs.py       a script: it answers questions (see `Lane` in dispatch.py)
python script_module.py     the same, importing this
"""

from __future__ import annotations

import asyncio
import enum
import json
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import headgate

CALLERS = 100
WORKERS = 2


class Kind(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@dataclass
class Order:
    number: int
    price: float = 1.0
    kind: Kind = Kind.SMALL
    notes: list[str] = field(default_factory=list)

    def total(self) -> float:
        return self.number * self.price

    def raised(self, by: float) -> Order:
        return Order(self.number, self.price + by, self.kind)


def kind_of(total: float) -> Kind:
    return Kind.LARGE if total > LIMIT else Kind.SMALL


LIMIT = 100.0


@headgate.routine
async def add(a: int, b: int) -> int:
    return a + b


@headgate.routine
async def fib(n: int) -> int:
    if n < 2:
        return n
    a, b = await asyncio.gather(fib(n - 1), fib(n - 2))
    return a + b


@headgate.routine
async def uses(number: int) -> bool:
    return kind_of(Order(number).raised(2.0).total()) is Kind.LARGE


@headgate.routine
async def takes(order: Order) -> float:
    return order.total()


@headgate.routine
async def gives(number: int) -> Order:
    return Order(number)


@headgate.routine
async def calls(order: Order) -> float:
    return await takes(order.raised(1.0))


CASES: dict[str, Callable[[int], Awaitable[Any]]] = {
    "numbers only": lambda i: add(i, 1),
    "a recursive routine": lambda i: fib(4),
    "uses a dataclass, an Enum and a function": lambda i: uses(i),
    "takes a dataclass": lambda i: takes(Order(i)),
    "returns a dataclass": lambda i: gives(i),
    "calls a routine with a dataclass": lambda i: calls(Order(i)),
}


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    file: str
    rows: int
    total: float


def parse(path: str) -> Summary:
    import pandas as pd

    frame = pd.read_csv(path)
    return Summary(path, len(frame), float(frame["price"].sum()))


@headgate.routine
async def parse_on_loop(path: str) -> Summary:
    return parse(path)


ROUTINES = {"async def": parse_on_loop, "def": headgate.routine(parse)}


def files_of(folder: str) -> list[str]:
    return sorted(map(str, Path(folder).glob("*.csv")))


async def parse_ours(kind: str, files: list[str]) -> int:
    return sum([one.rows async for one in headgate.map(ROUTINES[kind], files)])


def parse_executor(pool: ProcessPoolExecutor, files: list[str]) -> int:
    return sum(one.rows for one in pool.map(parse, files))


# -- questions --------------------------------------------------------------------------------------------------------


async def make_calls(case: str, each: int) -> None:
    call = CASES[case]

    async def caller() -> None:
        for i in range(each):
            await call(i)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def serve() -> None:
    """Answer questions from stdin, until it is closed."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    executor = ProcessPoolExecutor(WORKERS)
    async with headgate.WorkerPool(spawn=WORKERS):
        while line := await reader.readline():
            question = json.loads(line)
            print(json.dumps(await answer(question, executor)), flush=True)
    executor.shutdown()


async def answer(question: dict[str, Any], executor: ProcessPoolExecutor) -> Any:
    if question["measure"] == "calls":
        return await make_calls(question["case"], question["each"])
    files = files_of(question["folder"])
    began = time.perf_counter()
    if question["measure"] in ROUTINES:
        rows = await parse_ours(question["measure"], files)
    else:
        rows = await asyncio.to_thread(parse_executor, executor, files)
    return {"seconds": time.perf_counter() - began, "rows": rows}


if __name__ == "__main__":
    asyncio.run(serve())
