"""One tree of errors, each with a stable code and a remedy; all of them travel."""

from __future__ import annotations

import pickle
import re

import pytest

from headgate import errors
from headgate.errors import HeadgateError

ALL = sorted(
    (thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, HeadgateError)),
    key=lambda kind: kind.__name__,
)
LEAVES = [kind for kind in ALL if kind is not HeadgateError]

FIXED = {
    "QueueFull": "POL-001",
    "PoolBusy": "POL-002",
    "DuplicatePool": "POL-003",
    "ScopeNeedsStore": "POL-004",
    "PipelineIdMissing": "POL-005",
    "IdempotencyConflict": "POL-006",
    "WaitCycle": "POL-007",
    "PoolClosed": "POL-008",
    "SubmitTimeout": "POL-009",
}


def test_the_codes_that_are_promised() -> None:
    for name, code in FIXED.items():
        assert getattr(errors, name).code == f"HEADGATE-{code}"


def test_codes_are_unique_and_well_formed() -> None:
    codes = [kind.code for kind in LEAVES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"HEADGATE-[A-Z]{3}-\d{3}", code) for code in codes)


def test_the_tree_drawn_at_the_top_is_the_tree() -> None:
    drawn = dict(re.findall(r"─ (\w+)(?: \(\w+\))? +(HEADGATE-\S+)", errors.__doc__ or ""))
    assert drawn == {kind.__name__: kind.code for kind in LEAVES}
    bases = dict(re.findall(r"─ (\w+) \((\w+)\)", errors.__doc__ or ""))
    for name, base in bases.items():
        assert base in {parent.__name__ for parent in getattr(errors, name).__mro__}


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_an_error_says_what_happened_and_what_to_do(kind: type[HeadgateError]) -> None:
    error = kind("something happened")
    assert str(error) == f"something happened. {kind.remedy} [{kind.code}]"
    assert kind.remedy != HeadgateError.remedy
    assert kind.remedy.endswith(".")
    assert error.message == "something happened"
    assert kind.__doc__


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_errors_survive_pickling(kind: type[HeadgateError]) -> None:
    error = kind("something happened", remedy="Do this.")
    error.add_note("a note")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is kind
    assert str(twin) == str(error) == f"something happened. Do this. [{kind.code}]"
    assert twin.args == error.args


def test_a_subclass_with_a_constructor_of_its_own_survives_too() -> None:
    twin = pickle.loads(pickle.dumps(Odd(code_number=7)))
    assert (twin.number, str(twin)) == (7, str(Odd(code_number=7)))


class Odd(errors.RpcError):
    def __init__(self, *, code_number: int) -> None:
        super().__init__(f"code {code_number}")
        self.number = code_number


def test_the_builtin_kin() -> None:
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(errors.InvalidType, TypeError)
    assert issubclass(errors.UnknownResource, KeyError)
    assert issubclass(errors.RoutineTimeout, TimeoutError)
    assert issubclass(errors.TransientRpcError, errors.RpcError)
    assert str(errors.UnknownResource("unknown resource_id 'x'")).startswith("unknown resource_id 'x'. ")


def test_the_empty_message_still_says_something() -> None:
    assert str(errors.PoolBusy()).startswith("PoolBusy. ")
