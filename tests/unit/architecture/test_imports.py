"""Import rules: which package may import which, and which modules must be pure.

Nothing is imported here. Every module is parsed, so an import inside a function is found too. Imports under
``if TYPE_CHECKING:`` are exempt: they never run, so they cannot make an import cycle.

A rule is a function from sources (path below ``src/headgate`` -> text) to complaints. Each rule has two tests: the
sources keep it, and a planted breach is reported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[3] / "src" / "headgate"

Sources = Mapping[str, str]

# ----------------------------------------------------------------------------------------------------------------------
# The packages, from the lowest layer to the highest
#
#   errors <- core <- {registry, calls} <- gate <- sharing <- stores <- resources <- context <- workers+discovery
#          <- tasks <- {observe, integrations} <- dashboard <- cli
#
# Packages joined by "+" may import each other. Packages separated by "|" or "," inside braces may not.

_LOWEST = ("core", "errors", "registry")
_WORKERS = ("context", "discovery", "workers")
_BELOW_RESOURCES = ("stores", "sharing", "gate", "calls", *_LOWEST)
_UP_TO_TASKS = ("resources", "tasks", *_WORKERS, *_BELOW_RESOURCES)
_BELOW_CLI = ("certs", "dashboard", "integrations", "observe", *_UP_TO_TASKS)

ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "core": ("errors",),
    "registry": ("core", "errors"),
    "certs": ("core", "errors"),
    "calls": ("core", "errors"),
    "gate": ("core", "errors"),
    "sharing": ("gate", *_LOWEST),
    "stores": ("sharing", *_LOWEST),
    "resources": _BELOW_RESOURCES,
    "tasks": ("resources", *_WORKERS, *_BELOW_RESOURCES),  # workers only when a pool is given some: see FOR_ATTEMPTS
    "context": ("resources", *_LOWEST),
    "workers": ("calls", "certs", "context", "discovery", "resources", *_LOWEST),
    "discovery": ("context", "workers", "resources", *_LOWEST),
    "observe": _UP_TO_TASKS,
    "integrations": _UP_TO_TASKS,
    "dashboard": ("integrations", "observe", *_UP_TO_TASKS),
    "cli": _BELOW_CLI,
    "__main__": ("cli",),
    # Shipped for users' tests. It may import every package, and no package may import it.
    "testing": ("cli", *_BELOW_CLI),
}

# A module with a version number and no imports: every package may import it.
FOR_ALL = ("_version",)

# The root module may import every package. One of its imports is for its effect, not for a name: it installs
# `observe.logging`, so that cooldowns are logged although no lower package imports logging.
ROOT_MODULE = "__init__.py"

# Modules that decide. They take the time and random numbers as arguments. A file that is renamed must be renamed here
# too; a test checks that every path exists.
PURE = (
    "calls/retry_budget.py",
    "calls/retrying.py",
    "cli/top_frame.py",
    "dashboard/security.py",
    "core/labels.py",
    "core/views.py",
    "observe/history.py",
    "observe/lines.py",
    "cli/batch/book.py",
    "cli/batch/ids.py",
    "cli/batch/journal.py",
    "cli/batch/meter.py",
    "core/wait_queue.py",
    "discovery/lan_records.py",
    "discovery/news.py",
    "discovery/records.py",
    "gate/learned.py",
    "gate/refusals.py",
    "gate/windows.py",
    "integrations/key_rules.py",
    "integrations/keys_proxy/headers.py",
    "integrations/keys_proxy/refusals.py",
    "integrations/keys_proxy/rules.py",
    "integrations/keys_proxy/tokens.py",
    "integrations/rate_limits.py",
    "integrations/token_usage.py",
    "resources/accounts.py",
    "resources/affinity.py",
    "resources/affinity_cooldowns.py",
    "resources/attempts.py",
    "resources/cooldowns.py",
    "resources/effects.py",
    "resources/exchange.py",
    "resources/health.py",
    "resources/holding.py",
    "resources/http_status.py",
    "resources/http_times.py",
    "resources/leased_budget.py",
    "resources/ledger.py",
    "resources/openings.py",
    "resources/permits.py",
    "resources/quota.py",
    "resources/quota_exchange.py",
    "resources/rate_limits.py",
    "resources/replica.py",
    "resources/siblings.py",
    "resources/stats.py",
    "resources/model.py",
    "resources/run_options.py",
    "resources/rotation.py",
    "resources/members.py",
    "resources/pickers.py",
    "resources/strategies.py",
    "sharing/claims.py",
    "sharing/protocol.py",
    "sharing/slots.py",
    "stores/codec.py",
    "stores/jsonl/compaction.py",
    "stores/jsonl/journal.py",
    "stores/jsonl/lines.py",
    "stores/result_types.py",
    "stores/structures.py",
    "stores/type_tags.py",
    "tasks/admission.py",
    "tasks/scheduling/budget.py",
    "tasks/scheduling/timers.py",
    "tasks/scheduling/scheduler.py",
    "tasks/scheduling/shared_queue.py",
    "tasks/scheduling/submit_queue.py",
    "tasks/fairness.py",
    "tasks/scheduling/idempotency.py",
    "tasks/scheduling/states.py",
    "tasks/scheduling/slots.py",
    "tasks/model.py",
    "tasks/options.py",
    "tasks/strategies.py",
    "workers/membership.py",
    "workers/missing.py",
    "workers/server/admission.py",
    "workers/server/concurrency.py",
    "workers/client/balancing.py",
    "workers/model.py",
    "workers/options.py",
    "workers/protocol/messages.py",
    "workers/protocol/message_lengths.py",
    "workers/protocol/bulk.py",
    "workers/protocol/bulk_channel.py",
    "workers/processes/restarts.py",
    "workers/protocol/client_session.py",
    "workers/protocol/worker_session.py",
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

# The only module that reads a clock or draws random numbers. `testing` is exempt: it builds the virtual clock.
CLOCK = "core/clock.py"
# A separate program: it imports nothing of headgate, and so it cannot use headgate's clock.
APART = "workers/processes/keeper.py"
TIME_AND_CHANCE = ("random", "time", "uuid")
NO_CHANCE = ("from uuid import UUID",)  # a type; it draws no random number


# ----------------------------------------------------------------------------------------------------------------------
# The rules


def layers(sources: Sources) -> Iterator[str]:
    """A package imports only the packages that ALLOWED names for it."""
    for path in sources:
        package = package_of(module_of(path))
        if path == ROOT_MODULE or package in FOR_ALL:
            continue
        if package not in ALLOWED:
            yield f"{path} is in a package without import rules: add {package} to ALLOWED"
            continue
        allowed = ALLOWED[package]
        for found in imports(path, sources):
            target = package_of(found.module)
            if found.is_ours and target not in (None, package, *allowed, *FOR_ALL):
                names = ", ".join(sorted(allowed)) or "nothing"
                yield f"{path} imports {found.module}: {package} may only import {names}"


def no_bare_root(sources: Sources) -> Iterator[str]:
    """No module of headgate imports the root package `headgate`."""
    for path in sources:
        for found in imports(path, sources):
            if found.module == "headgate" or (found.is_ours and found.binds_root):
                yield f"{path} has `{found.text}`: inside, import from the module that defines the name"


def purity(sources: Sources) -> Iterator[str]:
    """A pure module imports no event loop, thread, clock, random numbers or logging."""
    for path in PURE:
        if path in sources:
            yield from _breaches(path, sources, IMPURE, ", and is pure: pass in what it needs to know")


def one_clock(sources: Sources) -> Iterator[str]:
    """Only `core/clock.py` imports time and random numbers."""
    for path in sources:
        if path not in (CLOCK, APART) and package_of(module_of(path)) != "testing":
            yield from _breaches(path, sources, TIME_AND_CHANCE, f": only {CLOCK} may, ask its `clock`")


RULES = (layers, no_bare_root, purity, one_clock)


@cache
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """What imports: every rule asks for the same. The whole trees are not kept, for each `gc.collect()` to come."""
    # `import` is a statement; expressions import only by these functions.
    kinds = (ast.AST,) if "import_module" in source or "__import__" in source else STATEMENTS
    return tuple(filter(_is_import, _running(ast.parse(source), kinds)))


def _is_import(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Call(func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module")):
            return True
    return False


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
    """True for ``import headgate.core``: it binds the name `headgate`, and with it every package."""

    @property
    def is_ours(self) -> bool:
        return self.module.split(".")[0] == "headgate"


@cache
def module_of(path: str) -> str:
    """``resources/pool.py`` -> ``headgate.resources.pool``; a package's ``__init__.py`` -> the package."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(("headgate", *parts)).removesuffix(".__init__")


def package_of(module: str) -> str | None:
    """``headgate.resources.pool`` -> ``resources``; None for the root and for modules of others."""
    head, _, rest = module.partition(".")
    return rest.split(".")[0] or None if head == "headgate" else None


def imports(path: str, sources: Sources) -> Iterator[Import]:
    """Every import of this module that can run."""
    for node in _nodes(sources[path]):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, ast.unparse(node), binds_root=alias.asname is None)
            case ast.ImportFrom(names=names):
                base = _base(node, path)
                for alias in names:
                    deeper = f"{base}.{alias.name}"
                    yield Import(deeper if _is_module(deeper, sources) else base, ast.unparse(node))
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                yield Import(name, ast.unparse(node))


def _is_module(name: str, sources: Sources) -> bool:
    head, _, rest = name.partition(".")
    path = rest.replace(".", "/")
    is_source = f"{path}.py" in sources or f"{path}/__init__.py" in sources
    return head == "headgate" and (is_source or rest in ALLOWED or rest in FOR_ALL)


STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""What stands in statements and has statements in it."""


def _running(tree: ast.AST, kinds: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
    """Every node of these kinds, without what is for type checkers only."""
    waiting = [tree]
    while waiting:
        yield (node := waiting.pop())
        if isinstance(node, ast.If) and _is_for_checkers(node.test):
            waiting += reversed(node.orelse)
        else:
            waiting += reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, kinds)])


def _is_for_checkers(test: ast.expr) -> bool:
    match test:
        case ast.Name("TYPE_CHECKING") | ast.Attribute(ast.Name("typing"), "TYPE_CHECKING"):
            return True
    return False


def _base(node: ast.ImportFrom, path: str) -> str:
    if not node.level:
        return node.module or ""
    package = ("headgate", *PurePosixPath(path).parent.parts)
    return ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))


# ----------------------------------------------------------------------------------------------------------------------
# The tests


@pytest.fixture(scope="module")
def sources() -> Sources:
    return {path.relative_to(SRC).as_posix(): path.read_text("utf-8") for path in sorted(SRC.rglob("*.py"))}


def test_the_sources_keep_the_rules(sources: Sources) -> None:
    complaints = [complaint for rule in RULES for complaint in rule(sources)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_every_pure_module_exists(sources: Sources) -> None:
    missing = [path for path in PURE if path not in sources]
    assert not missing, f"PURE names {missing}, which do not exist: rename the path here when you rename the module"


def complaints_about(path: str, source: str, **others: str) -> list[str]:
    sources = {path: source, **{name.replace("__", "/") + ".py": text for name, text in others.items()}}
    return [complaint for rule in RULES for complaint in rule(sources)]


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
def test_a_forbidden_import_is_reported_however_it_is_written(source: str) -> None:
    allowed = "calls, core, errors, gate, registry, sharing, stores"
    assert complaints_about("resources/pool.py", source) == [
        f"resources/pool.py imports headgate.observe: resources may only import {allowed}"
    ]


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("errors.py", "core"),
        ("core/events.py", "resources"),
        ("core/events.py", "registry"),
        ("registry.py", "resources"),
        ("resources/__init__.py", "tasks"),
        ("stores/jsonl/store.py", "discovery"),
        ("workers/pool.py", "tasks"),
        ("context/wire.py", "workers"),
        ("tasks/pool.py", "observe"),
        ("observe/metrics.py", "integrations"),
        ("integrations/httpx.py", "cli"),
        ("core/clock.py", "testing"),
        ("cli/__init__.py", "testing"),
    ],
)
def test_a_package_may_not_import(path: str, target: str) -> None:
    [complaint] = complaints_about(path, f"from headgate.{target} import x")
    assert complaint.startswith(f"{path} imports headgate.{target}: {package_of(module_of(path))} may only import ")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("errors.py", "if TYPE_CHECKING:\n    from headgate.resources.model import Attempt"),
        ("errors.py", "import typing\nif typing.TYPE_CHECKING:\n    import headgate"),
        ("core/cancellation.py", "import asyncio\nfrom headgate.core.clock import clock"),
        ("resources/pool.py", "from headgate import errors\nfrom headgate.resources import rotation"),
        ("resources/signals.py", "from datetime import datetime"),
        ("tasks/pool.py", "from headgate.stores import Store"),
        ("stores/memory.py", "from headgate.sharing.states import Seen"),
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
def test_an_import_of_the_root_package_is_reported(path: str, source: str) -> None:
    assert complaints_about(path, source) == [
        f"{path} has `{source}`: inside, import from the module that defines the name"
    ]


def test_a_package_without_import_rules_is_reported() -> None:
    assert complaints_about("utils/misc.py", "") == [
        "utils/misc.py is in a package without import rules: add utils to ALLOWED"
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
def test_only_the_clock_module_imports_time_and_random_numbers(source: str) -> None:
    [complaint] = complaints_about("resources/pool.py", source)
    assert complaint.endswith(": only core/clock.py may, ask its `clock`")
    assert complaints_about(CLOCK, source) == []
