"""No module uses an underscore name that another module defines: what is needed from outside has a public name."""

from __future__ import annotations

import ast
import re
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path

import pytest

SRC = Path(__file__).parents[3] / "src" / "headgate"

OTHER_LIBRARIES = {
    "_DYNAMIC_CLASS_TRACKER_BY_CLASS": "cloudpickle: classes by value must land on the class that is there",
    "_DYNAMIC_CLASS_TRACKER_BY_ID": "cloudpickle: the same",
    "_DYNAMIC_CLASS_TRACKER_LOCK": "cloudpickle: the same",
    "_get_or_create_tracker_id": "cloudpickle: the id by which it knows a class by value",
    "_args_from_interpreter_flags": "subprocess: the flags of this interpreter, for another one that is to be like it",
    "_actions": "argparse: the arguments of a parser, which nothing else tells",
    "_asdict": "NamedTuple's, public in spite of its name",
    "_fill_text": "argparse: how a description is shown, to be overridden as its own formatters do",
    "_fields": "NamedTuple's, public in spite of its name",
    "_is_owned": "threading.RLock: does this thread hold it",
    "_make": "NamedTuple's, public in spite of its name",
    "_replace": "NamedTuple's, public in spite of its name",
    "_at_fork_reinit": "threading.RLock: frees a lock in a forked child",
    "_ActionsContainer": "argparse: what a parser and a group of arguments have in common",
    "_current_frames": "sys: documented, the only way to see the stacks of other threads",
    "_exit": "os: documented, ends a process without its clean-up",
    "_getframe": "sys: documented, who calls",
    "_get_running_loop": "asyncio: documented as for this use, None instead of an exception",
    "_set_running_loop": "asyncio: documented as for event loops; makes a loop the running one of another thread",
    "_run_exitfuncs": "atexit: what a process runs that ends with os._exit",
    "_setoption": "warnings: reads a filter as the option -W does",
}
"""Underscore names of the standard library and of dependencies that are used, and why."""

SUSPECT = re.compile(
    rf"(?<![^.\w]self)(?<![^.\w]cls)\s*\.[ \t]*_(?!_)(?!(?:version|{'|'.join(n[1:] for n in OTHER_LIBRARIES)})\b)"
    r"|^\s*from\s+\S+\s+import\b(?:\s*\([^)]*?|[^\n]*?)[\s(,]_(?!_)",
    re.MULTILINE,
)
"""What a source contains if it uses such a name of another. Most do not, and need not be parsed."""


def defined_in(tree: ast.Module) -> set[str]:
    """The underscore names that this module gives to anything: functions, classes, variables, attributes, slots."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Constant(value=str(name)):  # of __slots__
                names.add(name)
    return {name for name in names if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def uses_of_others(path: str, source: str) -> Iterator[str]:
    """Each use in this module of an underscore name that it does not define itself."""
    if not SUSPECT.search(source):
        return
    tree = ast.parse(source, path)
    own = defined_in(tree) | OTHER_LIBRARIES.keys()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name) if is_private(name) and name not in own:
                yield f"{path}:{node.lineno} uses {ast.unparse(node)}: give it a public name where it is defined"
            case ast.ImportFrom(names=names, module=module):
                for alias in names:
                    if is_private(alias.name) and alias.name not in own | {"_version", "_logging"}:
                        yield f"{path}:{node.lineno} imports {alias.name} from {module}: give it a public name there"


@pytest.fixture(scope="module")
def sources() -> Mapping[str, str]:
    generated = "_pb2.py"
    paths = [path for path in sorted(SRC.rglob("*.py")) if not path.name.endswith(generated)]
    return {path.relative_to(SRC).as_posix(): path.read_text("utf-8") for path in paths}


def test_no_module_uses_the_underscore_names_of_another(sources: Mapping[str, str]) -> None:
    found = [complaint for path, source in sources.items() for complaint in uses_of_others(path, source)]
    assert not found, f"\n{len(found)} uses\n" + "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "pool._engine",
        "self.pool._engine",
        "pool._engine = 1",
        "del pool._engine",
        "pool._start()",
        "class A:\n    def f(self, other):\n        return other.pool._engine._rotation",
        "x.self._engine",
        "from headgate.tasks.pool import _loaded",
        "from headgate.tasks.pool import (\n    loaded,\n    _loaded,\n)",
        "def late():\n    from headgate.tasks.pool import loaded as pool, _loaded",
    ],
)
def test_a_planted_use_is_reported(planted: str) -> None:
    assert list(uses_of_others("planted.py", planted))


@pytest.mark.parametrize(
    "allowed",
    [
        "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, other):\n        return other._x == 1",
        "class A:\n    __slots__ = ('_x',)\n    def f(self, other):\n        return other._x",
        "import os\nos._exit(1)",
        "x.__class__",
        "_helper = 1\nmodule._helper",
    ],
)
def test_what_a_module_defines_itself_is_not_reported(allowed: str) -> None:
    assert list(uses_of_others("allowed.py", allowed)) == []


DUNDERS_OF_OURS = {"__dispatcher__", "__engine__", "__executor__", "__follow_workers__", "__open_pool__"}
"""Invented names that stand in for underscore names. The list may only become shorter: give them public names."""


def test_no_module_invents_a_dunder_name(sources: Mapping[str, str]) -> None:
    defined = {
        name
        for source in sources.values()
        for name in re.findall(r"def (__\w+__)\(", source)
        if not any(hasattr(kind, name) for kind in KINDS) and name not in PROTOCOLS
    }
    assert defined == DUNDERS_OF_OURS


KINDS = (
    type,
    object,
    int,
    dict,
    list,
    BaseException,
    Coroutine,
    AsyncGenerator,
    AbstractContextManager,
    AbstractAsyncContextManager,
)
"""What defines the names that Python knows, between them."""
PROTOCOLS = {
    *("__post_init__", "__copy__", "__deepcopy__", "__getattr__", "__set__", "__del__", "__get__", "__setstate__"),
    *("__getnewargs__", "__replace__"),
    "__agent_notes__",  # of the package agent-readable
}
