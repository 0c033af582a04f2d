"""What notebooks show of pools, without a notebook."""

from __future__ import annotations

import pytest

from headgate import CooldownResource, ResourcePool, TaskPool, WorkerPool
from headgate.core.html import card
from headgate.testing import virtual


def test_c33_text_is_escaped_and_long_tables_are_cut() -> None:
    html = card("<Pool '<script>' 1 & 2>", ("a<b",), [(f"<{n}>",) for n in range(60)], more=5)
    assert html.startswith("<div><b>Pool</b> &#x27;&lt;script&gt;&#x27; 1 &amp; 2<table>")
    assert "a&lt;b" in html
    assert "&lt;49&gt;" in html
    assert "&lt;50&gt;" not in html
    assert html.endswith("<div>... and 15 more</div></div>")
    assert "x" * 200 + "..." in card("<Pool>", ("a",), [("x" * 300,)])
    assert card("<Pool>", ("a",), []) == "<div><b>Pool</b> </div>"


@virtual
async def test_c33_a_task_pool_shows_its_newest_tasks_without_values_of_resources() -> None:
    async def fail(key: object) -> None:
        raise LookupError("<i>sk-very-secret</i>")

    keys = ResourcePool({"first": "sk-very-secret"})
    async with TaskPool("review", resources=keys, max_concurrent=2) as pool:
        handles = [await pool.submit(fail, key=f"pr-{n}") for n in range(12)]
        await pool.drain()
        html = pool._repr_html_()
        assert "12 failed" in html
        assert html.count("<tr>") == 11, "a head and ten tasks"
        assert "... and 2 more" in html
        assert "pr-11" in html
        assert "LookupError: &lt;i&gt;" in html
        assert "secret" not in html
        for handle in handles:
            with pytest.raises(LookupError):
                await handle


@virtual
async def test_c33_a_resource_pool_shows_cooldowns() -> None:
    keys = ResourcePool({"first": "sk-very-secret", "second": "sk-other-secret"})

    async def call(key: object) -> None:
        raise CooldownResource(30)

    with pytest.raises(Exception, match="attempts"):
        await keys.run(call, max_attempts=1)
    html = keys._repr_html_()
    assert ">cooling down<" in html
    assert ">30.0 s<" in html
    assert "secret" not in html


@virtual
async def test_c33_pools_that_are_not_open_are_shown_too() -> None:
    assert WorkerPool(spawn=1)._repr_html_() == "<div><b>WorkerPool</b> new</div>"
    pool = TaskPool()
    assert "0 of 1 active" in pool._repr_html_()
    await pool.close()
