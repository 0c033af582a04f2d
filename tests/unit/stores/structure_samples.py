"""Classes whose values are stored by their fields, of all kinds. Some tests make this module look unloaded."""

from __future__ import annotations

import enum
from collections import namedtuple
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, Self, TypeVar

import msgspec
import pydantic

T = TypeVar("T")
RAN: list[str] = []
"""What code of these classes ran."""


@dataclass
class Order:
    id: int
    lines: list[Any] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    name: str
    at: Any = None


@dataclass
class Computed:
    """Everything that makes `__init__` differ from the fields."""

    price: float
    _: KW_ONLY
    tax: InitVar[float] = 0.2
    total: float = field(init=False)
    unset: int = field(init=False, repr=False, compare=False)

    def __post_init__(self, tax: float) -> None:
        RAN.append("Computed.__post_init__")
        self.price *= 2  # twice would be wrong
        self.total = self.price * (1 + tax)
        self.seen_by = ["somebody"]  # no field

    @cached_property
    def slow(self) -> object:
        return object()


@dataclass(slots=True)
class Base:
    a: int


@dataclass(slots=True)
class Derived(Base):
    b: int = 2


@dataclass
class Box(Generic[T]):
    value: T


@dataclass
class _Private:
    x: int


@dataclass
class WithProperty:
    x: int

    @property  # type: ignore[no-redef]
    def x(self) -> int:
        return self._x

    @x.setter
    def x(self, value: int) -> None:
        RAN.append("WithProperty.x")
        self._x = value


@dataclass
class Closes:
    """Must not be made by a file: it does something when it is collected."""

    path: str = ""

    def __del__(self) -> None:
        RAN.append(f"Closes {self.path}")


@dataclass
class Failing(Exception):
    """Has a state of C besides its fields."""

    code: int = 0


class Outer:
    @dataclass
    class Inner:
        x: int


class Point(NamedTuple):
    x: float
    y: float = 0.0


OldStyle = namedtuple("OldStyle", "a b")  # noqa: PYI024 # they exist


class Louder(Point):
    """A named tuple with room for more."""

    def __new__(cls, *args: float) -> Self:
        RAN.append("Louder.__new__")
        return super().__new__(cls, *args)


class Colour(enum.Enum):
    RED = 1
    GREEN = 2
    CRIMSON = 1  # noqa: PIE796 # an alias


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Word(enum.StrEnum):
    YES = "yes"


class Handler(enum.Enum):
    """Whose values only the program knows."""

    FAST = object()
    LISTED = [1, 2]


class Perm(enum.Flag):
    R = 4
    W = 2
    X = 1


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Usage(pydantic.BaseModel):
    prompt_tokens: int
    completion_tokens: int = 0


class Answer(pydantic.BaseModel):
    """Of the shape of answers of providers: extras allowed, aliases, private attributes, nested models."""

    model_config = pydantic.ConfigDict(extra="allow")

    id: str
    finish: str | None = pydantic.Field(None, alias="finishReason")
    usage: Usage | None = None
    tags: set[str] = pydantic.Field(default_factory=set)
    _request_id: str | None = pydantic.PrivateAttr(None)
    _never: str = pydantic.PrivateAttr()

    @pydantic.field_validator("id")
    @classmethod
    def _check(cls, value: str) -> str:
        RAN.append("Answer validator")
        return value

    @cached_property
    def slow(self) -> object:
        return object()


class FrozenModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    x: int


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Root(pydantic.RootModel[list[int]]):
    pass


@pydantic.dataclasses.dataclass
class Checked:
    x: int


class Row(msgspec.Struct):
    id: int
    cells: list[Any] = msgspec.field(default_factory=list)


class FrozenRow(msgspec.Struct, frozen=True, kw_only=True, tag="row", rename="camel", array_like=True):
    some_id: int


class PostRow(msgspec.Struct, dict=True):
    n: int

    def __post_init__(self) -> None:
        self.n += 1
        if self.n > 1000:
            raise ValueError("too large")


class GenericRow(msgspec.Struct, Generic[T]):
    value: T
