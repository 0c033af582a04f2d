"""Python values as JSON, and back with the value and the type they had.

A journal must be readable: by people, by other tools, by the next release. So results are kept as JSON, and what JSON
lacks is an object with one key, a tag that begins with "$": ``(1, b"x")`` is ``{"$tuple": [1, {"$bytes": "eA=="}]}``. A
key of the user's own that begins with "$" gets a second one, so nothing that is stored can be taken for a tag.

All or nothing
--------------
What comes back is what was given, or an `Opaque` that names its type; never something close to it. So types are
compared exactly: an IntEnum is not the int that JSON would make of it, a namedtuple is not a tuple. One member that
cannot be kept makes the whole value opaque, and so do nesting deeper than 100 (a value that contains itself is that
too) and more than 1 MB of text. Encoding never raises, whatever the value does: the work it is the result of has
succeeded.

Dataclasses, named tuples, enums and models of pydantic and msgspec are stored by their fields (`structures`), with the
name of their class: ``{"$dataclass": ["shop:Order", {"id": 7}]}``. They come back as that class where `types` finds it,
which imports nothing; otherwise, and if the class has changed too much, as a plain mapping of their fields.

A budget runs out while encoding and not afterwards: forty lists, each holding the next one twice, are a small value and
a text without end.

Pickle
------
Only a store made with ``codec="pickle"`` writes pickles, and only for values that would be opaque otherwise and for
those with named fields, because a pickle imports their classes; only such a store reads them, because loading a pickle
runs code. All others read the type's name, which stands beside it.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from headgate.errors import InvalidArgument
from headgate.stores.result_types import LOADED, ResultTypes
from headgate.stores.type_tags import LARGEST, TOO_LONG, Decoder, Encoded, Encoder, Unfit, sorted_dumps

Codec: TypeAlias = Literal["json", "pickle"]

_SMALL: Final = 2**63

REMEDY: Final = (
    "Return values that JSON knows, dataclasses, named tuples, enums, or models of pydantic or msgspec, below 1 MB in "
    "all; of more, return where it is; or use JsonLinesStore(codec='pickle')."
)
"""What to do about a result that cannot be kept."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands for a value that could not be stored."""

    type_name: str
    """The class of the value, as module.qualname."""


def refuse_pickle(codec: object) -> None:
    """InvalidArgument: a shared store was told to keep pickles."""
    if codec != "json":
        raise InvalidArgument(
            f"codec must be 'json' for a store that processes share, got {codec!r}",
            remedy="Leave it out: reading a pickle runs code, of whoever can write to the store. Return dataclasses, "
            "named tuples, enums or models, which are kept without it; or use JsonLinesStore(codec='pickle').",
        )


def encode(value: object, *, codec: Codec = "json") -> Encoded:
    """`value` as json.dumps takes it. Never raises: what cannot be kept is ``{"$opaque": type}``."""
    return _fitted(value, codec)[0]


def text_of(value: object, *, codec: Codec = "json") -> str:
    """Encode a value as JSON text, in ASCII and on one line."""
    if value is None:
        return "null"
    if type(value) is int and -_SMALL < value < _SMALL:
        return str(value)
    return _fitted(value, codec)[1]


def decode(encoded: Encoded, *, codec: Codec = "json", types: ResultTypes = LOADED) -> Any:
    """What `encode` was given, or an `Opaque`. Never raises. Runs what a pickle says only with ``codec="pickle"``.

    `types` finds the classes of stored values; without it, those of loaded modules are found.
    """
    try:
        if is_opaque(encoded):
            return _revealed(encoded, codec)
        return Decoder(types).decode(encoded)
    except Exception:
        return Opaque("unreadable")


def is_opaque(encoded: Encoded) -> bool:
    """Does this stand for a value that could not be stored as JSON?"""
    return type(encoded) is dict and "$opaque" in encoded


def why_opaque(value: object, *, codec: Codec = "json") -> str:
    """Why a value cannot be kept, for people; "" if it can."""
    encoded = encode(value, codec=codec)
    if not is_opaque(encoded) or "$pickle" in encoded:
        return ""
    try:
        _within(dumps(Encoder(structures=codec == "json").encode(value)))
    except Unfit as why:
        return str(why)
    except Exception as error:  # `value` may be anything
        return f"reading it raised {name_of(type(error))}"
    return "it changes while it is read"


def canonical(value: object) -> str | None:
    """A text that is the same for equal values of equal types in every process; None when there is none.

    None for values with named fields: digests of arguments in older journals are made of their pickles.
    """
    try:
        return _within(sorted_dumps(Encoder(sorts=True, structures=False).encode(value)))
    except Exception:
        return None


def _made_once() -> Callable[[Any], str]:
    """json.dumps makes its encoder anew on each call, which takes as long as a small value itself. This keeps one.

    The price: the name it is made by is the stdlib's own, and where that is gone this is json.dumps.
    """
    slow = json.JSONEncoder(separators=(",", ":"), check_circular=False)
    text = json.encoder.encode_basestring_ascii
    try:
        make = vars(json.encoder)["c_make_encoder"]
        encoder = make(None, slow.default, text, None, ":", ",", False, False, True)
        if "".join(encoder({"a": [1.5, "\u00fc"]}, 0)) != '{"a":[1.5,"\\u00fc"]}':
            return slow.encode
    except (KeyError, TypeError):
        return slow.encode
    return lambda value: "".join(encoder(value, 0))


dumps: Final[Callable[[Any], str]] = _made_once()
"""Compact JSON, in ASCII. What contains itself is a RecursionError instead of a ValueError."""


def _fitted(value: object, codec: Codec) -> tuple[Encoded, str]:
    if type(value) is Opaque:
        hidden = {"$opaque": value.type_name}
        return hidden, dumps(hidden)
    try:
        encoded = Encoder(structures=codec == "json").encode(value)
        return encoded, _within(dumps(encoded))
    except Exception:  # `value` may be anything, even changing under our eyes
        pass
    name = name_of(type(value))
    hidden = {"$opaque": name}
    if codec == "pickle":
        try:
            hidden = {"$opaque": name, "$pickle": _pickled(value)}
        except Exception:  # unpicklable, or too large
            pass
    return hidden, dumps(hidden)


def _within(text: str) -> str:
    if len(text) > LARGEST:
        raise Unfit(TOO_LONG)
    return text


def name_of(kind: type) -> str:
    """Return the name of a type as module.qualname."""
    try:
        return f"{kind.__module__}.{kind.__qualname__}"
    except Exception:  # a metaclass can make anything of these names
        return "unknown"


# -- pickles ----------------------------------------------------------------------------------------------------------


class _Bounded:
    """A file with a limit: a gigabyte must not be pickled only to find that it is too much."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > LARGEST * 3 // 4:
            raise Unfit(TOO_LONG)


def _pickled(value: object) -> str:
    file = _Bounded()
    pickle.Pickler(file, protocol=5).dump(value)
    return base64.b64encode(file.data).decode("ascii")


def _revealed(hidden: dict[str, Encoded], codec: Codec) -> Any:
    name = hidden["$opaque"]
    if codec == "pickle" and "$pickle" in hidden:
        try:
            return pickle.loads(base64.b64decode(hidden["$pickle"]))
        except Exception:  # a class that moved, a module that is gone
            pass
    return Opaque(name if type(name) is str else "unreadable")
