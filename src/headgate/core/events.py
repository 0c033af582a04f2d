"""The root of all events: something that happened, frozen, with a name, a topic and a time.

A frozen dataclass sets each field through ``object.__setattr__``, which takes ten times as long as an assignment. Three
events of each task would cost the first subscriber more than the task itself (benchmarks/observe.py). So what is
made for each task or call is made by `maker`: as an instance of a class with the same slots that is not frozen, which
then becomes one of the event's class. Users see no difference: it is of that class, frozen, and equal by value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

P = ParamSpec("P")
E = TypeVar("E")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. Subclasses add fields and set `name` and `topic`."""

    name: ClassVar[str] = "event"
    topic: ClassVar[str] = ""
    schema: ClassVar[int] = 1
    """The version of all events together. It grows when a field gets another meaning or goes; fields may be added."""

    at: float
    """When it happened, in Unix seconds."""

    def to_dict(self) -> dict[str, Any]:
        """Name, topic and every field, as values that JSON knows."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {"name": self.name, "topic": self.topic, **values}


def maker(kind: Callable[P, E]) -> Callable[P, E]:
    """Return what makes instances of a frozen dataclass with slots as calling it does, for a fifth of the price."""
    made = cast("type[Any]", kind)
    ordinary = {"__setattr__": object.__setattr__, "__delattr__": object.__delattr__}  # both, or both stay slow
    draft = type(made.__name__, made.__bases__, {"__slots__": made.__slots__, **ordinary})
    names = [one.name for one in fields(made)]
    code = f"def make(*, {', '.join(names)}):\n one = new(draft)\n"
    code += "".join(f" one.{name} = {name}\n" for name in names) + " one.__class__ = made\n return one"
    known: dict[str, Any] = {"new": object.__new__, "draft": draft, "made": made}
    exec(code, known)  # as dataclasses does: a call with keywords is quick only if the function names them
    make = known["make"]
    make.__kwdefaults__ = {one.name: one.default for one in fields(made) if one.default is not MISSING}
    return cast("Callable[P, E]", make)


def _plain(value: object) -> object:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    to_dict = getattr(value, "to_dict", None)
    return to_dict() if callable(to_dict) else str(value)
