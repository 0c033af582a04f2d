"""The protocol between a program and those who look at it: one JSON object a line, in both directions. Pure.

    -> {"v": 1, "id": 1, "ask": "hello"}
    <- {"v": 1, "id": 1, "ok": {"pid": 4711, "program": "batch.py", ...}}
    -> {"v": 1, "id": 2, "ask": "snapshot"}
    -> {"v": 1, "id": 3, "ask": "story", "task": "calls/17"}
    -> {"v": 1, "id": 4, "ask": "act", "action": "disable", "target": "key-1", "pool": "keys"}
    <- {"v": 1, "id": 4, "error": "no pool here has the resource 'key-1'"}
    -> {"v": 1, "id": 4, "ask": "find", "action": "disable", "target": "key-1"}     which pool it would be about
    <- {"v": 1, "id": 4, "ok": "keys"}
    -> {"v": 1, "id": 5, "ask": "watch", "tasks": false}
    <- {"v": 1, "id": 5, "ok": {"history": {...}}}
    <- {"v": 1, "id": 5, "look": {...}, "events": [...]}       once a second, until the connection is closed
    -> {"v": 1, "tasks": true}                                 tell of tasks too, from now on
    -> {"v": 1, "id": 6, "ask": "rows", "pool": "#3", "list": "tenants", "offset": 50, "limit": 50, "filter": "a"}

A request may have an "until", in Unix seconds: after that nobody waits for the answer any more, and nothing is done.
A line that is longer than the limit, no object, or of another version ends the connection.
"""

from __future__ import annotations

import json
from typing import Any, Final

from headgate.errors import HeadgateError, InvalidArgument

VERSION: Final = 1
LONGEST_REQUEST: Final = 64 * 1024
LONGEST_ANSWER: Final = 16 * 1024 * 1024


def encoded(message: dict[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps({"v": VERSION, **message}, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def decoded(line: bytes) -> dict[str, Any]:
    """Return the message in a line, or raise InvalidArgument."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidArgument("a line is no JSON") from None
    if not isinstance(message, dict):
        raise InvalidArgument("a line is no JSON object")
    if message.get("v") != VERSION:
        raise InvalidArgument(
            f"the other side speaks version {str(message.get('v'))[:20]} of the protocol, this one {VERSION}",
            remedy="Use the same release of headgate for both.",
        )
    return message


def text_of(message: dict[str, Any], name: str) -> str:
    """Return a text of a message, "" if it is not there; InvalidArgument if it is something else."""
    value = message.get(name, "")
    if not isinstance(value, str) or len(value) > 1000:
        raise InvalidArgument(f"{name} must be a text of at most 1000 characters")
    return value


def said(error: HeadgateError) -> str:
    """Return what an error says, and its remedy where it has one of its own, without its code."""
    message = str(error.args[0]) if error.args else type(error).__name__
    remedy = vars(error).get("remedy")
    return f"{message}. {remedy}" if remedy else message
