"""Names that were made to do harm: half a character, codes for terminals, marks that turn text around, HTML."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate import ResourcePool, TaskPool, registry
from headgate.dashboard import serve
from headgate.observe import prometheus, publish, sampler
from tests.cli.support import run, run_here
from tests.observe.conftest import Program
from tests.observe.support import PATIENCE

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
