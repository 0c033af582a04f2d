"""W93, W03: what functions and classes see, whether calls may share a copy of it, and how a change is noticed.

Programs are texts, run as if they were a `__main__`. The worker is in the same process.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from headgate.errors import RemoteError
from headgate.workers.client.routine_call import ArgumentNames
from headgate.workers.protocol.wire.wire_pb2 import Definition
from headgate.workers.serialization.dynamic_classes import loads
from headgate.workers.serialization.functions import PortableFunction, ReceivedFunction
from headgate.workers.serialization.pickling import Given, dump_arguments, dumps, load_arguments
from headgate.workers.serialization.settled import read, surroundings_of

HEAD = """
import abc, contextvars, dataclasses, enum, functools, logging, re, threading, typing
from dataclasses import dataclass, field
from headgate import routine
"""


def program(text: str) -> dict[str, Any]:
    """What a script of this text defines. The text defines f."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(HEAD + textwrap.dedent(text), "<script>", "exec", dont_inherit=True), names)
    return names


def sent(portable: PortableFunction) -> ReceivedFunction:
    return ReceivedFunction(Definition(**portable.form(portable.fn)._asdict()))


SHARED = {
    "a class": """
        class C:
            n = 1
            def get(self): return self.n
        def f(): return C().get()
        """,
    "self": """
        class C:
            def __init__(self): self.n = 1
            def more(self):
                self.n += 1
                del self.n
                self.n = 2
                return self.n
        def f(): return C().more()
        """,
    "its dict": """
        class C:
            def __init__(self, **kw): self.__dict__.update(kw)
        def f(): return C(n=1).n
        """,
    "what it has made": """
        class C: pass
        def f():
            c = C()
            c.n = 1
            c.n += len('ab')
            return c.n
        """,
    "what it has made, with arguments": """
        @dataclass
        class C:
            a: int
            b: int = 2
        def f():
            c = C(len('x'), b=3)
            c.a = 4
            return c.a + c.b
        """,
    "a dataclass": """
        @dataclass
        class C:
            a: int = 1
            b: list[int] = field(default_factory=list)
            c: 'C | None' = None
            d: typing.Optional[str] = None
        def f(): return repr(C()), C() == C()
        """,
    "a frozen dataclass with slots": """
        @dataclass(frozen=True, slots=True, order=True)
        class C:
            a: int = 1
        def f(): return hash(C(2)), C(1) < C(2)
        """,
    "a named tuple": """
        class C(typing.NamedTuple):
            a: int
            b: str = 'x'
            def both(self): return (self.a, self.b)
        def f(): return C(1).both(), C(1)._replace(a=2)._asdict()
        """,
    "an Enum": """
        class C(enum.Enum):
            A = 1
            B = 'x'
            def low(self): return self.name.lower()
        def f(): return C(1).low(), C['B'].value, C.A is C(1)
        """,
    "Enums of other kinds": """
        class I(enum.IntEnum):
            A = 1
        class F(enum.Flag):
            A = enum.auto()
            B = enum.auto()
        def f(): return I.A + 1, (F.A | F.B).value
        """,
    "a member of an Enum": """
        class C(enum.Enum):
            A = 1
        best = C.A
        def f(x=C.A): return best is x is C.A
        """,
    "inheritance": """
        class A:
            def __init__(self): self.a = 1
        class B(A):
            def __init__(self):
                super().__init__()
                self.b = 2
        def f():
            b = B()
            return isinstance(b, A), b.a + b.b
        """,
    "an exception": """
        class E(Exception):
            def __init__(self, *, code):
                super().__init__(code)
                self.code = code
        def f():
            try:
                raise E(code=3)
            except E as error:
                return error.code
        """,
    "an abstract class": """
        class A(abc.ABC):
            @abc.abstractmethod
            def get(self): ...
        class B(A):
            def get(self): return 1
        def f(): return isinstance(B(), A), B().get()
        """,
    "a protocol": """
        class P(typing.Protocol):
            def get(self) -> int: ...
        class B(P):
            def get(self): return 1
        def f(): return B().get()
        """,
    "a generic class": """
        T = typing.TypeVar('T')
        class Box(typing.Generic[T]):
            def __init__(self, x: T): self.x = x
        def f(): return Box[int](3).x
        """,
    "every kind of method": """
        class C:
            @staticmethod
            def s(): return 1
            @classmethod
            def c(cls): return cls
            @property
            def p(self): return self._p
            @p.setter
            def p(self, v): self._p = v
            @routine
            async def r(self): return 1
            class Inner: n = 2
        def f():
            c = C()
            c.p = 3
            return C.s(), C.c() is C, c.p, C.Inner.n
        """,
    "a circle": """
        class A:
            def b(self): return B()
        class B:
            def a(self): return A()
        def h(): return A()
        def f(): return type(h().b().a()) is A
        """,
    "an annotation": """
        class C: pass
        def f(c: C | None = None) -> list[C]: return []
        """,
    "values that cannot change": """
        import datetime, decimal, pathlib, uuid
        a = re.compile('x')
        b = datetime.date(2024, 1, 1)
        c = decimal.Decimal(1)
        d = pathlib.Path('x')
        e = uuid.UUID(int=1)
        g = logging.getLogger('x')
        h = range(3)
        def f(): return a.pattern, b, c, d, e, g.name, len(h)
        """,
    "a decorator of its own": """
        def deco(fn):
            @functools.wraps(fn)
            def call(*a): return fn(*a) + 1
            return call
        @deco
        def g(x): return x
        def f(): return g(1)
        """,
}
EXCLUSIVE = {
    "an argument": """
        class C: pass
        def f(c=None):
            c = c or C()
            c.n = 1
            return c.n
        """,
    "a class": """
        class C: n = 0
        def f():
            C.n += 1
            return C.n
        """,
    "its class": """
        class C:
            n = 0
            def more(self):
                type(self).n += 1
                return C.n
        def f(): return C().more()
        """,
    "cls": """
        class C:
            n = 0
            @classmethod
            def more(cls):
                cls.n += 1
                return cls.n
        def f(): return C.more()
        """,
    "self, assigned to": """
        class C:
            n = 0
            def more(self):
                self = C
                self.n += 1
                return C.n
        def f(): return C().more()
        """,
    "what a function returns": """
        class C: n = 0
        def pick(): return C
        def f():
            c = pick()
            c.n += 1
            return C.n
        """,
    "self, of a method that is a function too": """
        def more(self):
            self.n += 1
            return C.n
        class C:
            n = 0
            put = more
        def f(): return C and more(C)
        """,
    "setattr": """
        class C: n = 0
        def f():
            setattr(C, 'n', C.n + 1)
            return C.n
        """,
    "a method of a class": """
        class C: n = 0
        def f():
            C.get = lambda self: 2
            found = C().get(), 'get' in dir(C)
            return found
        """,
    "a deleted attribute": """
        class C: n = 0
        def f():
            found = 'n' in dir(C)
            if found:
                del C.n
            return found
        """,
    "a member of an Enum": """
        class C(enum.Enum):
            A = 1
            def more(self):
                self.n = getattr(self, 'n', 0) + 1
                return self.n
        def f(): return C.A.more()
        """,
    "__new__ of its own": """
        class C:
            n = 0
            def __new__(cls): return cls
        def f():
            c = C()
            c.n += 1
            return C.n
        """,
}
FRESH = {
    "a list of a class": """
        class C: seen = []
        def f():
            C.seen.append(1)
            return len(C.seen)
        """,
    "a list of a base": """
        class B: seen = []
        class C(B): pass
        def f():
            C.seen.append(1)
            return len(C.seen)
        """,
    "a list of a member": """
        class C(enum.Enum):
            A = []
        def f():
            C.A.value.append(1)
            return len(C.A.value)
        """,
    "a list that a method sees": """
        seen = []
        class C:
            def more(self):
                seen.append(1)
                return len(seen)
        def f(): return C().more()
        """,
    "a global that a method sets": """
        n = 0
        class C:
            def more(self):
                global n
                n += 1
                return n
        def f(): return C().more()
        """,
    "an instance of a class": """
        class C:
            def __init__(self): self.n = 0
            def more(self):
                self.n += 1
                return self.n
        c = C()
        def f(): return c.more()
        """,
    "a metaclass": """
        class M(type):
            n = 0
        class C(metaclass=M): pass
        def f():
            M.n += 1
            return C.n
        """,
    "a virtual subclass": """
        class A(abc.ABC): pass
        class B: pass
        def f():
            found = issubclass(B, A)
            A.register(B)
            return found
        """,
    "the dict of a function": """
        class C: pass
        def g(): return C
        def f():
            g.__dict__['n'] = g.__dict__.get('n', 0) + 1
            return g.__dict__['n']
        """,
    "a default of a field": """
        class D:
            def __init__(self): self.n = 0
        @dataclass
        class C:
            d: D = dataclasses.field(default=D(), hash=False)
            __hash__ = None
        def f():
            C().d.n += 1
            return C().d.n
        """,
}


@pytest.mark.parametrize("name", SHARED)
def test_w93_what_sets_attributes_of_instances_only_is_loaded_once(name: str) -> None:
    fn = program(SHARED[name])["f"]
    portable = PortableFunction(fn, False)
    form = portable.form(fn)
    assert (form.fresh, form.reusable) == (False, False)
    assert portable.form(fn) is form, "pickled once"
    worker = sent(portable)
    first, second = worker.open({}), worker.open({})
    expected = fn()
    assert first.fn() == expected == first.fn()
    assert first.fn is second.fn is worker.open({}).fn, "calls share it, and calling it changes nothing"


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_w93_w03_what_may_set_others_is_for_one_call_at_a_time(name: str) -> None:
    fn = program(EXCLUSIVE[name])["f"]
    portable = PortableFunction(fn, False)
    form = portable.form(fn)
    assert (form.fresh, form.reusable) == (True, True)
    assert portable.form(fn) is form, "pickled once"
    worker = sent(portable)
    first, second = worker.open({}), worker.open({})
    assert first.copy is not second.copy
    found = first.fn()
    assert second.fn() == found, "calls that run at the same time"
    worker.close(first.copy)
    worker.close(second.copy)
    assert worker.open({}).fn() == found, "and later ones"


@pytest.mark.parametrize("name", FRESH)
def test_w03_a_change_that_would_not_be_noticed_is_made_to_a_fresh_copy(name: str) -> None:
    fn = program(FRESH[name])["f"]
    portable = PortableFunction(fn, False)
    form = portable.form(fn)
    assert (form.fresh, form.reusable) == (True, False)
    worker = sent(portable)
    assert worker.open({}).fn() == worker.open({}).fn() == worker.open({}).fn()


def test_w93_an_unchanged_copy_is_used_again_and_a_changed_one_is_not() -> None:
    names = program("class C: n = 0\ndef f(value):\n    if value:\n        C.n = value\n    return C.n")
    worker = sent(PortableFunction(names["f"], False))
    first = worker.open({})
    assert first.fn(0) == 0
    worker.close(first.copy)
    second = worker.open({})
    assert second.copy is first.copy
    assert second.fn(7) == 7
    worker.close(second.copy)
    third = worker.open({})
    assert third.copy is not first.copy
    assert third.fn(0) == 0


def test_w03_a_shared_copy_that_was_changed_after_all_is_seen_by_no_later_call() -> None:
    names = program(
        """
        class C:
            n = 0
            def put(self): self.n = 5
        def f(bad):
            if bad: C.put(C)
            return C.n
        """
    )
    portable = PortableFunction(names["f"], False)
    assert not portable.form(names["f"]).fresh
    worker = sent(portable)
    assert worker.open({}).fn(True) == 5
    assert worker.open({}).fn(False) == 0


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an attribute": lambda names: setattr(names["C"], "n", 2),
    "a new method": lambda names: setattr(names["C"], "get", lambda self: 2),
    "a default of a method": lambda names: setattr(names["C"].get, "__defaults__", (1,)),
    "a base": lambda names: setattr(names["B"], "base", 1),
    "a global of a method": lambda names: names.update(plus=1),
    "the class": lambda names: exec("class C(B):\n    def get(self): return 2", names),
    "an attribute that was not there": lambda names: setattr(names["C"], "extra", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_w93_w03_a_function_sees_its_classes_as_they_are_at_each_call(name: str) -> None:
    names = program(
        "plus = 0\nclass B: base = 0\nclass C(B):\n    n = 1\n    extra_ = 0\n"
        "    def get(self, more=0): return self.n + more + self.base + plus + getattr(self, 'extra', 0)\n"
        "def f(): return C().get()"
    )
    portable = PortableFunction(names["f"], False)
    before = portable.form(names["f"])
    assert sent(portable).open({}).fn() == 1
    assert portable.form(names["f"]) is before
    CHANGES[name](names)
    assert names["f"]() == 2, "here"
    assert sent(portable).open({}).fn() == 2
    assert portable.form(names["f"]) is portable.form(names["f"]), "settled again"


# -- classes of arguments and results ---------------------------------------------------------------------------------


class Names(ArgumentNames):
    """What a call does for its arguments; this one is of a function that nobody has decorated."""

    def __init__(self, fn: Any, portable: PortableFunction | None = None) -> None:
        self.portable = portable or PortableFunction(fn, False)
        super().__init__(SimpleNamespace(portable=self.portable, decorated=fn))  # type: ignore[arg-type]


def test_w93_an_argument_names_its_class_and_so_does_the_result() -> None:
    names = program("class C:\n    def __init__(self, n): self.n = n\ndef f(c): return c")
    naming = Names(names["f"])
    data = dump_arguments("f", (names["C"](3),), {}, names["f"], naming)
    assert isinstance(data, bytes)
    assert len(data) < 200
    worker = sent(naming.portable)
    fn, copy = worker.open({})
    (value,), _ = load_arguments(data, dict(copy.scope))
    assert type(value) is not names["C"], "a copy"
    assert list(copy.scope.values()) == [type(value)]
    back = dumps(fn(value), Given(copy.names))
    assert isinstance(back, bytes)
    assert len(back) < 200
    result = loads(back)
    assert (type(result), result.n) == (names["C"], 3)


def test_w93_a_class_that_cannot_be_settled_travels_with_its_objects() -> None:
    names = program("class C:\n    seen = []\ndef f(c): return c")
    naming = Names(names["f"])
    for _ in range(2):
        naming = Names(names["f"], naming.portable)
        data = dump_arguments("f", (names["C"](),), {}, names["f"], naming)
        scope: dict[str, type] = {}
        (value,), _ = load_arguments(data, scope)
        assert type(value).seen == []
        assert type(value) in scope.values()
    assert naming.names() == {}


def test_w93_a_fresh_function_is_pickled_once_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    names = program("class C: pass\nseen = []\ndef f(c): return seen, c")
    naming = Names(names["f"])
    pickled: list[object] = []
    dumped = cloudpickle.dumps
    monkeypatch.setattr(cloudpickle, "dumps", lambda value, *rest: (pickled.append(value), dumped(value, *rest))[1])
    dump_arguments("f", (names["C"](),), {}, names["f"], naming)
    assert naming.form().fresh
    assert pickled == [names["f"]]
    names["seen"] = ()
    naming = Names(names["f"], naming.portable)
    dump_arguments("f", (names["C"](),), {}, names["f"], naming)
    assert not naming.form().fresh, "what settles is noticed"
    assert len(naming.names()) == 1


def test_w93_a_function_by_reference_takes_classes_of_its_arguments_along() -> None:
    names = program("class C: n = 1")
    naming = Names(textwrap.dedent)
    before = naming.portable.form(textwrap.dedent)
    assert before.value == b""
    data = dump_arguments("f", (names["C"](),), {}, textwrap.dedent, naming)
    form = naming.portable.form(textwrap.dedent)
    assert (form.module, form.qualname) == ("textwrap", "dedent")
    assert form.value
    worker = sent(naming.portable)
    fn, copy = worker.open({})
    assert fn is textwrap.dedent
    (value,), _ = load_arguments(data, dict(copy.scope))
    assert value.n == 1
    names["C"].seen = []
    naming = Names(textwrap.dedent, naming.portable)
    dump_arguments("f", (names["C"](),), {}, textwrap.dedent, naming)
    assert naming.form() == before, "it cannot be named any more"


def test_w93_a_class_that_is_unknown_is_an_error() -> None:
    kind = program("class C: pass")["C"]
    data = dumps(kind(), Given({id(kind): "an id that nobody has"}))
    for scope in (None, {}):
        with pytest.raises(RemoteError, match=r"an id that nobody has.* is not known here"):
            loads(data, scope)


def test_w93_members_of_a_group_are_sent_on_as_they_came() -> None:
    names = program(
        "@routine\nasync def even(n): return n == 0 or await odd(n - 1)\n"
        "@routine\nasync def odd(n): return n > 0 and await even(n - 1)\n"
    )
    even = names["even"].__headgate_routine__
    form = even.portable.form(even.decorated)
    worker = ReceivedFunction(Definition(**form._asdict()))
    there = worker.open({}).fn.__globals__["odd"].__headgate_routine__
    onward = there.portable.form(there.decorated)
    assert onward.value == form.value, "another worker knows it already"
    assert (form.member, onward.member) == (1, 2)
    back = ReceivedFunction(Definition(**onward._asdict())).open({})
    assert back.fn is there.fn, "one copy for all functions of a group"


def test_w93_code_is_read_for_what_it_sets() -> None:
    names = program(
        "class C: pass\n"
        "def f(a):\n    b = C()\n    b.x = 1\n    a.x = 2\n    b.x += a.x if a else 3\n    C().y = 1\n"
        "    (a or b).z = 1\n"
    )
    assert read(names["f"].__code__).writes == ["b", "a", "b", None, None]


def test_w93_an_unsettled_class_in_an_annotation_disturbs_no_function() -> None:
    names = program("class C: seen = []\ndef f(c: C = None): return 1")
    found = surroundings_of((names["f"],))
    assert found is not None
    assert (found.names_classes, found.classes, found.exclusive) == (False, [], False)
