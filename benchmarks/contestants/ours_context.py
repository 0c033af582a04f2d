"""Variables, and routines of the module that declares them: our workers know them all."""

from __future__ import annotations

import itertools
from typing import Any

import headgate

VARIABLES: tuple[headgate.ContextVar[Any], ...] = tuple(headgate.ContextVar(f"value_{number}") for number in range(10))

_requests = itertools.count()


@headgate.routine
async def add(a: int, b: int) -> int:
    return a + b


@headgate.routine
async def set_there(times: str) -> None:
    """`times` is a text, for the arguments to have the same size however many they are."""
    set_here(1, int(times))


async def set_and_add(a: int, b: int) -> int:
    """A call for a request of its own: nothing that was written down for the one before can be sent again."""
    VARIABLES[0].set(f"request-{next(_requests):06}")
    return await add(a, b)


def set_objects() -> None:
    """Values that have to be pickled one by one, as plain text has not."""
    for number, variable in enumerate(VARIABLES):
        variable.set(("request", number))


def set_here(variables: int, times: int) -> list[headgate.Token[Any]]:
    """Give the first variables a value, so many times, and have the tokens. The last value is always the same."""
    return [
        variable.set(f"request-{number:06}") for variable in VARIABLES[:variables] for number in reversed(range(times))
    ]
