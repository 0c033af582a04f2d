"""Pickles that were recorded load as they did, and pickles made now name nothing that an older release has not got."""

from __future__ import annotations

import base64
import pickle
import pkgutil
from functools import cache

import pytest

import headgate
from tests.frozen import pickles
from tests.frozen.pickles import PYTHON, Made, group_of, made_now, meaning, names_in, operations, ours
from tests.frozen.support import ANEW, recorded, same

RECORDED = recorded("pickles/pickles.json")
GLOBALS = recorded("pickles/globals.json")
USED = [*GLOBALS["in payloads"], *GLOBALS["in public things only"]]
FROZEN_GLOBALS = frozenset([*USED, *GLOBALS["public names"]])
"""Names of headgate that the recorded release can import: pickles made now may hold these and no others."""


@cache
def now() -> dict[str, Made]:
    return made_now()


def then(name: str) -> bytes:
    return base64.b64decode(RECORDED[name]["pickle"])


@cache
def groups() -> dict[str, list[str]]:
    """Names of pickles by kind. A test for each pickle would take longer than all that it tests."""
    found: dict[str, list[str]] = {}
    for name, made in now().items():
        found.setdefault(group_of(name, made), []).append(name)
    return found


each_group = pytest.mark.parametrize("group", sorted(groups()))


def test_every_pickle_is_recorded() -> None:
    assert sorted(now()) == sorted(RECORDED), ANEW


@each_group
def test_recorded_pickles_mean_what_they_meant(group: str) -> None:
    if group == "code" and GLOBALS["python"] != PYTHON:
        pytest.skip(f"they hold code that {GLOBALS['python']} compiled, and this is {PYTHON}")
    for name in groups()[group]:
        try:
            told = meaning(now()[name]._replace(data=then(name)))
        except Exception as error:
            raise AssertionError(f"the recorded pickle of {name} cannot be loaded: {error!r}") from error
        same(f"the meaning of the recorded pickle of {name}", told, RECORDED[name]["meaning"])


@each_group
def test_pickles_made_now_mean_the_same(group: str) -> None:
    for name in groups()[group]:
        same(f"the meaning of a pickle of {name}", meaning(now()[name]), RECORDED[name]["meaning"])


@each_group
def test_pickles_made_now_can_be_loaded_by_an_older_release(group: str) -> None:
    wrong = []
    for name in groups()[group]:
        before, after = ours(names_in(then(name))), ours(names_in(now()[name].data))
        if unknown := after - FROZEN_GLOBALS:
            gone = ", ".join(sorted(before - after)) or "none"
            wrong.append(f"{name} refers to {', '.join(sorted(unknown))} (recorded, and not any more: {gone})")
    assert not wrong, (
        "pickles made now refer to names that the recorded release cannot import, and so an older worker cannot load "
        "them. Give what moved its recorded name for pickling (`__module__`, `__reduce__`):\n" + "\n".join(wrong)
    )


@each_group
def test_pickles_made_now_say_the_same(group: str) -> None:
    fixed = [name for name in groups()[group] if now()[name].fixed]
    if not fixed:
        pytest.skip("compiled code differs between Pythons, and names its file")
    for name in fixed:
        same(f"the pickle of {name}", operations(now()[name].data), operations(then(name)))


def test_names_in_older_pickles_can_be_imported() -> None:
    missing = []
    for name in sorted(FROZEN_GLOBALS):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert not missing, "pickles of older releases refer to these names:\n" + "\n".join(missing)


def test_a_payload_beside_its_pickle_is_as_it_was() -> None:
    large = recorded("pickles/large.json")
    same("a large payload", pickles.large_payload(), large["payload"])
    same("a recorded large payload", pickles.large_meaning(large["payload"]), large["meaning"])


@pytest.mark.parametrize("name", ["Context", "ResourcePool"])
def test_what_belongs_to_its_process_refuses(name: str) -> None:
    with pytest.raises(headgate.InvalidType):
        pickle.dumps(pickles.refusing()[name])


def test_names_are_found_in_pickles_within_pickles() -> None:
    inner = pickle.dumps(headgate.QueueFull("full"), 5)
    assert "headgate.errors:QueueFull" in names_in(pickle.dumps([inner, inner], 5))
    assert "headgate.errors:QueueFull" in names_in(pickle.dumps(headgate.QueueFull("full"), 2))
