"""Import cycles, type imports included: `cycles.txt` lists the modules that are in one, and may only become shorter.

Imports under ``if TYPE_CHECKING:`` never run, but they tie modules together for a reader all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

SRC = Path(__file__).parents[3] / "src" / "headgate"
LIST = Path(__file__).with_name("cycles.txt")

Graph = Mapping[str, set[str]]


def module_of(path: str) -> str:
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__") or "__init__"


def imports(sources: Mapping[str, str]) -> Graph:
    """The modules of headgate that each module imports, by whatever statement."""
    modules = {module_of(path): text for path, text in sources.items()}
    return {module: set(_targets(ast.parse(text), modules)) - {module} for module, text in modules.items()}


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement, at any depth. Expressions hold no imports and are nine tenths of a tree."""
    waiting = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
                waiting.append(node)
                yield node


def _targets(tree: ast.Module, modules: Mapping[str, object]) -> Iterator[str]:
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headgate."):
            base = node.module.removeprefix("headgate.")
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield from [name for name in (deeper, base) if name in modules][:1]


def knots(graph: Graph) -> list[set[str]]:
    """The groups of modules in which each imports each other, directly or not."""
    reach = {module: _reached(graph, module) for module in graph}
    found: list[set[str]] = []
    for module in sorted(graph):
        if module in reach[module] and not any(module in knot for knot in found):
            found.append({other for other in reach[module] if module in reach[other]})
    return found


def _reached(graph: Graph, module: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[module])
    while waiting:
        if (one := waiting.pop()) not in seen:
            seen.add(one)
            waiting += graph[one]
    return seen


def complaints(now: list[set[str]], listed: list[set[str]]) -> Iterator[str]:
    for knot in now:
        if not any(knot <= known for known in listed):
            known = max(listed, key=lambda one: len(one & knot), default=set())
            names = ", ".join(sorted(knot - known)) or "two knots of the list, now one"
            yield f"a new import cycle, or a longer one: {names}"
    tied = set().union(*now)
    for module in sorted(set().union(*listed) - tied):
        yield f"{module} is in no cycle any more: take it off {LIST.name}"


def test_no_import_cycle_is_new_or_longer() -> None:
    sources = {path.relative_to(SRC).as_posix(): path.read_text("utf-8") for path in SRC.rglob("*.py")}
    listed = [set(part.split()) for part in LIST.read_text("utf-8").split("\n\n")]
    found = list(complaints(knots(imports(sources)), listed))
    assert not found, "\n" + "\n".join(found)


def test_planted_cycles_are_reported() -> None:
    planted = {
        "a.py": "from headgate.b import x",
        "b.py": "if TYPE_CHECKING:\n    from headgate.c import y",
        "c/__init__.py": "def late():\n    from headgate import a\n    from headgate.a import z",
        "d.py": "from headgate.a import x",
    }
    now = knots(imports(planted))
    assert now == [{"a", "b", "c"}]
    assert list(complaints(now, [{"a", "b"}, {"e", "f"}])) == [
        "a new import cycle, or a longer one: c",
        "e is in no cycle any more: take it off cycles.txt",
        "f is in no cycle any more: take it off cycles.txt",
    ]
    assert list(complaints(now, [{"a", "b", "c"}])) == []
