"""The two tables behind `codec`: how each type becomes JSON, and how it comes back."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, Final, TypeAlias
from uuid import UUID  # the type alone: drawing one is the clock's
from zoneinfo import ZoneInfo

Encoded: TypeAlias = Any
"""What json.dumps takes: None, bool, int, float, str, and lists and dicts of them."""

LARGEST: Final = 1_000_000
"""Bytes of JSON text. Above it a value is opaque: a journal is read whole, and is no place for files."""
DEEPEST: Final = 100
"""Levels of containers. A level takes up to three frames on the way back, and Python allows a thousand in all."""
_WIDEST: Final = 2_000
"""Bits of an int in decimal. Python refuses long decimals, from 640 digits on when so told, but never hexadecimals."""

_MICROSECOND: Final = timedelta(microseconds=1)

sorted_dumps: Final[Callable[[Any], str]] = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode
"""Compact JSON whose text does not depend on the order of keys."""


class Unfit(Exception):
    """Raised for a value that cannot be stored as JSON."""


# -- encoding ---------------------------------------------------------------------------------------------------------


class Encoder:
    """Encodes one value. Not used again after a failure: the next value gets a new one."""

    __slots__ = ("_depth", "_left", "sorts")

    def __init__(self, *, sorts: bool = False) -> None:
        self._left = LARGEST + 1  # the outermost value needs no comma
        self._depth = 0
        self.sorts: bool = sorts

    def encode(self, value: object) -> Encoded:
        kind = type(value)
        if kind is str:
            return _from_str(self, value)  # type: ignore[arg-type] # it is one
        encoder = _ENCODERS.get(kind)
        if encoder is None:
            raise Unfit
        self.spend(2)  # a character and a comma
        return encoder(self, value)

    def spend(self, size: int) -> None:
        """Count bytes that the text will have at least; Unfit: it is too long."""
        self._left -= size
        if self._left < 0:
            raise Unfit

    def members(self, values: Iterable[object]) -> list[Encoded]:
        """Encode the members of a container, one level deeper."""
        if self._depth >= DEEPEST:
            raise Unfit
        self._depth += 1
        encoded = [self.encode(value) for value in values]
        self._depth -= 1
        return encoded


def _as_it_is(_: Encoder, value: bool | None) -> Encoded:
    return value


def _from_str(encoder: Encoder, value: str) -> Encoded:
    encoder.spend(len(value) + 2)
    return value if _survives(value) else {"$str": _base64(value.encode("utf-8", "surrogatepass"))}


def _survives(text: str) -> bool:
    """JSON makes one character of two lone surrogates that stand side by side."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_int(encoder: Encoder, value: int) -> Encoded:
    encoder.spend(value.bit_length() // 4)
    return value if value.bit_length() <= _WIDEST else {"$int": hex(value)}


def _from_float(_: Encoder, value: float) -> Encoded:
    return value if value - value == 0 else {"$float": repr(value)}


def _from_dict(encoder: Encoder, value: dict[Any, Any]) -> Encoded:
    keys = []
    for key in value:
        if type(key) is not str or not (key.isascii() or _survives(key)):
            return _from_any_dict(encoder, value)
        encoder.spend(len(key))
        keys.append("$" + key if key.startswith("$") else key)
    return dict(zip(keys, encoder.members(value.values()), strict=True))


def _from_any_dict(encoder: Encoder, value: dict[Any, Any]) -> Encoded:
    pairs = [list(pair) for pair in zip(encoder.members(value), encoder.members(value.values()), strict=True)]
    if encoder.sorts:
        pairs.sort(key=sorted_dumps)
    return {"$dict": pairs}


def _from_set(encoder: Encoder, value: set[Any] | frozenset[Any]) -> list[Encoded]:
    # Strings hash differently in every process: without this, so would the text.
    return sorted(encoder.members(value), key=sorted_dumps)


def _from_datetime(encoder: Encoder, value: datetime | time) -> Encoded:
    return [value.replace(tzinfo=None).isoformat(), value.fold, _from_zone(encoder, value.tzinfo)]


def _from_zone(encoder: Encoder, zone: tzinfo | None) -> Encoded:
    if zone is None:
        return None
    if type(zone) is timezone:
        offset, name = zone.utcoffset(None), zone.tzname(None)
        named = [] if name == timezone(offset).tzname(None) else [encoder.encode(name)]
        return [offset // _MICROSECOND, *named]
    if type(zone) is ZoneInfo and zone.key:
        zone.__reduce__()  # raises for a zone read from a file, whose key says nothing about its rules
        return zone.key
    raise Unfit


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_bytes(encoder: Encoder, value: bytes | bytearray) -> Encoded:
    encoder.spend(len(value))
    return _base64(value)


def _tagged(tag: str, encoder: Callable[[Encoder, Any], Encoded]) -> Callable[[Encoder, Any], Encoded]:
    return lambda state, value: {tag: encoder(state, value)}


_ENCODERS: Final[dict[type, Callable[[Encoder, Any], Encoded]]] = {
    type(None): _as_it_is,
    bool: _as_it_is,
    int: _from_int,
    float: _from_float,
    list: lambda encoder, value: encoder.members(value),
    dict: _from_dict,
    tuple: _tagged("$tuple", lambda encoder, value: encoder.members(value)),
    set: _tagged("$set", _from_set),
    frozenset: _tagged("$frozenset", _from_set),
    bytes: _tagged("$bytes", _from_bytes),
    bytearray: _tagged("$bytearray", _from_bytes),
    complex: _tagged("$complex", lambda encoder, value: encoder.members((value.real, value.imag))),
    # A decimal context may ask for a small "e".
    Decimal: _tagged("$decimal", lambda _, value: str(value).upper()),
    UUID: _tagged("$uuid", lambda _, value: str(value)),
    date: _tagged("$date", lambda _, value: value.isoformat()),
    datetime: _tagged("$datetime", _from_datetime),
    time: _tagged("$time", _from_datetime),
    timedelta: _tagged("$timedelta", lambda _, value: [value.days, value.seconds, value.microseconds]),
}


# -- decoding ---------------------------------------------------------------------------------------------------------


def decoded(encoded: Encoded) -> Any:
    if type(encoded) is list:
        return _members(encoded)
    if type(encoded) is not dict:
        return encoded
    if len(encoded) == 1:
        [(tag, inner)] = encoded.items()
        if tag.startswith("$") and not tag.startswith("$$"):
            return _DECODERS[tag](inner)
    return {key[1:] if key.startswith("$") else key: decoded(value) for key, value in encoded.items()}


def _members(encoded: Iterable[Encoded]) -> list[Any]:
    return [decoded(member) for member in encoded]


def _to_datetime(inner: Encoded) -> datetime:
    text, fold, zone = inner
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=_to_zone(zone))


def _to_time(inner: Encoded) -> time:
    text, fold, zone = inner
    return time.fromisoformat(text).replace(fold=fold, tzinfo=_to_zone(zone))


def _to_zone(zone: Encoded) -> tzinfo | None:
    if zone is None:
        return None
    if type(zone) is str:
        return ZoneInfo(zone)
    return timezone(zone[0] * _MICROSECOND, *_members(zone[1:]))


_DECODERS: Final[dict[str, Callable[[Encoded], Any]]] = {
    "$str": lambda inner: base64.b64decode(inner).decode("utf-8", "surrogatepass"),
    "$int": lambda inner: int(inner, 16),
    "$float": float,
    "$dict": lambda inner: {decoded(key): decoded(value) for key, value in inner},
    "$tuple": lambda inner: tuple(_members(inner)),
    "$set": lambda inner: set(_members(inner)),
    "$frozenset": lambda inner: frozenset(_members(inner)),
    "$bytes": base64.b64decode,
    "$bytearray": lambda inner: bytearray(base64.b64decode(inner)),
    "$complex": lambda inner: complex(*_members(inner)),
    "$decimal": Decimal,
    "$uuid": UUID,
    "$date": date.fromisoformat,
    "$datetime": _to_datetime,
    "$time": _to_time,
    "$timedelta": lambda inner: timedelta(*inner),
}
