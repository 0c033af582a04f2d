"""Options that nobody knows: refused, with the nearest that is known."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from headgate.errors import InvalidType

F = TypeVar("F", bound=Callable[..., None])


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint for who wrote `name`: the known option that is most like it, or all of them."""
    import difflib  # not above: it is needed only when somebody misspelt something

    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else f"It takes {', '.join(known)}."


def named_options(init: F) -> F:
    """A decorator for a constructor: keywords that it does not have are refused with the nearest that it has.

    Its signature stays as it is, for people, `inspect` and type checkers.
    """
    known = [
        parameter.name
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ][1:]  # without self

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise InvalidType(f"{type(self).__name__}() has no option {name!r}", remedy=nearest(name, known))
        init(self, *args, **options)

    return wrapper  # type: ignore[return-value] # it is what it wraps, to whoever calls it
