"""Values with named parts: dataclasses, named tuples, enums, models of pydantic and of msgspec. Pure.

`taken_apart` gives the parts of such a value, and `put_together` makes the value again. Both read and write what the
instance holds, as pickle does, and leave methods alone: no `__init__`, no `__post_init__`, no validator and no property
runs. So a value comes back as it was, whether its class is frozen, has slots, or computes fields from others. And a
file that names a class can make instances of it and nothing else. The exceptions: a struct of msgspec and a combination
of flags can be made only by calling their class, and defaults of fields that were added may come from a factory.

pydantic and msgspec are known by what their classes look like, and are not imported.

A class that has changed since: a field that was added takes its default. If a stored field is gone, or an added one has
no default, the value does not fit (`Misfit`), and its parts come back as a mapping: nothing is dropped silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, Flag
from functools import cached_property
from types import MemberDescriptorType
from typing import Any, Final, NamedTuple

_MISSING: Final = object()


class Misfit(Exception):
    """Raised for parts that cannot be put together any more; says why."""


class Parts(NamedTuple):
    """A value taken apart."""

    tag: str
    """What kind of value it is, as a tag of the codec."""
    fields: dict[str, Any]
    """What people would call its parts."""
    rest: dict[str, Any]
    """What else is needed to make it again; mostly nothing."""


def is_structure(kind: type) -> bool:
    """Is this a dataclass, a named tuple, an enum, or a model of pydantic or msgspec?"""
    return _tag_of(kind) is not None


def taken_apart(value: object) -> Parts | None:
    """The parts of a value; None if it is no such value, or has more to it than its parts."""
    kind = type(value)
    tag = _tag_of(kind)
    if tag is None or _static(kind, "__del__") is not _MISSING:  # it holds something that must be let go of
        return None
    fields, rest = _TAKING[tag](value, kind)
    return Parts(tag, fields, {name: part for name, part in rest.items() if part is not None})


def put_together(tag: str, kind: type, fields: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
    """Make a value of this class from its parts; Misfit says why that cannot be."""
    if _tag_of(kind) != tag:
        raise Misfit("it is another kind of class now")
    if _static(kind, "__del__") is not _MISSING:
        raise Misfit("it has a __del__ method")
    return _MAKING[tag](kind, fields, rest)


def as_mapping(tag: str, fields: dict[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a value whose class is not known here."""
    extra = rest.get("extra") if tag == "$pydantic" else None
    return {**fields, **extra} if isinstance(extra, dict) else fields


def _tag_of(kind: type) -> str | None:
    if issubclass(kind, Enum):
        return "$enum"
    if issubclass(kind, tuple):
        return "$namedtuple" if isinstance(_static(kind, "_fields"), tuple) else None
    if isinstance(_static(kind, "__dataclass_fields__"), dict):
        return "$dataclass"
    if type(_static(kind, _SET)) is MemberDescriptorType and _model_fields(kind) is not None:
        return "$pydantic"
    return None if _struct_fields(kind) is None else "$msgspec"


# -- classes and instances, without running code of theirs -------------------------------------------------------------


def _mro(kind: type) -> tuple[type, ...]:
    found: tuple[type, ...] = type.__getattribute__(kind, "__mro__")
    return found


def _static(kind: type, name: str) -> Any:
    """What stands in a class under a name, as it stands there."""
    for base in _mro(kind):
        own = type.__getattribute__(base, "__dict__")
        if name in own:
            return own[name]
    return _MISSING


def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    return {
        name: member
        for base in reversed(_mro(kind))
        for name, member in type.__getattribute__(base, "__dict__").items()
        if type(member) is MemberDescriptorType
    }


def _instance_dict(value: object) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _state(value: object, kind: type) -> dict[str, Any]:
    """All attributes of an instance that are not only remembered results of its methods."""
    state = {}
    for name, member in _slots(kind).items():
        try:
            state[name] = member.__get__(value, kind)
        except AttributeError:  # never set
            pass
    for name, attribute in (_instance_dict(value) or {}).items():
        # A generic class notes there with which types it was made.
        if name != "__orig_class__" and not isinstance(_static(kind, name), cached_property):
            state[name] = attribute
    return state


def _set_state(value: object, kind: type, state: Mapping[str, Any]) -> None:
    slots, own = _slots(kind), _instance_dict(value)
    for name, attribute in state.items():
        if name in slots:
            slots[name].__set__(value, attribute)
        elif own is not None:
            own[name] = attribute
        else:
            raise Misfit(f"it has no attribute {name!r} any more")


def _blank(kind: type) -> Any:
    """An instance that nothing has been done to. Of a class built on one of C there is none: its state is hidden."""
    try:
        return object.__new__(kind)
    except TypeError as error:
        raise Misfit(str(error)) from None


def _split(state: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The fields, in their order, and what else there is."""
    fields = {name: state[name] for name in names if name in state}
    return fields, {name: value for name, value in state.items() if name not in fields} or None


def _mapping(rest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of `rest`, which a file says and which is not to be trusted."""
    found = rest.get(name)
    if found is None:
        return {}
    if type(found) is not dict or not all(type(key) is str for key in found):
        raise Misfit("it is stored in another way")
    return found


def _refuse_unknown(names: Iterable[str], known: Iterable[str], what: str = "field") -> None:
    gone = sorted(set(names) - set(known))
    if gone:
        raise Misfit(f"it has no {what} {gone[0]!r} any more")


def _added(name: str) -> Misfit:
    return Misfit(f"it has a field {name!r} now, without a default")


# -- dataclasses -------------------------------------------------------------------------------------------------------


def _take_dataclass(value: Any, kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    _blank(kind)  # raises if it could not be made again
    fields, more = _split(_state(value, kind), [field.name for field in dataclasses.fields(kind)])
    return fields, {"more": more}


def _make_dataclass(kind: Any, fields: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
    known = {field.name: field for field in dataclasses.fields(kind)}
    _refuse_unknown(fields, known)
    value = _blank(kind)
    state = {**fields, **_mapping(rest, "more")}
    for name, field in known.items():
        if name not in state and not isinstance(_static(kind, name), property):
            if field.default is not dataclasses.MISSING:
                state[name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                state[name] = field.default_factory()
            elif field.init:
                raise _added(name)
    _set_state(value, kind, state)
    return value


# -- named tuples ------------------------------------------------------------------------------------------------------


def _take_tuple(value: Any, kind: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    names = _static(kind, "_fields")
    values = tuple(tuple.__iter__(value))
    if len(names) != len(values) or _instance_dict(value):
        raise Misfit("it has more to it than its fields")
    return dict(zip(names, values, strict=True)), {}


def _make_tuple(kind: Any, fields: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
    names, defaults = _static(kind, "_fields"), _static(kind, "_field_defaults")
    _refuse_unknown(fields, names)
    found = {**(defaults if type(defaults) is dict else {}), **fields}
    for name in names:
        if name not in found:
            raise _added(name)
    return tuple.__new__(kind, [found[name] for name in names])


# -- enums -------------------------------------------------------------------------------------------------------------


def _take_enum(value: Any, kind: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    own = _instance_dict(value) or {}  # `name` and `value` of a member may be anything that its class makes of them
    return {"name": own["_name_"], "value": own["_value_"]}, {}


def _make_enum(kind: Any, fields: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
    """A member by its name and by its value. If only one of the two is known any more, that decides."""
    name, value = fields["name"], fields.get("value", _MISSING)
    by_name = _static(kind, "_member_map_").get(name)
    if issubclass(kind, Flag):
        if by_name is not None and (_instance_dict(by_name) or {})["_value_"] == value:
            return by_name
        if type(value) is int:  # a combination, which is no member
            try:
                return kind(value)
            except ValueError as error:
                raise Misfit(str(error)) from None
    try:
        by_value = _static(kind, "_value2member_map_").get(value)
    except TypeError:  # not hashable
        by_value = None
    found = by_name if by_name is not None else by_value
    if found is None or (by_value is not None and by_value is not found):
        raise Misfit(f"it has no member {name!r} of this value any more")
    return found


# -- pydantic ----------------------------------------------------------------------------------------------------------

_PYDANTIC: Final = ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
_SET, _EXTRA, _PRIVATE = _PYDANTIC


def _model_fields(kind: type) -> dict[str, Any] | None:
    for name in ("__pydantic_fields__", "model_fields"):  # the second before pydantic 2.10
        if isinstance(found := _static(kind, name), dict):
            return found
    return None


def _part(value: object, kind: type, name: str) -> Any:
    member = _static(kind, name)
    return member.__get__(value, kind) if type(member) is MemberDescriptorType else None  # a RootModel has some only


def _set_part(value: object, kind: type, name: str, part: Any) -> None:
    member = _static(kind, name)
    if type(member) is MemberDescriptorType:
        member.__set__(value, part)


def _take_model(value: Any, kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    _blank(kind)
    state = {name: part for name, part in _state(value, kind).items() if name not in _PYDANTIC}
    fields, more = _split(state, _model_fields(kind) or ())
    chosen: set[str] = _part(value, kind, _SET)
    given = None if chosen == fields.keys() else sorted(chosen)
    extra, private = _part(value, kind, _EXTRA), _part(value, kind, _PRIVATE)
    return fields, {"set": given, "extra": extra or None, "private": private or None, "more": more}


def _make_model(kind: Any, fields: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
    known = _model_fields(kind) or {}
    _refuse_unknown(fields, known)
    own = {name: fields[name] if name in fields else _model_default(name, field) for name, field in known.items()}
    extra, config = _mapping(rest, "extra"), _static(kind, "model_config")
    is_open = type(config) is dict and config.get("extra") == "allow"
    if extra and not is_open:
        _refuse_unknown(extra, ())
    given = rest.get("set", list(fields))
    if type(given) is not list or not all(type(name) is str for name in given):
        raise Misfit("it is stored in another way")
    value = _blank(kind)
    _set_state(value, kind, {**own, **_mapping(rest, "more")})
    _set_part(value, kind, _SET, set(given))
    _set_part(value, kind, _EXTRA, extra if is_open else None)
    _set_part(value, kind, _PRIVATE, _private_of(kind, _mapping(rest, "private")))
    return value


def _model_default(name: str, field: Any) -> Any:
    if field.is_required():
        raise _added(name)
    return field.get_default(call_default_factory=True)


def _private_of(kind: type, stored: Mapping[str, Any]) -> dict[str, Any] | None:
    known = _static(kind, "__private_attributes__")
    known = known if isinstance(known, dict) else {}
    _refuse_unknown(stored, known, "private attribute")
    private = dict(stored)
    for name, attribute in known.items():
        if name not in private and (attribute.default_factory is not None or not _is_undefined(attribute.default)):
            private[name] = attribute.get_default()
    return private or None


def _is_undefined(default: object) -> bool:
    return type(default).__name__ == "PydanticUndefinedType"


# -- msgspec -----------------------------------------------------------------------------------------------------------


def _struct_fields(kind: Any) -> tuple[str, ...] | None:
    meta = type(kind)
    if meta.__name__ != "StructMeta" and not any(base.__name__ == "StructMeta" for base in _mro(meta)):
        return None
    found = getattr(kind, "__struct_fields__", None)  # a member of the metaclass, written in C
    return found if isinstance(found, tuple) else None


def _take_struct(value: Any, kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    fields, more = _split(_state(value, kind), _struct_fields(kind) or ())
    return fields, {"more": more}


def _make_struct(kind: Any, fields: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
    _refuse_unknown(fields, _struct_fields(kind) or ())
    try:
        value = kind(**fields)
    except Exception as error:  # a field that was added, or what __post_init__ says to stored values
        raise Misfit(str(error)) from None
    _set_state(value, kind, {**fields, **_mapping(rest, "more")})  # __post_init__ may have changed them once more
    return value


_Taking = Callable[[Any, Any], tuple[dict[str, Any], dict[str, Any]]]
_Making = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Any]

_TAKING: Final[dict[str, _Taking]] = {
    "$dataclass": _take_dataclass,
    "$namedtuple": _take_tuple,
    "$enum": _take_enum,
    "$pydantic": _take_model,
    "$msgspec": _take_struct,
}
_MAKING: Final[dict[str, _Making]] = {
    "$dataclass": _make_dataclass,
    "$namedtuple": _make_tuple,
    "$enum": _make_enum,
    "$pydantic": _make_model,
    "$msgspec": _make_struct,
}
TAGS: Final = frozenset(_TAKING)
"""The tags of such values."""
