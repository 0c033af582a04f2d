"""`make mutants`: its changes are other programs, leave words and types alone, and are the same for the same seed."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TOOL = runpy.run_path(str(ROOT / "tools" / "mutants"))


def changed(source: str) -> list[str]:
    """What each mutant makes of a source."""
    text = source.encode()
    return [mutant.applied_to(text).decode() for mutant in TOOL["mutants"]("engine", text)]


@pytest.mark.parametrize(
    ("source", "some"),
    [
        ("a < b", ["a <= b"]),
        ("a >= b", ["a > b"]),
        ("a == b != c", ["a != b != c", "a == b == c"]),
        ("a is not b", ["a is b"]),
        ("a not in b", ["a in b"]),
        ("a and b and c", ["a or b and c", "a and b or c"]),
        ("not (a or b)", ["(a or b)", "not (a and b)"]),
        ("a + b - c", ["a - b - c", "a + b + c"]),
        ("a * b / c // d", ["a / b / c // d", "a * b * c // d", "a * b / c * d"]),
        ("a & b", ["a | b"]),
        ("a = 2, 0.5, True", ["a = 3, 0.5, True", "a = 2, 1.5, True", "a = 2, 0.5, False"]),
        ("a = min(b, c)", ["a = max(b, c)"]),
        ("a += b", ["pass", "a -= b"]),
        ("a.b = c", ["pass"]),
        ("f(a)", ["pass"]),
        ("raise E(f'{a + 1} < 2')", ["pass"]),
        ("if a: b", ["if not (a): b"]),
        ("if a > b: c", ["if not (a > b): c", "if a >= b: c"]),
        ("b if a else c", ["b if not (a) else c"]),
        ("[a for a in b if a]", ["[a for a in b if not (a)]"]),
        ("def f(a=1): return a", ["def f(a=2): return a", "def f(a=1): return None"]),
        ("while a: continue", ["while not (a): continue", "while a: pass"]),
        ("é = 'é', a < b", ["é = 'é', a <= b"]),
    ],
)
def test_each_kind_of_change(source: str, some: list[str]) -> None:
    made = changed(source)
    assert set(some) <= set(made)
    assert ast.dump(ast.parse(source)) not in {ast.dump(ast.parse(one)) for one in made}


@pytest.mark.parametrize(
    "source",
    [
        '"""1 < 2"""',
        "a: Literal[1]",
        "A: TypeAlias = dict[str, int | None]",
        "def f(a: int | Literal[1]) -> str | None: return None",
        "class A:\n    __slots__ = ('a', *('b' * 2))",
        "class A:\n    def __repr__(self): return a + 1",
        "class A:\n    def __init__(self): self.a = b",
        "if TYPE_CHECKING:\n    f(1)",
        "@dataclass(frozen=True)\nclass A: ...",
        "assert a < 1, 2",
        "raise AssertionError(1)",
        "a = f'{b + 1}'",
        "def f(): return None",
    ],
)
def test_words_types_and_what_makes_no_difference_are_left_alone(source: str) -> None:
    assert changed(source) == []


def test_the_sample_is_the_same_for_the_same_seed_and_spread_over_the_files() -> None:
    files: list[list[Any]] = [TOOL["mutants"](name, b"a < b\n" * size) for name, size in (("x", 30), ("y", 60))]
    chosen = TOOL["sample"](files, 9, 1)
    assert chosen == TOOL["sample"](files, 9, 1)
    assert chosen != TOOL["sample"](files, 9, 2)
    assert [mutant.engine for mutant in chosen] == ["x"] * 3 + ["y"] * 6
    assert len(set(chosen)) == 9
    assert len(TOOL["sample"](files, 1000, 1)) == 90


def test_every_engine_and_its_tests_exist() -> None:
    for engine, tests in TOOL["ENGINES"].items():
        source = (TOOL["PACKAGE"] / f"{engine}.py").read_bytes()
        mutants = TOOL["mutants"](engine, source)
        for mutant in mutants[:: len(mutants) // 5]:
            assert ast.dump(ast.parse(mutant.applied_to(source))) != ast.dump(ast.parse(source))
        for path in TOOL["files"](tests):
            assert (ROOT / path).exists(), path
