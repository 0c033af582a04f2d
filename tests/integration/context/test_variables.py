"""W80: how a variable is declared, what its key is, who may declare it again, and get, set and reset of it."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib
import inspect
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import headgate
from headgate import ContextVarCollision, HeadgateError, InvalidArgument, InvalidType
from headgate.context.variables import known
from tests.support.context.local_support import apart, collect, declare, error_of, fresh
from tests.support.workers.support import PATIENCE, environment, script

Plant = Callable[[dict[str, str]], ModuleType]


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Write modules, each as path and code, and import the last of them."""
    monkeypatch.syspath_prepend(tmp_path)

    def planted(files: dict[str, str]) -> ModuleType:
        name = ""
        for path, code in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(code))
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return planted


def ran(code: str, folder: Path) -> list[str]:
    """What this script, in `__main__` of a process of its own, printed."""
    done = script(textwrap.dedent(code), folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


# -- keys and namespaces ----------------------------------------------------------------------------------------------


def test_w80_a_key_is_namespace_and_name() -> None:
    namespace = fresh()
    var = headgate.ContextVar("tenant", namespace=namespace)
    assert (var.name, var.namespace, var.key) == ("tenant", namespace, f"{namespace}:tenant")


def test_w80_the_namespace_is_the_top_level_package_of_the_calling_module() -> None:
    name = fresh("name")
    var = headgate.ContextVar(name)
    assert __name__ == "tests.integration.context.test_variables"
    assert (var.namespace, var.key) == ("tests", f"tests:{name}")


def test_w80_a_submodule_of_a_package_has_the_namespace_of_the_package(plant: Plant) -> None:
    top = fresh("acme_")
    deep = plant(
        {
            f"{top}/__init__.py": "import headgate\nhere = headgate.ContextVar('here')\n",
            f"{top}/inner/__init__.py": "",
            f"{top}/inner/deep.py": "from headgate import ContextVar\ntenant = ContextVar('tenant', default='none')\n",
        }
    )
    assert deep.__name__ == f"{top}.inner.deep"
    assert deep.tenant.key == f"{top}:tenant"
    assert sys.modules[top].here.key == f"{top}:here"


def test_w80_a_module_outside_of_packages_is_its_own_namespace(plant: Plant) -> None:
    name = fresh("alone_")
    module = plant({f"{name}.py": "import headgate\nvar = headgate.ContextVar('v')\n"})
    assert module.var.key == f"{name}:v"


def test_w80_the_namespace_is_that_of_the_code_that_declares_and_not_of_its_caller(plant: Plant) -> None:
    name = fresh("factory_")
    code = """
        import headgate
        def make(name, **options):
            return headgate.ContextVar(name, **options)
    """
    module = plant({f"{name}.py": code})
    var = module.make("v")
    own = module.make("v", namespace=fresh("app"))
    assert var.namespace == name
    assert own.namespace != name


def test_w80_the_spelling_of_the_call_does_not_change_the_namespace() -> None:
    """Each of these may put a frame of another module between the declaration and its module."""

    class Holder:
        inside = headgate.ContextVar(fresh("n"))

    made = [
        Holder.inside,
        headgate.ContextVar[str](fresh("n")),
        headgate.ContextVar[dict[str, list[int]]](fresh("n"), default={}),
        functools.partial(headgate.ContextVar, fresh("n"))(),
        (lambda: headgate.ContextVar(fresh("n")))(),
        *[headgate.ContextVar(name) for name in (fresh("n"), fresh("n"))],
        *map(headgate.ContextVar, [fresh("n")]),
        headgate.ContextVar(name=fresh("n")),
    ]
    assert {var.namespace for var in made} == {"tests"}


@pytest.mark.integration
def test_w80_a_script_has_the_namespace_main(tmp_path: Path) -> None:
    code = """
        import headgate
        var = headgate.ContextVar("tenant")
        typed = headgate.ContextVar[str]("typed")
        def inside():
            return headgate.ContextVar("inside", default=1)
        print(var.key, typed.key, inside().key)
    """
    assert ran(code, tmp_path) == ["__main__:tenant __main__:typed __main__:inside"]


@pytest.mark.integration
@pytest.mark.parametrize("how", [["-m", "acme.tool"], ["-c", "import runpy; runpy.run_module('acme.tool')"]])
def test_w80_the_namespace_follows_the_name_under_which_a_module_runs(tmp_path: Path, how: list[str]) -> None:
    package = tmp_path / "acme"
    package.mkdir()
    (package / "__init__.py").write_text("import headgate\nown = headgate.ContextVar('own')\n")
    (package / "tool.py").write_text("import acme, headgate\nprint(headgate.ContextVar('v').key, acme.own.key)\n")
    done = subprocess.run(
        [sys.executable, *how],
        cwd=tmp_path,
        env=environment(),
        timeout=PATIENCE,
        capture_output=True,
        text=True,
        check=False,
    )
    expected = "__main__:v acme:own" if how[0] == "-m" else "acme:v acme:own"
    assert done.stdout.split("\n")[0] == expected, done.stderr


def test_w80_a_name_may_contain_a_colon_and_keys_stay_distinct() -> None:
    namespace = fresh()
    var = headgate.ContextVar("a:b", namespace=namespace)
    assert (var.name, var.namespace, var.key) == ("a:b", namespace, f"{namespace}:a:b")
    assert known(var.key) is var


def test_w80_the_same_name_in_two_namespaces_is_two_variables() -> None:
    one, two = declare("same"), declare("same")
    assert one is not two
    assert one.key != two.key

    def main() -> None:
        one.set(1)
        assert two.get(None) is None
        two.set(2)
        assert (one.get(), two.get()) == (1, 2)

    apart(main)()


# -- collisions -------------------------------------------------------------------------------------------------------


def test_w80_a_second_declaration_says_where_the_first_is() -> None:
    namespace = fresh()
    first, place = headgate.ContextVar("v", namespace=namespace, default=1), f"{__file__}:{line()}"
    with pytest.raises(ContextVarCollision) as caught:
        headgate.ContextVar("v", namespace=namespace, default=1)
    assert place in str(caught.value)
    assert first.key in str(caught.value)
    assert isinstance(caught.value, HeadgateError)
    assert caught.value.code == "HEADGATE-ARG-005"
    assert known(first.key) is first


@pytest.mark.parametrize("options", [{}, {"default": 1}, {"default": 2}])
@apart
def test_w80_a_collision_leaves_the_first_as_it_was(options: dict[str, Any]) -> None:
    first = declare("v", default=1)
    first.set("kept")
    for _ in range(3):
        with pytest.raises(ContextVarCollision):
            headgate.ContextVar(first.name, namespace=first.namespace, **options)
    assert known(first.key) is first
    assert first.get() == "kept"
    assert contextvars.Context().run(first.get) == 1


def test_w80_a_collision_names_the_file_of_a_library(plant: Plant) -> None:
    name = fresh("lib_")
    module = plant({f"{name}/__init__.py": "", f"{name}/a.py": "\n\nimport headgate\nv = headgate.ContextVar('v')\n"})
    with pytest.raises(ContextVarCollision) as caught:
        plant({f"{name}/b.py": "import headgate\nv = headgate.ContextVar('v')\n"})
    assert f"{module.__file__}:4" in str(caught.value)
    with pytest.raises(ContextVarCollision) as caught:
        headgate.ContextVar("v", namespace=name)
    assert f"{module.__file__}:4" in str(caught.value)


def test_w80_an_inferred_namespace_collides_with_the_same_given_one() -> None:
    name = fresh("n")
    first = headgate.ContextVar(name)
    with pytest.raises(ContextVarCollision):
        headgate.ContextVar(name, namespace="tests")
    assert known(f"tests:{name}") is first


def test_w80_of_many_threads_one_declares() -> None:
    for _ in range(20):
        namespace = fresh()
        made: list[Any] = []
        refused: list[ContextVarCollision] = []
        start = threading.Barrier(6)

        def race(namespace: str = namespace, made: list[Any] = made, refused: list[Any] = refused) -> None:
            start.wait(10)  # noqa: B023 - joined below, in the same turn
            try:
                made.append(headgate.ContextVar("v", namespace=namespace))
            except ContextVarCollision as error:
                refused.append(error)

        threads = [threading.Thread(target=race) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(made), len(refused)) == (1, 5)
        assert known(f"{namespace}:v") is made[0]


# -- notebooks --------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_w80_main_may_declare_again_with_the_same_default(tmp_path: Path) -> None:
    code = """
        import headgate
        from headgate import ContextVar
        one = ContextVar("plain")
        one.set("kept")
        assert ContextVar("plain") is one and one.get() == "kept"
        for default in (None, 1, "text", (1, 2), {"a": [1]}, float("nan"), object()):
            name = f"with {type(default).__name__} {default!r:.9}"
            first = ContextVar(name, default=default)
            assert ContextVar(name, default=default) is first, default
            assert first.get() is default
        mapping = ContextVar("mapping", default={"a": [1]})
        assert ContextVar("mapping", default={"a": [1]}) is mapping
        assert ContextVar[int]("plain") is one
        print("same")
    """
    assert ran(code, tmp_path) == ["same"]


@pytest.mark.integration
def test_w80_a_cell_may_be_run_again(tmp_path: Path) -> None:
    code = """
        cell = "import headgate\\ntenant = headgate.ContextVar('tenant', default='unknown')\\n"
        exec(compile(cell, "<cell 1>", "exec"), globals())
        first = tenant
        token = first.set("acme")
        exec(compile(cell, "<cell 1>", "exec"), globals())
        assert tenant is first and tenant.get() == "acme"
        tenant.reset(token)
        print(tenant.get())
    """
    assert ran(code, tmp_path) == ["unknown"]


@pytest.mark.integration
def test_w80_main_may_not_declare_again_with_another_default(tmp_path: Path) -> None:
    code = """
        import contextvars
        from headgate import ContextVar, ContextVarCollision
        one = ContextVar("one", default=1)
        bare = ContextVar("bare")
        one.set("kept")
        for name, options in [("one", {"default": 2}), ("one", {}), ("bare", {"default": None})]:
            try:
                ContextVar(name, **options)
            except ContextVarCollision as error:
                print(name, "main.py:4" in str(error), "main.py:5" in str(error))
        assert one.get() == "kept" and contextvars.Context().run(one.get) == 1
        assert bare.get("none") == "none"
    """
    assert ran(code, tmp_path) == ["one True False", "one True False", "bare False True"]


@pytest.mark.integration
def test_w80_a_module_may_not_declare_again_even_with_the_same_default(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import headgate\ndef make(): return headgate.ContextVar('v', default=1)\n")
    code = """
        import headgate, shop
        first = shop.make()
        try:
            shop.make()
        except headgate.ContextVarCollision as error:
            print(first.key, "shop.py:2" in str(error))
    """
    assert ran(code, tmp_path) == ["shop:v True"]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, 1, b"name", ["name"], object(), 1.5])
def test_w80_a_name_is_a_str(name: Any) -> None:
    with pytest.raises(InvalidType, match="name"):
        headgate.ContextVar(name, namespace=fresh())
    with pytest.raises(InvalidType, match="name"):
        headgate.ContextVar(name)


@pytest.mark.parametrize("namespace", [1, b"acme", ["acme"], object()])
def test_w80_a_namespace_is_a_str(namespace: Any) -> None:
    with pytest.raises(InvalidType, match="namespace"):
        headgate.ContextVar("v", namespace=namespace)


@pytest.mark.parametrize("namespace", ["", ":", "a:b", "acme:", ":acme"])
def test_w80_a_namespace_is_not_empty_and_has_no_colon(namespace: str) -> None:
    with pytest.raises(InvalidArgument, match="namespace"):
        headgate.ContextVar("v", namespace=namespace)
    assert known(f"{namespace}:v") is None


def test_w80_a_name_is_not_empty() -> None:
    with pytest.raises(InvalidArgument, match="name"):
        headgate.ContextVar("")
    with pytest.raises(InvalidArgument, match="name"):
        headgate.ContextVar("", namespace=fresh())


def test_w80_options_are_keywords() -> None:
    make: Any = headgate.ContextVar
    with pytest.raises(TypeError):
        make(fresh(), 1)
    with pytest.raises(TypeError):
        make()
    with pytest.raises(TypeError):
        make(fresh(), defualt=1)


# -- get, set, reset --------------------------------------------------------------------------------------------------


@apart
def test_w80_get_without_a_value_or_default_is_a_lookup_error() -> None:
    var = declare()
    with pytest.raises(LookupError) as caught:
        var.get()
    assert type(caught.value) is LookupError
    token = var.set(1)
    var.reset(token)
    with pytest.raises(LookupError):
        var.get()


@apart
def test_w80_value_before_argument_before_default() -> None:
    bare, with_default, with_none = declare(), declare(default="default"), declare(default=None)
    assert with_default.get() == "default"
    assert with_default.get("given") == "given"
    assert with_default.get(None) is None
    assert with_none.get() is None
    assert with_none.get(1) == 1
    assert bare.get("given") == "given"
    assert bare.get(None) is None
    for var in (bare, with_default, with_none):
        var.set("value")
        assert (var.get(), var.get("given")) == ("value", "value")


@pytest.mark.parametrize("value", [None, False, 0, "", (), contextvars.Token.MISSING, NotImplemented, ...])
@apart
def test_w80_any_object_is_a_value(value: Any) -> None:
    var = declare(default="default")
    token = var.set(value)
    assert var.get() is value
    assert var.get("given") is value
    inner = var.set("inner")
    assert inner.old_value is value
    var.reset(inner)
    assert var.get() is value
    var.reset(token)
    assert var.get() == "default"


@pytest.mark.parametrize("value", [False, 0, "", (), contextvars.Token.MISSING, NotImplemented, ...])
@apart
def test_w80_any_object_is_a_default(value: Any) -> None:
    assert declare(default=value).get() is value


@apart
def test_w80_reset_restores_what_was_before_its_set() -> None:
    var = declare(default="default")
    tokens = [var.set(number) for number in range(5)]
    var.reset(tokens[3])
    assert var.get() == 2
    var.reset(tokens[1])
    assert var.get() == 0
    var.reset(tokens[4])
    assert var.get() == 3
    var.reset(tokens[0])
    assert var.get() == "default"
    var.reset(tokens[2])
    assert var.get() == 1


@apart
def test_w80_reset_returns_nothing_and_values_are_not_copied() -> None:
    var = declare()
    value: list[int] = []
    token = var.set(value)
    assert isinstance(token, headgate.Token)
    assert var.get() is value
    assert var.reset(token) is None  # type: ignore[func-returns-value]


@apart
def test_w80_wrong_calls_fail_as_those_of_the_stdlib() -> None:
    ours: Any = declare()
    theirs: Any = contextvars.ContextVar("theirs")
    for var in (theirs, ours):
        assert error_of(lambda v=var: v.set()) == "TypeError"
        assert error_of(lambda v=var: v.set(1, 2)) == "TypeError"
        assert error_of(lambda v=var: v.get(1, 2)) == "TypeError"
        assert error_of(lambda v=var: v.reset()) == "TypeError"
        assert error_of(lambda v=var: setattr(v, "name", "other")) == "AttributeError"
    for attribute in ("namespace", "key"):
        assert error_of(lambda a=attribute: setattr(ours, a, "other")) == "AttributeError"


def test_w80_a_thread_begins_as_with_a_stdlib_variable() -> None:
    ours, theirs = declare(default="default"), contextvars.ContextVar("theirs", default="default")
    seen: list[Any] = []

    def main() -> None:
        ours.set("set")
        theirs.set("set")
        thread = threading.Thread(target=lambda: seen.extend([ours.get(), theirs.get()]))
        thread.start()
        thread.join()

    apart(main)()
    assert seen[0] == seen[1]


def test_w80_a_variable_works_without_a_loop_and_in_one() -> None:
    var = declare()

    async def main() -> Any:
        seen = var.get()
        var.set("in the loop")
        await asyncio.sleep(0)
        return seen, var.get()

    def outside() -> None:
        var.set("outside")
        assert asyncio.run(main()) == ("outside", "in the loop")
        assert var.get() == "outside"

    apart(outside)()


# -- what a reader and a type checker see -----------------------------------------------------------------------------


def test_w80_a_variable_and_a_token_take_a_type() -> None:
    for generic in (headgate.ContextVar, headgate.Token):
        assert generic[int] is not None
        assert generic[dict[str, int]] is not None
    name = fresh("n")
    var: headgate.ContextVar[int] = headgate.ContextVar[int](name, default=1)
    assert isinstance(var, headgate.ContextVar)
    assert (var.key, var.get()) == (f"tests:{name}", 1)


def test_w80_repr_names_the_variable() -> None:
    var = declare("tenant_of_repr", default="the-default")
    assert "ContextVar" in repr(var)
    assert "tenant_of_repr" in repr(var)
    assert var.namespace in repr(var)


@apart
def test_w80_a_variable_is_itself_and_nothing_else() -> None:
    one, two = declare(default=1), declare(default=1)
    assert one == one
    assert one != two
    assert {one: "one", two: "two"}[two] == "two"
    before = hash(one)
    one.set(2)
    assert hash(one) == before


# -- the registry is weak ---------------------------------------------------------------------------------------------


def test_w80_a_key_is_free_when_its_variable_is_gone() -> None:
    var = declare("v", default=1)
    namespace, key = var.namespace, var.key
    assert known(key) is var
    gone = weakref.ref(var)
    del var
    collect()
    assert gone() is None
    assert known(key) is None
    again = headgate.ContextVar("v", namespace=namespace, default=2)
    assert known(key) is again
    assert again.get() == 2
    with pytest.raises(ContextVarCollision):
        headgate.ContextVar("v", namespace=namespace, default=2)


def test_w80_unknown_keys_are_unknown() -> None:
    assert known(f"{fresh()}:never") is None


def test_w80_a_variable_that_was_set_is_gone_with_the_contexts_in_which_it_was_set() -> None:
    var = declare("v")
    key = var.key
    here = contextvars.copy_context()
    here.run(var.set, object())
    asyncio.run(task_that_sets(var))
    gone = weakref.ref(var)
    del var, here
    collect()
    assert gone() is None
    assert known(key) is None


async def task_that_sets(var: headgate.ContextVar[Any]) -> None:
    await asyncio.create_task(asyncio.to_thread(var.set, 1))
    var.reset(var.set(2))
    var.set(3)


@apart
def test_w80_a_collision_keeps_no_variable_alive() -> None:
    var = declare("v")
    key = var.key
    try:
        headgate.ContextVar(var.name, namespace=var.namespace)
    except ContextVarCollision as error:
        kept = error
    del var
    kept.__traceback__ = None
    collect()
    assert known(key) is None


def test_w80_ten_thousand_declarations_leave_nothing(scale: float) -> None:
    many = 10_000 if scale >= 1 else 2000

    def some(count: int) -> None:
        for number in range(count):
            var = headgate.ContextVar(f"many {number}", namespace="many", default=number)
            assert contextvars.copy_context().run(var.set, number) is not None

    some(100)
    collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        some(many)
        collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20 * many
    assert known(f"many:many {many // 2}") is None
