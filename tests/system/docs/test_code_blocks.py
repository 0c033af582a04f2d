"""Every ``python`` block of README.md and docs/*.md runs.

The blocks of one file share one namespace and run in order, in an empty directory. A block that awaits at its top level
runs on a virtual loop, and in a file with the comment ``<!-- real time -->`` on a real loop, because other processes do
not follow virtual time. A block that defines ``test_...`` functions without parameters runs them too. A block after the
comment ``<!-- not run -->`` is left out.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

from headgate.testing import VirtualLoop, run

ROOT = Path(__file__).parents[3]
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if path.exists()]

BLOCK = re.compile(
    r"^(?P<skip><!-- not run -->\s*\n)?(?P<indent>[ ]*)```python[^\n]*\n(?P<source>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)

REAL_TIME = re.compile(r"^<!-- real time -->$", re.MULTILINE)


class Block(NamedTuple):
    line: int
    """Number of the document's line before the first line of code."""
    source: str

    def compiled(self, name: str) -> CodeType:
        # The empty lines make tracebacks point into the document.
        padded = "\n" * self.line + self.source
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(padded, name, "exec", flags=flags, dont_inherit=True)
        return code


def blocks_of(text: str) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        if not found["skip"]:
            indent = found["indent"]
            lines = [line.removeprefix(indent) for line in found["source"].splitlines()]
            yield Block(text.count("\n", 0, found.start("source")), "\n".join(lines))


def runner_of(text: str) -> Callable[[Any], Any]:
    return asyncio.run if REAL_TIME.search(text) else run


def execute(block: Block, name: str, namespace: dict[str, Any], run: Callable[[Any], Any] = run) -> None:
    code = block.compiled(name)
    before = dict(namespace)
    result = eval(code, namespace)
    if code.co_flags & inspect.CO_COROUTINE:
        run(result)
    for defined, value in list(namespace.items()):
        if defined.startswith("test_") and before.get(defined) is not value and not inspect.signature(value).parameters:
            value()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": document.stem}
    text = document.read_text("utf-8")
    for block in blocks_of(text):
        execute(block, str(document), namespace, runner_of(text))


def run_text(text: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    for block in blocks_of(text):
        execute(block, "planted.md", namespace, runner_of(text))
    return namespace


def test_blocks_share_names_and_may_await() -> None:
    text = "```python\nimport asyncio\nx = 1\n```\n\n```python\nawait asyncio.sleep(3600)\nx += 1\n```\n"
    assert run_text(text)["x"] == 2


def test_a_document_may_ask_for_real_time() -> None:
    text = "```python\nimport asyncio\nloop = type(asyncio.get_running_loop())\nawait asyncio.sleep(0)\n```\n"
    assert run_text(text)["loop"] is VirtualLoop
    assert run_text(f"<!-- real time -->\n{text}")["loop"] is not VirtualLoop


def test_blocks_in_lists_lose_their_indent() -> None:
    assert run_text("- so:\n\n  ```python\n  if True:\n      y = 2\n  ```\n")["y"] == 2


@pytest.mark.parametrize("gap", ["", "\n"])
def test_marked_blocks_and_other_languages_are_left_out(gap: str) -> None:
    text = f"<!-- not run -->\n{gap}```python\n1 / 0\n```\n```sh\n1 / 0\n```\n```\n1 / 0\n```\n```python\nz = 3\n```\n"
    assert run_text(text)["z"] == 3


def test_tests_of_a_block_are_called_once() -> None:
    text = "```python\ncalls = []\ndef test_it(): calls.append(1)\ndef test_other(fixture): 1 / 0\n```\n"
    assert run_text(text + "```python\nw = 4\n```\n")["calls"] == [1]


def test_a_failure_points_into_the_document() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_text("# Title\n\n```python\nok = 1\n1 / 0\n```\n")
    last = caught.traceback[-1]
    assert (Path(str(last.path)).name, last.lineno + 1) == ("planted.md", 5)
