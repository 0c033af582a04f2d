"""What functions and classes see, and whether a call could change it.

A function that is sent by value takes along what it sees: globals, defaults, its closure, and what those see in turn.
It is *settled* if all of that is atoms, modules, objects that are imported by name, and functions, classes and routines
that are settled themselves. `surroundings_of` collects these, or returns None: then a call could change something that
nothing here would notice (a list, a global name).

Settled objects are compared by identity. `Surroundings.is_unchanged` looks at every name once more: in the dictionaries
of classes, in globals, in cells. The client reuses a pickle as long as nothing changed, and a worker a loaded copy.

Setting an attribute of a function or of a class of these is the one change that calls can make and that is noticed.
Calls that run at the same time must not see such a change of each other either. So the code is read: if every object
whose attributes it sets is surely an instance (``self`` in a method, or the result of calling a class), calls may share
a copy. If that is not sure, each running call has a copy of its own (`Surroundings.exclusive`).
"""

from __future__ import annotations

import abc
import dis
import enum
import functools
import inspect
import logging
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_
from types import CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from headgate.context.variables import ContextVar

if TYPE_CHECKING:
    from headgate.workers.routines import Routine

ROUTINE = "__headgate_routine__"
"""The attribute by which a decorated function is known."""
MAINS = ("__main__", "__mp_main__")
"""The modules that every process has for itself."""

_ATOMS = frozenset({int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type(NotImplemented), range})
_VALUES = frozenset(
    {
        *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
        *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
        *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
        *(("decimal", "Decimal"), ("fractions", "Fraction"), ("uuid", "UUID"), ("re", "Pattern")),
        *(("zoneinfo", "ZoneInfo"), ("operator", "itemgetter"), ("operator", "attrgetter")),
        *(("dataclasses", "_MISSING_TYPE"), ("dataclasses", "_HAS_DEFAULT_FACTORY_CLASS")),
        *(("dataclasses", "_DataclassParams"), ("dataclasses", "_FIELD_BASE"), ("dataclasses", "_KW_ONLY_TYPE")),
    }
)
_DESCRIPTORS = frozenset(
    {"getset_descriptor", "member_descriptor", "wrapper_descriptor", "method_descriptor", "_tuplegetter", "_abc_data"}
)
_PROTOCOL: type = type(typing.Protocol)
_METACLASSES = frozenset({type, abc.ABCMeta, enum.EnumMeta, _PROTOCOL})
_HANDLED = frozenset({"__annotations__", "__annotations_cache__", "__dataclass_fields__"})  # dictionaries of their own
_ADDED = frozenset({"__annotations__", "__annotations_cache__", "__slotnames__"})  # by Python, when they are needed
_OF_PROTOCOLS = frozenset({"__subclasshook__", "__protocol_attrs__", "__non_callable_proto_members__"})
_OF_TUPLES = frozenset({"__new__", "_make", "_replace", "__replace__", "_asdict", "__repr__", "__getnewargs__"})
_OF_ENUMS = frozenset(
    {
        *("_member_names_", "_member_map_", "_value2member_map_", "_unhashable_values_", "_hashable_values_"),
        *("_unhashable_values_map_", "_member_type_", "_value_repr_", "_use_args_", "_new_member_", "__new__"),
        *("_generate_next_value_", "_iter_member_", "_iter_member_by_value_", "_iter_member_by_def_"),
        *("_flag_mask_", "_singles_mask_", "_all_bits_", "_boundary_", "_inverted_"),
    }
)
_HARMLESS = frozenset({ROUTINE, "__wrapped__", "__isabstractmethod__"})  # attributes of functions that others set
_HIDDEN = frozenset({"globals", "exec", "eval", "vars", "__import__", "locals"})
_SETTERS = frozenset({"setattr", "delattr"})
_INNER = frozenset({"__dict__", "__globals__", "__closure__", "cell_contents", "__kwdefaults__"})
_FAST = re.compile(r"(LOAD|STORE|DELETE)_FAST(?:_BORROW|_CHECK|_AND_CLEAR|_MAYBE_NULL)?")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_MADE_BY_PYTHON = 1 << 9  # of classes: Py_TPFLAGS_HEAPTYPE. Others are as they are, whatever they are called
_ABSENT = object()


class Unsettled(Exception):
    """Something was found that a call could change unnoticed."""


@dataclass(slots=True)
class Surroundings:
    """Functions and classes that see each other, and what else they see, all of it settled."""

    functions: list[FunctionType] = field(default_factory=list)
    """All that are sent by value: also methods, and what routines run."""
    routines: list[Routine] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)
    """All that are sent by value."""
    exclusive: bool = False
    """Could a call set an attribute of one of them? Then no two calls may use one copy at the same time."""
    names_classes: bool = True
    """May arguments and results name the classes? Not if one that is seen only by an annotation is unsettled."""
    _parts: list[tuple[FunctionType, CodeType, Any, Any]] = field(default_factory=list)
    _attributes: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    _members: list[tuple[Mapping[str, Any], tuple[str, ...], tuple[Any, ...]]] = field(default_factory=list)
    _names: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    _cells: list[tuple[CellType, Any]] = field(default_factory=list)

    def is_unchanged(self) -> bool:
        """Tell whether every name still means the same object. (Two for each call: benchmarks/scripts.py.)"""
        for function, code, defaults, kwdefaults in self._parts:
            if (
                function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not kwdefaults
            ):
                return False
        get, absent = dict.get, _ABSENT
        for space, name, value in self._names:
            if get(space, name, absent) is not value:
                return False
        for cell, value in self._cells:
            if _content(cell) is not value:
                return False
        return self.has_its_attributes()

    def has_its_attributes(self) -> bool:
        """Tell whether the classes and functions have the attributes that they had. Calls cannot change more."""
        for attributes, length in self._attributes:
            if len(attributes) != length:
                return False
        for place, (now, names, values) in enumerate(self._members):
            if not (len(now) == len(names) and all(map(is_, now.values(), values))):
                if not _same(now, names, values):
                    return False
                self._members[place] = now, tuple(now), tuple(now.values())
        return True

    def note_function(self, function: FunctionType) -> None:
        """Remember a function, and the parts of it that can be replaced."""
        self.functions.append(function)
        self._parts.append((function, function.__code__, function.__defaults__, function.__kwdefaults__))
        self.note_attributes(function)

    def note_attributes(self, function: FunctionType) -> None:
        """Remember how many attributes a function, or the wrapper of a routine, has."""
        self._attributes.append((function.__dict__, len(function.__dict__)))

    def note_members(self, now: Mapping[str, Any]) -> None:
        """Remember all attributes of a class, or of a member of an Enum."""
        self._members.append((now, tuple(now), tuple(now.values())))

    def note_name(self, space: dict[str, Any], name: str, value: Any) -> None:
        """Remember what a name means: a global, or a parameter with a default."""
        self._names.append((space, name, value))

    def note_cell(self, cell: CellType, value: Any) -> None:
        """Remember what a variable of a closure is."""
        self._cells.append((cell, value))


def _same(now: Mapping[str, Any], names: tuple[str, ...], values: tuple[Any, ...]) -> bool:
    """Compare the attributes of a class one by one: their order may differ, and Python adds some itself."""
    before = dict(zip(names, values, strict=True))
    return all(now.get(name, _ABSENT) is before.get(name, _ABSENT) for name in {*now, *before} - _ADDED)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def surroundings_of(functions: Iterable[Any], classes: Iterable[type] = ()) -> Surroundings | None:
    """Return all that these functions and classes can see; None: a call could change some of it unnoticed."""
    search = _Search()
    try:
        for function in functions:
            search.function(function)
        for kind in classes:
            search.value(kind)
        search.run()
        return search.found
    except Unsettled:
        return None


def routine_of(fn: object) -> Routine | None:
    """Return the routine of a decorated function; None: it is none, or only wraps one (`functools.wraps`)."""
    routine = getattr(fn, ROUTINE, None) if isinstance(fn, FunctionType) else None
    return routine if routine is not None and routine.decorated is fn else None


def modules_by_value() -> Collection[str]:
    """Return the names of the modules that cloudpickle was told to send by value."""
    cloudpickle = sys.modules.get("cloudpickle")
    return cloudpickle.list_registry_pickle_by_value() if cloudpickle is not None else ()


def is_registered(module: str) -> bool:
    """Tell whether cloudpickle was told to send a module by value, or the package that it is in."""
    return any(module == name or module.startswith(f"{name}.") for name in modules_by_value())


def is_by_name(value: FunctionType | type) -> bool:
    """Tell whether a function or a class is what an import of its module finds under its name."""
    module = getattr(value, "__module__", None) or ""
    found: object = sys.modules.get(module)
    if found is None or module in MAINS or getattr(found, "__spec__", None) is None:
        return found is not None and module == "builtins"
    if is_registered(module):
        return False
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


# -- the search -------------------------------------------------------------------------------------------------------


class _Search:
    """Goes from function to class to function, and collects what they see. Raises `Unsettled`."""

    def __init__(self) -> None:
        self.found = Surroundings()
        self._todo: list[tuple[FunctionType, type | None] | type] = []
        self._known: set[int] = set()
        self._methods: set[int] = set()  # functions that were only seen as methods
        self._annotations: list[Any] = []
        self._writes = False  # does code set attributes of what may be no instance?
        self._carries = False  # are there functions or classes besides the first?
        self._registers = False  # does code use an attribute `register`?

    def run(self) -> None:
        self._go_on()
        if self._annotations:
            self._annotated()
        if self._registers and any(isinstance(kind, abc.ABCMeta) for kind in self.found.classes):
            raise Unsettled  # an ABC may be given a virtual subclass, which its attributes do not show
        self.found.exclusive = self._writes and self._carries

    def _go_on(self) -> None:
        while self._todo:
            item = self._todo.pop()
            if isinstance(item, type):
                self._class(item)
            else:
                self._function(*item)

    def _annotated(self) -> None:
        """Look at classes that annotations mention, which are sent too. What is wrong with them disturbs no call."""
        if self.found.classes:
            self._annotated_classes()
            return
        before = self._writes, self._carries
        try:
            self._annotated_classes()
        except Unsettled:
            self._writes, self._carries = before
            self.found.names_classes = False
            self.found.classes.clear()

    def _annotated_classes(self) -> None:
        while self._annotations:
            for annotation in self._annotations.pop():
                self._annotation(annotation)
            self._go_on()

    def function(self, function: Any, owner: type | None = None) -> None:
        """Look at a function. `owner`: it is a method of this class, whose first parameter is an instance."""
        if not isinstance(function, FunctionType) or not _HARMLESS.issuperset(function.__dict__):
            raise Unsettled
        if id(function) in self._known and (owner is not None or id(function) not in self._methods):
            return
        self._known.add(id(function))
        if owner is None:
            self._methods.discard(id(function))  # whatever it is of a class, it can also be called with anything
        else:
            self._methods.add(id(function))
        self._todo.append((function, owner))

    def _function(self, function: FunctionType, owner: type | None) -> None:
        reading = read(function.__code__)
        if reading.hides or any(owner is None or not reading.is_first(target) for target in reading.inner):
            raise Unsettled
        self._registers = self._registers or reading.registers
        self.found.note_function(function)
        wrapped = function.__dict__.get("__wrapped__")
        if _guards_against_recursion(function):
            self.function(wrapped, owner)
            return
        if isinstance(wrapped, (FunctionType, type)):
            self.value(wrapped)
        self._seen_by(function, reading, owner)
        self._annotations.append(_annotations_of(function))

    def _seen_by(self, function: FunctionType, reading: Reading, owner: type | None) -> None:
        space = function.__globals__
        self._writes = self._writes or not reading.writes_only_instances(owner, space)
        for cell in function.__closure__ or ():
            content = _content(cell)
            self.value(content)
            self.found.note_cell(cell, content)
        for value in function.__defaults__ or ():
            self.value(value)
        defaults = function.__kwdefaults__ or {}
        for name, value in defaults.items():
            self.value(value)
            self.found.note_name(defaults, name, value)
        for name in reading.globals:
            value = dict.get(space, name, _ABSENT)
            if value is _ABSENT and name in _HIDDEN:
                raise Unsettled
            self._writes = self._writes or (value is _ABSENT and name in _SETTERS)
            self.value(value)
            self.found.note_name(space, name, value)

    def value(self, value: Any) -> None:
        """Look at something that a function or a class refers to."""
        kind = type(value)
        if value is _ABSENT or kind in _ATOMS:
            return
        if isinstance(value, FunctionType):
            self._seen_function(value)
        elif _is_type_expression(value):  # before classes: `list[int]` passes for one
            self._type_expression(value)
        elif isinstance(value, type):
            self._seen_class(value)
        elif isinstance(value, ModuleType):
            found = sys.modules.get(value.__name__) is value and getattr(value, "__spec__", None) is not None
            if not found or is_registered(value.__name__):
                raise Unsettled
        elif kind in (tuple, frozenset):
            for item in value:
                self.value(item)
        elif kind.__name__ == "builtin_function_or_method":
            owner = getattr(value, "__self__", None)
            if not isinstance(owner, ModuleType) and not (isinstance(owner, type) and is_by_name(owner)):
                raise Unsettled
        elif isinstance(value, ContextVar):  # one for each key in a process: its values are no part of it
            if not value.is_plain:
                raise Unsettled
        elif isinstance(value, enum.Enum):
            self._seen_class(kind)
        elif kind is logging.Logger:  # it is sent by name
            if logging.Logger.manager.loggerDict.get(value.name) is not value:
                raise Unsettled
        elif (kind.__module__, kind.__qualname__) not in _VALUES or not is_by_name(kind):
            raise Unsettled

    def _seen_function(self, value: FunctionType) -> None:
        if is_by_name(value):
            return
        self._carries = True
        routine = routine_of(value)
        if routine is None:
            self.function(value)
        elif id(value) not in self._known:
            if not _HARMLESS.issuperset(value.__dict__):
                raise Unsettled
            self._known.add(id(value))
            self.found.routines.append(routine)
            self.found.note_attributes(value)
            self.function(routine.fn)

    def _seen_class(self, kind: type) -> None:
        if is_by_name(kind) or id(kind) in self._known or not kind.__flags__ & _MADE_BY_PYTHON:
            return
        if type(kind) not in _METACLASSES:
            raise Unsettled
        self._carries = True
        self._known.add(id(kind))
        self._todo.append(kind)

    def _class(self, kind: type) -> None:
        _annotations_of(kind)  # Python may make an empty dictionary when it is first asked
        self.found.classes.append(kind)
        self.found.note_members(vars(kind))
        for base in kind.__bases__:
            self.value(base)
        is_tuple, is_enum = _is_named_tuple(kind), issubclass(kind, enum.Enum)
        skipped = {"__slots__", "__slotnames__"}
        if is_tuple:
            skipped |= _OF_TUPLES
        if type(kind) is _PROTOCOL:
            skipped |= _OF_PROTOCOLS
        members: Mapping[str, Any] = {}
        if issubclass(kind, enum.Enum):
            members = kind.__members__
            self._members(members)
        for name, value in list(vars(kind).items()):
            if name in _HANDLED:
                self._annotations.append(_annotated_types(value, name))
                if name == "__dataclass_fields__":
                    self._fields(value)
            elif name in ("__orig_bases__", "__parameters__", "__type_params__"):
                self._annotation(value)
            elif is_tuple and name == "_field_defaults":
                self.value(tuple(value.values()))
            elif is_enum and name in _OF_ENUMS:
                if isinstance(value, (FunctionType, staticmethod)):
                    self._member(kind, name, value)
            elif not (name in members or name in skipped):
                self._member(kind, name, value)

    def _member(self, kind: type, name: str, value: Any) -> None:
        """Look at one attribute of a class."""
        if isinstance(value, (staticmethod, classmethod)):
            self._method(value.__func__, None)
        elif isinstance(value, property):
            for part in (value.fget, value.fset, value.fdel):
                if part is not None:
                    self._method(part, kind)
        elif isinstance(value, FunctionType):
            is_of_class = name in ("__new__", "__init_subclass__", "__class_getitem__")
            self._method(value, None if is_of_class or issubclass(kind, type) else kind)
        elif type(value).__name__ not in _DESCRIPTORS:
            self.value(value)

    def _method(self, function: Any, owner: type | None) -> None:
        if not isinstance(function, FunctionType):
            raise Unsettled
        if is_by_name(function) or routine_of(function) is not None:
            self._seen_function(function)
        else:
            self.function(function, owner)

    def _members(self, members: Mapping[str, enum.Enum]) -> None:
        """Look at the members of an Enum: they are objects that all calls have in common."""
        for member in members.values():
            self.found.note_members(vars(member))
            for name, value in vars(member).items():
                if name != "__objclass__":
                    self.value(value)

    def _fields(self, fields: Mapping[str, Any]) -> None:
        for one in fields.values():
            self.value(one.default)
            self.value(one.default_factory)
            self.value(tuple(one.metadata.values()))

    def _annotation(self, value: Any) -> None:
        """Look at a type as annotations have it: a class, a string, ``list[C]``, ``C | None``."""
        if type(value) in (tuple, list):
            for item in value:
                self._annotation(item)
        else:
            self.value(value)

    def _type_expression(self, value: Any) -> None:
        if isinstance(value, typing.TypeVar):
            self._annotation(value.__constraints__)
            self._annotation(value.__bound__)
        else:
            self._annotation(typing.get_origin(value) or ())
            self._annotation(typing.get_args(value))


def _is_type_expression(value: object) -> bool:
    return isinstance(value, (types.GenericAlias, types.UnionType)) or type(value).__module__ == "typing"


def _annotations_of(value: FunctionType | type) -> list[Any]:
    try:
        return list(value.__annotations__.values())
    except AttributeError:
        return []
    except Exception as error:  # Python 3.14 evaluates them now
        raise Unsettled from error


def _annotated_types(value: Any, name: str) -> list[Any]:
    if name == "__dataclass_fields__":
        return [one.type for one in value.values()]
    return list(value.values())


def _is_named_tuple(kind: type) -> bool:
    return kind.__bases__[0] is tuple and isinstance(vars(kind).get("_field_defaults"), dict)


def _guards_against_recursion(function: FunctionType) -> bool:
    """Tell whether a function is the ``__repr__`` of a dataclass: it remembers, in a set, what is being shown."""
    made_by = dict.get(function.__globals__, "__name__")
    return made_by in ("dataclasses", "reprlib") and function.__code__.co_name == "wrapper"


# -- the code of a function -------------------------------------------------------------------------------------------


class Reading:
    """The names that the code of a function uses, with the code nested in it, and of what it sets attributes."""

    __slots__ = (
        *("_free", "_name", "_nested", "_parameters", "_sources"),
        *("globals", "hides", "inner", "instance", "registers", "writes"),
    )

    def __init__(self, code: CodeType) -> None:
        self.globals: set[str] = set()
        self.hides: bool = False
        """Does the code write to globals, or to a closure that outlives the call?"""
        self.inner: list[str | None] = []
        """Whose dictionary, globals or closure it reads: a local name, or None."""
        self.writes: list[str | None] = []
        """Whose attributes it sets: a local name, or None."""
        self.registers: bool = False
        """Does it use an attribute of this name, as virtual subclasses of an ABC are declared?"""
        self.instance: str | None = code.co_varnames[0] if code.co_argcount else None
        """The first parameter, if nothing else is ever assigned to it."""
        self._parameters = frozenset(inspect.getargs(code)[0]) | {*filter(None, inspect.getargs(code)[1:])}
        self._sources: dict[str, set[str | None]] = {}  # of local names: the globals whose results they are
        self._name = code.co_name
        self._free = frozenset(code.co_freevars)
        self._nested = [Reading(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
        self._read(list(_instructions(code)))
        if self.instance in self._sources or self.instance in code.co_cellvars:
            self.instance = None
        for nested in self._nested:
            self.globals |= nested.globals
            self.hides = self.hides or nested.hides
            self.registers = self.registers or nested.registers
            self.inner += [None] * len(nested.inner)

    def is_first(self, target: str | None) -> bool:
        """Tell whether a target is the first parameter."""
        return target is not None and target == self.instance

    def writes_only_instances(self, owner: type | None, space: dict[str, Any]) -> bool:
        """Tell whether the code sets attributes of instances only. `owner`: it is a method of this class."""
        return all(self._is_instance(target, owner, space) for target in self.writes) and all(
            nested.writes_only_instances(None, space) for nested in self._nested
        )

    def _is_instance(self, target: str | None, owner: type | None, space: dict[str, Any]) -> bool:
        if target is None:
            return False
        if owner is not None and self.is_first(target):
            return not issubclass(owner, enum.Enum) or self._name == "__init__"  # its instances are shared
        sources = self._sources.get(target)
        if not sources or target in self._parameters:
            return False
        return all(name is not None and _makes_instances(dict.get(space, name)) for name in sources)

    def _read(self, code: list[_Instruction]) -> None:
        for place, (name, value, _) in enumerate(code):
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.globals.add(value)
            elif name in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_STAR"):
                self.hides = True
            elif name in ("STORE_DEREF", "DELETE_DEREF"):
                self.hides = self.hides or value in self._free
            elif name == "STORE_FAST":
                self._sources.setdefault(value, set()).add(_called(code, place - 1))
            elif name in ("STORE_ATTR", "DELETE_ATTR"):
                self.writes.append(_target(code, place - 1))
            elif name in ("LOAD_ATTR", "LOAD_METHOD") and value == "register":
                self.registers = True
            elif name in ("LOAD_ATTR", "LOAD_METHOD") and value in _INNER:
                self.inner.append(_target(code, place - 1) if value == "__dict__" else None)


read: Callable[[CodeType], Reading] = functools.lru_cache(4096)(Reading)
"""The `Reading` of code, made once."""

_Instruction = tuple[str, Any, int]
"""Name, argument, and by how much it makes the stack grow."""


def _instructions(code: CodeType) -> Iterator[_Instruction]:
    """Yield the instructions of code. Those of newer Pythons that do two things at once become two."""
    for instruction in dis.get_instructions(code):
        if instruction.is_jump_target:  # the value before it may come from elsewhere
            yield "JUMP_TARGET", None, 99
        name, value = instruction.opname, instruction.argval
        jumps = instruction.opcode in _JUMPS
        grows = 99 if jumps else dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        parts = _FAST.findall(name)
        if not parts:
            yield name, value, grows
            continue
        for part, local in zip(parts, value if isinstance(value, tuple) else (value,), strict=True):
            yield f"{part}_FAST", local, grows
            grows = 0


def _target(code: list[_Instruction], place: int) -> str | None:
    """Return the local name whose attribute is used, if it was loaded here; None: it is something else."""
    name, value, _ = code[place]
    if name == "SWAP":  # `x.n += 1`: the object was loaded, and copied, before what is added to
        while place > 0 and code[place][:2] != ("COPY", 1):
            place -= 1
        name, value, _ = code[place - 1] if place > 0 else ("", None, 0)
    return value if name == "LOAD_FAST" else None


def _called(code: list[_Instruction], place: int) -> str | None:
    """Return the global name whose call gives the value at this place; None: it is something else."""
    if code[place][0] not in ("CALL", "CALL_KW"):
        return None
    grown = 0
    while place >= 0:
        name, value, grows = code[place]
        grown += grows
        if grown >= 1:
            return value if grown == 1 and name == "LOAD_GLOBAL" else None
        place -= 1
    return None


def _makes_instances(kind: Any) -> bool:
    """Tell whether calling this gives a new instance, and nothing that somebody else has too."""
    if type(kind) not in (type, abc.ABCMeta) or issubclass(kind, type):
        return False
    return is_by_name(kind) or all("__new__" not in vars(base) for base in kind.__mro__ if not is_by_name(base))
