"""T60c: dataclasses, named tuples, enums, models of pydantic and msgspec are stored by value with their type."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass, make_dataclass
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import InvalidType
from headgate.stores import Opaque, canonical, decode, encode
from headgate.stores.codec import text_of, why_opaque
from headgate.stores.result_types import ResultTypes, checked_types
from tests.conftest import SCALE
from tests.unit.stores import structure_samples as samples
from tests.unit.stores.structure_samples import (
    RAN,
    Answer,
    Bits,
    Box,
    Checked,
    Closes,
    Colour,
    Computed,
    Derived,
    Failing,
    Frozen,
    FrozenModel,
    FrozenRow,
    GenericRow,
    Handler,
    Louder,
    OldStyle,
    Order,
    Outer,
    Page,
    Perm,
    Point,
    PostRow,
    Root,
    Row,
    Size,
    Usage,
    WithProperty,
    Word,
)

HOME = samples.__name__


def stored(value: object) -> Any:
    """What a file would hold."""
    return json.loads(text_of(value))


def back(value: object, *given: type) -> Any:
    return decode(stored(value), types=ResultTypes(given))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, HOME)


@pytest.fixture(autouse=True)
def _forgetful() -> None:
    RAN.clear()


VALUES = [
    Order(1, [Order(2)], "x"),
    Frozen(name="n", at=(1, b"x")),
    Derived(1, 3),
    samples._Private(3),
    Outer.Inner(4),
    Box([1]),
    Checked(5),
    Point(1.0, 2.0),
    OldStyle(1, (2,)),
    Colour.GREEN,
    Colour.CRIMSON,
    Size.LARGE,
    Word.YES,
    Handler.FAST,
    Handler.LISTED,
    Perm.R,
    Perm.R | Perm.W,
    Perm(0),
    Bits.A | Bits.B,
    Bits(8),
    Usage(prompt_tokens=3),
    FrozenModel(x=1),
    Root([1, 2]),
    Page[int](items=[1]),
    Page[Usage](items=[Usage(prompt_tokens=1)]),
    Page[Page[int]](items=[Page[int](items=[2])]),
    Row(1, [Row(2)]),
    FrozenRow(some_id=7),
    GenericRow[int](3),
    [{"orders": {Colour.RED: Point(1.0)}}, {Frozen(name="a"), Frozen(name="b")}, {Size.SMALL}],
    {Point(1.0): Order(1)},
    Frozen(name="$", at={"$dataclass": [1], "$$": 2}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_t60c_a_value_with_fields_comes_back_as_its_type(value: Any) -> None:
    again = back(value)
    assert type(again) is type(value)
    assert again == value
    assert repr(again) == repr(value)
    assert why_opaque(value) == ""


def test_t60c_the_text_is_for_readers() -> None:
    assert text_of(Order(7)) == '{"$dataclass":["' + HOME + ':Order",{"id":7,"lines":[],"note":""}]}'
    assert encode(Colour.RED) == {"$enum": [f"{HOME}:Colour", {"name": "RED", "value": 1}]}
    assert encode(Point(1.0)) == {"$namedtuple": [f"{HOME}:Point", {"x": 1.0, "y": 0.0}]}
    assert encode(Usage(prompt_tokens=1, completion_tokens=2)) == {
        "$pydantic": [f"{HOME}:Usage", {"prompt_tokens": 1, "completion_tokens": 2}]
    }
    assert encode(Row(1)) == {"$msgspec": [f"{HOME}:Row", {"id": 1, "cells": []}]}


def test_t60c_nothing_of_a_dataclass_runs_and_all_of_it_comes_back() -> None:
    value = Computed(10.0, tax=0.5)
    assert value.slow is value.slow
    RAN.clear()
    again = back(value)
    assert (again.price, again.total, again.seen_by) == (20.0, 30.0, ["somebody"])
    assert not hasattr(again, "unset")
    assert RAN == []
    assert "slow" not in vars(again)  # computed when it is asked for
    assert type(again.slow) is object


def test_t60c_a_field_that_is_a_property_is_neither_called_nor_lost() -> None:
    value = WithProperty(3)
    RAN.clear()
    assert back(value).x == 3
    assert RAN == []


def test_t60c_a_generic_dataclass_forgets_its_parameters_only() -> None:
    assert back(Box[int](3)) == Box(3)


def test_t60c_a_named_tuple_is_made_without_its_new() -> None:
    value = Louder(1.0, 2.0)
    RAN.clear()
    assert type(back(value)) is Louder
    assert RAN == []


def test_t60c_a_model_of_pydantic_comes_back_whole() -> None:
    value = Answer(id="a", finishReason="stop", usage=Usage(prompt_tokens=1), tags={"x"}, service_tier="default")
    value._request_id = "req_1"
    assert value.slow is value.slow
    RAN.clear()
    again = back(value)
    assert again.__pydantic_fields_set__ == value.__pydantic_fields_set__
    assert again.model_extra == {"service_tier": "default"}
    assert again._request_id == "req_1"
    assert again.model_dump() == value.model_dump()
    del value.__dict__["slow"]
    assert again == value
    assert RAN == []
    again.usage = None
    again.new = 1
    assert again.model_extra == {"service_tier": "default", "new": 1}


def test_t60c_a_model_that_was_not_validated_comes_back_as_it_is() -> None:
    """As SDKs make the answers of servers that say more than they document."""
    value = Answer.model_construct(id=None, usage={"prompt_tokens": "many"}, later=[1])
    again = back(value)
    assert (again.id, again.usage, again.later) == (None, {"prompt_tokens": "many"}, [1])
    assert again.model_fields_set == value.model_fields_set


def test_t60c_the_answer_of_a_real_sdk_comes_back() -> None:
    chat = pytest.importorskip("openai.types.chat")
    value = chat.ChatCompletion.model_validate(
        {
            "id": "c-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
            "made_up_by_a_proxy": {"x": [1]},
        }
    )
    again = back(value)
    assert type(again) is chat.ChatCompletion
    assert again == value
    assert again.choices[0].message.content == "hello"
    assert again.made_up_by_a_proxy == {"x": [1]}
    assert again.model_dump_json() == value.model_dump_json()


def test_t60c_a_struct_is_made_by_its_class_and_then_as_it_was() -> None:
    value = PostRow(1)
    value.extra = "x"
    again = back(value)
    assert (again.n, again.extra) == (2, "x")


def test_t60c_a_struct_whose_class_refuses_it_is_a_mapping() -> None:
    value = PostRow(999)
    assert back(value) == {"n": 1000}


# -- where the type is not known ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("value", "mapping"),
    [
        (Order(1, [Order(2)]), {"id": 1, "lines": [{"id": 2, "lines": [], "note": ""}], "note": ""}),
        (Point(1.0), {"x": 1.0, "y": 0.0}),
        (Colour.RED, {"name": "RED", "value": 1}),
        (Perm(0), {"name": None, "value": 0}),
        (Handler.FAST, {"name": "FAST"}),
        (Computed(1.0), {"price": 2.0, "total": 2.4}),
        (Row(1), {"id": 1, "cells": []}),
        ({Point(1.0)}, [{"x": 1.0, "y": 0.0}]),  # a mapping cannot stand in a set
        ({Size.SMALL: 2}, [({"name": "SMALL", "value": 1}, 2)]),
        ((Point(1.0), 2), ({"x": 1.0, "y": 0.0}, 2)),
    ],
)
def test_t60c_without_its_module_it_is_a_mapping(value: object, mapping: Any) -> None:
    assert back(value) == mapping
    assert HOME not in sys.modules


@pytest.mark.usefixtures("unloaded")
def test_t60c_the_mapping_of_a_model_has_its_extras() -> None:
    assert back(Answer(id="a", more=1)) == {"id": "a", "finish": None, "usage": None, "tags": set(), "more": 1}


@pytest.mark.usefixtures("unloaded")
def test_t60c_a_given_type_needs_no_module() -> None:
    assert back(Order(1, [Point(1.0)]), Order) == Order(1, [{"x": 1.0, "y": 0.0}])
    assert back(Page[int](items=[1]), Page[int]) == Page[int](items=[1])


def test_t60c_a_local_class_comes_back_if_it_is_given() -> None:
    @dataclass
    class Local:
        x: int

    assert back(Local(1)) == {"x": 1}
    assert back(Local(1), Local) == Local(1)


def test_t60c_a_given_type_is_found_where_it_moved_to() -> None:
    value = {"$dataclass": ["__main__:Order", {"id": 3}]}
    assert decode(value, types=ResultTypes([Order])) == Order(3)
    other = make_dataclass("Order", ["id"])
    other.__module__ = "elsewhere"
    assert decode(value, types=ResultTypes([Order, other])) == {"id": 3}  # which of the two?
    exact = {"$dataclass": ["elsewhere:Order", {"id": 3}]}
    assert decode(exact, types=ResultTypes([Order, other])) == other(3)


def test_t60c_two_models_of_one_parametrized_name_are_told_apart_only_if_given() -> None:
    one = pydantic.create_model("Item", x=(int, ...))
    other = pydantic.create_model("Item", x=(int, ...))
    value, _alive = Page[one](items=[one(x=1)]), Page[other]
    assert back(value) == {"items": [{"x": 1}]}
    assert type(back(value, Page[one], one)) is Page[one]


def test_t60c_why_it_is_a_mapping_is_told() -> None:
    told: list[tuple[str, str]] = []
    types = ResultTypes(on_miss=lambda name, why: told.append((name, why)))
    decode([{"$dataclass": ["no.such:Thing", {}]}, {"$dataclass": [f"{HOME}:Order", {"gone": 1}]}], types=types)
    assert told == [
        ("no.such:Thing", "its module is not loaded, or has no such class"),
        (f"{HOME}:Order", "it has no field 'gone' any more"),
    ]


# -- classes that have changed -----------------------------------------------------------------------------------------


def now(tag: str, kind: Any, fields: dict[str, Any], rest: dict[str, Any] | None = None) -> Any:
    """What a stored value of an older form of this class is today."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return decode({tag: [name, fields] if rest is None else [name, fields, rest]}, types=ResultTypes([kind]))


def test_t60c_an_added_field_takes_its_default() -> None:
    assert now("$dataclass", Order, {"id": 1}) == Order(1)
    assert now("$dataclass", Derived, {"a": 1}) == Derived(1)
    assert now("$namedtuple", Point, {"x": 1.0}) == Point(1.0)
    assert now("$pydantic", Usage, {"prompt_tokens": 1}) == Usage(prompt_tokens=1)
    assert now("$pydantic", Answer, {"id": "a"})._request_id is None
    assert now("$msgspec", Row, {"id": 1}) == Row(1)


@pytest.mark.parametrize(
    ("tag", "kind", "fields"),
    [
        ("$dataclass", Order, {"id": 1, "gone": 2}),
        ("$dataclass", Order, {"note": "x"}),
        ("$namedtuple", Point, {"x": 1.0, "z": 2.0}),
        ("$namedtuple", OldStyle, {"a": 1}),
        ("$pydantic", Usage, {"completion_tokens": 1}),
        ("$pydantic", Usage, {"prompt_tokens": 1, "gone": 2}),
        ("$msgspec", Row, {"cells": []}),
        ("$msgspec", Row, {"id": 1, "gone": 2}),
        ("$dataclass", Point, {"x": 1.0}),
        ("$namedtuple", Order, {"id": 1}),
        ("$pydantic", Row, {"id": 1}),
        ("$enum", Order, {"name": "id"}),
        ("$enum", Colour, {"name": "BLUE", "value": 9}),
        ("$enum", Colour, {"name": "RED", "value": 2}),  # RED had the value that GREEN has now
        ("$enum", Colour, {"name": "__class__"}),
        ("$enum", Colour, {"name": ["RED"]}),
        ("$enum", Perm, {"name": None, "value": 64}),
    ],
)
def test_t60c_what_no_longer_fits_is_a_mapping_and_loses_nothing(tag: str, kind: Any, fields: dict[str, Any]) -> None:
    assert now(tag, kind, fields) == fields


def test_t60c_extras_and_private_attributes_that_are_gone_make_a_mapping() -> None:
    assert now("$pydantic", Usage, {"prompt_tokens": 1}, {"extra": {"x": 2}}) == {"prompt_tokens": 1, "x": 2}
    assert now("$pydantic", Answer, {"id": "a"}, {"private": {"_gone": 2}}) == {"id": "a"}


def test_t60c_a_member_is_found_by_what_is_left_of_it() -> None:
    assert now("$enum", Colour, {"name": "SCARLET", "value": 1}) is Colour.RED  # renamed
    assert now("$enum", Colour, {"name": "RED", "value": 77}) is Colour.RED  # numbered anew
    assert now("$enum", Colour, {"name": "RED"}) is Colour.RED
    assert now("$enum", Handler, {"name": "LISTED", "value": [1, 2, 3]}) is Handler.LISTED
    assert now("$enum", Perm, {"name": "R|W", "value": 6}) == Perm.R | Perm.W


# -- what cannot be kept -----------------------------------------------------------------------------------------------


class Tagged(Point):
    """A named tuple with a `__dict__`."""


def tagged() -> Tagged:
    value = Tagged(1.0)
    value.more = 1  # type: ignore[attr-defined]
    return value


def endless() -> Order:
    value = Order(1)
    value.lines.append(value)
    return value


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = Box(value)
    return value


class Locked(pydantic.BaseModel):
    _lock: Any = pydantic.PrivateAttr(default_factory=object)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Order(1, [object()]), "builtins.object has no form in JSON"),
        (Failing(3), "is not safe"),
        (tagged(), "more to it than its fields"),
        (endless(), "contains itself"),
        (deep(101), "100 levels"),
        (Order(1, ["x" * 1_000_000]), "above 1 MB"),
        (Locked(), "builtins.object"),
        (Usage(prompt_tokens=1).model_copy(update={"prompt_tokens": object()}), "builtins.object"),
        (Row(1, [msgspec.UNSET]), "UnsetType"),
        (Closes("x"), "Closes has no form"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_t60c_what_cannot_be_kept_is_opaque_and_says_why(value: object, why: str) -> None:
    kind = type(value)
    assert encode(value) == {"$opaque": f"{kind.__module__}.{kind.__qualname__}"}
    assert why in why_opaque(value)


def test_t60c_up_to_the_depth_all_comes_back() -> None:
    assert back(deep(100)) == deep(100)


@dataclass
class Odd:
    """Whatever it is asked, it raises."""

    x: int = 1

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_t60c_encoding_never_raises_and_asks_no_method() -> None:
    assert encode(Odd()) == {"$dataclass": [f"{__name__}:Odd", {"x": 1}]}


def test_t60c_with_the_pickle_codec_they_are_pickled_as_before() -> None:
    encoded = encode(Order(1), codec="pickle")
    assert set(encoded) == {"$opaque", "$pickle"}
    assert decode(encoded, codec="pickle") == Order(1)
    assert decode(stored(Order(1)), codec="pickle") == Order(1)  # of a journal that was json's


def test_t60c_digests_of_arguments_stay_as_they_are() -> None:
    assert canonical(Order(1)) is None
    assert canonical([Colour.RED]) is None


def test_t60c_the_stand_in_of_an_opaque_value_stays_one() -> None:
    assert encode(Opaque("my.Type")) == {"$opaque": "my.Type"}


# -- hostile files -----------------------------------------------------------------------------------------------------


HOSTILE = [
    {"$dataclass": ["os:system", {"command": "echo"}]},
    {"$dataclass": ["subprocess:Popen", {"args": ["true"]}]},
    {"$pydantic": ["builtins:exec", {"x": 1}]},
    {"$enum": ["builtins:eval", {"name": "x"}]},
    {"$msgspec": ["builtins:dict", {"x": 1}]},
    {"$namedtuple": ["builtins:tuple", {"x": 1}]},
    {"$namedtuple": ["antigravity:x", {"x": 1}]},
    {"$dataclass": [f"{HOME}:RAN", {}]},
    {"$dataclass": [f"{HOME}:Order.__init__", {"id": 1}]},
    {"$dataclass": [f"{HOME}:Order.__class__", {"id": 1}]},
    {"$dataclass": [f"{HOME}:__loader__", {"id": 1}]},
    {"$dataclass": [f"{HOME}:", {"id": 1}]},
    {"$dataclass": [":", {"id": 1}]},
    {"$dataclass": ["", {"id": 1}]},
    {"$pydantic": [f"{HOME}:Page[int", {"nothing": []}]},
    {"$pydantic": [f"{HOME}:[", {"nothing": []}]},
]


@pytest.mark.parametrize("encoded", HOSTILE, ids=str)
def test_t60c_a_name_in_a_file_runs_nothing_and_imports_nothing(encoded: Any) -> None:
    before = set(sys.modules)
    [(_, (_, fields))] = encoded.items()
    assert decode(encoded) == fields
    assert set(sys.modules) == before
    assert RAN == []


@pytest.mark.parametrize(
    "encoded",
    [
        {"$dataclass": None},
        {"$dataclass": []},
        {"$dataclass": [f"{HOME}:Order"]},
        {"$dataclass": [f"{HOME}:Order", [1]]},
        {"$dataclass": [f"{HOME}:Order", {"$dict": [[1, 2]]}]},
        {"$dataclass": [f"{HOME}:Order", {"id": 1}, [], 4]},
        {"$dataclass": [7, {"id": 1}]},
        {"$dataclass": [["x"], {"id": 1}]},
        {"$dataclass": {"name": "x", "fields": {}}},
    ],
    ids=str,
)
def test_t60c_what_has_another_form_is_unreadable(encoded: Any) -> None:
    assert decode(encoded) == Opaque("unreadable")


def test_t60c_odd_rests_make_a_mapping() -> None:
    for rest in ({"more": 3}, {"more": [1]}, {"set": 3}, {"set": [3]}, {"extra": 3}, {"private": "x"}):
        value = now("$pydantic", Answer, {"id": "a"}, rest)
        assert value == {"id": "a"}, rest
    assert now("$dataclass", Order, {"id": 1}, {"more": 3}) == {"id": 1}
    assert now("$dataclass", Frozen, {"name": "a"}, {"more": {"x": 1}}) == {"name": "a"}


def test_t60c_attributes_in_a_file_change_no_class_and_no_slot_of_python() -> None:
    value = now("$dataclass", Order, {"id": 1}, {"more": {"__class__": "x", "__dict__": {}}})
    assert type(value) is Order
    assert value == Order(1)


def test_t60c_a_class_that_does_something_at_its_end_is_not_made() -> None:
    assert now("$dataclass", Closes, {"path": "/"}) == {"path": "/"}
    assert RAN == []


def test_t60c_a_lazy_module_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            RAN.append(name)
            return Order

        __getattr__ = __getattribute__

    monkeypatch.setitem(sys.modules, "lazy_one", Lazy("lazy_one"))
    assert decode({"$dataclass": ["lazy_one:Order", {"id": 1}]}) == {"id": 1}
    assert RAN == []
    monkeypatch.setitem(sys.modules, "no_module", None)  # type: ignore[arg-type] # Python does that
    assert decode({"$dataclass": ["no_module:Order", {"id": 1}]}) == {"id": 1}


def test_t60c_a_class_that_was_renamed_is_found_by_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "Purchase", Order, raising=False)
    assert decode({"$dataclass": [f"{HOME}:Purchase", {"id": 1}]}) == Order(1)


NAMES = st.sampled_from([f"{HOME}:{name}" for name in dir(samples)]) | st.text(max_size=8)
FORGED = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.sampled_from(["RED", "id", "x"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["id", "x", "name", "value", "lines", "extra", "set", "more"]), inner),
        st.builds(
            lambda tag, name, fields, rest: {tag: [name, fields, rest]},
            st.sampled_from(["$dataclass", "$namedtuple", "$enum", "$pydantic", "$msgspec"]),
            NAMES,
            st.dictionaries(st.sampled_from(["id", "x", "name", "value", "items", "a"]), inner, max_size=3),
            st.dictionaries(st.sampled_from(["extra", "set", "more", "private"]), inner, max_size=2),
        ),
    ),
    max_leaves=10,
)


@settings(max_examples=max(60, int(200 * SCALE)))
@given(FORGED)
def test_t60c_decoding_forged_values_never_raises_and_runs_nothing(encoded: Any) -> None:
    RAN.clear()
    before = set(sys.modules)
    decode(encoded)
    assert set(sys.modules) == before
    assert RAN == []


ORDERS = st.recursive(
    st.integers() | st.text() | st.sampled_from([Colour.RED, Size.LARGE, Perm.R | Perm.X]),
    lambda inner: st.one_of(
        st.builds(Order, st.integers(), st.lists(inner, max_size=3), st.text()),
        st.builds(Frozen, name=st.text(), at=inner),
        st.builds(Point, inner, inner),
        st.builds(Row, st.integers(), st.lists(inner, max_size=3)),
        st.builds(lambda items: Page[Any](items=items), st.lists(inner, max_size=3)),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
    max_leaves=10,
)
ANY_PAGE = Page[Any]


@settings(max_examples=max(50, int(150 * SCALE)))
@given(ORDERS)
def test_t60c_nested_values_come_back_equal(value: Any) -> None:
    again = back(value)
    assert again == value
    assert text_of(again) == text_of(value)


# -- result_types= -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_types", [int, [dict], ["Order"], [Order(1)], 7, [object]])
def test_t60c_result_types_must_be_such_classes(given_types: Any) -> None:
    with pytest.raises(InvalidType, match="result_types"):
        checked_types(given_types)


def test_t60c_result_types_may_be_one_class_or_several() -> None:
    assert checked_types(Order) == (Order,)
    assert checked_types({Point}) == (Point,)
    assert checked_types(None) == ()
    assert checked_types([Colour, Usage, Row, Page[int]]) == (Colour, Usage, Row, Page[int])
