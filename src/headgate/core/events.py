"""The root of all events: something that happened, frozen, with a name, a topic and a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar


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


def _plain(value: object) -> object:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    to_dict = getattr(value, "to_dict", None)
    return to_dict() if callable(to_dict) else str(value)
