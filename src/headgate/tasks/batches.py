"""What `submit_many` is given: calls with a function each, or argument tuples for one function. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from headgate.errors import InvalidType
from headgate.tasks.item_options import ItemOptions


class OneCall(NamedTuple):
    """One call of a batch."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]


_EACH = "Pass (fn, args) or (fn, args, options) for each: (review, (17,), {'tenant_id': 'acme'})."
_ONE = "Pass the arguments of each call as a tuple: submit_many(review, [(17,), (18,)])."


def calls_of(given: object, arguments: object, options: Mapping[str, Any], fair: str) -> list[OneCall]:
    """The calls of a batch. `fair` is the option that names the tenant."""
    if arguments is None:
        if options:
            raise InvalidType(f"submit_many() takes no {next(iter(options))!r} beside calls", remedy=_EACH)
        return [_one_call(number, call) for number, call in enumerate(_listed(given, _EACH), 1)]
    for_item = ItemOptions(options, fair)
    calls = []
    for number, args in enumerate(_listed(arguments, _ONE), 1):
        if not isinstance(args, (tuple, list)):
            raise InvalidType(f"call {number} must be a tuple of arguments, got {type(args).__name__}", remedy=_ONE)
        calls.append(OneCall(given, tuple(args), for_item.of(*args)))  # type: ignore[arg-type] # it is checked with the others
    return calls


def _listed(calls: object, remedy: str) -> list[Any]:
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Iterable):
        raise InvalidType(f"submit_many() takes an iterable of calls, got {type(calls).__name__}", remedy=remedy)
    return list(calls)


def _one_call(number: int, call: object) -> OneCall:
    if isinstance(call, (tuple, list)) and len(call) in (2, 3):
        fn, args, options = call if len(call) == 3 else (*call, {})
        if isinstance(args, (tuple, list)) and isinstance(options, Mapping):
            return OneCall(fn, tuple(args), dict(options))
    raise InvalidType(f"call {number} must be (fn, args, options), got {type(call).__name__}", remedy=_EACH)
