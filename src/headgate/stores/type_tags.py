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

from headgate.stores.result_types import ResultTypes, stored_name
from headgate.stores.structures import TAGS, Misfit, Parts, as_mapping, put_together, taken_apart

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
    """Raised for a value that cannot be stored as JSON. Its text says why, for people."""


TOO_LONG: Final = "it is above 1 MB"


# -- encoding ---------------------------------------------------------------------------------------------------------


class Encoder:
    """Encodes one value. Not used again after a failure: the next value gets a new one."""

    __slots__ = ("_depth", "_left", "_structures", "sorts")

    def __init__(self, *, sorts: bool = False, structures: bool = True) -> None:
        self._left = LARGEST + 1  # the outermost value needs no comma
        self._depth = 0
        self._structures = structures
        self.sorts: bool = sorts

    def encode(self, value: object) -> Encoded:
        kind = type(value)
        if kind is str:
            return _from_str(self, value)  # type: ignore[arg-type] # it is one
        encoder = _ENCODERS.get(kind)
        self.spend(2)  # a character and a comma
        if encoder is None:
            return self._structure(value, kind)
        return encoder(self, value)

    def spend(self, size: int) -> None:
        """Count bytes that the text will have at least; Unfit: it is too long."""
        self._left -= size
        if self._left < 0:
            raise Unfit(TOO_LONG)

    def members(self, values: Iterable[object]) -> list[Encoded]:
        """Encode the members of a container, one level deeper."""
        if self._depth >= DEEPEST:
            raise Unfit(f"it is nested more than {DEEPEST} levels deep, or contains itself")
        self._depth += 1
        encoded = [self.encode(value) for value in values]
        self._depth -= 1
        return encoded

    def _structure(self, value: object, kind: type) -> Encoded:
        """Encode a value by its fields, with the name of its class."""
        try:
            parts = taken_apart(value) if self._structures else None
        except Misfit as why:
            raise Unfit(f"{_shown(kind)}: {why}") from None
        if parts is None:
            raise Unfit(f"{_shown(kind)} has no form in JSON")
        name = stored_name(kind)
        self.spend(len(name))
        fields = self._member(parts) if parts.tag == "$enum" else _from_dict(self, parts.fields)
        return {parts.tag: [name, fields, _from_dict(self, parts.rest)] if parts.rest else [name, fields]}

    def _member(self, parts: Parts) -> Encoded:
        """A member of an enum. Its name is enough, if its value is something that only the program knows."""
        depth = self._depth
        try:
            return _from_dict(self, parts.fields)
        except Unfit:
            self._depth = depth
            return _from_dict(self, {"name": parts.fields["name"]})


def _shown(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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
    raise Unfit(f"{_shown(type(zone))} has no form in JSON")


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


class Decoder:
    """Makes values of what `Encoder` made, with classes that `types` finds."""

    __slots__ = ("_types",)

    def __init__(self, types: ResultTypes) -> None:
        self._types = types

    def decode(self, encoded: Encoded) -> Any:
        if type(encoded) is list:
            return self.members(encoded)
        if type(encoded) is not dict:
            return encoded
        if len(encoded) == 1:
            [(tag, inner)] = encoded.items()
            if tag.startswith("$") and not tag.startswith("$$"):
                if tag in TAGS:
                    return self._structure(tag, *inner)
                return _DECODERS[tag](inner) if tag in _DECODERS else _CONTAINERS[tag](self, inner)
        return {key[1:] if key.startswith("$") else key: self.decode(value) for key, value in encoded.items()}

    def members(self, encoded: Iterable[Encoded]) -> list[Any]:
        return [self.decode(member) for member in encoded]

    def _structure(self, tag: str, name: str, fields: Encoded, rest: Encoded = None) -> Any:
        """A value of the class of this name; a mapping, where that is not known or has changed too much."""
        fields, rest = self._fields(fields), {} if rest is None else self._fields(rest)
        kind = self._types.find(name)
        if kind is None:
            self._types.missed(name, "its module is not loaded, or has no such class")
            return as_mapping(tag, fields, rest)
        try:
            return put_together(tag, kind, fields, rest)
        except Exception as error:
            self._types.missed(name, str(error))
            return as_mapping(tag, fields, rest)

    def _fields(self, encoded: Encoded) -> dict[str, Any]:
        fields = self.decode(encoded)
        if type(fields) is not dict or not all(type(name) is str for name in fields):
            raise TypeError(encoded)
        return fields


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
    return timezone(zone[0] * _MICROSECOND, *(_to_text(name) for name in zone[1:]))


def _to_text(encoded: Encoded) -> str:
    """The name of a zone, which may have what JSON cannot hold."""
    return str(_DECODERS["$str"](encoded["$str"]) if type(encoded) is dict else encoded)


def _to_dict(decoder: Decoder, inner: Encoded) -> Any:
    pairs = [(decoder.decode(key), decoder.decode(value)) for key, value in inner]
    return _hashed(dict, pairs)


def _hashed(kind: Callable[[Any], Any], members: list[Any]) -> Any:
    """A set or a dict; a list, if a member came back as a mapping, which has no hash."""
    try:
        return kind(members)
    except TypeError:
        return members


_CONTAINERS: Final[dict[str, Callable[[Decoder, Encoded], Any]]] = {
    "$dict": _to_dict,
    "$tuple": lambda decoder, inner: tuple(decoder.members(inner)),
    "$set": lambda decoder, inner: _hashed(set, decoder.members(inner)),
    "$frozenset": lambda decoder, inner: _hashed(frozenset, decoder.members(inner)),
    "$complex": lambda decoder, inner: complex(*decoder.members(inner)),
}
_DECODERS: Final[dict[str, Callable[[Encoded], Any]]] = {
    "$str": lambda inner: base64.b64decode(inner).decode("utf-8", "surrogatepass"),
    "$int": lambda inner: int(inner, 16),
    "$float": float,
    "$bytes": base64.b64decode,
    "$bytearray": lambda inner: bytearray(base64.b64decode(inner)),
    "$decimal": Decimal,
    "$uuid": UUID,
    "$date": date.fromisoformat,
    "$datetime": _to_datetime,
    "$time": _to_time,
    "$timedelta": lambda inner: timedelta(*inner),
}
