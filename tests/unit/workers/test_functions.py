"""W03: how a function travels: by reference or by value, settled or fresh, and what a worker makes of it.

Functions of a program's own file are made here by running a text as if it were one. A worker is in the same process,
so by reference both sides see one module; by value they never share anything.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import math
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from headgate import routine
from headgate.errors import InvalidType, RemoteError
from headgate.workers.model import FunctionForm
from headgate.workers.protocol.wire.wire_pb2 import Definition
from headgate.workers.serialization import functions
from headgate.workers.serialization.functions import (
    PYTHON,
    PortableFunction,
    ReceivedFunction,
    code_digest,
    importable,
    missing_module,
    tag_of,
)


def program(text: str, name: str = "__main__", **names: Any) -> dict[str, Any]:
    """What a program of this text defines."""
    namespace = {"__name__": name, **names}
    exec(textwrap.dedent(text), namespace)
    return namespace


def form_of(fn: Any, thread: bool = False) -> FunctionForm:
    return PortableFunction(fn, thread).form(fn)


class Arrived:
    """The worker's side of it: each load is for another call, and none has ended."""

    def __init__(self, form: FunctionForm) -> None:
        self.received = ReceivedFunction(Definition(**form._asdict()))
        self.tag, self.thread = self.received.tag, self.received.thread

    def load(self) -> Callable[..., Any]:
        return self.received.open({}).fn


def arrived(form: FunctionForm) -> Arrived:
    return Arrived(form)


class Outer:
    """Methods have names that can be looked up, too."""

    def method(self) -> int:
        return 1

    @classmethod
    def of_class(cls) -> int:
        return 2

    @staticmethod
    def static() -> int:
        return 3


def plain() -> int:
    return 4


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Put a module of this text among those that are imported."""

    def planted(name: str, text: str = "", *, with_spec: bool = True) -> Any:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None) if with_spec else None
        exec(textwrap.dedent(text), module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return planted


# -- names ------------------------------------------------------------------------------------------------------------


def test_w09_a_tag_says_where_a_function_is_defined() -> None:
    here = plain.__code__.co_firstlineno
    assert tag_of(plain) == f"{__name__}.plain:{here}"
    assert tag_of(Outer.method) == f"{__name__}.Outer.method:{Outer.method.__code__.co_firstlineno}"
    assert ".<locals>.<lambda>:" in tag_of(lambda: 0)
    assert tag_of(len) == "builtins.len", "without code there is no line"
    assert tag_of(partial(plain)) == "functools.partial"


@pytest.mark.parametrize("fn", [plain, Outer.method, Outer.static, Outer.of_class.__func__, json.dumps])
def test_w03_what_can_be_found_by_its_name_is_importable(fn: Any) -> None:
    assert importable(fn)


def test_w03_what_another_process_would_not_find_is_not_importable(
    plant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def local() -> None:
        pass

    assert not importable(local)
    assert not importable(lambda: 0)
    assert not importable(program("def f(): pass")["f"]), "a worker's __main__ is another"
    assert not importable(program("def f(): pass", "__mp_main__")["f"])
    assert not importable(program("def f(): pass", "nowhere_to_be_found")["f"])
    assert not importable(Outer().method.__func__.__get__(Outer())), "bound to one object"
    assert importable(plant("planted_one", "def f(): pass").f)
    assert not importable(plant("planted_two", "def f(): pass", with_spec=False).f), "made by hand, from no file"
    module = plant("planted_three", "def f(): pass")
    old = module.f
    exec("def f(): pass", module.__dict__)
    assert not importable(old), "its name means another now"
    assert importable(module.f)
    del module.f
    assert not importable(old)
    old.__module__ = None
    assert not importable(old)


def test_w03_a_module_that_cloudpickle_sends_by_value_is_not_importable(plant: Callable[..., Any]) -> None:
    module = plant("planted_by_value", "def f(): return 1")
    cloudpickle.register_pickle_by_value(module)
    try:
        assert not importable(module.f)
        form = form_of(module.f)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert form.value
    del sys.modules["planted_by_value"]
    assert arrived(form).load()() == 1
    sys.modules["planted_by_value"] = module  # for whoever takes it out


# -- by reference -----------------------------------------------------------------------------------------------------


def test_w03_by_reference_travels_a_name_and_a_digest() -> None:
    form = form_of(plain, thread=True)
    assert form == FunctionForm(
        tag=tag_of(plain),
        module=__name__,
        qualname="plain",
        digest=code_digest(plain.__code__),
        python=PYTHON,
        thread=True,
        file=__file__,
    )
    assert (form.value, form.fresh) == (b"", False)
    portable = PortableFunction(plain, False)
    assert portable.form(plain) is portable.form(plain), "made once"


def test_w03_a_decorated_function_is_found_by_its_decorated_name(plant: Callable[..., Any]) -> None:
    module = plant("planted_routine", "async def f(): return 1")
    inner = module.f
    module.f = routine(inner)
    decorated = module.f.__headgate_routine__
    form = decorated.portable.form(decorated.decorated)
    assert (form.module, form.qualname, form.value) == ("planted_routine", "f", b"")
    assert arrived(form).load() is inner, "a worker runs the function, and dispatches nothing"
    undecorated = PortableFunction(inner, False).form(inner)
    assert arrived(undecorated).load() is inner, "under its name stands the routine, and inside that the function"


@pytest.mark.parametrize(
    ("qualname", "returns"), [("Outer.method", 1), ("Outer.of_class", 2), ("Outer.static", 3), ("plain", 4)]
)
def test_w03_a_worker_finds_methods_too(qualname: str, returns: int) -> None:
    fn = arrived(FunctionForm("tag", __name__, qualname)).load()
    assert isinstance(fn, types.FunctionType)
    assert fn(*[Outer] * (returns < 3)) == returns


# -- settled or fresh -------------------------------------------------------------------------------------------------

SETTLED = {
    "nothing": "def f(): return 1",
    "atoms": "a, b, c, d, e, g = 1, 2.5, 'x', b'y', None, 3j\ndef f(): return a, b, c, d, e, g, True, ...",
    "a bool and an ellipsis": "yes, dots = True, ...\ndef f(): return yes, dots",
    "tuples of atoms": "t = (1, ('x', frozenset({2, 3})))\ndef f(): return t",
    "a module": "import json\ndef f(): return json.dumps([1])",
    "a function and a class of a module": (
        "from json import dumps\nfrom decimal import Decimal\ndef f(): return dumps(str(Decimal(1)))"
    ),
    "builtins": "def f(): return len(str(sum(map(int, '123'))))",
    "a builtin under another name": "import math\nroot = math.sqrt\nsize = len\ndef f(): return root(size('abcd'))",
    "itself": "def f(n=3): return n and f(n - 1)",
    "a circle of functions": "def g(n): return n and f(n - 1)\ndef f(n=3): return n and g(n - 1)",
    "a helper with atoms": "k = 3\ndef g(x): return x * k\ndef f(): return g(2)",
    "an atom in nested code": "k = 3\ndef f(): return [(lambda y: y + k)(x) for x in range(2)]",
    "an atom in a nested class": "k = 3\ndef f():\n    class C:\n        def x(self): return k\n    return C().x()",
    "defaults": "def f(a=1, b=(2, 'x')): return a, b",
    "keyword defaults": "def f(*, a=1): return a",
    "a closure of atoms": "def make():\n    n = 5\n    def f(): return n\n    return f\nf = make()",
    "a closure with a function": (
        "def make():\n    def g(): return 5\n    def f(): return g()\n    return f\nf = make()"
    ),
    "an unknown name": "def f(): return missing if False else 1",
    "a local import": "def f():\n    import json\n    return json.dumps(1)",
    "a routine": "from headgate import routine\n@routine\nasync def g(): return 1\ndef f(): return g.__name__",
}


@pytest.mark.parametrize("name", SETTLED)
def test_w03_what_no_call_can_change_is_settled(name: str) -> None:
    namespace = program(SETTLED[name])
    fn = namespace["f"]
    portable = PortableFunction(fn, False)
    form = portable.form(fn)
    assert form.value
    assert not form.fresh
    assert (form.module, form.qualname, form.digest) == ("", "", b"")
    assert portable.form(fn) is form, "dumped once"
    worker = arrived(form)
    loaded = worker.load()
    assert worker.load() is loaded, "loaded once"
    assert loaded() == fn() == loaded()


FRESH = {
    "a list": "seen = []\ndef f():\n    seen.append(1)\n    return len(seen)",
    "a dict": "seen = {}\ndef f():\n    seen[len(seen)] = 1\n    return len(seen)",
    "a set in a tuple": "t = (set(),)\ndef f():\n    t[0].add(len(t[0]))\n    return len(t[0])",
    "an object": "class C: n = 0\nc = C()\ndef f():\n    c.n += 1\n    return c.n",
    "a class of its own": "class C: n = 0\ndef f():\n    C.n += 1\n    return C.n",
    "a default": "def f(seen=[]):\n    seen.append(1)\n    return len(seen)",
    "a keyword default": "def f(*, seen=[]):\n    seen.append(1)\n    return len(seen)",
    "a list in a closure": (
        "def make():\n    seen = []\n    def f():\n        seen.append(1)\n        return len(seen)\n    return f\n"
        "f = make()"
    ),
    "a name in a closure": (
        "def make():\n    n = 0\n    def f():\n        nonlocal n\n        n += 1\n        return n\n    return f\n"
        "f = make()"
    ),
    "a name in a closure, by nested code": (
        "def make():\n    n = 0\n    def f():\n        def g():\n            nonlocal n\n            n += 1\n"
        "        g()\n        return n\n    return f\nf = make()"
    ),
    "a name in the closure of a helper": (
        "def make():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n        return n\n    return g\n"
        "g = make()\ndef f(): return g()"
    ),
    "a global name": "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
    "a global name, by a helper": ("n = 0\ndef g():\n    global n\n    n += 1\ndef f():\n    g()\n    return n"),
    "a global name, by nested code": (
        "n = 0\ndef f():\n    def g():\n        global n\n        n += 1\n    g()\n    return n"
    ),
    "a deleted name": (
        "n = 0\ndef f():\n    global n\n    try:\n        del n\n    except NameError:\n        return 'gone'\n"
        "    return 'there'"
    ),
    "globals()": "n = 0\ndef f():\n    globals()['n'] += 1\n    return n",
    "exec": "n = 0\ndef f():\n    exec('n += 1', f.__globals__)\n    return n",
    "an attribute of itself": "def f():\n    f.n = getattr(f, 'n', 0) + 1\n    return f.n",
    "an attribute of a helper": "def g(): pass\ndef f():\n    g.n = getattr(g, 'n', 0) + 1\n    return g.n",
    "an attribute of a helper in a tuple": (
        "def make():\n    def g(): pass\n    return (g,)\nhelpers = make()\n"
        "def f():\n    helpers[0].n = getattr(helpers[0], 'n', 0) + 1\n    return helpers[0].n"
    ),
    "its dict": "def f():\n    f.__dict__['n'] = f.__dict__.get('n', 0) + 1\n    return f.__dict__['n']",
    "its globals": "n = 0\ndef f():\n    f.__globals__['n'] += 1\n    return n",
    "an attribute it has": "def f():\n    f.n += 1\n    return f.n\nf.n = 0",
    "a number with attributes": (
        "class Number(int): pass\nn = Number(3)\nn.uses = 0\ndef f():\n    n.uses += 1\n    return n.uses"
    ),
    "a text with attributes, of a class that can be imported": (
        "from tests.unit.workers.test_functions import Text\nt = Text('x')\nt.uses = 0\n"
        "def f():\n    t.uses += 1\n    return t.uses"
    ),
    "a method of an object": "push = [].append\ndef f():\n    push(1)\n    return len(push.__self__)",
    "a partial": (
        "from functools import partial\nseen = []\ngrow = partial(seen.append, 1)\n"
        "def f():\n    grow()\n    return len(grow.func.__self__)"
    ),
    "an iterator's place": (
        "class Count:\n    n = 0\n    def __next__(self):\n        self.n += 1\n        return self.n\n"
        "numbers = Count()\ndef f(): return next(numbers)"
    ),
    "a list, by a routine it may call": (
        "from headgate import routine\nseen = []\n@routine\nasync def g(): seen.append(1)\n"
        "def f():\n    seen.append(1)\n    return len(seen), g.__name__"
    ),
    "a module made by hand": (
        "import types\nstate = types.ModuleType('state')\nstate.n = 0\ndef f():\n    state.n += 1\n    return state.n"
    ),
}


class Text(str):
    """A str that may carry more."""

    uses: int


@pytest.mark.parametrize("name", FRESH)
def test_w03_a_change_that_a_call_makes_is_seen_by_no_later_call(name: str) -> None:
    form = form_of(program(FRESH[name])["f"])
    worker = arrived(form)
    first, second, third = worker.load()(), worker.load()(), worker.load()()
    assert first == second == third


@pytest.mark.parametrize("name", FRESH)
def test_w03_what_a_call_could_change_is_fresh(name: str) -> None:
    fn = program(FRESH[name])["f"]
    portable = PortableFunction(fn, True)
    form = portable.form(fn)
    assert form.fresh
    assert form.thread
    again = portable.form(fn)
    assert again == form, "dumped anew, and the same bytes while nothing changed: it is sent once"
    worker = arrived(form)
    assert worker.load() is not worker.load()


# -- what it sees now -------------------------------------------------------------------------------------------------


def set_cell(fn: Any, value: Any) -> None:
    fn.__closure__[0].cell_contents = value


def set_defaults(fn: Any, value: Any) -> None:
    fn.__defaults__ = value


def set_kwdefaults(fn: Any, value: Any) -> None:
    fn.__kwdefaults__ = value


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a global": ("n = 1\ndef f(): return n", lambda names: names.update(n=2)),
    "a global of nested code": ("n = 1\ndef f(): return [n for _ in 'x'][0]", lambda names: names.update(n=2)),
    "a list": ("n = [1]\ndef f(): return n[0]", lambda names: names["n"].__setitem__(0, 2)),
    "a global that settles": ("n = [1]\ndef f(): return n if n == 2 else 1", lambda names: names.update(n=2)),
    "a global that unsettles": ("n = 1\ndef f(): return n if n == 1 else n[0]", lambda names: names.update(n=[2])),
    "a builtin's name": ("def f(): return len('x')", lambda names: names.update(len=lambda _: 2)),
    "a name that was missing": (
        "def f():\n    try:\n        return late\n    except NameError:\n        return 1",
        lambda names: names.update(late=2),
    ),
    "a name that is gone": (
        "n = 1\ndef f():\n    try:\n        return n\n    except NameError:\n        return 2",
        lambda names: names.pop("n"),
    ),
    "a default": ("def f(n=1): return n", lambda names: set_defaults(names["f"], (2,))),
    "a keyword default": ("def f(*, n=1): return n", lambda names: set_kwdefaults(names["f"], {"n": 2})),
    "a keyword default, in place": ("def f(*, n=1): return n", lambda names: names["f"].__kwdefaults__.update(n=2)),
    "a cell": (
        "def make(n):\n    def f(): return n\n    return f\nf = make(1)",
        lambda names: set_cell(names["f"], 2),
    ),
    "a helper": ("def g(): return 1\ndef f(): return g()", lambda names: names.update(g=lambda: 2)),
    "a global of a helper": ("n = 1\ndef g(): return n\ndef f(): return g()", lambda names: names.update(n=2)),
    "a default of a helper": (
        "def g(n=1): return n\ndef f(): return g()",
        lambda names: set_defaults(names["g"], (2,)),
    ),
    "a cell of a helper": (
        "def make(n):\n    def g(): return n\n    return g\ng = make(1)\ndef f(): return g()",
        lambda names: set_cell(names["g"], 2),
    ),
    "an attribute": (
        "def f(): return getattr(f, 'n', 1)",
        lambda names: setattr(names["f"], "n", 2),
    ),
    "its code": (
        "def f(): return 1\ndef g(): return 2",
        lambda names: setattr(names["f"], "__code__", names["g"].__code__),
    ),
    "an attribute of a routine": (
        "from headgate import routine\n@routine\nasync def g(): pass\ndef f(): return getattr(g, 'n', 1)",
        lambda names: setattr(names["g"], "n", 2),
    ),
    "an attribute of a class": ("class C: n = 1\ndef f(): return C.n", lambda names: setattr(names["C"], "n", 2)),
    "a name in a module made by hand": (
        "import types\nstate = types.ModuleType('state')\nstate.n = 1\ndef f(): return state.n",
        lambda names: setattr(names["state"], "n", 2),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_w03_a_function_sees_its_names_as_they_are_at_each_call(name: str) -> None:
    text, change = CHANGES[name]
    names = program(text)
    portable = PortableFunction(names["f"], False)
    assert arrived(portable.form(names["f"])).load()() == 1
    assert arrived(portable.form(names["f"])).load()() == 1
    change(names)
    assert names["f"]() == 2, "here it does"
    assert arrived(portable.form(names["f"])).load()() == 2
    assert arrived(portable.form(names["f"])).load()() == 2


def test_w03_what_a_module_by_value_holds_is_seen_as_it_is(plant: Callable[..., Any]) -> None:
    module = plant("planted_state", "n = 1\ndef g(): return n")
    fn = program("from planted_state import g\ndef f(): return g()")["f"]
    portable = PortableFunction(fn, False)
    cloudpickle.register_pickle_by_value(module)
    try:
        forms = [portable.form(fn)]
        module.n = 2
        forms.append(portable.form(fn))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert [arrived(form).load()() for form in forms] == [1, 2]


class Names(dict[str, Any]):
    """A namespace that is more than a dict, as some shells have."""


def test_w03_names_may_stand_in_a_namespace_of_any_kind() -> None:
    names = Names(__name__="__main__")
    exec("n = 1\ndef f(): return n", names)
    portable = PortableFunction(names["f"], False)
    for value in (1, 1, 2, 2):
        names["n"] = value
        assert arrived(portable.form(names["f"])).load()() == value


def test_w03_a_worker_shares_nothing_with_the_client() -> None:
    names = program("seen = []\ndef f():\n    seen.append(1)\n    return seen")
    assert arrived(form_of(names["f"])).load()() == [1]
    assert names["seen"] == []


def test_w03_a_program_started_by_multiprocessing_travels_by_value_too(
    plant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = plant("__mp_main__", "n = 1\ndef g(): return n\ndef f(): return g()")
    try:
        form = form_of(module.f)
    finally:
        if "__mp_main__" in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(module)
    assert form.value
    monkeypatch.delitem(sys.modules, "__mp_main__")
    assert arrived(form).load()() == 1, "no worker has such a module"


# -- digests ----------------------------------------------------------------------------------------------------------


def digest(text: str, file: str = "a.py") -> bytes:
    names: dict[str, Any] = {}
    exec(compile(textwrap.dedent(text), file, "exec"), names)
    return code_digest(names["f"].__code__)


def test_w03_a_digest_does_not_depend_on_file_or_line() -> None:
    text = "def f(x):\n    return [y for y in x if y in {'a', 'b', 1}]"
    assert digest(text) == digest("\n\n\n" + text, "b.py")
    assert len(digest(text)) == 16


@pytest.mark.parametrize(
    "text",
    [
        "def f(a, b): return a + 2",
        "def f(a, b): return a - 1",
        "def f(a, b): return b + 1",
        "def f(a, c): return a + 1",
        "def f(a, b): return a + True",
        "def f(a, b): return a + 1.0",
        "def f(a, b): return x + 1",
        "def f(a, b): return (lambda: a + 1)()",
        "def f(a, b): return (lambda: a + 2)()",
        "def f(a, b): return [a + 1 for _ in b]",
        "def f(a, *, b): return a + 1",
        "def f(a, b, /): return a + 1",
        "def f(a, *b): return a + 1",
        "def f(a, **b): return a + 1",
        "async def f(a, b): return a + 1",
        "def f(a, b): yield a + 1",
    ],
)
def test_w03_a_digest_tells_two_functions_apart(text: str) -> None:
    assert digest(text) != digest("def f(a, b): return a + 1")


def test_w03_a_digest_does_not_depend_on_the_order_of_a_set() -> None:
    one, other = "{'a', 'b', 'c', 'd', 'e'}", "{'e', 'd', 'c', 'b', 'a'}"
    assert digest(f"def f(x): return x in {one}") == digest(f"def f(x): return x in {other}")
    assert digest(f"def f(x): return x in {one}") != digest("def f(x): return x in {'a'}")


@pytest.fixture
def unwarned() -> Iterator[None]:
    """As in a new process."""
    before = set(functions._warned)
    functions._warned.clear()
    yield
    functions._warned.clear()
    functions._warned.update(before)


@pytest.mark.usefixtures("unwarned")
def test_w03_a_worker_whose_code_differs_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    form = form_of(plain)._replace(digest=b"another", file="/client/jobs.py")
    with caplog.at_level(logging.WARNING, "headgate.workers"):
        assert [arrived(form).load() for _ in range(3)] == [plain] * 3, "it runs its own"
    (record,) = caplog.records
    assert "/client/jobs.py" in record.getMessage()
    assert __file__ in record.getMessage()
    assert form.tag in record.getMessage()


@pytest.mark.usefixtures("unwarned")
def test_w03_digests_of_two_pythons_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    assert arrived(form_of(plain)).load() is plain
    assert arrived(form_of(plain)._replace(digest=b"another", python="cpython-399")).load() is plain
    assert arrived(FunctionForm("tag", "math", "sqrt", b"x", PYTHON)).load() is math.sqrt, "without code of its own"
    assert caplog.records == []


# -- what cannot travel -----------------------------------------------------------------------------------------------


def test_w42_a_function_that_sees_what_cannot_travel_is_refused_at_the_caller() -> None:
    names = program("def f(): return lock", lock=threading.Lock())
    portable = PortableFunction(names["f"], False)
    with pytest.raises(InvalidType, match="lock") as caught:
        portable.form(names["f"])
    assert caught.value.message.startswith("__main__.f:1 cannot be pickled")
    assert "Move it to a module" in caught.value.remedy
    names["lock"] = 1
    assert arrived(portable.form(names["f"])).load()() == 1, "nothing of the failure is left"


def test_w03_a_heavy_function_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    names = program("seen = []\ndef f(): return len(data) + len(seen)", data=b"x" * (functions.HEAVY_BYTES + 1))
    portable = PortableFunction(names["f"], False)
    with caplog.at_level(logging.WARNING, "headgate.workers"):
        for _ in range(3):
            portable.form(names["f"])
    (record,) = caplog.records
    assert "__main__.f:2" in record.getMessage()
    assert "1.0 MB" in record.getMessage()
    assert "pass it as an argument or move it to a module" in record.getMessage()


class SlowClock:
    """Each look at it takes ten milliseconds."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 0.01
        return self._now


def test_w03_a_slow_function_is_named_once_it_is_slow_again_and_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "clock", SlowClock())
    names = program("seen = []\ndef f(): return len(seen)")
    portable = PortableFunction(names["f"], False)
    said = []
    with caplog.at_level(logging.WARNING, "headgate.workers"):
        for _ in range(12):
            portable.form(names["f"])
            said.append(len(caplog.records))
    assert said == [0] * 8 + [1] * 4, "some take long because the machine is busy"


def test_w40b_a_missing_module_is_named_with_the_remedy() -> None:
    with pytest.raises(RemoteError, match="the module nowhere_to_be_found,") as caught:
        arrived(FunctionForm("jobs.f:1", "nowhere_to_be_found", "f")).load()
    assert "jobs.f:1" in caught.value.message
    assert "Install it" in caught.value.remedy
    assert "sys.path" in caught.value.remedy
    assert "the module x," in missing_module("t", ModuleNotFoundError("No module named 'x'", name="x")).message
    assert "gone" in missing_module("t", ModuleNotFoundError("gone")).message


def test_w40b_a_value_that_needs_a_missing_module_names_it(plant: Callable[..., Any]) -> None:
    plant("planted_and_gone", "def g(): return 1")
    form = form_of(program("from planted_and_gone import g\ndef f(): return g()")["f"])
    del sys.modules["planted_and_gone"]
    with pytest.raises(RemoteError, match="the module planted_and_gone,"):
        arrived(form).load()
    sys.modules["planted_and_gone"] = types.ModuleType("planted_and_gone")  # for whoever takes it out


def test_w40b_a_function_the_worker_has_not_got_is_named_with_both_places() -> None:
    for qualname in ("nothing", "Outer.nothing", "Outer.method.nothing"):
        with pytest.raises(RemoteError, match=f"has no {qualname}") as caught:
            arrived(FunctionForm("jobs.f:1", __name__, qualname, file="/client/jobs.py")).load()
        assert "/client/jobs.py" in caught.value.remedy


def test_w40b_a_value_that_cannot_be_loaded_is_named() -> None:
    worker = arrived(FunctionForm("__main__.f:1", value=b"no pickle", fresh=True))
    for _ in range(2):
        with pytest.raises(RemoteError, match=r"__main__\.f:1 could not be loaded"):
            worker.load()


def test_w40b_a_module_whose_import_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_and_broken.py").write_text("raise ValueError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RemoteError, match="planted_and_broken") as caught:
        arrived(FunctionForm("planted_and_broken.f:1", "planted_and_broken", "f")).load()
    assert "at import" in caught.value.message
    assert isinstance(caught.value.__cause__, ValueError)


def test_w40b_nothing_is_loaded_before_it_is_called() -> None:
    """Importing runs user code, and that belongs on the task loop."""
    for form in (FunctionForm("t", "nowhere_to_be_found", "f"), FunctionForm("t", value=b"no pickle", thread=True)):
        worker = arrived(form)
        assert (worker.tag, worker.thread) == ("t", form.thread)
