"""Pools in notebooks: cells are executed by a real kernel, as Jupyter does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="executes notebooks; it is in the dev extra")
pytest.importorskip("ipykernel", reason="the kernel; it is in the dev extra")

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
EXECUTE = """
import json, sys, nbformat, nbclient
shown = []
for cells in json.load(sys.stdin):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=60, kernel_name="python3", allow_errors=True).execute()
    shown.append([cell.outputs for cell in book.cells])
json.dump(shown, sys.stdout)
"""

CELLS = {
    "imports": "import asyncio, contextlib\nimport headgate\n"
    "from headgate import ResourcePool, TaskPool, WorkerPool, routine",
    "define": "@routine\ndef add(x, y):\n    return x + y\n\n"
    "async def later(n):\n    await asyncio.sleep(0.05)\n    return n",
    "top-level await": "async with TaskPool() as short:\n    print(await (await short.submit(later, 4)))",
    # A pool that stays open, in a cell that may be run again.
    "open": "if 'opened' in globals():\n    await opened.aclose()\n"
    "opened = contextlib.AsyncExitStack()\n"
    "workers = await opened.enter_async_context(WorkerPool(spawn=1))\n"
    "pool = await opened.enter_async_context(TaskPool('review', max_concurrent=2, workers=workers))",
    "use": "print(await (await pool.submit(add, 1, 2)))",
    "define again": "@routine\ndef add(x, y):\n    return x + y + 100",
    "use what was defined again": "print(await (await pool.submit(add, 1, 2)))",
    "begin in one cell": "handle = await pool.submit(add, 20, 3)",
    "end in another": "print(await handle, handle.status)",
    "tasks": "pool",
    "workers": "workers",
    "keys": "values = {'<b>first</b>': 'sk-very-secret-1', 'second': 'sk-very-secret-2'}\n"
    "keys = ResourcePool(values, name='sk-very-secret-1')\nkeys",
    "progress": "async with TaskPool('batch', max_concurrent=3) as batch:\n"
    "    found = [n async for n in batch.map(later, range(12), progress='<b>twelve</b>')]\n"
    "print(found == list(range(12)))",
    "executor": "with TaskPool(max_concurrent=2).as_executor() as executor:\n"
    "    print(list(executor.map(lambda n: 2 * n, range(4))))",
    "same name": "TaskPool('review')",
    "blocks": "keys.run_sync(lambda key: key.value)",
    "no pool": "await add(1, 2)",
    "open again": "if 'opened' in globals():\n    await opened.aclose()\n"
    "opened = contextlib.AsyncExitStack()\n"
    "workers = await opened.enter_async_context(WorkerPool(spawn=1))\n"
    "pool = await opened.enter_async_context(TaskPool('review', max_concurrent=2, workers=workers))\n"
    "print(await (await pool.submit(add, 1, 2)))",
    "close": "await opened.aclose()\nprint(pool, workers)",
    # What the errors above say to do.
    "made": "pool = headgate.TaskPool('review')",
    "made again": "await headgate.pool_get('review').close()\npool = headgate.TaskPool('review')",
    "called": "keys = headgate.ResourcePool({'a': 'sk-aaaa'})\nasync def call(key): return 'called'",
    "called in a thread": "print(await keys.run(call), await asyncio.to_thread(keys.run_sync, lambda key: 'thread'))",
}
EXAMPLE = json.loads((ROOT / "examples" / "notebook.ipynb").read_text("utf-8"))["cells"]

Outputs = list[dict[str, Any]]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[list[Outputs]]:
    """What each cell showed, above and of the example, in a kernel for each."""
    folder = str(tmp_path_factory.mktemp("jupyter"))
    places = dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"), folder)
    environment = {**os.environ, **places, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), *sys.path]))}
    example = ["".join(cell["source"]) for cell in EXAMPLE if cell["cell_type"] == "code"]
    ended = subprocess.run(
        [sys.executable, "-c", EXECUTE],
        input=json.dumps([list(CELLS.values()), example]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
        cwd=folder,
    )
    assert ended.returncode == 0, ended.stderr
    found: list[list[Outputs]] = json.loads(ended.stdout)
    return found


@pytest.fixture(scope="module")
def shown(executed: list[list[Outputs]]) -> dict[str, Outputs]:
    return dict(zip(CELLS, executed[0], strict=True))


def text_of(outputs: Outputs) -> str:
    return "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout").strip()


def error_of(outputs: Outputs) -> str:
    return "".join(f"{output['ename']}: {output['evalue']}" for output in outputs if output["output_type"] == "error")


def html_of(outputs: Outputs) -> str:
    [output] = [output for output in outputs if "data" in output]
    html: str = output["data"]["text/html"]
    return html


def test_c33_cells_await_and_pools_stay_open_across_them(shown: dict[str, Outputs]) -> None:
    refused = {"same name", "blocks", "no pool"}
    failures = {cell: error_of(outputs) for cell, outputs in shown.items() if error_of(outputs)}
    assert failures.keys() == refused, failures
    assert text_of(shown["top-level await"]) == "4"
    assert text_of(shown["use"]) == "3"
    assert text_of(shown["end in another"]) == "123 completed"
    assert text_of(shown["executor"]) == "[0, 2, 4, 6]"


def test_c33_a_cell_may_be_changed_and_run_again(shown: dict[str, Outputs]) -> None:
    assert text_of(shown["use what was defined again"]) == "103", "the new definition"
    assert text_of(shown["open again"]) == "103", "in a pool of the same name, which took the place of the first"
    assert "closed" in text_of(shown["close"])


def test_c33_pools_of_all_kinds_have_a_readable_html(shown: dict[str, Outputs]) -> None:
    tasks, workers, keys = (html_of(shown[cell]) for cell in ("tasks", "workers", "keys"))
    assert "<b>TaskPool</b> &#x27;review&#x27; 0 of 2 active" in tasks
    assert tasks.count("<tr>") == 4, "a head and three tasks"
    assert ">completed<" in tasks
    assert "<b>WorkerPool</b> open: 1 ready" in workers
    assert ">ready<" in workers
    assert keys.count("<tr>") == 3
    assert ">healthy<" in keys


def test_c33_html_is_escaped_and_has_no_values_of_resources(shown: dict[str, Outputs]) -> None:
    keys = html_of(shown["keys"])
    assert "&lt;b&gt;first&lt;/b&gt;" in keys
    assert "<b>first" not in keys
    assert "very-secret" not in keys


def test_c33_progress_is_drawn_in_its_place(shown: dict[str, Outputs]) -> None:
    outputs = shown["progress"]
    assert text_of(outputs) == "True"
    html = html_of(outputs)  # one output, however often it was drawn
    assert '<progress max="12" value="12">' in html
    assert "&lt;b&gt;twelve&lt;/b&gt;: 12 of 12" in html
    assert "done" in html
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_c33_remedies_work_in_a_cell(shown: dict[str, Outputs]) -> None:
    """What an error says to do can be done where it was raised."""
    same_name, blocks, no_pool = (error_of(shown[cell]) for cell in ("same name", "blocks", "no pool"))
    assert "DuplicatePool" in same_name
    assert "await headgate.pool_get('review').close()" in same_name
    assert "await pool.run(...)" in blocks
    assert "async with headgate.TaskPool(workers=workers) as pool:" in no_pool
    assert "asyncio.run(" not in same_name + blocks + no_pool
    assert [error_of(shown[cell]) for cell in ("made", "made again", "called", "called in a thread")] == [""] * 4
    assert text_of(shown["called in a thread"]) == "called thread"


def test_c33_the_example_runs(executed: list[list[Outputs]]) -> None:
    assert all(not cell.get("outputs") for cell in EXAMPLE), "outputs are not kept in the repository"
    assert executed[1]
    assert [error_of(outputs) for outputs in executed[1]] == [""] * len(executed[1])
