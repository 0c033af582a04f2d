"""What the canary tests run, here and on workers: functions that put what they were given into all they say."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from headgate import CooldownResource, DisableResource, Resource, RetryOperation, routine


@dataclass
class Account:
    """A value whose parts are secrets."""

    user: str
    password: str


class Indiscreet(Exception):
    """Keeps what it was given, and shows it."""

    def __init__(self, what: Any) -> None:
        super().__init__(f"refused {what}", what)
        self.what = what


class Stays(Exception):
    """Cannot be sent."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(f"it stays: {self}")


def given(key: Any) -> Any:
    return key.value if isinstance(key, Resource) else key


def say(key: Any, how: str) -> Any:
    """Raise (or return) something that shows the value in the way `how`."""
    value = given(key)
    if how == "text":
        raise ValueError(f"bad key {value}")
    if how == "repr":
        raise Indiscreet(value)
    if how == "chain":
        try:
            raise KeyError(value)
        except KeyError as error:
            error.add_note(f"it was {value!r}")
            raise RuntimeError(f"wrapped {value}") from error
    if how == "group":
        raise ExceptionGroup(f"both with {value}", [ValueError(f"one {value}"), TypeError(f"{value!r}")])
    if how == "cool":
        raise CooldownResource(0.01, f"{value} is rate limited")
    if how == "retry":
        raise RetryOperation(f"{value} hiccups")
    if how == "disable":
        raise DisableResource(f"{value} was revoked")
    if how == "lost":
        os._exit(3)
    return {"the key": value}


HOWS = ["text", "repr", "chain", "group", "cool", "retry", "returned"]


async def here(key: Any, how: str) -> Any:
    await asyncio.sleep(0)
    return say(key, how)


def plainly(key: Any, how: str) -> Any:
    return say(key, how)


async def late(key: Any) -> None:
    try:
        await asyncio.sleep(3600)
    finally:
        raise TimeoutError(f"late with {given(key)}")


async def items(key: Any, how: str) -> AsyncGenerator[str, None]:
    yield "an item"
    say(key, how)


@routine
async def there(key: Any, how: str) -> Any:
    return say(key, how)


@routine
def there_plainly(key: Any, how: str) -> Any:
    return say(key, how)


@routine
async def nested(key: Any, how: str) -> Any:
    return await there(key, how)


@routine
async def items_there(key: Any, how: str) -> AsyncGenerator[str, None]:
    yield "an item"
    say(key, how)


@routine(timeout=0.05)
async def late_there(key: Any) -> None:
    await late(key)


@routine
async def cannot_travel(key: Any) -> None:
    raise Stays(f"bad key {given(key)}")


@routine
async def exits(key: Any) -> None:
    sys.exit(f"bad key {given(key)}")
