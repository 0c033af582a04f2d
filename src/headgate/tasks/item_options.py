"""Options of `map` and `submit_many` that differ from item to item: a function of the item, or the name of its field.

Pure. A text is the name of a field where a text makes no sense as a value (priority, cost, idempotency_key, tags). For
a tenant, which may be a text itself, the first item decides: if it has such a field, the text is its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from headgate.errors import InvalidArgument
from headgate.tasks.options import refuse_callables
from headgate.tasks.strategies import KEY

_NEVER_TEXTS: Final = ("priority", "cost", "idempotency_key", "tags")
"""Options whose values are no texts, or differ for each item: a text is the name of a field."""
_MAYBE_TEXTS: Final = (KEY, "affinity")
"""Options whose value may be a text, besides the one that the strategy names."""
_MISSING: Final = object()


class ItemOptions:
    """The options of a `map`, for one item after the other."""

    def __init__(self, options: Mapping[str, Any], fair: str) -> None:
        """`fair` is the option that names the tenant."""
        by_item = {*_NEVER_TEXTS, *_MAYBE_TEXTS, fair}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._fields: dict[str, str] = {}
        self._undecided: dict[str, str] = {}
        self._same: dict[str, Any] = {}  # for every item
        self._count = 0
        for name, value in options.items():
            if name in by_item and callable(value):
                self._functions[name] = value
            elif name in _NEVER_TEXTS and isinstance(value, str):
                self._fields[name] = value
            elif name in by_item and isinstance(value, str):
                self._undecided[name] = value
            else:
                self._same[name] = value
        refuse_callables(self._same)

    def of(self, *arguments: Any) -> dict[str, Any]:
        """The options of the next item: functions are called with the arguments, fields are those of the first."""
        self._count += 1
        try:
            return self._of(arguments)
        except Exception as error:
            error.add_note(f"It happened with the options of item {self._count}, {_shown(arguments)}.")
            raise

    def _of(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        if self._undecided:
            self._decide(arguments)
        options = dict(self._same)
        for name, function in self._functions.items():
            options[name] = _plain(name, function(*arguments))
        for name, field in self._fields.items():
            options[name] = _plain(name, self._field(name, field, arguments))
        return options

    def _decide(self, arguments: tuple[Any, ...]) -> None:
        for name, text in self._undecided.items():
            known = self._fields if _field_of(arguments, text) is not _MISSING else self._same
            known[name] = text
        self._undecided = {}

    def _field(self, option: str, field: str, arguments: tuple[Any, ...]) -> Any:
        value = _field_of(arguments, field)
        if value is _MISSING or (value is None and option == "idempotency_key"):
            raise InvalidArgument(
                f"{option}={field!r} names a field or an attribute of each item, and this one has none",
                remedy=f"Name one that every item has, or pass a function: {option}=lambda item: ...",
            )
        return value


def _field_of(arguments: tuple[Any, ...], field: str) -> Any:
    """The value of a field or an attribute of the first argument. Methods are no fields."""
    item = arguments[0] if arguments else None
    if isinstance(item, Mapping):
        return item.get(field, _MISSING)
    value = getattr(item, field, _MISSING)
    return _MISSING if callable(value) else value


def _plain(option: str, value: Any) -> Any:
    """What an item says, as `submit` takes it: the number of a record names it, and one tag is a list of one."""
    if option == "idempotency_key" and type(value) is int:
        return str(value)
    return (value,) if option == "tags" and isinstance(value, str) else value


def _shown(arguments: tuple[Any, ...]) -> str:
    try:
        text = repr(arguments[0] if len(arguments) == 1 else arguments)
    except Exception:
        return "which cannot be shown"
    return text if len(text) <= 80 else f"{text[:80]}..."
