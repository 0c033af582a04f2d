"""What calls take of limits: requests, and tokens, of which some are input and some output. Pure.

A limit counts one of four things, its *dimension*: requests, tokens, input tokens or output tokens. The name of a limit
says which. A number of tokens says nothing about input and output, so it counts in full as both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from headgate.core.checks import checked_seconds, is_finite
from headgate.errors import InvalidArgument

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"
INPUT: Final = "input_tokens"
OUTPUT: Final = "output_tokens"

_PERIODS: Final = {1.0: "second", 60.0: "minute", 3600.0: "hour", 86400.0: "day"}


@lru_cache(maxsize=256)  # names come from servers too
def dimension_of(name: str) -> str:
    """What a limit of this name counts."""
    counted = name.partition("/")[0].replace("-", "_")  # policies of IETF's headers may have any name
    return next((one for one in (INPUT, OUTPUT, TOKENS) if counted.endswith(one)), REQUESTS)


def name_of(dimension: str, per: float) -> str:
    """The name of one of several windows with the same dimension: "requests/minute", "tokens/90s"."""
    return f"{dimension}/{_PERIODS.get(per, f'{per:.12g}s')}"


@dataclass(frozen=True, slots=True)
class Cost:
    """The tokens that a call may use: those it sends, and those of its answer."""

    input: float = 0.0
    output: float = 0.0

    def __post_init__(self) -> None:
        for name in ("input", "output"):
            amount = getattr(self, name)
            object.__setattr__(self, name, checked_tokens(f"{name} of a Cost", amount))

    def __bool__(self) -> bool:
        return self.input > 0 or self.output > 0

    def __float__(self) -> float:
        return self.input + self.output


AnyCost: TypeAlias = float | Cost
"""How many tokens a call may use: in all, or its input and its output separately."""


def checked_tokens(what: str, amount: Any) -> float:
    """Return a number of tokens as a float, or raise InvalidArgument, which begins with `what`."""
    return float(checked_seconds(f"{what} must be a finite number of tokens >= 0", amount))


def checked_cost(what: str, cost: Any) -> AnyCost:
    """Return a Cost, or a number of tokens as a float. Raises InvalidArgument for anything else."""
    if isinstance(cost, Cost):
        return cost
    if not is_finite(cost) or cost < 0:
        raise InvalidArgument(
            f"{what} must be a finite number of tokens >= 0, or a Cost, got {cost!r}",
            remedy="Pass the most that a call may use: 1500, or Cost(input=1000, output=500).",
        )
    return float(cost)


def shown_cost(cost: AnyCost) -> str:
    """A cost as the option that was given."""
    return f"cost={cost!r}" if isinstance(cost, Cost) else f"cost={cost:g}"


def tokens_of(cost: AnyCost, dimension: str) -> float:
    """The tokens of this dimension that a call with this cost may use."""
    if not isinstance(cost, Cost):
        return cost
    if dimension == INPUT:
        return cost.input
    return cost.output if dimension == OUTPUT else cost.input + cost.output


def needed(name: str, cost: AnyCost, most: float | None = None) -> float:
    """The amount of one limit that a call reserves: one request, or its tokens (at least 1), but not more than `most`.

    Whole amounts: sums of fractions are not exact, and a call that needs all there is would wait for the last bit.
    """
    dimension = dimension_of(name)
    amount = 1.0 if dimension == REQUESTS else max(1.0, float(math.ceil(tokens_of(cost, dimension))))
    return amount if most is None else min(amount, max(1.0, float(math.floor(most))))


class Spent(NamedTuple):
    """The tokens that a call has really used, as far as it has reported them."""

    total: float = 0.0
    input: float | None = None
    """None if the call has not reported it."""
    output: float | None = None
    """None if the call has not reported it."""

    def plus(self, more: Spent) -> Spent:
        """The sum of both."""
        return Spent(self.total + more.total, _sum(self.input, more.input), _sum(self.output, more.output))

    def since(self, before: Spent) -> Spent:
        """What was reported after `before`."""
        return Spent(self.total - before.total, _less(self.input, before.input), _less(self.output, before.output))

    def parts(self) -> tuple[float, float, float]:
        """Input tokens, output tokens, and tokens not known to be either. Together they are the total."""
        read, written = self.input or 0.0, self.output or 0.0
        if read + written > self.total:  # a total alone, which counts in full as both
            return 0.0, 0.0, self.total
        return read, written, self.total - read - written

    def of(self, dimension: str, reserved: float) -> float:
        """The tokens of this dimension. A part that was not reported stays as it was reserved."""
        if dimension == INPUT:
            return reserved if self.input is None else self.input
        if dimension == OUTPUT:
            return reserved if self.output is None else self.output
        is_whole = self.input is not None and self.output is not None
        return self.total if is_whole else max(reserved, self.total)


def spent_of(tokens: float | None, input: float | None, output: float | None) -> Spent:
    """What one report says. A total without its parts counts in full as both; a part and the total give the other."""
    if tokens is input is output is None:
        raise InvalidArgument(
            "spent() needs a number of tokens",
            remedy="Pass the total, spent(tokens), or its parts, spent(input=..., output=...).",
        )
    read = None if input is None else checked_tokens("input of spent()", input)
    written = None if output is None else checked_tokens("output of spent()", output)
    if tokens is None:
        return Spent((read or 0.0) + (written or 0.0), read, written)
    total = checked_tokens("tokens of spent()", tokens)
    if max(read or 0.0, written or 0.0) > total:
        raise InvalidArgument(
            f"tokens of spent() are all tokens of the call, got {total:g} with input={input!r} and output={output!r}",
            remedy="Leave tokens out: input and output are enough.",
        )
    return Spent(
        total,
        total - (written or 0.0) if read is None else read,
        total - (read or 0.0) if written is None else written,
    )


def _sum(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else one + other


def _less(one: float | None, other: float | None) -> float | None:
    return one if one is None or other is None else one - other
