"""W88 outside of a dispatch: variables and tokens in pickles and copies, stubs, and a second process."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import pickle
import textwrap
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import headgate
from headgate.context.variables import known
from tests.support.context.local_support import apart, collect, declare, error_of, fresh
from tests.support.workers.support import script

MISSING = contextvars.Token.MISSING
PICKLERS: dict[str, Callable[[Any], bytes]] = {
    "protocol 0": lambda value: pickle.dumps(value, 0),
    "protocol 2": lambda value: pickle.dumps(value, 2),
    "newest": lambda value: pickle.dumps(value, pickle.HIGHEST_PROTOCOL),
    "pure python": lambda value: pickle._dumps(value),  # type: ignore[attr-defined]
    "cloudpickle": cloudpickle.dumps,
}
each_pickler = pytest.mark.parametrize("pickler", list(PICKLERS))


@dataclass
class Order:
    """A graph with a variable in it."""

    tenant: Any
    parts: dict[str, Any] = field(default_factory=dict)


class Value:
    """Something a weak reference can point to."""


def elsewhere(blob: bytes, code: str, folder: Path, **modules: str) -> list[str]:
    """What this code printed as the main module of another process, where `blob` is what was pickled here."""
    (folder / "blob").write_bytes(blob)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    start = """
        import contextvars, copy, gc, pickle, weakref
        from pathlib import Path
        import headgate
        from headgate.context.variables import known
        MISSING = contextvars.Token.MISSING
        blob = Path("blob").read_bytes()
        def error_of(call):
            try:
                call()
            except Exception as error:
                return next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
            return ""
        def collect():
            for _ in range(3):
                gc.collect()
    """
    done = script(textwrap.dedent(start) + textwrap.dedent(code), folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def pickled(var: headgate.ContextVar[Any], *values: Any) -> bytes:
    for value in values:
        var.set(value)
    return pickle.dumps(copy.copy(var))


def forgotten(*values: Any, **options: Any) -> tuple[str, bytes]:
    """The key and the pickle of a variable that this process no longer knows; set to the value, when there is one."""
    var = declare(**options)

    key, blob = var.key, contextvars.Context().run(pickled, var, *values)
    del var
    collect()
    assert known(key) is None
    return key, blob


# -- variables, in this process ---------------------------------------------------------------------------------------


@each_pickler
@apart
def test_w88_a_variable_comes_back_as_itself(pickler: str) -> None:
    dumps = PICKLERS[pickler]
    bare, with_default = declare(), declare(default={"a": 1})
    for var in (bare, with_default):
        assert pickle.loads(dumps(var)) is var
        assert var not in headgate.current_context()  # a default is no value
        var.set("value")
        assert pickle.loads(dumps(var)) is var
        assert var.get() == "value"


@each_pickler
@apart
def test_w88_in_any_graph(pickler: str) -> None:
    var = declare()
    var.set([1])
    order = Order(var, {"again": var, "list": [var, (var,)]})
    arrived = pickle.loads(PICKLERS[pickler](order))
    assert arrived is not order
    assert arrived.tenant is var
    assert arrived.parts == {"again": var, "list": [var, (var,)]}
    assert pickle.loads(PICKLERS[pickler]({var: "key"})) == {var: "key"}


@apart
def test_w88_a_value_that_contains_its_own_variable() -> None:
    var, other = declare("one"), declare("other")
    var.set({"me": var, "other": other})
    other.set([var])
    blob = pickle.dumps(var)

    def arrive() -> None:
        assert pickle.loads(blob) is var
        assert var.get() == {"me": var, "other": other}
        assert other.get() == [var]

    contextvars.Context().run(arrive)


@pytest.mark.parametrize("wrap", [tuple, frozenset, Order], ids=["tuple", "frozenset", "object"])
@apart
def test_w88_a_value_that_holds_its_variable_and_its_token(wrap: Callable[[Any], Any]) -> None:
    """A tuple cannot be made before its items are: a naive pickle of this never ends."""
    var = declare()
    token = var.set("first")
    var.set(wrap([var]))
    assert pickle.loads(pickle.dumps(var)) is var
    blob = pickle.dumps(var)
    arrived = contextvars.Context().run(lambda: pickle.loads(blob).get())
    if wrap is Order:
        assert arrived.tenant == [var]
    else:
        assert arrived == wrap([var])
    if wrap is not frozenset:
        var.set(wrap([var, token]))
        assert pickle.loads(pickle.dumps([var, token])) == [var, token]


@apart
def test_w88_unpickling_sets_only_where_unset() -> None:
    var = declare(default="default")
    var.set("sent")
    blob = pickle.dumps(var)
    var.set("newer")
    pickle.loads(blob)
    assert var.get() == "newer"

    def arrive(*before: Any) -> tuple[Any, dict[Any, Any]]:
        for value in before:
            var.set(value)
        assert pickle.loads(blob) is var
        return var.get(), dict(headgate.current_context())

    assert contextvars.Context().run(arrive) == ("sent", {var: "sent"})
    assert contextvars.Context().run(arrive, "mine") == ("mine", {var: "mine"})
    assert contextvars.Context().run(arrive, None) == (None, {var: None})  # None is a value
    assert var.get() == "newer"


@apart
def test_w88_what_was_reset_is_unset_and_takes_the_value() -> None:
    var = declare()
    token = var.set("sent")
    blob = pickle.dumps(var)
    var.reset(token)
    assert var.get(None) is None
    pickle.loads(blob)
    assert var.get() == "sent"


@apart
def test_w88_an_unset_variable_takes_nothing_away() -> None:
    var = declare(default="default")
    blob = pickle.dumps(var)
    var.set("mine")
    assert pickle.loads(blob) is var
    assert var.get() == "mine"


@pytest.mark.parametrize("value", [None, False, 0, "", ()])
@apart
def test_w88_a_value_that_looks_like_none_travels_too(value: Any) -> None:
    var = declare(default="default")
    var.set(value)
    blob = pickle.dumps(var)

    def arrive() -> Any:
        pickle.loads(blob)
        return var.get()

    arrived = contextvars.Context().run(arrive)
    assert arrived == value
    assert type(arrived) is type(value)


def test_w88_the_value_is_that_of_the_context_in_which_it_is_pickled() -> None:
    var = declare()

    async def pickled(value: str) -> bytes:
        var.set(value)
        await asyncio.sleep(0)
        return pickle.dumps(var)

    async def main() -> list[bytes]:
        return await asyncio.gather(pickled("a"), pickled("b"))

    def arrive(blob: bytes) -> Any:
        pickle.loads(blob)
        return var.get()

    assert [contextvars.Context().run(arrive, blob) for blob in asyncio.run(main())] == ["a", "b"]
    assert var.get(None) is None


@apart
def test_w88_what_was_set_by_unpickling_can_be_set_and_reset_as_usual() -> None:
    var = declare()
    var.set("sent")
    blob = pickle.dumps(var)

    def arrive() -> None:
        pickle.loads(blob)
        token = var.set("mine")
        assert token.old_value == "sent"
        var.reset(token)
        assert var.get() == "sent"

    contextvars.Context().run(arrive)


@apart
def test_w88_a_copy_of_a_variable_is_the_variable() -> None:
    bare, var, locked = declare(), declare(default=[1]), declare(default=threading.Lock())
    value = {"a": [1]}
    var.set(value)
    for one in (bare, var, locked):
        assert copy.copy(one) is one
        assert copy.deepcopy(one) is one
        assert copy.deepcopy({"graph": [one]})["graph"][0] is one
    assert var.get() is value
    assert bare.get(None) is None


@apart
def test_w88_a_copy_of_a_variable_or_token_copies_no_value() -> None:
    var = declare()
    for value in (threading.Lock(), (item for item in ()), Value()):
        var.set(value)
        token = var.set("next")
        var.set(value)
        assert copy.copy(var) is var
        assert copy.deepcopy([var])[0] is var
        assert var.get() is value
        assert copy.copy(token) is token
        assert copy.deepcopy([token])[0] is token
        assert token.old_value is value


@apart
def test_w88_a_default_that_cannot_be_pickled_stays_at_home() -> None:
    lock = threading.Lock()
    var = declare(default=lock)
    assert pickle.loads(pickle.dumps(var)) is var
    assert pickle.loads(cloudpickle.dumps(var)) is var
    assert var.get() is lock
    var.set("value")
    blob = pickle.dumps(var)
    assert contextvars.Context().run(lambda: pickle.loads(blob).get()) == "value"


@apart
def test_w88_pickling_keeps_nothing_alive() -> None:
    gone = weakref.ref(var := declare())
    value = Value()
    value_gone = weakref.ref(value)
    contextvars.copy_context().run(pickled, var, value)
    contextvars.Context().run(pickle.loads, pickle.dumps(var))
    del var, value
    collect()
    assert gone() is None
    assert value_gone() is None


# -- stubs ------------------------------------------------------------------------------------------------------------


@apart
def test_w83_an_unknown_variable_is_a_stub_and_is_promoted_in_place() -> None:
    key, blob = forgotten("sent", name="tenant")
    stub = pickle.loads(blob)
    assert isinstance(stub, headgate.ContextVar)
    assert (stub.key, stub.name, stub.namespace) == (key, "tenant", key.split(":")[0])
    assert stub.get() == "sent"
    assert known(key) is stub
    assert pickle.loads(blob) is stub
    mine = stub.set("changed here")
    declared = headgate.ContextVar("tenant", namespace=stub.namespace, default="default")
    assert declared is stub
    assert known(key) is declared
    assert declared.get() == "changed here"
    declared.reset(mine)
    assert declared.get() == "sent"
    assert contextvars.Context().run(declared.get) == "default"
    with pytest.raises(headgate.ContextVarCollision) as caught:
        headgate.ContextVar("tenant", namespace=stub.namespace, default="default")
    assert __file__ in str(caught.value)


@apart
def test_w83_the_default_of_the_declaration_counts() -> None:
    for sent, declared, expected in [({"default": 1}, {"default": 2}, 2), ({}, {"default": 2}, 2)]:
        key, blob = forgotten(name="v", **sent)
        stub = pickle.loads(blob)
        assert stub.get("none") == "none"
        if sent:
            assert stub.get() == 1
        else:
            assert error_of(stub.get) == "LookupError"
        assert headgate.ContextVar("v", namespace=key.split(":")[0], **declared) is stub
        assert stub.get() == expected
        assert stub not in headgate.current_context()


@apart
def test_w83_a_declaration_without_a_default_has_none_whatever_the_stub_had() -> None:
    key, blob = forgotten(name="v", default=1)
    stub = pickle.loads(blob)
    assert stub.get() == 1
    assert headgate.ContextVar("v", namespace=key.split(":")[0]) is stub
    assert error_of(stub.get) == "LookupError"


@apart
def test_w83_a_stub_waits_in_its_context_though_nobody_holds_it() -> None:
    key, blob = forgotten("sent", name="v")
    pickle.loads(blob)
    collect()
    var = headgate.ContextVar("v", namespace=key.split(":")[0], default="default")
    assert var.get() == "sent"
    assert contextvars.Context().run(var.get) == "default"


@apart
def test_w83_a_stub_never_declared_vanishes() -> None:
    key, blob = forgotten(Value(), name="v")
    context = contextvars.copy_context()
    stub = context.run(pickle.loads, blob)
    gone = weakref.ref(stub)
    value_gone = weakref.ref(context.run(stub.get))
    assert known(key) is stub
    del stub
    assert context.run(lambda: known(key)) is not None
    del context
    collect()
    assert gone() is None
    assert value_gone() is None
    assert known(key) is None
    var = headgate.ContextVar("v", namespace=key.split(":")[0], default="default")
    assert var.get() == "default"


@apart
def test_w83_a_thousand_stubs_leave_nothing(scale: float) -> None:
    many = 1000 if scale >= 1 else 300
    blobs = []
    for number in range(many):
        var = headgate.ContextVar(f"v{number}", namespace="stubs")
        blobs.append(contextvars.Context().run(lambda v=var: (v.set([1]), pickle.dumps(v))[1]))
        del var
    collect()

    def arrive(some: list[bytes]) -> None:
        for blob in some:
            contextvars.copy_context().run(pickle.loads, blob)

    arrive(blobs[:50])
    collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        arrive(blobs)
        collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 100 * many
    assert [number for number in range(many) if known(f"stubs:v{number}")] == []


@apart
def test_w83_a_colon_in_a_name_is_not_taken_for_the_end_of_the_namespace() -> None:
    key, blob = forgotten("sent", name="a:b:c")
    stub = pickle.loads(blob)
    assert (stub.key, stub.name) == (key, "a:b:c")
    assert headgate.ContextVar("a:b:c", namespace=stub.namespace) is stub


# -- tokens, in this process ------------------------------------------------------------------------------------------


@each_pickler
@apart
def test_w88_a_token_comes_back_as_itself(pickler: str) -> None:
    dumps = PICKLERS[pickler]
    var = declare(default="default")
    first, second = var.set(1), var.set(2)
    for token in (first, second):
        assert pickle.loads(dumps(token)) is token
        assert pickle.loads(dumps([token, {"again": token}])) == [token, {"again": token}]
    assert copy.copy(first) is first
    assert copy.deepcopy([second])[0] is second
    var.reset(pickle.loads(dumps(second)))
    assert var.get() == 1
    assert error_of(lambda: var.reset(second)) == "RuntimeError"
    assert pickle.loads(dumps(second)) is second
    var.reset(copy.copy(first))
    assert var.get() == "default"


@apart
def test_w85_a_token_pickled_before_its_use_is_used_after_it() -> None:
    var = declare()
    token = var.set(1)
    blob = pickle.dumps(token)
    var.reset(token)
    var.set("kept")
    again = pickle.loads(blob)
    assert error_of(lambda: var.reset(again)) == "RuntimeError"
    assert contextvars.copy_context().run(error_of, lambda: var.reset(again)) == "RuntimeError"
    assert var.get() == "kept"


@apart
def test_w85_a_token_that_only_its_pickle_keeps_can_be_used_where_it_was_made() -> None:
    var = declare(default="default")
    blob = pickle.dumps(var.set(1))
    collect()
    assert contextvars.copy_context().run(error_of, lambda: var.reset(pickle.loads(blob))) == "ValueError"
    token = pickle.loads(blob)
    assert (token.var, token.old_value) == (var, MISSING)
    var.reset(token)
    assert var.get() == "default"
    assert error_of(lambda: var.reset(token)) == "RuntimeError"


@apart
def test_w85_unpickling_a_token_does_not_make_it_one_of_this_context() -> None:
    var = declare()
    token = var.set(1)
    blob = pickle.dumps(token)

    def try_it() -> str:
        return error_of(lambda: var.reset(pickle.loads(blob)))

    assert contextvars.copy_context().run(try_it) == "ValueError"
    assert contextvars.Context().run(try_it) == "ValueError"
    var.reset(token)


@apart
def test_w85_a_token_whose_old_value_is_missing_comes_back_so() -> None:
    var = declare(default="default")
    token = var.set(1)
    assert pickle.loads(pickle.dumps(token)).old_value is MISSING
    var.reset(pickle.loads(pickle.dumps(token)))
    assert var not in headgate.current_context()


# -- a second process -------------------------------------------------------------------------------------------------

SHOP = """
    import headgate
    tenant = headgate.ContextVar("tenant", namespace="shop", default="unknown")
"""


@pytest.fixture
def tenant() -> headgate.ContextVar[Any]:
    """What the module `shop` of the other process declares."""
    collect()  # that of the test before may be in a cycle
    return headgate.ContextVar("tenant", namespace="shop", default="unknown")


@pytest.mark.integration
@pytest.mark.parametrize(
    "pickler",
    [pytest.param(name, marks=() if name in ("newest", "cloudpickle") else pytest.mark.soak) for name in PICKLERS],
)
@apart
def test_w88_a_variable_lands_on_the_one_instance(
    tmp_path: Path, tenant: headgate.ContextVar[Any], pickler: str
) -> None:
    tenant.set({"name": "acme"})
    code = """
        import shop
        arrived = pickle.loads(blob)
        print(arrived is shop.tenant, shop.tenant.get(), known("shop:tenant") is shop.tenant)
        print(contextvars.Context().run(shop.tenant.get))
    """
    said = elsewhere(PICKLERS[pickler](tenant), code, tmp_path, shop=SHOP)
    assert said == ["True {'name': 'acme'} True", "unknown"]


@pytest.mark.integration
@apart
def test_w88_a_second_process_keeps_what_it_has_set(tmp_path: Path, tenant: headgate.ContextVar[Any]) -> None:
    tenant.set("sent")
    code = """
        import shop
        token = shop.tenant.set("mine")
        pickle.loads(blob)
        print(shop.tenant.get())
        shop.tenant.reset(token)
        print(shop.tenant.get())
        pickle.loads(blob)
        print(shop.tenant.get())
    """
    assert elsewhere(pickle.dumps(tenant), code, tmp_path, shop=SHOP) == ["mine", "unknown", "sent"]


@pytest.mark.integration
@apart
def test_w83_a_stub_of_a_second_process_is_promoted_when_its_module_is_imported(
    tmp_path: Path, tenant: headgate.ContextVar[Any]
) -> None:
    tenant.set("sent")
    code = """
        stub = pickle.loads(blob)
        print(stub.key, stub.get(), stub in headgate.current_context())
        number = hash(stub)
        import shop
        print(shop.tenant is stub, hash(stub) == number, shop.tenant.get())
        print(contextvars.Context().run(shop.tenant.get))
        try:
            headgate.ContextVar("tenant", namespace="shop")
        except headgate.ContextVarCollision as error:
            print("shop.py:3" in str(error))
    """
    said = elsewhere(pickle.dumps(tenant), code, tmp_path, shop=SHOP)
    assert said == ["shop:tenant sent True", "True True sent", "unknown", "True"]


@pytest.mark.integration
@apart
def test_w83_a_stub_is_promoted_by_a_package_that_infers_its_namespace(
    tmp_path: Path, tenant: headgate.ContextVar[Any]
) -> None:
    tenant.set("sent")
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tills.py").write_text("import headgate\ntenant = headgate.ContextVar('tenant')\n")
    code = """
        pickle.loads(blob)
        collect()
        import shop.tills
        print(shop.tills.tenant.get(), shop.tills.tenant.key)
    """
    assert elsewhere(pickle.dumps(tenant), code, tmp_path) == ["sent shop:tenant"]


@pytest.mark.integration
@apart
def test_w83_main_may_promote_a_stub_and_declare_again(tmp_path: Path) -> None:
    var: headgate.ContextVar[Any] = headgate.ContextVar(fresh("n"), namespace="__main__", default=1)
    var.set("sent")
    code = f"""
        stub = pickle.loads(blob)
        name = {var.name!r}
        declared = headgate.ContextVar(name, default=2)
        print(declared is stub, declared.get(), contextvars.Context().run(declared.get))
        print(headgate.ContextVar(name, default=2) is stub)
        print(error_of(lambda: headgate.ContextVar(name, default=1)))
    """
    assert elsewhere(pickle.dumps(var), code, tmp_path) == ["True sent 2", "True", "Exception"]


@pytest.mark.integration
@apart
def test_w83_stubs_of_a_second_process_vanish(tmp_path: Path, tenant: headgate.ContextVar[Any]) -> None:
    tenant.set("sent")
    code = """
        def inside():
            stub = pickle.loads(blob)
            assert known("shop:tenant") is stub and stub.get() == "sent"
            return weakref.ref(stub)
        gone = contextvars.copy_context().run(inside)
        collect()
        print(gone(), known("shop:tenant"), len(headgate.current_context()))
        import shop
        print(shop.tenant.get())
    """
    assert elsewhere(pickle.dumps(tenant), code, tmp_path, shop=SHOP) == ["None None 0", "unknown"]


@pytest.mark.integration
def test_w88_a_default_travels_when_it_can(tmp_path: Path) -> None:
    plain, locked = declare("plain", default=[1, 2]), declare("locked", default=threading.Lock())
    code = """
        plain, locked = pickle.loads(blob)
        print(plain.get(), error_of(locked.get), len(headgate.current_context()))
        print(plain.get("given"), locked.get("given"))
    """
    said = elsewhere(pickle.dumps((plain, locked)), code, tmp_path)
    assert said == ["[1, 2] LookupError 0", "given given"]


@pytest.mark.integration
@apart
def test_w88_a_function_takes_its_variables_along(tmp_path: Path, tenant: headgate.ContextVar[Any]) -> None:
    namespace: dict[str, Any] = {"tenant": tenant}
    exec("def by_global():\n    return tenant.get()\n", namespace)
    by_closure = (lambda var: lambda: (var, var.get()))(tenant)
    tenant.set("sent")
    code = """
        by_global, by_closure = pickle.loads(blob)
        import shop
        var, value = by_closure()
        print(by_global(), value, var is shop.tenant)
        shop.tenant.set("changed")
        print(by_global(), by_closure()[1])
    """
    blob = cloudpickle.dumps((namespace["by_global"], by_closure))
    assert elsewhere(blob, code, tmp_path, shop=SHOP) == ["sent sent True", "changed changed"]


@pytest.mark.integration
@apart
def test_w85_a_token_in_a_second_process(tmp_path: Path, tenant: headgate.ContextVar[Any]) -> None:
    used = tenant.set("a")
    tenant.reset(used)
    first, second = tenant.set("b"), tenant.set("c")
    code = """
        import shop
        var, other = shop.tenant, headgate.ContextVar("other")
        used, first, second = pickle.loads(blob)
        print(all(isinstance(one, headgate.Token) for one in (used, first, second)))
        print(used.var is var, first.var is var, second.var is var)
        print(used.old_value is MISSING, first.old_value is MISSING, second.old_value)
        print(["used" in repr(one) for one in (used, first, second)])
        before = var.get()
        print(error_of(lambda: var.reset(used)), error_of(lambda: other.reset(used)))
        print(error_of(lambda: other.reset(second)), *[error_of(lambda: var.reset(one)) for one in (second, first)])
        print(var.get() == before)
        print(all(a is b for a, b in zip(pickle.loads(blob), (used, first, second))))
        print(all(copy.copy(one) is one for one in (used, first, second)))
        mine = var.set("mine")
        var.reset(mine)
        print(error_of(lambda: var.reset(mine)))
    """
    said = elsewhere(pickle.dumps((used, first, second)), code, tmp_path, shop=SHOP)
    assert said == [
        "True",
        "True True True",
        "True True b",
        "[True, False, False]",
        "RuntimeError RuntimeError",
        "ValueError ValueError ValueError",
        "True",
        "True",
        "True",
        "RuntimeError",
    ]
    tenant.reset(second)  # what the other process was refused has not used it up here
    tenant.reset(first)
    assert tenant.get() == "unknown"


@pytest.mark.integration
@apart
def test_w88_a_token_of_an_unknown_variable_brings_a_stub(tmp_path: Path, tenant: headgate.ContextVar[Any]) -> None:
    token = tenant.set("b")
    code = """
        token = pickle.loads(blob)
        stub = token.var
        print(stub.key, token.old_value is MISSING)
        import shop
        print(shop.tenant is stub, token.var is shop.tenant)
    """
    assert elsewhere(pickle.dumps(token), code, tmp_path, shop=SHOP) == ["shop:tenant True", "True True"]


@pytest.mark.integration
@apart
def test_w88_there_and_back(tmp_path: Path, tenant: headgate.ContextVar[Any]) -> None:
    """What another process pickled again lands on the instances that are alive here."""
    token = tenant.set("b")
    code = """
        graph = pickle.loads(blob)
        Path("back").write_bytes(pickle.dumps(graph))
    """
    assert elsewhere(pickle.dumps([tenant, token]), code, tmp_path) == []
    var, again = pickle.loads((tmp_path / "back").read_bytes())
    assert var is tenant
    assert again is token
    assert tenant.get() == "b"
    tenant.reset(again)
    assert error_of(lambda: tenant.reset(token)) == "RuntimeError"
