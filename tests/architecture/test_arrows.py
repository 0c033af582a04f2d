"""Imports point one way, and the pure modules stay pure: DESIGN's picture of the house, read from the sources.

Nothing is imported here: every module is parsed, so an import hidden inside a function is seen like any other. Only
what stands under ``if TYPE_CHECKING:`` is exempt: it is never run, and ties no knot.

A contract is a function from sources (path below ``src/headgate`` -> text) to complaints. So each has two tests: the
house keeps it, and a planted breach is reported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[2] / "src" / "headgate"

Sources = Mapping[str, str]

# ----------------------------------------------------------------------------------------------------------------------
# The house
#
#   errors <- core <- resources <- {tasks+stores | context <- workers+discovery} <- combined <- {observe, integrations}
#          <- cli
#
# "+" is one storey whose rooms may know each other; what braces part may not.

_GROUND = ("core", "errors")
_TASKS = ("stores", "tasks")
_WORKERS = ("context", "discovery", "workers")
_BELOW_COMBINED = ("resources", *_TASKS, *_WORKERS, *_GROUND)
_BELOW_CLI = ("integrations", "observe", "combined", *_BELOW_COMBINED)

ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "core": ("errors",),
    "resources": _GROUND,
    "tasks": ("stores", "resources", *_GROUND),
    "stores": ("tasks", "resources", *_GROUND),
    "context": ("resources", *_GROUND),
    "workers": ("context", "discovery", "resources", *_GROUND),
    "discovery": ("context", "workers", "resources", *_GROUND),
    "combined": _BELOW_COMBINED,
    "observe": ("combined", *_BELOW_COMBINED),
    "integrations": ("combined", *_BELOW_COMBINED),
    "cli": _BELOW_CLI,
    # Shipped for users' tests. It may look into every room, and no room may lean on it.
    "testing": ("cli", *_BELOW_CLI),
}

# A number without imports of its own: anyone may read it.
EVERYBODYS = ("_version",)

# The face of the house stands above all rooms and may import any. One of its imports is for the effect alone, not for a
# name: it installs `observe.logging`, so that cooldowns reach a user's log although no room below knows of logging.
FACE = "__init__.py"

# What decides, and so takes `now` and chance as arguments. A renamed file must be renamed here (a test asks).
PURE = (
    "core/wait_queue.py",
    "resources/affinity.py",
    "resources/attempts.py",
    "resources/effects.py",
    "resources/stats.py",
    "resources/model.py",
    "resources/run_options.py",
    "resources/rotation.py",
    "resources/members.py",
    "resources/strategies.py",
    "stores/codec.py",
    "stores/jsonl/compaction.py",
    "stores/jsonl/journal.py",
    "stores/jsonl/lines.py",
    "stores/type_tags.py",
    "tasks/admission.py",
    "tasks/scheduling/timers.py",
    "tasks/scheduling/queues/by_requirement.py",
    "tasks/scheduling/scheduler.py",
    "tasks/scheduling/submit_queue.py",
    "tasks/scheduling/queues/fair.py",
    "tasks/fairness.py",
    "tasks/scheduling/idempotency.py",
    "tasks/scheduling/queues/by_key.py",
    "tasks/scheduling/states.py",
    "tasks/scheduling/slots.py",
    "tasks/model.py",
    "tasks/options.py",
    "tasks/scheduling/queues/simple.py",
    "tasks/strategies.py",
    "workers/server/admission.py",
    "workers/client/balancing.py",
    "workers/model.py",
    "workers/protocol/messages.py",
    "workers/protocol/bulk.py",
    "workers/processes/restarts.py",
    "workers/protocol/session.py",
)
IMPURE = (
    "asyncio",
    "headgate.core.clock",
    "logging",
    "os",
    "random",
    "socket",
    "threading",
    "time",
)

# Where time and chance come in. `testing` is free: it builds the virtual clock.
CLOCK = "core/clock.py"
# A program of its own: it imports nothing of headgate, and has no test clock to follow.
APART = "workers/processes/keeper.py"
TIME_AND_CHANCE = ("random", "time", "uuid")
NO_CHANCE = ("from uuid import UUID",)  # a kind of value; it draws nothing


# ----------------------------------------------------------------------------------------------------------------------
# The contracts


def arrows(sources: Sources) -> Iterator[str]:
    """A room imports only the rooms below it."""
    for path in sources:
        room = room_of(module_of(path))
        if path == FACE or room in EVERYBODYS:
            continue
        if room not in ROOMS:
            yield f"{path} is in no room of the house: give {room} its place in ROOMS"
            continue
        allowed = ROOMS[room]
        for found in imports(path, sources):
            target = room_of(found.module)
            if found.is_ours and target not in (None, room, *allowed, *EVERYBODYS):
                yield f"{path} imports {found.module}: {room} may only import {', '.join(sorted(allowed)) or 'nothing'}"


def no_bare_root(sources: Sources) -> Iterator[str]:
    """Nobody inside the house goes out and in again by the front door."""
    for path in sources:
        for found in imports(path, sources):
            if found.module == "headgate" or (found.is_ours and found.binds_root):
                yield f"{path} has `{found.text}`: inside, import from the module that defines the name"


def purity(sources: Sources) -> Iterator[str]:
    """What decides takes time and chance as arguments, and knows no loop, thread or log."""
    for path in PURE:
        if path in sources:
            yield from _breaches(path, sources, IMPURE, ", and is pure: pass in what it needs to know")


def one_clock(sources: Sources) -> Iterator[str]:
    """Time and chance enter by one door."""
    for path in sources:
        if path not in (CLOCK, APART) and room_of(module_of(path)) != "testing":
            yield from _breaches(path, sources, TIME_AND_CHANCE, f": only {CLOCK} may, ask its `clock`")


CONTRACTS = (arrows, no_bare_root, purity, one_clock)


def _breaches(path: str, sources: Sources, forbidden: tuple[str, ...], why: str) -> Iterator[str]:
    for found in imports(path, sources):
        if found.text in NO_CHANCE:
            continue
        if any(found.module == name or found.module.startswith(name + ".") for name in forbidden):
            yield f"{path} imports {found.module}{why}"


# ----------------------------------------------------------------------------------------------------------------------
# Reading imports


class Import(NamedTuple):
    module: str
    """Absolute, down to the module: ``from headgate.core import clock`` is ``headgate.core.clock``."""
    text: str
    binds_root: bool = False
    """``import headgate.core`` leaves the name `headgate` behind, and with it every room."""

    @property
    def is_ours(self) -> bool:
        return self.module.split(".")[0] == "headgate"


def module_of(path: str) -> str:
    """``resources/pool.py`` -> ``headgate.resources.pool``; a package's ``__init__.py`` -> the package."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(("headgate", *parts)).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    """``headgate.resources.pool`` -> ``resources``; the root and foreign modules are in none."""
    head, _, rest = module.partition(".")
    return rest.split(".")[0] or None if head == "headgate" else None


def imports(path: str, sources: Sources) -> Iterator[Import]:
    """Every import of this module that can run."""
    known = {module_of(other) for other in sources} | {f"headgate.{room}" for room in (*ROOMS, *EVERYBODYS)}
    for node in _running(ast.parse(sources[path], path)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, ast.unparse(node), binds_root=alias.asname is None)
            case ast.ImportFrom(names=names):
                base = _base(node, path)
                for alias in names:
                    deeper = f"{base}.{alias.name}"
                    yield Import(deeper if deeper in known else base, ast.unparse(node))
            case ast.Call(
                func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name, ast.unparse(node))


def _running(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for otherwise in child.orelse:
                yield from _running(otherwise)
        else:
            yield from _running(child)


def _base(node: ast.ImportFrom, path: str) -> str:
    if not node.level:
        return node.module or ""
    package = ("headgate", *PurePosixPath(path).parent.parts)
    return ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))


# ----------------------------------------------------------------------------------------------------------------------
# The tests


@pytest.fixture(scope="module")
def house() -> Sources:
    return {path.relative_to(SRC).as_posix(): path.read_text("utf-8") for path in sorted(SRC.rglob("*.py"))}


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_the_house_keeps(contract: Callable[[Sources], Iterator[str]], house: Sources) -> None:
    complaints = list(contract(house))
    assert not complaints, "\n" + "\n".join(complaints)


def test_every_pure_module_is_there(house: Sources) -> None:
    missing = [path for path in PURE if path not in house]
    assert not missing, f"PURE names {missing}, which do not exist: a renamed module must not slip out of the contract"


def complaints_about(path: str, source: str, **others: str) -> list[str]:
    sources = {path: source, **{name.replace("__", "/") + ".py": text for name, text in others.items()}}
    return [complaint for contract in CONTRACTS for complaint in contract(sources)]


@pytest.mark.parametrize(
    "source",
    [
        "import headgate.observe as o",
        "from headgate import observe",
        "from headgate.observe import anything",
        "from ..observe import anything",
        "from .. import observe",
        "def late():\n    import headgate.observe as o",
        "try:\n    from headgate.observe import x\nexcept ImportError:\n    pass",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import headgate.observe as o",
        "import importlib\nimportlib.import_module('headgate.observe')",
    ],
)
def test_an_import_against_the_arrows_is_reported_however_it_is_written(source: str) -> None:
    assert complaints_about("resources/pool.py", source) == [
        "resources/pool.py imports headgate.observe: resources may only import core, errors"
    ]


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("errors.py", "core"),
        ("core/events.py", "resources"),
        ("resources/__init__.py", "tasks"),
        ("tasks/pool.py", "workers"),
        ("tasks/pool.py", "context"),
        ("stores/jsonl/store.py", "discovery"),
        ("workers/pool.py", "tasks"),
        ("workers/pool.py", "combined"),
        ("context/wire.py", "workers"),
        ("combined/pool.py", "observe"),
        ("observe/metrics.py", "integrations"),
        ("integrations/httpx.py", "cli"),
        ("core/clock.py", "testing"),
        ("cli/__init__.py", "testing"),
    ],
)
def test_a_room_may_not_import(path: str, target: str) -> None:
    [complaint] = complaints_about(path, f"from headgate.{target} import x")
    assert complaint.startswith(f"{path} imports headgate.{target}: {room_of(module_of(path))} may only import ")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("errors.py", "if TYPE_CHECKING:\n    from headgate.resources.model import Attempt"),
        ("errors.py", "import typing\nif typing.TYPE_CHECKING:\n    import headgate"),
        ("core/cancellation.py", "import asyncio\nfrom headgate.core.clock import clock"),
        ("resources/pool.py", "from headgate import errors\nfrom headgate.resources import rotation"),
        ("resources/signals.py", "from datetime import datetime"),
        ("tasks/pool.py", "from headgate.stores import Store"),
        ("stores/memory.py", "from headgate.tasks.model import Record"),
        ("workers/pool.py", "from headgate.resources.rotation import Rotation"),
        ("cli/__init__.py", "from headgate._version import __version__"),
        ("testing/loop.py", "import time\nfrom headgate.core.clock import clock\nfrom headgate.cli import main"),
        ("__init__.py", "import headgate.observe.logging as _logging\nfrom headgate.testing import x"),
    ],
)
def test_what_is_allowed_is_not_reported(path: str, source: str) -> None:
    assert complaints_about(path, source) == []


@pytest.mark.parametrize(
    "source",
    ["import headgate", "import headgate as h", "from headgate import ResourcePool", "import headgate.errors"],
)
@pytest.mark.parametrize("path", ["resources/pool.py", "testing/loop.py", "__init__.py"])
def test_the_front_door_is_not_for_those_inside(path: str, source: str) -> None:
    assert complaints_about(path, source) == [
        f"{path} has `{source}`: inside, import from the module that defines the name"
    ]


def test_a_room_without_a_place_is_reported() -> None:
    assert complaints_about("utils/misc.py", "") == [
        "utils/misc.py is in no room of the house: give utils its place in ROOMS"
    ]


@pytest.mark.parametrize("name", ["asyncio", "logging", "os.path", "socket", "threading"])
@pytest.mark.parametrize("path", PURE)
def test_a_pure_module_may_not_import(path: str, name: str) -> None:
    assert complaints_about(path, f"def late():\n    import {name}") == [
        f"{path} imports {name}, and is pure: pass in what it needs to know"
    ]


@pytest.mark.parametrize("source", ["from headgate.core.clock import clock", "from headgate.core import clock"])
def test_a_pure_module_may_not_read_the_clock(source: str) -> None:
    assert complaints_about(PURE[-1], source, core__clock="import time") == [
        f"{PURE[-1]} imports headgate.core.clock, and is pure: pass in what it needs to know"
    ]


@pytest.mark.parametrize("source", ["import time", "from random import choice", "def f():\n    from uuid import uuid4"])
def test_time_and_chance_enter_by_one_door(source: str) -> None:
    [complaint] = complaints_about("resources/pool.py", source)
    assert complaint.endswith(": only core/clock.py may, ask its `clock`")
    assert complaints_about(CLOCK, source) == []
