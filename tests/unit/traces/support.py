"""Where the recordings lie, and how a value becomes JSON that two runs can be compared by."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from headgate import ContextVar, Resource
from headgate.core.events import Event
from headgate.tasks.model import View

RECORDED = Path(__file__).with_name("recorded")
ANEW = "If the change is intended, record again with `python -m tests.unit.traces.record` and read the difference."

WIDTH = 300
"""Characters of a line."""

_TOKEN = re.compile(r"token-\d+")


def text_of(value: object) -> str:
    """The text of a recording: JSON in which what fits into a line stands in one, as an event does."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any, indent: str = "") -> list[str]:
    short = json.dumps(value, ensure_ascii=False)
    if len(short) + len(indent) <= WIDTH or not isinstance(value, (dict, list)) or not value:
        return [short]
    inner = indent + " "
    if isinstance(value, dict):
        members = [(f"{json.dumps(key, ensure_ascii=False)}: ", item) for key, item in value.items()]
    else:
        members = [("", item) for item in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    lines = [first]
    for place, (name, item) in enumerate(members, 1):
        head, *rest = _lines(item, inner)
        lines += [f"{inner}{name}{head}", *rest]
        lines[-1] += "," * (place < len(members))
    return [*lines, f"{indent}{last}"]


@cache
def recorded(name: str) -> Any:
    """The recording of a scenario. Do not change what this returns."""
    return json.loads((RECORDED / f"{name}.json").read_text("utf-8"))


def recorded_names() -> list[str]:
    """The scenarios that are recorded."""
    return sorted(path.stem for path in RECORDED.glob("*.json"))


def same(what: str, now: object, then: object) -> None:
    """Fail with the lines that differ between the recording and now."""
    if now == then:
        return
    lines = difflib.unified_diff(
        text_of(then).splitlines(), text_of(now).splitlines(), "recorded", "now", lineterm="", n=4
    )
    raise AssertionError("\n".join([f"{what} is not as it was recorded. {ANEW}", *list(lines)[:120]]))


def plain(value: Any) -> Any:
    """`value` as JSON holds it, without any name of a module: what moved must still compare equal."""
    if value is None or isinstance(value, (bool, int, str)):
        return str(value) if type(value) is not str and isinstance(value, str) else value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: value.decode("latin-1") if len(value) < 100 else f"{len(value)} bytes"}
    if isinstance(value, Event):
        return value.to_dict()
    if isinstance(value, View):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, BaseException):
        return error_of(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): plain(item) for key, item in value.items()}
    if isinstance(value, Resource):
        return {"Resource": {name: plain(getattr(value, name)) for name in _RESOURCE}}
    if isinstance(value, ContextVar):
        return {"ContextVar": value.key, "value": plain(value.get("unset"))}
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: {field.name: plain(getattr(value, field.name)) for field in fields(value)}}
    if hasattr(value, "_fields") and isinstance(value, tuple):
        return {type(value).__name__: {name: plain(getattr(value, name)) for name in value._fields}}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return {type(value).__name__: sorted((plain(item) for item in value), key=repr)}
    if isinstance(value, type):
        return {"class": value.__qualname__}
    if isinstance(value, Enum):
        return {type(value).__name__: value.name}
    if isinstance(value, FunctionType):
        return {"function": value.__qualname__}
    if hasattr(value, "__dict__") and not callable(value):
        return {type(value).__name__: {name: plain(item) for name, item in vars(value).items()}}
    return {type(value).__name__: str(value)}


_RESOURCE = (
    "resource_id",
    "value",
    "max_in_flight",
    "status",
    "cooldown_until",
    "consecutive_cooldown",
    "tags",
    "weight",
)


def error_of(error: BaseException) -> dict[str, Any]:
    """An exception with its text, its attributes, its notes and its chain; no traceback."""
    told: dict[str, Any] = {"error": type(error).__qualname__, "text": str(error), "args": plain(list(error.args))}
    attributes = {name: plain(item) for name, item in vars(error).items() if name != "__notes__"}
    for name in getattr(type(error), "__slots__", ()):
        attributes[name] = plain(getattr(error, name, None))
    if attributes:
        told["fields"] = attributes
    notes = [_without_files(note) for note in getattr(error, "__notes__", ())]
    if notes:
        told["notes"] = notes
    if isinstance(error, BaseExceptionGroup):
        told["args"] = [error.message]
        told["members"] = [error_of(member) for member in error.exceptions]
    if error.__cause__ is not None:
        told["cause"] = error_of(error.__cause__)
    elif error.__context__ is not None and not error.__suppress_context__:
        told["context"] = error_of(error.__context__)
    return told


def _without_files(note: str) -> str:
    """A note of the traceback of another process names files and lines: only its beginning is compared."""
    first, _, rest = str(note).partition("\n")
    return f"{first.partition(' (')[0]} ..." if rest and "raceback" in first else str(note)


def steady(value: Any) -> Any:
    """The same value with generated ids numbered by their first appearance."""
    known: dict[str, str] = {}
    text = _TOKEN.sub(lambda found: known.setdefault(found[0], f"id-{len(known) + 1}"), json.dumps(value))
    return json.loads(text)
