"""Tests show behaviour: `internals.txt` counts where they look inside headgate instead, and may only become smaller.

Counted are names that a test imports from a module that is neither public, nor a port, nor a pure engine that is
tested against a model, and what a test patches, with `monkeypatch.setattr` or `mock.patch`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
LIST = Path(__file__).with_name("internals.txt")

PUBLIC = {
    *("", "errors", "registry", "context", "resources", "tasks", "stores", "workers", "discovery", "dashboard"),
    *("observe", "observe.logging", "observe.json_logs", "observe.prometheus", "observe.opentelemetry"),
    "observe.opentelemetry_metrics",
    *("integrations", "testing"),
}
"""What users import, below `headgate`; and all modules directly in `integrations` and `testing`."""
PORTS = {
    *("sharing.link", "sharing.states", "sharing.transactions", "stores.port", "discovery.port"),
    *("workers.processes.placement", "workers.client.balancing"),
    *("workers.processes.keepers", "workers.processes.engine_keepers", "core.pool_executor"),
}
ENGINES = (
    *("calls", "gate", "resources.rotation", "resources.effects", "tasks.scheduling", "sharing.slots"),
    *("resources.exchange", "resources.permits", "resources.health", "resources.replica"),
    *("resources.quota", "resources.ledger", "resources.quota_exchange", "resources.leased_budget"),
    *("core.key_windows", "core.labels", "core.lessons", "core.views"),
    *("sharing.claims", "sharing.memory", "sharing.protocol"),
    *(
        "stores.codec",
        "stores.jsonl.lines",
        "workers.codec",
        "workers.protocol.client_session",
    ),
    *("workers.protocol.worker_session", "workers.protocol.messages", "workers.protocol.wire", "workers.protocol.bulk"),
    *("observe.history", "observe.metrics", "observe.lines", "cli.arguments", "cli.batch.journal", "cli.batch.ids"),
)
"""Pure modules and packages of them, and the values that they take and return."""

IMPORT = re.compile(
    r"^[ \t]*(?:from headgate[\w.]* import (?:\([^)]*\)|[^\n(]+)|import headgate\.[^\n]*)", re.MULTILINE
)
"""An import of headgate, also in a program that a test holds as a text. To parse all files would take 2 s."""
PATCH = re.compile(r"\w\.setattr\(|\bpatch(?:\.object)?\(")


class Count(NamedTuple):
    """How often the tests of a folder look inside."""

    imports: int
    patches: int


def is_internal(module: str) -> bool:
    path = module.removeprefix("headgate").removeprefix(".")
    if path in PUBLIC | PORTS or re.fullmatch(r"(integrations|testing)\.\w+", path):
        return False
    return not any(path == engine or path.startswith(f"{engine}.") for engine in ENGINES)


def imported(source: str, modules: set[str]) -> Iterator[str]:
    """The module of each name that is imported from headgate, or the name itself if it is a module."""
    for statement in IMPORT.findall(source):
        for node in ast.parse(dedent(statement)).body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    deeper = f"{node.module}.{alias.name}"
                    yield deeper if deeper in modules else str(node.module)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)


def counts(sources: Mapping[str, str], modules: set[str]) -> dict[str, Count]:
    """The counts of each folder of tests that looks inside at all; a folder is `unit/tasks`, whatever is below it."""
    imports: Counter[str] = Counter()
    patches: Counter[str] = Counter()
    for path, source in sources.items():
        folder = "/".join(path.split("/")[:-1][:2]) or "."
        imports[folder] += sum(map(is_internal, imported(source, modules)))
        patches[folder] += len(PATCH.findall(source))
    return {
        folder: Count(imports[folder], patches[folder])
        for folder in sorted(imports)
        if imports[folder] or patches[folder]
    }


def complaints(now: Mapping[str, Count], listed: Mapping[str, Count]) -> Iterator[str]:
    for folder in sorted({*now, *listed}):
        have, had = now.get(folder, Count(0, 0)), listed.get(folder, Count(0, 0))
        if have.imports > had.imports:
            yield f"{folder}: {have.imports} imports of internals instead of {had.imports}: use a public name or a port"
        if have.patches > had.patches:
            yield f"{folder}: {have.patches} patches instead of {had.patches}: use an option of headgate"
        if have != had and have.imports <= had.imports and have.patches <= had.patches:
            yield f"{folder} looks inside less often: change its line in {LIST.name} to `{line(folder, have)}`"


def line(folder: str, count: Count) -> str:
    return f"{folder:26} {count.imports:4} {count.patches:4}"


def recorded(text: str) -> dict[str, Count]:
    rows = (row.split() for row in text.splitlines() if not row.startswith("#"))
    return {folder: Count(int(imports), int(patches)) for folder, imports, patches in rows}


def test_tests_do_not_look_inside_more_often() -> None:
    source = ROOT / "src"
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in source.rglob("*.py")
    }
    texts = {path.relative_to(TESTS).as_posix(): path.read_text("utf-8") for path in TESTS.rglob("*.py")}
    del texts[Path(__file__).relative_to(TESTS).as_posix()]
    found = list(complaints(counts(texts, modules), recorded(LIST.read_text("utf-8"))))
    assert not found, "\n" + "\n".join(found)


def test_planted_looks_inside_are_counted_and_reported() -> None:
    planted = {
        "unit/tasks/test_one.py": "from headgate import TaskPool\nfrom headgate.core.clock import (\n    a,\n    b,\n)",
        "unit/tasks/deep/test_two.py": "def f():\n    from headgate.core import clock\n    m.setattr(clock, 'x', 1)",
        "unit/gate/test_pure.py": "from headgate.gate.windows import Window\nfrom headgate.integrations.httpx import x",
        "conftest.py": "import headgate.core.clock\nCODE = '''\nfrom headgate.tasks.pool import TaskPool\n'''",
    }
    now = counts(planted, {"headgate.core.clock"})
    assert now == {".": Count(2, 0), "unit/tasks": Count(3, 1)}
    assert list(complaints(now, {".": Count(2, 0), "unit/tasks": Count(3, 1)})) == []
    assert list(complaints(now, {"unit/tasks": Count(4, 0), "unit/gate": Count(1, 0), ".": Count(2, 1)})) == [
        f". looks inside less often: change its line in internals.txt to `{line('.', Count(2, 0))}`",
        f"unit/gate looks inside less often: change its line in internals.txt to `{line('unit/gate', Count(0, 0))}`",
        "unit/tasks: 1 patches instead of 0: use an option of headgate",
    ]
    assert recorded(f"# a comment\n{line('.', Count(2, 0))}\n") == {".": Count(2, 0)}
