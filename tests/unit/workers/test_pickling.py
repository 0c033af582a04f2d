"""W43, W03, W42: Python objects as bytes. Exceptions arrive as what they were, or say what they were."""

from __future__ import annotations

import asyncio
import copyreg
import dataclasses
import errno
import json
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, Self

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import HeadgateError, InvalidType, PoolExhausted, RemoteError, WorkerLost
from headgate.workers.protocol.bulk import INLINE, BulkPayload
from headgate.workers.serialization import dynamic_classes
from headgate.workers.serialization.pickling import (
    describe,
    dump_arguments,
    dump_exception,
    dump_sent,
    dump_thrown,
    dumps,
    load_arguments,
    load_exception,
    loads,
)
from tests.conftest import SCALE


def raised(error: BaseException) -> BaseException:
    """The same, with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def carried(data: bytes | BulkPayload) -> bytes | BulkPayload:
    """As it arrives: a buffer as bytes, or as a bytearray where it was writable."""
    if isinstance(data, bytes):
        assert len(data) <= INLINE, "what is longer travels apart"
        return data
    assert isinstance(data.pickle, bytes)
    buffers = [bytes(part) if part.readonly else bytearray(part) for part in data.segments()[1:]]
    return BulkPayload(data.pickle, buffers, data.lifted)


def trip(error: BaseException) -> BaseException:
    try:
        data = dump_exception(error, "worker w1, pid 5")
    except (SystemExit, KeyboardInterrupt):
        pytest.fail("what an exception says of itself must not end a program")
    return load_exception(carried(data))


def notes_of(error: BaseException) -> list[str]:
    """Without the remote traceback, which is the last one."""
    *before, last = error.__notes__
    assert last.startswith("Remote traceback (worker w1, pid 5):\n")
    return before


def program(text: str) -> dict[str, Any]:
    """What a program of this text defines."""
    namespace = {"__name__": "__main__"}
    exec(textwrap.dedent(text), namespace)
    return namespace


# -- atoms and others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [0, -1, 2**200, True, None, 1.5, float("inf"), "", "é\ud800", b"", b"x" * (2 << 20), "y" * (1 << 20)]
)
def test_w03_atoms_travel(value: Any) -> None:
    copy = loads(carried(dumps(value)))
    assert copy == value
    assert type(copy) is type(value)


MEG = 1 << 20


@pytest.mark.parametrize(
    ("make", "apart"),
    [
        (lambda: b"x" * (INLINE - 30), None),
        (lambda: b"x" * INLINE, 1),
        (lambda: bytearray(b"x" * MEG), 1),
        (lambda: "é" * MEG, 0),
        (lambda: [b"a" * MEG, bytearray(b"b" * MEG), "c" * MEG], 2),
        (lambda: {"a": (b"a" * MEG, [b"b" * MEG, 1])}, 2),
        (lambda: [list(range(100_000))], 0),
        (lambda: [pickle.PickleBuffer(b"x" * 10)], None),
    ],
)
def test_w05_what_is_long_travels_apart(make: Callable[[], Any], apart: int | None) -> None:
    """Long bytes stay out of the pickle, and come back as what they were."""
    value = make()
    data = dumps(value)
    if apart is None:
        assert isinstance(data, bytes)
        return
    assert isinstance(data, BulkPayload)
    assert len(data.buffers) == apart
    assert len(data) == len(data.pickle) + sum(len(buffer) for buffer in data.buffers)
    copy = loads(carried(data))
    assert copy == value
    assert repr(type(copy)) == repr(type(value))
    if isinstance(value, list):
        assert [type(member) for member in copy] == [type(member) for member in value]
    args = dump_arguments("tag", (value,), {})
    assert load_arguments(carried(args)) == ((value,), {})
    assert loads(carried(dump_sent("tag", value))) == value


@pytest.mark.parametrize(
    "value", [b"x" * (INLINE - 1), "é" * (INLINE - 1), 1 << 8 * INLINE], ids=["bytes", "str", "int"]
)
def test_w05_an_atom_whose_pickle_is_too_long_for_a_frame_travels_apart(value: Any) -> None:
    """A pickle is longer than what it holds, and text may be four times as long as it counts."""
    for data in (dumps(value), dump_arguments("tag", (value,), {}), dump_sent("tag", value)):
        assert isinstance(data, BulkPayload) or len(data) <= INLINE
    assert loads(carried(dumps(value))) == value


@pytest.mark.parametrize("size", [10, MEG])
def test_w05_what_is_shared_stays_shared_however_long_it_is(size: int) -> None:
    """A routine that is given an object and a part of it changes both in one."""
    holder = types.SimpleNamespace(part=bytearray(size))
    copy, part = loads(carried(dumps((holder, holder.part))))
    assert copy == holder
    assert copy.part is part
    parts = [bytearray(size)]
    outer, ((((inner,),),),) = loads(carried(dumps((parts, ((((parts,),),),)))))
    assert inner == parts
    assert inner is outer


def test_w05_what_may_be_changed_while_it_travels_is_copied() -> None:
    value = bytearray(b"x" * MEG)
    data = dumps([value])
    value[:5] = b"later"
    assert loads(carried(data)) == [b"x" * MEG]


def test_w05_long_bytes_that_occur_twice_stay_one_object() -> None:
    long, changing = b"x" * MEG, bytearray(b"y" * MEG)
    copy = loads(carried(dumps([long, changing, [changing], {"long": long}])))
    assert copy == [long, changing, [changing], {"long": long}]
    assert copy[0] is copy[3]["long"]
    assert copy[1] is copy[2][0]


def test_w05_a_container_that_holds_itself_travels_with_long_bytes() -> None:
    value: list[Any] = [b"x" * MEG]
    value.append(value)
    copy = loads(carried(dumps(value)))
    assert copy[0] == value[0]
    assert copy[1] is copy


def test_w05_long_exceptions_travel_apart() -> None:
    error = ValueError("x" * MEG)
    assert isinstance(dump_exception(error, "worker w1, pid 5"), BulkPayload)
    assert trip(error).args == error.args
    thrown = dump_thrown(error)
    assert isinstance(thrown, BulkPayload)
    assert loads(carried(thrown)).args == error.args


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=20,
    )
)
@settings(max_examples=int(330 * SCALE))
def test_w03_whatever_is_made_of_atoms_travels(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert load_arguments(dump_arguments("tag", (value,), {"key": value})) == ((value,), {"key": value})
    assert load_arguments(dump_arguments("tag", (value, 1, "x"), {})) == ((value, 1, "x"), {})


def test_w03_functions_and_classes_of_a_function_travel() -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    assert loads(dumps(Local(5))).value == 5
    assert loads(dumps([lambda x: x + 1]))[0](1) == 2


def test_w03_what_lives_in_main_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain pickle would write its name, and a worker's `__main__` is another."""
    made = program("class Thing:\n    def __init__(self, n): self.n = n\ndef double(n): return 2 * n")
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "Thing", made["Thing"], raising=False)
    monkeypatch.setattr(main, "double", made["double"], raising=False)
    assert b"__main__" in pickle.dumps(made["Thing"](1))
    data = dumps({"things": [made["Thing"](5)], "double": made["double"]})
    monkeypatch.delattr(main, "Thing")
    monkeypatch.delattr(main, "double")
    copy = loads(data)
    assert copy["things"][0].n == 5
    assert copy["double"](4) == 8


def test_w03_what_lives_in_a_main_of_multiprocessing_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the program's file has this name, and no worker has such a module."""
    module = types.ModuleType("__mp_main__")
    exec("class Thing:\n    n = 5", module.__dict__)
    monkeypatch.setitem(sys.modules, "__mp_main__", module)
    try:
        data = dump_arguments("tag", (module.Thing(), [module.Thing]), {})
    finally:
        if "__mp_main__" in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, "__mp_main__")
    (thing, [kind]), _ = load_arguments(data)
    assert thing.n == kind.n == 5


def test_w03_a_text_that_names_main_is_only_a_text() -> None:
    value = ["if __name__ == '__main__':", b"__main__"]
    assert loads(dumps(value)) == value
    assert loads(dumps(value[0])) == value[0]


def test_w03_a_module_that_cloudpickle_sends_by_value_is_not_sent_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("planted_things")
    exec("class Thing:\n    n = 5", module.__dict__)
    monkeypatch.setitem(sys.modules, "planted_things", module)
    cloudpickle.register_pickle_by_value(module)
    try:
        data = dumps([module.Thing()])
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, "planted_things")
    assert loads(data)[0].n == 5


# -- arguments --------------------------------------------------------------------------------------------------------


def test_w06_arguments_are_copies_that_keep_what_they_share() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    (one, two), named = load_arguments(dump_arguments("tag", (shared, shared), {"also": shared}))
    assert one is two is named["also"] is one[1]
    assert one is not shared


def test_w03_no_arguments_and_atoms_travel() -> None:
    assert load_arguments(dump_arguments("tag", (), {})) == ((), {})
    assert load_arguments(dump_arguments("tag", (1, "x", None, b"y"), {})) == ((1, "x", None, b"y"), {})
    assert load_arguments(dump_arguments("tag", (1,), {"a": "b"})) == ((1,), {"a": "b"})


LOCK = threading.Lock()


def takes(first: Any, second: Any, /, third: Any = 0, *rest: Any, key: Any = 0, **more: Any) -> None:
    """For its names."""


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((LOCK,), {}, "argument 'first' of jobs.f:1, a lock,"),
        ((1, [LOCK]), {}, "argument 'second' of jobs.f:1, a list,"),
        ((1, 2, {"x": LOCK}), {}, "argument 'third' of jobs.f:1, a dict,"),
        ((1, 2, 3, 4, LOCK), {}, "argument 5 of jobs.f:1, a lock,"),
        ((1, 2), {"key": LOCK}, "argument 'key' of jobs.f:1, a lock,"),
        ((1, 2), {"fine": 1, "other": (i for i in "x")}, "argument 'other' of jobs.f:1, a generator,"),
    ],
)
def test_w42_an_argument_that_cannot_travel_is_named(args: Any, kwargs: Any, named: str) -> None:
    with pytest.raises(InvalidType) as caught:
        dump_arguments("jobs.f:1", args, kwargs, takes)
    assert caught.value.message.startswith(named)
    assert "cannot be pickled: TypeError: " in caught.value.message
    assert caught.value.remedy
    assert isinstance(caught.value.__cause__, TypeError)


def test_w42_without_a_signature_arguments_are_counted() -> None:
    for fn in (None, type("NoSignature", (), {"__signature__": 5})()):
        with pytest.raises(InvalidType, match=r"^argument 2 of jobs\.f:1, a lock, cannot be pickled"):
            dump_arguments("jobs.f:1", (1, LOCK), {}, fn)


class Stubborn:
    """Fails in a way that cannot be told."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def __reduce__(self) -> Any:
        raise self.Mute


class Alone:
    """Travels alone and not beside another of its kind."""

    dumps = 0

    def __reduce__(self) -> Any:
        Alone.dumps += 1
        if Alone.dumps < 5:
            raise ValueError("not now")
        return Alone, ()


def test_w42_an_argument_that_fails_in_an_odd_way_is_named_too() -> None:
    with pytest.raises(InvalidType, match=r"argument 1 of tag, a Stubborn, cannot be pickled: .*Mute"):
        dump_arguments("tag", (Stubborn(),), {})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidType, match="argument 1 of tag, a list, cannot be pickled"):
        dump_arguments("tag", (deep,), {})
    while deep:
        deep = deep.pop()  # level by level: freeing it at once is deep, too


def test_w42_when_no_single_argument_is_at_fault_all_of_them_are() -> None:
    Alone.dumps = 2
    with pytest.raises(InvalidType, match=r"^the arguments of tag cannot be pickled: ValueError: not now"):
        dump_arguments("tag", (Alone(),), {})


# -- exceptions that keep their type and fields -----------------------------------------------------------------------


class KeywordOnly(Exception):
    def __init__(self, *, code: int, reason: str = "why") -> None:
        super().__init__(f"{code} because {reason}")
        self.code = code
        self.reason = reason


class Several(ValueError):
    def __init__(self, first: int, second: str, third: Any) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.second, self.third = first, second, third


class NoArgs(Exception):
    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class Uncalled(Exception):
    def __init__(self, code: int) -> None:  # of those that forget to call the parent's
        self.code = code


class Strict(Exception):
    def __init__(self, code: int) -> None:
        if not isinstance(code, int):
            raise TypeError("code must be a number")
        super().__init__(f"code {code}")
        self.code = code


class OwnNew(Exception):
    def __new__(cls, code: int, *, extra: str) -> Self:
        made = super().__new__(cls, code)
        made.extra = extra
        return made

    def __init__(self, code: int, *, extra: str) -> None:
        super().__init__(code)

    extra: str


class Slots(Exception):
    __slots__ = ("code", "unset")

    def __init__(self, code: int) -> None:
        super().__init__("slots")
        self.code = code


class MoreSlots(Slots):
    __slots__ = ("extra",)

    def __init__(self, code: int, extra: str) -> None:
        super().__init__(code)
        self.extra = extra
        self.plain = 1


class Properties(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("properties")
        self._code = code
        vars(self)["shadowed"] = code

    @property
    def code(self) -> int:
        return self._code

    @property
    def shadowed(self) -> int:
        return vars(self)["shadowed"] + 1


@dataclasses.dataclass
class Data(Exception):
    code: int
    items: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int
    reason: str = ""


class Guarded(Exception):
    """Lets nobody set anything after it was made."""

    def __init__(self, code: int) -> None:
        super().__init__("guarded")
        vars(self)["code"] = code

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is not to be set")


class OwnOSError(OSError):
    def __init__(self, path: str, *, code: int) -> None:
        super().__init__(errno.ENOENT, "not there", path)
        self.code = code


class NamedOSError(ConnectionError):
    def __init__(self, peer: str) -> None:
        super().__init__(f"lost {peer}")
        self.peer = peer


class TwoBases(ValueError, KeyError):
    def __init__(self, code: int) -> None:
        super().__init__("two", code)
        self.code = code


class TwoLayouts(ValueError, ConnectionError):
    """Two builtins of which only the second has room for all that an object of it holds."""

    def __init__(self, code: int) -> None:
        super().__init__("layouts")
        self.code = code


class LayoutLast(LookupError, UnicodeError, ImportError):
    def __init__(self, code: int) -> None:
        super().__init__("last")
        self.code = code


class OwnReduce(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return OwnReduce, (self.code,)


class OwnReduceEx(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.extra = "set later"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.code,), {"extra": self.extra}


def _rebuilt(code: int) -> OwnReduceEx:
    return OwnReduceEx(code=code)


class OwnState(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("state")
        self.code = code

    def __reduce__(self) -> Any:
        return type(self), (0,), {"stored": self.code}

    def __setstate__(self, state: Any) -> None:
        self.code = state["stored"]


class OwnStateOnly(Exception):
    """Its reduction is Python's, and only how it is put back is its own."""

    def __init__(self, code: int) -> None:
        super().__init__("state")
        self.code = code

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.restored = True


class KeywordState(KeywordOnly):
    """Says how its state is put back, and not how it is made."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)


class Stateful:
    """A base for things of all kinds, which knows nothing of exceptions."""

    def __getstate__(self) -> Any:
        return dict(vars(self))


class KeywordMixed(Stateful, KeywordOnly):
    pass


class Unhashable(Exception):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compare me not")


class Registered(Exception):
    """How it travels is told to copyreg."""

    def __init__(self, code: int) -> None:
        super().__init__("registered")
        self.code = code


copyreg.pickle(Registered, lambda error: (Registered, (error.code,)))  # type: ignore[arg-type, return-value]


def changed(error: BaseException, **fields: Any) -> BaseException:
    vars(error).update(fields)
    return error


def decode_error() -> BaseException:
    try:
        json.loads('{"a": ')
    except json.JSONDecodeError as error:
        return error
    raise AssertionError


KEPT: dict[str, tuple[Callable[[], BaseException], tuple[str, ...]]] = {
    "plain": (lambda: ValueError("x", 2), ()),
    "no arguments": (lambda: KeyError(), ()),
    "attributes set later": (lambda: changed(ValueError("x"), code=5, more=[1]), ("code", "more")),
    "keyword only": (lambda: KeywordOnly(code=5, reason="so"), ("code", "reason")),
    "several": (lambda: Several(1, "b", {"c": 3}), ("first", "second", "third")),
    "no args": (lambda: NoArgs(5), ("code",)),
    "uncalled": (lambda: Uncalled(5), ("code",)),
    "strict": (lambda: Strict(5), ("code",)),
    "own new": (lambda: OwnNew(5, extra="x"), ("extra",)),
    "slots": (lambda: Slots(5), ("code",)),
    "more slots": (lambda: MoreSlots(5, "x"), ("code", "extra", "plain")),
    "properties": (lambda: Properties(5), ("code", "shadowed", "_code")),
    "dataclass": (lambda: Data(5, [1, 2]), ("code", "items")),
    "frozen dataclass": (lambda: Frozen(5, "so"), ("code", "reason")),
    "guarded": (lambda: Guarded(5), ("code",)),
    "file not found": (lambda: FileNotFoundError(2, "no", "f.txt"), ("errno", "strerror", "filename", "filename2")),
    "two file names": (lambda: OSError(errno.EXDEV, "no", "f", None, "g"), ("errno", "filename", "filename2")),
    "a file name of bytes": (lambda: PermissionError(13, "no", b"f"), ("filename",)),
    "an OSError of text": (lambda: OSError("just text"), ("errno", "filename")),
    "blocking": (lambda: BlockingIOError(11, "later", 7), ("errno", "characters_written")),
    "own OSError": (lambda: OwnOSError("f.txt", code=5), ("errno", "strerror", "filename", "code")),
    "named OSError": (lambda: NamedOSError("w1"), ("peer", "errno")),
    "decode": (
        lambda: UnicodeDecodeError("utf8", b"ab\xff", 2, 3, "bad"),
        ("encoding", "object", "start", "end", "reason"),
    ),
    "encode": (lambda: UnicodeEncodeError("ascii", "é", 0, 1, "bad"), ("encoding", "object", "start", "end", "reason")),
    "translate": (lambda: UnicodeTranslateError("é", 0, 1, "bad"), ("object", "start", "end", "reason")),
    "import": (lambda: ImportError("no", name="n", path="p"), ("name", "path", "msg")),
    "module not found": (lambda: ModuleNotFoundError("no", name="n"), ("name", "path")),
    "syntax": (
        lambda: SyntaxError("bad", ("f.py", 3, 4, "x = =", 3, 5)),
        ("msg", "filename", "lineno", "offset", "text", "end_lineno", "end_offset"),
    ),
    "stop": (lambda: StopIteration(5), ("value",)),
    "exit": (lambda: SystemExit(3), ("code",)),
    "interrupt": (lambda: KeyboardInterrupt("x"), ()),
    "cancelled": (lambda: asyncio.CancelledError("why"), ()),
    "two bases": (lambda: TwoBases(5), ("code",)),
    "two layouts": (lambda: TwoLayouts(5), ("code", "errno")),
    "own reduce": (lambda: OwnReduce(5), ("code",)),
    "own reduce_ex": (lambda: OwnReduceEx(code=5), ("code", "extra")),
    "own state": (lambda: OwnState(5), ("code",)),
    "own setstate": (lambda: OwnStateOnly(5), ("code",)),
    "keyword only, with a setstate": (lambda: KeywordState(code=5, reason="so"), ("code", "reason")),
    "keyword only, with a getstate": (lambda: KeywordMixed(code=5, reason="so"), ("code", "reason")),
    "registered": (lambda: Registered(5), ("code",)),
    "unhashable": (lambda: Unhashable("x"), ()),
    "json": (decode_error, ("msg", "doc", "pos", "lineno", "colno")),
    "incomplete read": (lambda: asyncio.IncompleteReadError(b"ab", 5), ("partial", "expected")),
    "limit overrun": (lambda: asyncio.LimitOverrunError("too long", 5), ("consumed",)),
    "process": (lambda: subprocess.CalledProcessError(3, ["x"], b"out"), ("returncode", "cmd", "output", "stderr")),
    "process timeout": (lambda: subprocess.TimeoutExpired("x", 5.0, output=b"o"), ("cmd", "timeout", "output")),
    "regex": (lambda: re.error("bad", "(", 0), ("msg", "pattern", "pos", "lineno")),
    "worker lost": (lambda: WorkerLost("x", task="c/1", worker="w1"), ("task", "worker", "code", "remedy")),
    "exhausted": (lambda: PoolExhausted("x", reason="attempts", retry_after=2.0), ("reason", "retry_after")),
    "own remedy": (lambda: HeadgateError("x", remedy="do that"), ("remedy", "message")),
}


@pytest.mark.parametrize("name", KEPT)
def test_w43_an_exception_keeps_its_type_and_fields(name: str) -> None:
    make, fields = KEPT[name]
    error = raised(make())
    copy = trip(error)
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert str(copy) == str(error)
    assert {field: getattr(copy, field) for field in fields} == {field: getattr(error, field) for field in fields}
    assert [type(copy.__cause__), type(copy.__context__)] == [type(error.__cause__), type(error.__context__)]
    assert copy.__suppress_context__ is error.__suppress_context__
    assert notes_of(copy) == []


def test_w43_what_was_not_set_is_not_set() -> None:
    assert not hasattr(trip(Slots(5)), "unset")


def test_w43_an_exception_of_many_builtins_keeps_its_type() -> None:
    try:
        error = LayoutLast(5)
    except TypeError:
        pytest.skip("this Python cannot make it")
    copy = trip(error)
    assert type(copy) is LayoutLast
    assert copy.code == 5


def test_w43_the_remote_traceback_is_the_last_note() -> None:
    error = raised(ValueError("x"))
    error.add_note("first")
    error.add_note("second")
    copy = trip(error)
    assert notes_of(copy) == ["first", "second"]
    assert "in raised" in copy.__notes__[-1]
    assert "ValueError: x" in copy.__notes__[-1]
    assert error.__notes__ == ["first", "second"], "the worker's own is left as it was"


def test_w43_exceptions_of_a_function_or_of_main_arrive_as_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Exception):
        def __init__(self, *, code: int) -> None:
            super().__init__("local")
            self.code = code

    copy = trip(Local(code=5))
    assert type(copy) is Local, "whoever sent the class gets the same one back"
    assert copy.code == 5
    own = program("class Own(LookupError):\n    def __init__(self, a, b): self.pair = a, b")["Own"]
    monkeypatch.setattr(sys.modules["__main__"], "Own", own, raising=False)
    data = dump_exception(own(1, 2), "w")
    monkeypatch.delattr(sys.modules["__main__"], "Own")
    error = load_exception(data)
    assert (type(error).__name__, error.pair) == ("Own", (1, 2))  # type: ignore[attr-defined]
    with pytest.raises(LookupError):
        raise error


# -- chains and groups ------------------------------------------------------------------------------------------------


def test_w43_cause_and_context_survive() -> None:
    try:
        try:
            try:
                raise KeywordOnly(code=1)
            except KeywordOnly as first:
                raise Several(1, "b", 3) from first
        except Several:
            raise OwnReduce(5)  # noqa: B904 - a context and no cause
    except OwnReduce as error:
        error.__context__.add_note("noted")  # type: ignore[union-attr]
        copy = trip(error)
    context = copy.__context__
    assert (copy.__cause__, copy.__suppress_context__) == (None, False)
    assert isinstance(context, Several)
    assert context.third == 3
    assert context.__notes__ == ["noted"], "only the exception itself carries the remote traceback"
    assert isinstance(context.__cause__, KeywordOnly)
    assert context.__cause__ is context.__context__
    assert context.__suppress_context__
    assert context.__cause__.code == 1


def test_w43_from_none_survives() -> None:
    try:
        try:
            raise KeyError(1)
        except KeyError:
            raise ValueError(2) from None
    except ValueError as error:
        copy = trip(error)
    assert (copy.__cause__, copy.__suppress_context__) == (None, True)
    assert isinstance(copy.__context__, KeyError)


def test_w43_chains_may_run_in_a_circle() -> None:
    one, two = Several(1, "b", 3), KeywordOnly(code=5)
    one.__context__, two.__context__ = two, one
    copy = trip(one)
    assert isinstance(copy, Several)
    assert isinstance(copy.__context__, KeywordOnly)
    assert copy.__context__.__context__ is copy
    alone = ValueError("x")
    alone.__cause__ = alone
    copy = trip(alone)
    assert copy.__cause__ is copy


def test_w43_a_very_long_chain_does_not_cost_the_exception() -> None:
    error: BaseException = ValueError("first")
    for number in range(3000):
        nxt = KeywordOnly(code=number)
        nxt.__context__ = error
        error = nxt
    copy = trip(error)
    assert isinstance(copy, KeywordOnly)
    assert copy.code == 2999
    assert copy.__context__ is not None


def make_group() -> ExceptionGroup[Any]:
    inner = KeywordOnly(code=5)
    inner.add_note("inner")
    inner.__cause__ = OwnOSError("f", code=7)
    nested = ExceptionGroup("nested", [inner, ValueError("v")])
    nested.add_note("nested note")
    group = ExceptionGroup("outer", [nested, Several(1, "b", 3)])
    group.add_note("outer note")
    return group


def test_w43_groups_keep_members_notes_and_causes() -> None:
    copy = trip(raised(make_group()))
    assert type(copy) is ExceptionGroup
    assert copy.message == "outer"
    assert notes_of(copy) == ["outer note"]
    nested, several = copy.exceptions
    assert isinstance(nested, ExceptionGroup)
    assert nested.__notes__ == ["nested note"]
    assert isinstance(several, Several)
    assert several.third == 3
    inner, value = nested.exceptions
    assert isinstance(inner, KeywordOnly)
    assert (inner.code, inner.__notes__) == (5, ["inner"])
    assert isinstance(inner.__cause__, OwnOSError)
    assert (inner.__cause__.filename, inner.__cause__.code) == ("f", 7)
    assert value.args == ("v",)
    caught = []
    try:
        raise copy
    except* KeywordOnly as found:
        caught += found.exceptions
    except* (Several, ValueError) as found:
        caught += found.exceptions
    assert len(caught) == 3


class OwnGroup(ExceptionGroup[Any]):
    def __new__(cls, message: str, members: list[Exception], code: int) -> Self:
        made = super().__new__(cls, message, members)
        made.code = code
        return made

    def __init__(self, message: str, members: list[Exception], code: int) -> None:
        super().__init__(message, members)

    def derive(self, members: Any) -> OwnGroup:
        return OwnGroup(self.message, members, self.code)

    code: int


def test_w43_groups_of_ones_own_keep_their_fields() -> None:
    copy = trip(OwnGroup("own", [ValueError(1)], 5))
    assert type(copy) is OwnGroup
    assert (copy.message, copy.code, [repr(one) for one in copy.exceptions]) == ("own", 5, ["ValueError(1)"])
    ends = BaseExceptionGroup("ends", [SystemExit(3), KeyboardInterrupt()])
    copy = trip(ends)
    assert type(copy) is BaseExceptionGroup
    assert [type(one) for one in copy.exceptions] == [SystemExit, KeyboardInterrupt]


@pytest.mark.parametrize("begin", ["member", "group"])
def test_w43_a_member_may_have_its_group_as_context(begin: str) -> None:
    """As after ``except ExceptionGroup as group: raise group.exceptions[0]``."""
    member = ValueError("member")
    group = ExceptionGroup("group", [member])
    member.__context__ = group
    copy = trip(member if begin == "member" else group)
    if begin == "member":
        assert type(copy) is ValueError
        assert isinstance(copy.__context__, ExceptionGroup)
        assert copy.__context__.exceptions == (copy,)
    else:
        assert type(copy) is ExceptionGroup
        assert [str(one) for one in copy.exceptions] == ["member"]


# -- exceptions that cannot travel ------------------------------------------------------------------------------------


class ReducesBadly(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not me")


class ReducesToText(Exception):
    def __reduce__(self) -> Any:
        return "nowhere"


class ReducesToLess(Exception):
    def __reduce__(self) -> Any:
        return (ReducesToLess,)


class Unloadable(Exception):
    def __reduce__(self) -> Any:
        return int, ("no number",)


class LoadsAsOther(Exception):
    def __reduce__(self) -> Any:
        return dict, ()


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Quitting(Exception):
    def __str__(self) -> str:
        raise SystemExit("told to say what it is")


class ReducesToEnd(Exception):
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class OddText(Exception):
    def __str__(self) -> Any:  # type: ignore[override]
        return 5


class NoGetattr(Exception):
    def __getattribute__(self, name: str) -> Any:
        if name in ("__notes__", "__dict__", "args"):
            raise RuntimeError(f"no {name} here")
        return super().__getattribute__(name)


NASTY: dict[str, Callable[[], BaseException]] = {
    "a field that cannot travel": lambda: changed(ValueError("the text"), lock=LOCK),
    "a frame": lambda: changed(ValueError("the text"), frame=sys._getframe()),
    "an argument that cannot travel": lambda: ValueError("the text", LOCK),
    "an argument that is itself": lambda: _of_itself(),
    "a member that cannot travel": lambda: ExceptionGroup("the text", [changed(ValueError(1), lock=LOCK)]),
    "a reduction that fails": lambda: ReducesBadly("the text"),
    "a reduction to a name": lambda: ReducesToText("the text"),
    "a reduction that is too short": lambda: ReducesToLess("the text"),
    "one that does not come out": lambda: Unloadable("the text"),
    "one that comes out as something else": lambda: LoadsAsOther("the text"),
    "a broken str": lambda: MuteError("the text"),
    "a str that ends the program": lambda: Quitting("the text"),
    "a reduction that ends the program": lambda: ReducesToEnd("the text"),
    "a str that is none": lambda: OddText("the text"),
    "notes that are no list": lambda: changed(ValueError("the text"), __notes__="note"),
    "notes that cannot be shown": lambda: changed(ValueError("the text"), __notes__=[MuteError()]),
    "frozen, with a field that cannot travel": lambda: Frozen(5, LOCK),  # type: ignore[arg-type]
    "two layouts, with a field that cannot travel": lambda: changed(TwoLayouts(5), lock=LOCK),
    "hidden attributes": lambda: NoGetattr("the text"),
}


def _of_itself() -> BaseException:
    error = ValueError("the text")
    error.args = ("the text", error)
    return error


@pytest.mark.parametrize("name", NASTY)
def test_w43_whatever_is_raised_something_arrives(name: str) -> None:
    error = raised(NASTY[name]())
    copy = trip(error)
    assert isinstance(copy, BaseException)
    if type(copy) is not type(error):
        assert type(copy) is RemoteError
        assert type(error).__qualname__ in copy.message, "which type it was"
        assert "Remote traceback (worker w1, pid 5)" in copy.__notes__[-1], "and its traceback"
        assert "in raised" in copy.__notes__[-1] or "cannot be shown" in copy.__notes__[-1]


@pytest.mark.parametrize(
    "name",
    [
        "a field that cannot travel",
        "an argument that cannot travel",
        "a member that cannot travel",
        "frozen, with a field that cannot travel",
        "two layouts, with a field that cannot travel",
    ],
)
def test_w43_one_that_cannot_travel_arrives_as_a_remote_error(name: str) -> None:
    error = raised(NASTY[name]())
    copy = trip(error)
    assert type(copy) is RemoteError
    assert f"{type(error).__qualname__}: {error}" in copy.message
    assert "Make the exception picklable" in str(copy)
    assert "in raised" in copy.__notes__[-1]


def test_w43_a_cause_that_cannot_travel_costs_only_itself() -> None:
    error, cause = KeywordOnly(code=5), changed(ValueError("of the cause"), lock=LOCK)
    error.__cause__ = cause
    copy = trip(raised(error))
    assert isinstance(copy, KeywordOnly)
    assert copy.code == 5
    assert isinstance(copy.__cause__, RemoteError)
    assert "ValueError: of the cause" in copy.__cause__.message
    assert copy.__suppress_context__


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
@pytest.mark.parametrize("make", [OwnReduce, Slots, Frozen, TwoLayouts, ReducesBadly])
def test_w43_a_chain_that_cannot_travel_costs_no_outcome(link: str, make: Any) -> None:
    error = make(5)
    BaseException.__setattr__(error, link, changed(ValueError("linked"), lock=LOCK))
    copy = trip(error)
    assert type(copy) in (make, RemoteError)
    assert "linked" in "\n".join([*copy.__notes__, str(copy), str(getattr(copy, link))])


def test_w43_an_exception_whose_class_is_unknown_here_says_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has a module that the client has not."""
    module = types.ModuleType("planted_errors")
    exec("class Odd(ValueError): pass", module.__dict__)
    module.Odd.__module__ = "planted_errors"
    monkeypatch.setitem(sys.modules, "planted_errors", module)
    data = dump_exception(raised(module.Odd("the text")), "worker w1, pid 5")
    monkeypatch.delitem(sys.modules, "planted_errors")
    copy = load_exception(data)
    assert type(copy) is RemoteError
    assert "importable" in copy.remedy
    told = "\n".join([copy.message, *getattr(copy, "__notes__", [])])
    assert "planted_errors" in told
    assert "planted_errors.Odd: the text" in told, "which type it was, and what it said"
    assert "in raised" in told, "and its traceback"


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps(5), pickle.dumps((1, 2))])
def test_w43_what_cannot_be_read_is_a_remote_error(data: bytes) -> None:
    assert type(load_exception(data)) is RemoteError


# -- as text ----------------------------------------------------------------------------------------------------------


def test_w43_a_traceback_is_shown_from_the_first_frame_that_is_not_ours() -> None:
    with pytest.raises(pickle.UnpicklingError) as caught:
        loads(b"no pickle")
    assert "in test_w43_a_traceback_is_shown" in describe(caught.value)
    trace = caught.value.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != dynamic_classes.__file__:
        trace = trace.tb_next
    assert trace is not None
    assert dynamic_classes.__file__ in describe(caught.value.with_traceback(trace)), "ours, when there is no other"
    assert describe(ValueError("never raised")) == "ValueError: never raised"


def test_w43_a_chain_is_shown_whole() -> None:
    error = ValueError("outer")
    error.__cause__ = raised(KeyError("inner"))
    shown = describe(raised(error))
    assert shown == "".join(traceback.format_exception(error)).rstrip()
    assert "KeyError: 'inner'" in shown
    assert "direct cause" in shown


@pytest.mark.parametrize("error", [MuteError(), OddText()])
def test_w43_what_cannot_say_what_it_is_is_named(error: BaseException) -> None:
    assert type(error).__name__ in describe(error)
