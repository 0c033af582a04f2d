"""Taking the values of resources out of text: what is hidden, what is not, and for how long."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core import redaction


class Owner:
    """Stands for a Resource."""


def knowing(value: object, label: str = "key-1") -> tuple[redaction.Redactor, Owner]:
    redactor, owner = redaction.Redactor(), Owner()
    redactor.learn(label, value, owner)
    return redactor, owner


def test_r07_a_text_is_hidden_wherever_it_stands() -> None:
    redactor, _owner = knowing("sk-0123456789")
    assert redactor.redact("Bearer sk-0123456789, xsk-0123456789x") == "Bearer <key-1>, x<key-1>x"
    assert redactor.redact("nothing to hide") == "nothing to hide"


SHOWS: list[Callable[[str], str]] = [str, repr, lambda text: repr(repr(text)), lambda text: repr({"k": [text]})]


@pytest.mark.parametrize("show", SHOWS, ids=["str", "repr", "repr of repr", "in a container"])
@pytest.mark.parametrize("value", ["it's 'quoted'", 'it is "quoted"', "two\nlines of it", "back\\slash", "\té\0..."])
def test_r07_forms_in_which_python_shows_a_text(value: str, show: Callable[[str], str]) -> None:
    redactor, _owner = knowing(value)
    assert "<key-1>" in redactor.redact(show(value))
    assert value not in redactor.redact(show(value))


@pytest.mark.parametrize("value", ["sk-0123456789\n", " sk-0123456789\t", "it's 'quoted'\r\n"])
def test_r07_a_value_with_space_around_it_is_hidden_without_that_too(value: str) -> None:
    """Whoever reads a key from a file has the line break too, and texts that are shown are often stripped."""
    redactor, _owner = knowing(value)
    for shown in (value, value.strip(), repr(value), repr(value.strip()), f"Bearer {value}".strip()):
        assert value.strip()[:4] not in redactor.redact(shown)
        assert "<key-1>" in redactor.redact(shown)


@pytest.mark.parametrize("show", [ascii, lambda text: repr(text.encode()), lambda text: repr({"k": text.encode()})])
def test_r07_a_value_beyond_ascii_is_hidden_as_ascii_and_bytes_show_it(show: Callable[[str], str]) -> None:
    redactor, _owner = knowing("pässword-0123")
    assert "0123" not in redactor.redact(show("pässword-0123"))


@pytest.mark.parametrize(
    ("value", "text"), [("a", "a cat sat"), ("abc", "abc"), (1234, "1234"), (None, "None"), ("", "")]
)
def test_r07_what_is_too_short_or_no_text_is_not_hidden(value: object, text: str) -> None:
    redactor, _owner = knowing(value)
    assert redactor.redact(text) == text


def test_r07_a_short_value_is_hidden_only_where_it_stands_alone() -> None:
    redactor, _owner = knowing("test")
    assert redactor.redact("the latest /tests/ of 'test', x=test") == "the latest /tests/ of '<key-1>', x=<key-1>"


def test_r07_what_stands_in_the_id_is_no_secret() -> None:
    redactor, _owner = knowing("gpu-0000-west", label="gpu-0000-west")
    assert redactor.redact("gpu-0000-west is hot") == "gpu-0000-west is hot"


class Pair(NamedTuple):
    user: str
    password: str


class Client:
    __slots__ = ("_api_key", "mode")

    def __init__(self) -> None:
        self._api_key = "sk-of-the-client"
        self.mode = "a mode of it"

    def __str__(self) -> str:
        return "Client 4711 of the shop"


class Broken:
    api_key = "not looked for in classes"

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    @property
    def token(self) -> str:
        raise RuntimeError("properties are not called")


@pytest.mark.parametrize(
    ("value", "hidden", "shown"),
    [
        (Pair("me", "my-password"), "('me', 'my-password')", "('me', '<key-1>')"),
        ({"a": {"b": ("deep-inside",)}}, "deep-inside", "<key-1>"),
        (b"\xffbinary", r"b'\xffbinary'", "b'<key-1>'"),
        ("http://me:p%40ssword@host:80", "p@ssword, me:p%40ssword at host:80", "<key-1>, <key-1> at host:80"),
        (Client(), "sk-of-the-client in a mode of it", "<key-1> in a mode of it"),
        (Client(), "by Client 4711 of the shop", "by <key-1>"),
        (Broken(), "not looked for in classes", "not looked for in classes"),
    ],
)
def test_r07_values_of_other_kinds(value: object, hidden: str, shown: str) -> None:
    redactor, _owner = knowing(value)
    assert redactor.redact(hidden) == shown


def test_r07_a_long_value_is_known_after_its_resource_is_gone_and_a_short_one_is_not() -> None:
    redactor, owner = redaction.Redactor(), Owner()
    redactor.learn("key-1", ["sk-0123456789", "short"], owner)
    del owner
    gc.collect()
    other = Owner()
    redactor.learn("key-2", "sk-9876543210", other)
    assert redactor.redact("sk-0123456789 short sk-9876543210") == "<key-1> short <key-2>"


def test_r07_a_value_that_was_replaced_is_still_hidden() -> None:
    redactor, owner = knowing("sk-of-yesterday")
    redactor.learn("key-1", "sk-of-today-01", owner)
    assert redactor.redact("sk-of-yesterday sk-of-today-01") == "<key-1> <key-1>"


def test_r07_of_two_resources_with_one_value_the_newest_names_it() -> None:
    redactor, owner = knowing("sk-0123456789", label="old")
    newer = Owner()
    redactor.learn("new", "sk-0123456789", newer)
    assert redactor.redact("sk-0123456789") == "<new>"
    del owner


def test_r07_past_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_PAST", 10)
    redactor, living = knowing("sk-that-lives-on")
    for number in range(5000):
        redactor.learn("proxy", f"http-proxy-{number:08}", Owner())
    assert len(redactor._labels) <= 12
    assert len(redactor._lengths) <= 12
    assert len(redactor._known) <= 2
    assert redactor.redact("sk-that-lives-on http-proxy-00004990") == "<key-1> <proxy>"
    assert redactor.redact("http-proxy-00000001") == "http-proxy-00000001"
    del living


def test_r07_a_copy_from_another_process_is_known_too() -> None:
    redactor = redaction.Redactor()
    for _ in range(2):
        redactor.meet("key-1", "sk-0123456789")
        redactor.meet("key-1", {"token": "tk-0123456789", "user": "me myself"})
    assert redactor.redact("sk-0123456789 tk-0123456789 me myself") == "<key-1> <key-1> me myself"


TEXTS = st.text(alphabet="ab1 '", max_size=12)


@given(st.lists(TEXTS, max_size=6), st.lists(TEXTS, max_size=12))
def test_r07_few_values_and_many_are_hidden_alike(values: list[str], parts: list[str]) -> None:
    """None that is long enough is left, and both ways to search agree on whether there is one."""
    redactor, owners = redaction.Redactor(), [Owner() for _ in values]
    for number, (value, owner) in enumerate(zip(values, owners, strict=True)):
        redactor.learn(str(number), value, owner)
    text = "".join(parts)
    searched, scanned = redactor._search(text), redactor._scan(text)
    assert (searched == text) == (scanned == text)
    for value in values:
        if len(value) >= 8:
            assert value not in searched
            assert value not in scanned


def test_r07_an_exception_is_logged_without_values(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    redaction.learn("key-1", "sk-logged-0123", owner)

    def fail(text: str) -> None:
        try:
            raise ValueError(text)
        except ValueError:
            redaction.log_exception("headgate.resources", "it failed %s", 3)

    fail("harmless")
    fail("bad sk-logged-0123")
    harmless, bad = caplog.records
    assert harmless.exc_info is not None, "handlers of users may want the exception itself"
    assert bad.exc_info is None, "not if it shows a value"
    assert "it failed 3" in bad.message
    assert "ValueError: bad <key-1>" in bad.message
    assert "sk-logged" not in caplog.text
