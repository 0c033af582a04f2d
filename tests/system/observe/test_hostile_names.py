"""Names that were made to do harm: half a character, codes for terminals, marks that turn text around, HTML."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate import DisableResource, ResourcePool, TaskPool, pool_wait, registry
from headgate.dashboard import serve
from headgate.observe import prometheus, publish, sampler
from tests.support.cli.support import run, run_here
from tests.system.observe.conftest import Program
from tests.system.observe.support import PATIENCE

pytestmark = pytest.mark.integration

HOSTILE = "half \ud800 \x1b[2J \u202e </script> " + "x" * 500


@pytest.fixture
def pools(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Pools, a tenant and a resource with such a name, in a program that is published. Gives their numbers."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    keys = ResourcePool({HOSTILE: "value"}, name=HOSTILE)
    twin = ResourcePool({HOSTILE: "value"}, name=HOSTILE)

    async def begin() -> TaskPool:
        pool = TaskPool(HOSTILE)
        await pool.submit(asyncio.sleep, 600, key=HOSTILE)
        return pool

    pool = program.do(begin())
    publication = publish()
    numbers = {one.kind: str(one.number) for one in registry.pools() if one.pool in (pool, keys)}
    yield {**numbers, "task": f"{pool.id}/1"}
    publication.close()
    program.do(pool.close(cancel=True))
    del twin


def test_o10_they_are_printed_as_text(pools: dict[str, str]) -> None:
    for asked in (["ps"], ["top", "--once"], ["show", pools["task"]], ["disable", HOSTILE]):
        ran = run_here(*asked)
        printed = ran.stdout + ran.stderr
        assert "half" in printed
        assert not {"\ud800", "\x1b", "\u202e"} & set(printed), asked
    assert "could be of several pools" in printed


TWO_LINES = "one\ntwo"


@pytest.fixture
def lined(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Names and a reason with line breaks. Gives the id of a task that has failed."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def fail(key: object) -> None:
        raise DisableResource(TWO_LINES)

    async def begin() -> tuple[TaskPool, str]:
        keys = ResourcePool({TWO_LINES: "value"}, name=TWO_LINES)
        pool = TaskPool(TWO_LINES, resources=keys)
        handle = await pool.submit(fail, key=TWO_LINES, idempotency_key=TWO_LINES)
        await pool_wait([handle])
        return pool, handle.id

    pool, task = program.do(begin())
    publication = publish()
    yield task
    publication.close()
    program.do(pool.close(cancel=True))


def test_o10_line_breaks_in_names_make_no_lines(lined: str) -> None:
    story = run_here("show", lined).stdout.splitlines()
    assert len(story) > 2
    assert [line for line in story[1:] if not re.match(r"  \d\d:\d\d:\d\d\.\d{3}  ", line)] == []
    assert story[0].startswith(r"one\ntwo#1 (one\ntwo), ")
    assert any(r"one\ntwo" in line for line in story[1:])
    assert json.loads(run_here("show", lined, "--json").stdout)["lines"] == [line.strip() for line in story[1:]]
    for asked in ("ps", "top"):
        printed = run_here(asked, *(["--once"] if asked == "top" else [])).stdout
        assert not any(line.lstrip().startswith("two") for line in printed.splitlines()), printed


def test_o10_line_breaks_in_names_make_no_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        keys = ResourcePool({TWO_LINES: "value"}, name=TWO_LINES)
        await keys.cool(TWO_LINES, 5, TWO_LINES)
        await keys.disable(TWO_LINES)

    with caplog.at_level("INFO", "headgate.resources"):
        asyncio.run(main())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all(line.startswith(r"one\ntwo: one\ntwo ") and "\n" not in line for line in told), told


def test_o10_they_are_printed_as_json(pools: dict[str, str]) -> None:
    for asked in (["ps", "--json"], ["top", "--json"], ["show", pools["task"], "--json"]):
        ran = run(*asked)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert "half" in json.dumps(json.loads(ran.stdout))


def test_o22_the_page_gets_them_as_text(pools: dict[str, str]) -> None:
    asked = [f"rows?list=tenants&pool=%23{pools['tasks']}", f"rows?list=resources&pool=%23{pools['resources']}"]
    with serve() as page:
        for path in (*asked, f"story?task={pools['task']}"):
            made = http.client.HTTPConnection("127.0.0.1", page.port, timeout=PATIENCE)
            made.request("GET", f"/api/{path}&program=here", headers={"Authorization": f"Bearer {page.token}"})
            answer = made.getresponse()
            body = answer.read()
            assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json"), body
            assert "half" in json.dumps(json.loads(body))
            made.close()


def test_o30_metrics_have_them_as_labels(pools: dict[str, str]) -> None:
    try:
        text = prometheus.exposition(prometheus.PoolCollector(sampler.acquire())).decode()
    finally:
        sampler.release()
    for label in ("pool", "tenant", "resource"):
        assert f'{label}="half \\\\ud800' in text
