"""The lines of a journal, as they are written. What they look like is told in `journal`.

The last field of each line is "crc", the checksum of all bytes before it (CRC-32, eight hexadecimal digits). A reader
that finds it there, in exactly this form, compares it. A line without it counts as it is: older journals
have none, and another tool that writes a line anew, with spaces or in another order, cannot keep it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple
from zlib import crc32

from headgate.stores.codec import Codec, dumps, encode, text_of
from headgate.stores.port import Entry

FORMAT: Final = 1
"""Raised when an older release could misread what a newer one writes."""

HEAD: Final = b'{"headgate":"journal",'
OPEN: Final = b'{"kind":"open",'
"""How the first line begins, and one that names the writer."""

_WRITTEN: Final = frozenset({"kind", "at", "task", "status", "window", "about", "result", "crc"})
_quoted: Final = json.encoder.encode_basestring_ascii
_SAFE: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_.")
"""No capitals: to some file systems they are the same letters."""
_LONG: Final = 150
"""Characters. File systems allow 255, and some of them are wanted for endings."""


class Writer(NamedTuple):
    """Who opened the journal to write."""

    pid: int
    host: str
    at: float


def file_name(pool_id: str) -> str:
    """The name of a pool's file: its id, escaped where a file system may object; a digest when it is long."""
    data = pool_id.encode("utf-8", "surrogatepass")
    name = "".join(chr(byte) if byte in _SAFE else f"%{byte:02x}" for byte in data)
    return f"{name}.jsonl" if len(name) <= _LONG else f"{name[:_LONG]}-{sha256(data).hexdigest()}.jsonl"


def header_line(pool_id: str, about: Mapping[str, Any], codec: Codec) -> bytes:
    """Make the first line of a journal."""
    return _line(
        {"headgate": "journal", "format": FORMAT, "pool_id": pool_id, "codec": codec, "about": _described(about)}
    )


def open_line(writer: Writer, about: Mapping[str, Any]) -> bytes:
    """The first line of a run."""
    return _line({"kind": "open", "at": writer.at, "pid": writer.pid, "host": writer.host, "about": _described(about)})


def entry_line(entry: Entry, codec: Codec = "json") -> bytes:
    """An entry as it is written. Never raises: nobody is left to ask what was meant."""
    # Put together by hand, because every task pays for two of these. What `compaction` asks of a line comes first.
    text = f'{{"kind":"{entry["kind"]}","at":{_time(entry["at"])}'
    if "task" in entry:
        text += f',"task":{entry["task"]:d}'
    if "status" in entry:
        text += f',"status":{_quoted(entry["status"])}'
    if "window" in entry and entry["kind"] == "end":
        text += f',"window":{dumps(entry["window"])}'
    if "about" in entry:
        about = entry["about"]
        if "idempotency_key" in about and (window := window_of(about)) is not None:
            text += f',"window":{dumps(window)}'
        text += f',"about":{_fields(about)}'
    if "result" in entry:
        result = entry["result"]
        text += f',"result":{result!r}' if _is_small(result) else f',"result":{text_of(result, codec=codec)}'
    for key, value in entry.items():
        if key not in _WRITTEN:
            text += f',"{key}":{"true" if value is True else _told(value)}'
    return _checked(text.encode("ascii"))


def _time(at: float) -> str:
    """Tasks that are submitted together share one time, and a float is dear to write."""
    global _last_time
    known, text = _last_time
    if known is not at:
        text = repr(float(at))
        _last_time = at, text
    return text


_last_time: tuple[object, str] = (None, "")


def _fields(about: Mapping[str, Any]) -> str:
    """What describes a task: mostly a few strings."""
    parts = []
    for key, value in about.items():
        if type(value) is not str or type(key) is not str:
            return _told(about)
        parts.append(f"{_quoted(key)}:{_quoted(value)}")
    return "{" + ",".join(parts) + "}"


def _is_small(value: object) -> bool:
    return type(value) is int and -(1 << 63) < value < 1 << 63


def _told(value: object) -> str:
    try:
        return dumps(value)
    except Exception:  # more than JSON knows, against the contract: keep what can be kept of it
        return dumps(_described(value)) if isinstance(value, Mapping) else text_of(value)


def window_of(about: Mapping[str, Any]) -> Any:
    """How long a task holds its idempotency key; None when it has none."""
    return None if about.get("idempotency_key") is None else about.get("window", "until_success")


def beat_line(at: float) -> bytes:
    """Make the line that says that the writer is alive."""
    return _line({"kind": "beat", "at": at})


def stale_line(number: int, at: float) -> bytes:
    """Make the line that ends a task which a former run left unfinished."""
    return _line({"kind": "end", "at": at, "task": number, "status": "stale"})


def _line(content: Mapping[str, Any]) -> bytes:
    return _checked(dumps(content)[:-1].encode("ascii"))


def _checked(text: bytes) -> bytes:
    """A line, of its text without the closing brace."""
    return b'%b,"crc":"%08x"}\n' % (text, crc32(text))


CRC_SIZE: Final = len(b',"crc":"00000000"}\n')
"""How many bytes the checksum at the end of a line takes."""


def is_intact(line: bytes) -> bool | None:
    """Does its checksum fit? None when it has none."""
    end = line[-CRC_SIZE:]
    if not end.startswith(b',"crc":"') or not end.endswith(b'"}\n'):
        return None
    return end[8:16] == b"%08x" % crc32(line[:-CRC_SIZE])


def _described(about: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(about)
    try:
        dumps(plain)
    except Exception:
        return {str(key): encode(value) for key, value in plain.items()}
    return plain
