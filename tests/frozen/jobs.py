"""Functions and classes that recorded pickles and frames refer to by name: they keep their names and their module."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import headgate


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: Any


class Pair(NamedTuple):
    left: Any
    right: Any


class Picky(Exception):
    """Its constructor does not take its args."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


class Slotted(Exception):
    __slots__ = ("place",)


class Reduced(Exception):
    """It says itself how it is rebuilt."""

    def __reduce__(self) -> Any:
        return _reduced, (str(self.args[0]),)


def _reduced(text: str) -> Reduced:
    return Reduced(text)


class Stateful(Exception):
    """It has its own state."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.seen = 0

    def __getstate__(self) -> Any:
        return {"seen": self.seen}

    def __setstate__(self, state: Any) -> None:
        self.seen = state["seen"] + 1


class Stuck(Exception):
    """It goes into no pickle."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("stuck")


class Special(headgate.Resource[str]):
    """A resource of a user's own class."""


class Adder:
    """An object that can be called."""

    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __call__(self, value: int) -> int:
        return value + self.amount


TENANT = headgate.ContextVar[str]("tenant", namespace="frozen")
LIMIT = headgate.ContextVar[int]("limit", namespace="frozen", default=7)


@headgate.routine
async def add(left: Any, right: Any = 0) -> Any:
    return left + right


@headgate.routine(timeout=60, retries=2)
async def fail(text: str) -> None:
    raise LookupError(text)


@headgate.routine(thread=True)
def plain(value: Any) -> Any:
    return value


@headgate.routine
async def hang() -> None:
    await asyncio.sleep(3600)


@headgate.routine
async def length(data: bytes) -> int:
    return len(data)


@headgate.routine(prefetch=2)
async def count(stop: int) -> AsyncGenerator[int, None]:
    for number in range(stop):
        yield number


@headgate.routine
async def echo(first: Any) -> AsyncGenerator[Any, Any]:
    item = first
    while True:
        try:
            item = yield item
        except KeyError as error:
            item = f"caught {error.args[0]}"


@headgate.routine
async def tenant() -> str:
    before = TENANT.get("nobody")
    TENANT.set("changed")
    return before


async def undecorated(value: Any) -> Any:
    return value


async def numbers(stop: int) -> AsyncGenerator[int, None]:
    for number in range(stop):
        yield number


async def value_of(resource: headgate.Resource[int]) -> int:
    return resource.value + 1
