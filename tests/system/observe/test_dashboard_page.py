"""The page in a real Chromium: values, actions, story, filters, keys, both widths, both themes, and hostile names."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    Adaptive,
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Quota,
    Resource,
    ResourcePool,
    SqliteStore,
    TaskPool,
    backpressure_queue,
    registry,
)
from headgate.dashboard import Dashboard, serve
from headgate.tasks.names import unregister
from headgate.testing import no_leaks
from tests.support.cli.support import command, environment
from tests.system.observe.browser import Browser, missing
from tests.system.observe.conftest import Program, at_work
from tests.system.observe.large_program import apply_big_updates
from tests.system.observe.large_program import look as large_look
from tests.system.observe.support import PATIENCE, eventually

pytestmark = [
    pytest.mark.integration,
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]


async def quick(key: Resource[str]) -> None:
    """A task that is over at once, if it gets a slot."""


ROW = "[...document.querySelectorAll('#main tbody tr')].find(row => row.innerText.includes(arguments[0]))"
CARDS = (
    "Object.fromEntries([...document.querySelectorAll('#main .card')]"
    ".map(one => [one.querySelector('h2').innerText, one]))"
)
OLDEST = "Waiting longest, of each tenant"
RUNNING = f"{CARDS}['Running longest']?.querySelector('tbody tr')"
BUTTON = "[...document.querySelectorAll(arguments[0])].find(one => one.innerText.trim() === arguments[1])"


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """A browser keeps connections open from one test to the next: what is left is checked for the whole module."""


@pytest.fixture(scope="module", autouse=True)
def module_leaves_nothing_behind() -> Iterator[None]:
    with no_leaks():
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with at_work("seen") as program:
        yield program


@pytest.fixture(scope="module")
def served(program: Program) -> Iterator[Dashboard]:
    with serve() as page:
        yield page


@pytest.fixture
def page(browser: Browser, served: Dashboard) -> Iterator[Browser]:
    """The page, as somebody who was given its address sees it."""
    browser.size(1280, 900)
    if browser.run("return location.port") != str(served.port):  # else it is open: loading it takes most of a second
        browser.open(served.url)
    browser.until("return window.headgate?.applied.updates > 0")
    browser.run("document.querySelectorAll('dialog').forEach(one => one.close()); document.activeElement.blur()")
    browser.press("1")
    yield browser
    assert browser.complaints() == [], "no script failed, and the policy had nothing to stop"


@pytest.fixture
def told_page(page: Browser) -> Iterator[Browser]:
    """The page without its server: it is told what a test wants. Afterwards it looks at its program again."""
    yield page
    page.run("headgate.state.program = ''; headgate.connect()")


def test_o23_the_page_opens_hides_its_token_and_values_move(page: Browser, program: Program, served: Dashboard) -> None:
    page.until_text("calls seen")
    assert served.token not in page.run("return location.href")
    assert page.run("return document.querySelector('#link').innerText") == "live"
    done = program.pool.snapshot().completed

    async def more() -> None:
        program.pool.resize(6)
        for _ in range(3):
            await (await program.pool.submit(quick, key="ann"))
        program.pool.resize(2)

    program.do(more())
    page.until(
        "return [...document.querySelectorAll('#main td')].some(td => td.innerText === arguments[0])", str(done + 3)
    )
    assert page.run("return document.cookie") == ""


STATS = (
    "Object.fromEntries([...document.querySelectorAll('#main .stat')].filter(one => one.checkVisibility())"
    ".map(one => [one.querySelector('dt').innerText, "
    "[...one.querySelector('dd').children].map(part => part.innerText).join(' ').trim()]))"
)


def test_o20_tasks_that_a_full_queue_drops_are_no_failures_in_rate_and_total(page: Browser, program: Program) -> None:
    page.until_text("calls seen")
    failures = page.run(f"return {STATS}['Failures a second']")
    assert "Dropped a second" not in page.run(f"return {STATS}"), "as long as nothing is"

    async def full() -> TaskPool:
        return TaskPool("full", max_concurrent=1, backpressure=backpressure_queue(2, "drop_oldest"))

    async def one_more() -> None:
        await pool.submit(asyncio.sleep, 600)

    def is_dropping() -> bool:
        program.do(one_more())  # again and again: a rate is of the last seconds
        return bool(page.run(f"return /^[^0].* [1-9]\\d* in all$/.test({STATS}['Dropped a second'] ?? '')"))

    pool = program.do(full())
    try:
        page.until_text("full")
        eventually(is_dropping)
        shown = page.run(f"return {STATS}")
        assert shown["Failures a second"].split()[1:] == failures.split()[1:]
        assert shown["Failures a second"].split()[0] == "0", "in the rate neither"
        assert "dropped/s" in page.text()
        page.run("headgate.state.pools.tasks = arguments[0]", number_of(pool))
        page.press("2")
        page.until(
            f"return {STATS}['Dropped'] === arguments[0] && {STATS}['Failed'] === '0'", str(pool.snapshot(0).rejected)
        )
    finally:
        program.do(pool.close(cancel=True))


def number_of(pool: TaskPool) -> int:
    return next(one.number for one in registry.pools() if one.pool is pool)


def test_o20_processes_that_share_a_budget_are_shown_after_their_sum(page: Browser, tmp_path: Path) -> None:
    program, stores = Program(), [SqliteStore(tmp_path / "shared.db") for _ in range(2)]
    pools: list[TaskPool] = []

    async def begin() -> None:
        for store in stores:  # each plays a process, and names are unique in one
            pools.append(TaskPool("shared", max_concurrent=3, scope="tenant", scope_id="acme", store=store))
            unregister(pools[-1])
        for pool, count in zip(pools, (2, 4), strict=True):
            for _ in range(count):
                await pool.submit(asyncio.sleep, 600)

    async def end() -> None:
        for pool in pools:
            await pool.close(cancel=True)

    program.do(begin())
    rows = f"[...{CARDS}['Shared with other processes']?.querySelectorAll('tbody tr') ?? []].map(one => one.innerText)"
    try:
        page.until(f"return ({rows}).length === 3")
        first, *others = (row.split("\t") for row in page.run(f"return {rows}"))
        assert first == ["shared", "3 of 3", "3", "2"]
        assert sorted(other[1:3] for other in others) == [["1", "3"], ["2", "0"]]
        assert all(f"(pid {os.getpid()})" in other[0] for other in others)
        page.run("headgate.state.pools.tasks = arguments[0]", number_of(pools[1]))
        page.press("2")
        page.until(f"return ({rows}).length === 3")
    finally:
        program.do(end())
        program.close()
        for store in stores:
            store.close()


def test_o23_a_cancelled_task_disappears_after_a_confirmation(page: Browser, program: Program) -> None:
    handle = program.do(program.pool.submit(quick, key="to be cancelled"))
    number = f"#{handle.id.rpartition('/')[2]}"
    page.press("2")
    page.until(f"return {ROW}", "to be cancelled")
    page.click(f"{ROW}?.querySelector('td.row-actions button')", number)
    page.until("return document.querySelector('#confirm').open")
    page.click(BUTTON, "#confirm button", "Back")
    assert handle.status == "queued", "who goes back has done nothing"
    page.click(f"{ROW}?.querySelector('td.row-actions button')", number)
    page.until("return document.querySelector('#confirm').open")
    page.click(BUTTON, "#confirm button", "Cancel the task")
    page.until_text("is cancelled")
    assert eventually(lambda: handle.status == "cancelled")
    page.until(f"return !({ROW})", number)


def test_o23_a_story_is_shown_and_a_failed_task_runs_again(page: Browser, program: Program) -> None:
    page.press("2")
    page.click(f"{ROW}?.querySelector('td')", "refused by <key-")
    page.until("return document.querySelectorAll('#story li').length > 1")
    story = page.run("return document.querySelector('#story').innerText")
    assert "submitted" in story
    assert "failed: ValueError: refused by <key-" in story
    page.press("\ue00c")  # Escape
    page.until("return !document.querySelector('#story').open")
    before = program.pool.snapshot().failed
    page.click(f"{ROW}?.querySelector('td.row-actions button')", "refused by <key-")
    page.until("return document.querySelector('#confirm').open")
    page.click(BUTTON, "#confirm button", "Run it again")
    eventually(lambda: program.pool.snapshot().failed > before or program.pool.snapshot().queued)
    page.until(f"return /ran again as #\\d+/.test({ROW}.innerText)", "refused by <key-")
    assert not page.run(f"return {ROW}.querySelector('td.row-actions button')", "refused by <key-"), "once is enough"


def test_o23_enter_opens_a_story_that_stays_open(page: Browser) -> None:
    page.press("2")
    page.until(f"{RUNNING}?.focus(); return document.activeElement.tagName === 'TR'")
    page.press("\ue007")  # Enter
    page.until("return document.querySelectorAll('#story li').length > 1")
    assert page.run("return document.querySelector('#story').open")
    assert re.search(
        r"running, submitted \d+\.\d+ s ago", page.run("return document.querySelector('#story').innerText")
    )
    page.press("\ue007")
    page.until("return !document.querySelector('#story').open")


def test_o23_a_running_task_says_what_a_cancel_does(page: Browser) -> None:
    page.press("2")
    page.click(f"{RUNNING}?.querySelector('td.row-actions button')")
    page.until_text("A coroutine is cancelled at its next await.")
    page.click(BUTTON, "#confirm button", "Back")


def test_o23_the_filter_of_tasks_finds_tenants_and_tasks_and_says_what_it_does_not_find(page: Browser) -> None:
    page.press("2")
    page.until_text("refused by <key-")
    page.press("/refused by")
    page.until_text("No tenant matches \u201crefused by\u201d.")
    shown = page.run(f"return Object.fromEntries(Object.entries({CARDS}).map(([name, one]) => [name, one.innerText]))")
    assert "refused by <key-" in shown["Ended badly"]
    assert "No task matches \u201crefused by\u201d." in shown["Running longest"]
    assert re.search(r"0 of \d", shown["Running longest"])
    page.press("\ue00c/EVE")
    page.until(f"return {CARDS}['Tenants'].querySelectorAll('tbody tr').length === 1")
    tasks = page.run(f"const cards = {CARDS}; return cards['Running longest'].innerText + cards['{OLDEST}'].innerText")
    assert "<b>eve</b>" in tasks
    assert "bob" not in tasks
    page.press("\ue00c3/nothing like that")
    page.until_text("No resource matches \u201cnothing like that\u201d.")
    assert "0 of 2" in page.text()
    page.press("\ue00c5/nothing like that")
    page.until_text("No event matches \u201cnothing like that\u201d.")
    page.press("\ue00c")


def test_o21_a_cooling_key_can_be_disabled_and_what_people_do_is_no_refusal(page: Browser, program: Program) -> None:
    program.do(program.keys.cool("key-2", 900))
    page.press("3")
    refused = "[...document.querySelectorAll('#main th')].findIndex(th => th.innerText === 'Refused')"
    page.until(f"return {ROW}?.innerText.includes('cools down')", "key-2")
    actions = f"[...{ROW}.querySelectorAll('td.row-actions button')].map(one => one.innerText)"
    assert page.run(f"return {actions}", "key-2") == ["Enable", "Disable", "Pause"]
    page.run(f"[...{ROW}.querySelectorAll('td.row-actions button')][1].click()", "key-2")
    page.click(BUTTON, "#confirm button", "Disable")
    page.until(f"return {ROW}.innerText.includes('disabled')", "key-2")
    page.until(f"return String({actions}) === 'Enable,Pause'", "key-2")
    assert program.keys.stats().resources["key-2"].disables == 1
    assert page.run(f"return {ROW}.cells[{refused}].innerText", "key-2") == "0"
    assert re.search(r"Refusals a second\s+0\s*0 in all", page.text())
    program.do(program.keys.enable("key-2"))


def test_l04_o20_an_adaptive_limit_is_shown_with_its_bounds_and_its_last_cut(page: Browser, program: Program) -> None:
    async def refused(_: Resource[str]) -> None:
        raise CooldownResource(reason="429")

    async def cut() -> None:
        await program.keys.add("key-9", "a value", max_in_flight=Adaptive(start=6, most=50), tags=["l04"])
        with pytest.raises(PoolExhausted):
            await program.keys.run(refused, tags=["l04"])

    program.do(cut())
    try:
        page.press("3")
        page.until(f"return {ROW}?.innerText.includes('1 to 50, refused at 1')", "key-9")
        page.press("5")
        page.until_text("key-9 takes 1 at a time, refused at 1: 429")
    finally:
        program.do(program.keys.remove("key-9"))


def test_l05_a_pool_a_tenant_and_a_key_can_be_paused_and_resumed(page: Browser, program: Program) -> None:
    page.press("2")
    page.click(BUTTON, "#main .title button", "Pause")
    page.click(BUTTON, "#confirm button", "Pause")
    page.until(f"return {BUTTON}?.innerText === 'Resume'", "#main .title button", "Resume")
    page.until_text("paused")
    assert program.pool.stats().paused
    page.click(BUTTON, "#main .title button", "Resume")
    page.click(BUTTON, "#confirm button", "Resume")
    page.until(f"return {BUTTON}?.innerText === 'Pause'", "#main .title button", "Pause")
    assert not program.pool.stats().paused
    row = f"{CARDS}['Tenants'].querySelector('tbody tr')"
    tenant = page.run(f"return {row}.cells[0].innerText")
    page.run(f"{row}.querySelector('td.row-actions button').click()")
    page.click(BUTTON, "#confirm button", "Pause")
    page.until(f"return [...{CARDS}['Tenants'].querySelectorAll('button')].some(one => one.innerText === 'Resume')")
    assert program.pool.stats().paused_tenants == {tenant}
    program.do(_call(program.pool.resume_tenant, tenant))
    page.press("3")
    page.until(f"return Boolean({ROW})", "key-1")
    buttons = f"[...{ROW}.querySelectorAll('td.row-actions button')]"
    page.run(f"{buttons}.find(one => one.innerText === 'Pause').click()", "key-1")
    page.click(BUTTON, "#confirm button", "Pause")
    page.until(f"return {ROW}.innerText.includes('paused')", "key-1")
    assert program.keys.stats().resources["key-1"].paused
    program.keys.resume("key-1")
    page.until(f"return !{ROW}.innerText.includes('paused')", "key-1")


async def _call(function: Any, *args: Any) -> None:
    function(*args)


def test_o23_a_cooled_key_counts_down_and_can_be_enabled_by_keyboard_alone(page: Browser, program: Program) -> None:
    program.do(program.keys.cool("key-2", 900))
    page.press("3")
    rest = "parseFloat(document.querySelectorAll('#main td.rest')[1]?.innerText ?? '0')"
    first = page.until(f"return {rest} > 800 && {rest}")
    page.until(f"return {rest} < arguments[0]", first)
    page.press("jj")
    assert page.run("return document.activeElement.innerText").startswith("key-2")
    page.press("x")
    page.until("return document.querySelector('#confirm').open")
    assert page.run("return document.querySelector('#confirm').contains(document.activeElement)")
    page.press("\ue004\ue007")  # Tab to the second button, Enter
    eventually(lambda: program.keys.snapshot()["key-2"]["status"] == "healthy")
    page.until(
        "return [...document.querySelectorAll('#main .pill')].filter(one => one.innerText === 'healthy').length > 1"
    )
    page.press("/")
    assert page.run("return document.activeElement.type") == "search"
    page.press("key-1")
    page.until("return document.querySelectorAll('#main tbody tr').length === 1")
    page.press("\ue00c")
    page.until("return document.querySelectorAll('#main tbody tr').length === 2")


def test_l02_o20_a_spent_quota_is_shown_with_what_is_left_and_when_it_opens(page: Browser) -> None:
    quotas = [Quota(requests=1, tokens=5000, per=300.0), Quota(requests=3000, per=86400.0)]
    limited = Resource("limited", "sk-1", quota=quotas)
    pool = ResourcePool([limited, Resource("other", "sk-2", quota=Quota(requests=2000, per=300.0))], name="with quotas")
    asyncio.run(pool.run(quick, cost=2000, exclude=["other"]))
    page.press("3")
    left = "[...document.querySelectorAll('#main th')].find(one => one.textContent === 'Quota left')"
    page.until(f"return {left} && {left}.hidden && document.querySelector('#main tbody tr')")  # nothing to show in it
    page.until("return document.querySelector('#main select')?.innerText.includes('with quotas')")
    page.run(
        "const pick = document.querySelector('#main select');"
        "pick.value = [...pick.options].find(one => one.innerText.includes('with quotas')).value;"
        "pick.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    page.until(f"const row = {ROW}; return row && row.innerText.includes('quota spent')", "limited")
    row = page.run(f"return {ROW}.innerText", "limited")
    assert re.search(r"(29|30)\d\.\d s", row), row
    assert re.search(r"0 of 1 requests/300s \(full in [45] ?m[^)]*\), 3.0k of 5.0k tokens \(full in", row), row
    assert "3.0k of 3.0k requests/day (full in" in row, row
    assert "2.0k of 2.0k requests" in page.run(f"return {ROW}.innerText", "other")
    assert not page.run(f"return {left}.hidden")


def test_o20_a_pool_that_cannot_be_shown_has_a_sentence_and_hides_no_other(page: Browser) -> None:
    class Pool:
        name = "a pool that cannot be shown"

    def fails(pool: Pool, rows: int) -> dict[str, Any]:
        raise ValueError("the engine is away")

    pool = Pool()
    registry.register(pool, "workers", lambda pool: None, view=fails)
    try:
        page.until_text("Looking at it fails with ValueError. The log of the program says more.")
        assert "cannot be shown" in page.run(f"return {ROW}.innerText", pool.name)
        assert "undefined" not in page.run("return document.querySelector('#main').innerText")
        page.press("4")
        page.until_text("This program has no WorkerPool that can be shown now.")
        page.press("1")
        page.until_text("calls seen")
    finally:
        registry.unregister(pool)


def test_o21_resize_asks_for_a_number_and_events_tell_of_it(page: Browser, program: Program) -> None:
    page.press("2")
    page.click(BUTTON, "#main button", "Resize")
    page.until("return document.querySelector('#confirm').open")
    page.press("5")
    page.click(BUTTON, "#confirm button", "Resize")
    eventually(lambda: program.pool.max_concurrent == 5)
    page.press("5")
    page.until_text("resize 5, from the page: done")
    program.do(asyncio.wait_for(_resized(program), 5))


def test_o21_enter_means_the_action_where_a_number_is_asked_for_and_nothing_else(
    page: Browser, program: Program
) -> None:
    page.press("2")
    page.click(BUTTON, "#main button", "Resize")
    wrong = "const one = document.querySelector('#confirm-wrong'); return one.checkVisibility() ? one.innerText : ''"
    assert page.run(wrong) == ""
    for number in ("0", "abc", "3.5", "999999999"):
        page.press(f"\ue003{number}\ue007")  # Backspace, the number, Enter
        assert page.run(wrong) == "It must be a whole number from 1 to 100,000.", number
        assert page.run("return document.querySelector('#confirm').open")
    page.press("\ue0034")
    assert page.run(wrong) == ""
    page.press("\ue007")
    assert eventually(lambda: program.pool.max_concurrent == 4)
    assert not page.run("return document.querySelector('#confirm').open")
    program.do(_resized(program))
    page.click(BUTTON, "#main button", "Drain")
    page.until_text("The pool is closed for good")
    assert page.run("return document.activeElement.innerText") == "Back"
    page.press("\ue007")
    assert not page.run("return document.querySelector('#confirm').open")
    assert program.do(_submitted_and_cancelled(program)), "it is open"


async def _submitted_and_cancelled(program: Program) -> bool:
    return (await program.pool.submit(quick, key="ann")).cancel()


async def _resized(program: Program) -> None:
    program.pool.resize(2)


CONTRAST = """
const linear = (v) => v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (one) => {
  for (; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if (!/, 0\\)$|transparent/.test(colour)) return colour;
  }
  return 'rgb(255, 255, 255)';
};
const bad = [];
for (const one of document.querySelectorAll('header *, nav *, main *')) {
  const hasText = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  if (one.closest('svg') || one.disabled || !hasText || !one.checkVisibility()) continue;
  const [a, b] = [light(getComputedStyle(one).color), light(ground(one))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) bad.push(`${one.tagName}.${one.className} ${one.innerText.slice(0, 20)}`);
}
return bad;
"""


CUT = """() => [...document.querySelectorAll('#main .scroll')].filter(one => one.scrollWidth > one.clientWidth)
  .map(one => `${one.closest('.card').innerText.slice(0, 20)}: ${one.scrollWidth} in ${one.clientWidth}`)"""


@pytest.mark.parametrize("width", [1280, 390])
def test_o23_it_can_be_read_at_both_widths_in_both_themes(page: Browser, width: int) -> None:
    page.size(width, 844)
    for theme in ("light", "dark"):
        page.run("document.documentElement.dataset.theme = arguments[0]", theme)
        for tab in "12345":
            page.press(tab)
            wide, cut, faint = page.run(
                f"return [document.documentElement.scrollWidth, ({CUT})(), (() => {{ {CONTRAST} }})()]"
            )
            assert wide <= width, f"{tab} is wider than the window"
            assert cut == [], f"tables of {tab} at {width}"
            assert faint == [], f"{tab} in the theme {theme}"
    page.press("t")
    assert page.run("return document.documentElement.dataset.theme") == "light"
    page.press("p")
    assert page.run("return document.querySelector('#link').innerText") == "paused"
    page.press("p?")
    assert page.run("return document.querySelector('#keys').open")


def test_o22_a_wrong_token_is_told_apart_from_a_broken_server(browser: Browser, served: Dashboard) -> None:
    browser.open("about:blank")
    for token in ("0" * 32, "%zz", "100%zz-sixteen-chars", "é"):
        browser.open("about:blank")  # else only the fragment would change, and nothing be loaded
        browser.open(served.url.replace(served.token, token))
        browser.until_text("This link has no valid token")
    browser.open("about:blank")
    browser.complaints()


def test_o23_it_follows_the_system_from_light_to_dark_until_somebody_chooses(page: Browser) -> None:
    page.run("localStorage.removeItem('headgate-theme')")
    for theme in ("light", "dark", "light"):
        page.devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
        page.until("return document.documentElement.dataset.theme === arguments[0]", theme)
    page.press("t")
    page.devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    page.devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "light"}]})
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    page.press("t")
    page.devtools("Emulation.setEmulatedMedia", {"features": []})


CHOOSE_HOSTILE = """
const select = document.querySelector('#main .title select');
if (!select.hidden) {
  select.value = [...select.options].find(one => one.text.includes('onerror')).value;
  select.dispatchEvent(new Event('change'));
}
"""
HOSTILE = "<img src=x onerror=window.pwned=1>\"'><script>window.pwned=1</script>${7*7}"


def test_o22_hostile_names_everywhere_are_text(browser: Browser) -> None:
    async def begin() -> TaskPool:
        keys = ResourcePool([Resource(HOSTILE, "v"), Resource("other", "w")], name=f"keys {HOSTILE}", max_attempts=9)

        async def evil(key: Resource[str], what: str) -> None:
            if what == "fail":
                raise ValueError(HOSTILE)
            await asyncio.sleep(600)

        evil.__qualname__ = HOSTILE
        pool = TaskPool(f"pool {HOSTILE}", max_concurrent=2, resources=keys, queue="fair_round_robin", keep_failed=5)
        for _ in range(3):
            await pool.submit(evil, "hold", key=HOSTILE, labels={HOSTILE: HOSTILE})
        await asyncio.sleep(0)
        await keys.cool(HOSTILE, 100, HOSTILE)
        return pool

    program = Program()
    pool: TaskPool = program.do(begin())
    keys = [one.pool for one in __import__("headgate").registry.pools("resources") if HOSTILE in one.name]

    async def fail() -> None:
        async def refuse(key: Resource[str]) -> None:
            raise DisableResource(HOSTILE)

        pool.resize(6)
        for body in (refuse,):
            await pool.submit(body, key=f"{HOSTILE}2")

    try:
        with serve() as page:
            browser.open("about:blank")
            browser.open(page.url)
            browser.until("return window.headgate?.applied.updates > 0")
            program.do(fail())
            name = f"pool {HOSTILE}"
            for tab, words in (("1", name), ("2", HOSTILE), ("3", HOSTILE), ("5", HOSTILE)):
                browser.press(tab)
                if tab in "23":
                    browser.run(CHOOSE_HOSTILE)
                browser.until_text(words[:60])
            browser.press("2")
            browser.run(CHOOSE_HOSTILE)
            browser.click(f"{ROW.replace('tbody tr', 'tbody tr.open')}?.querySelector('td')", "onerror")
            browser.until("return document.querySelectorAll('#story li').length > 0")
            browser.press("\ue00c")
            assert browser.run("return window.pwned ?? null") is None
            assert browser.run("return document.querySelectorAll('main img, main script, dialog img').length") == 0
            assert browser.complaints() == []
    finally:
        program.do(pool.close(cancel=True))
        program.close()
        keys.clear()


PROGRAM = """
import asyncio, sys, headgate
async def main():
    async with headgate.TaskPool(sys.argv[1], max_concurrent=1) as pool:
        await pool.submit(asyncio.sleep, 600)
        await pool.submit(asyncio.sleep, 600)
        await asyncio.sleep(600)
asyncio.run(main())
"""


class Programs:
    """`headgate dashboard` as a process, and programs that it shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = subprocess.Popen(command("dashboard", "--json"), stdout=subprocess.PIPE, env=environment())
        assert self.server.stdout is not None
        self.url: str = json.loads(self.server.stdout.readline())["url"]
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, script: str, pool: str) -> subprocess.Popen[bytes]:
        path = self.folder / script
        path.write_text(PROGRAM)
        env = {**os.environ, "HEADGATE_OBSERVE": "1"}
        self._started.append(subprocess.Popen([sys.executable, str(path), pool], env=env, stderr=subprocess.DEVNULL))
        return self._started[-1]

    def close(self) -> None:
        for process in (self.server, *self._started):
            process.kill()
            process.communicate()


@pytest.fixture
def programs(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """A page on which no program can be seen yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    programs = Programs(tmp_path)
    try:
        browser.size(1280, 900)
        browser.open("about:blank")
        browser.open(programs.url)
        browser.until_text("No program can be seen")
        yield programs
    finally:
        programs.close()
        browser.complaints()


ENDING = """
import asyncio, sys, headgate
async def main():
    print(headgate.dashboard.serve().url, flush=True)
    async with headgate.TaskPool("ends well", max_concurrent=2) as pool:
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(*[await pool.submit(asyncio.sleep, 0) for _ in range(17)])
asyncio.run(main())
"""


def test_o23_a_program_that_ends_sends_its_last_numbers(browser: Browser) -> None:
    program = subprocess.Popen([sys.executable, "-c", ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout is not None
    try:
        browser.size(1280, 900)
        browser.open(program.stdout.readline().decode().strip())
        browser.until_text("ends well")
        program.communicate(b"\n", timeout=PATIENCE)
        assert program.returncode == 0
        browser.until_text(f"(pid {program.pid}) has ended, or has closed this page.")
        row = browser.run(f"return {ROW}.innerText", "ends well")
        assert row.split() == ["ends", "well", "tasks", "closed", "0", "of", "2", "0", "17", "0"]
        assert browser.run(f"return {STALE} && {LINK}") == "ended"
        browser.press("2")
        assert re.search(r"Running\s+0\s*of 2", browser.text())
        assert browser.run("return [...document.querySelectorAll('#main [data-act]')].every(one => one.disabled)")
    finally:
        program.kill()
        program.communicate()
        browser.open("about:blank")
        browser.complaints()  # of a server that does not answer any more


LINK = "document.querySelector('#link').innerText.replace(/\\s+/g, ' ')"
STALE = "document.body.classList.contains('stale')"


def test_o23_programs_that_die_and_start_again_and_a_server_that_is_gone(browser: Browser, programs: Programs) -> None:
    first = programs.start("service.py", "first life")
    browser.until_text("first life")
    first.kill()
    first.wait()
    browser.until_text("has ended. What you see is how it was")
    assert "first life" in browser.text(), "its last state can still be read"
    second = programs.start("service.py", "second life")
    browser.until_text("second life")
    assert "has ended" not in browser.text()
    assert f"service.py (pid {second.pid}) has started" in browser.text(), "nobody is moved there silently"
    os.kill(programs.server.pid, signal.SIGSTOP)
    browser.run("headgate.state.heard -= 20000")  # instead of waiting so long
    browser.until_text("The dashboard gives no answer. What you see is how it was")
    assert browser.run(f"return {STALE} && {LINK}").startswith("no answer for 2")
    os.kill(programs.server.pid, signal.SIGCONT)
    browser.until(f"return {LINK} === 'live' && !{STALE}")
    programs.server.terminate()
    programs.server.communicate(timeout=PATIENCE)
    browser.until_text("The dashboard does not answer")


def test_o23_a_program_that_is_stopped_gives_no_answer_until_it_goes_on(browser: Browser, programs: Programs) -> None:
    program = programs.start("service.py", "stops")
    browser.until_text("stops")
    browser.until(f"return {LINK} === 'live' && !{STALE}")
    os.kill(program.pid, signal.SIGSTOP)
    browser.until(f"return /^no answer for \\d+ s$/.test({LINK}) && {STALE}")
    browser.until_text(f"service.py (pid {program.pid}) gives no answer: it may be stopped")
    browser.open("about:blank")
    browser.open(programs.url)
    browser.until(f"return window.headgate && /^no answer for \\d+ s$/.test({LINK}) && {STALE}")
    assert "stops" in browser.text(), "also who comes later sees how it was"
    os.kill(program.pid, signal.SIGCONT)
    browser.until(f"return {LINK} === 'live' && !{STALE}")
    browser.until("return document.querySelector('#banner').hidden")


def test_o20_before_the_first_answer_the_page_says_what_it_waits_for(browser: Browser, programs: Programs) -> None:
    program = programs.start("service.py", "answers late")
    browser.until_text("answers late")
    browser.devtools("Network.enable", {})
    browser.devtools("Network.setBlockedURLs", {"urls": ["*/api/stream*"]})
    browser.open("about:blank")
    browser.open(programs.url)
    browser.until_text("Connecting")
    assert "No program" not in browser.text()
    browser.devtools("Network.setBlockedURLs", {"urls": []})
    browser.until_text("answers late")
    os.kill(program.pid, signal.SIGSTOP)
    second = Programs(programs.folder)
    try:
        browser.open(second.url)
        browser.until_text("1 program found. Waiting for the first answer.")
        assert "No program" not in browser.text()
        os.kill(program.pid, signal.SIGCONT)
        browser.until_text("answers late")
    finally:
        os.kill(program.pid, signal.SIGCONT)
        second.close()
        browser.open("about:blank")


def test_o23_a_program_that_ends_stays_chosen_while_others_run(browser: Browser, programs: Programs) -> None:
    chosen = programs.start("service.py", "chosen one")
    browser.until_text("chosen one")
    programs.start("other.py", "other one")
    browser.until("return document.querySelectorAll('#program option').length === 2")
    browser.press("2")
    browser.click(BUTTON, "#main button", "Resize")
    browser.until("return document.querySelector('#confirm').open")
    chosen.kill()
    chosen.wait()
    browser.until_text(f"service.py (pid {chosen.pid}) has ended")
    assert not browser.run("return document.querySelector('#confirm').open"), "nothing can be resized there"
    assert browser.run(f"return {STALE} && {LINK}") == "ended"
    text = browser.text()
    assert "chosen one" in text
    assert "other one" not in text
    acts = "[...document.querySelectorAll('#main [data-act]')]"
    assert browser.run(f"return {acts}.length > 1 && {acts}.every(one => one.disabled)")
    assert browser.run("return document.querySelector('#banner-show').hidden"), "other.py is another program"
    again = programs.start("service.py", "started again")
    browser.until("return !document.querySelector('#banner-show').hidden")
    assert browser.run("return headgate.state.program").startswith(str(chosen.pid)), "nobody is moved there silently"
    assert str(again.pid) in browser.run("return document.querySelector('#banner-show').innerText")
    browser.click("document.querySelector('#banner-show')")
    browser.until(f"return {LINK} === 'live' && {acts}.every(one => !one.disabled)")
    browser.until_text("started again")
    assert browser.run("return document.querySelector('#banner').hidden")


def test_o23_events_of_a_kind_and_new_ones_wait_while_somebody_reads(page: Browser, program: Program) -> None:
    page.press("5")
    page.until("return document.querySelectorAll('#main .feed li').length")
    program.do(program.keys.cool("key-1", 600, "read this"))
    page.until("return document.querySelector('#main .feed li')?.innerText.includes('read this')")
    page.devtools("Input.dispatchMouseEvent", {"type": "mouseMoved", **_middle(page, "#main .feed li")})
    program.do(program.keys.enable("key-1"))
    program.do(program.keys.cool("key-1", 600, "and that"))
    page.until("return document.querySelector('#main .card header button')?.innerText === '2 new'")
    assert "read this" in page.run("return document.querySelector('#main .feed li').innerText")
    page.devtools("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 2, "y": 2})
    page.until("return document.querySelector('#main .feed li').innerText.includes('and that')")
    assert page.run("return document.querySelector('#main .card header button').hidden")
    for kind, fits in (("workers", "No event is of this kind."), ("resources", "and that")):
        page.run(
            "const one = document.querySelector('#main header select'); one.value = arguments[0];"
            "one.dispatchEvent(new Event('change'))", kind
        )  # fmt: skip
        assert fits in page.text()
    program.do(program.keys.enable("key-1"))


def test_o23_new_events_wait_while_the_list_is_scrolled(page: Browser, program: Program) -> None:
    page.press("5")
    page.size(1280, 200)
    for n in range(8):
        program.do(program.keys.cool("key-1", 600 + n, f"number {n}"))
    page.until("return document.querySelector('#main .feed li')?.innerText.includes('number 7')")
    page.until("scrollTo(0, 150); return scrollY > 100")
    program.do(program.keys.cool("key-1", 700, "and the last"))
    page.until("return document.querySelector('#main .card header button')?.innerText === '1 new'")
    assert "number 7" in page.run("return document.querySelector('#main .feed li').innerText")
    page.click("document.querySelector('#main .card header button')")
    page.until("return document.querySelector('#main .feed li').innerText.includes('and the last')")
    assert page.run("return scrollY") == 0
    program.do(program.keys.enable("key-1"))


def _middle(page: Browser, selector: str) -> dict[str, int]:
    place = "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
    return dict(page.run(f"{place} return {{x: Math.round(box.x + 20), y: Math.round(box.y + 8)}}", selector))


RECEIVED = """
window.headgate.stop();
window.headgate.state.program = 'big';
for (const message of arguments[0]) window.headgate.received(message);
return document.body.innerText;
"""
LEGEND = """
const plot = document.querySelectorAll('#main .plot')[1];
return [...plot.querySelectorAll('.legend span')].map(one => one.checkVisibility({visibilityProperty: true})
  ? [one.querySelector('em').innerText, one.querySelector('i').className] : null)
"""


def told(turn: int, tenants: list[str], ago: float, **more: object) -> dict[str, Any]:
    """What the server sends of a program in which these tenants wait."""
    seen = large_look(turn)
    seen["pools"][0]["point"] |= {"t": seen["at"] - ago, "tenants": {name: [3, 1.0] for name in tenants}}
    for name in ("tenants", "running", "oldest"):  # few are soon drawn
        seen["pools"][0][name] = seen["pools"][0][name][:4]
    seen["pools"][0] |= more
    program = {"id": "big", "age": 0.0, "look": seen, "events": []}
    return {"alive": ["big"], "programs": [program], "budgets": [], "looking": 0}


def test_o23_a_gap_in_the_plots_is_a_gap_and_tenants_keep_their_colours(told_page: Browser) -> None:
    page = told_page
    page.press("2")
    ours = [f"tenant {n}" for n in range(5)]
    first = told(0, ours, 200.0)
    first["programs"][0]["history"] = {"1": [first["programs"][0]["look"]["pools"][0]["point"]]}
    page.run(RECEIVED, [first, *(told(n, ours, 200.0 - n) for n in range(1, 9))])
    legend = page.run(LEGEND)
    assert [one[0] for one in legend if one] == ours
    high = page.run("return document.querySelectorAll('#main .plot')[1].clientHeight")
    failed = {"failed": 89, "failures": large_failures(50)}
    text = page.run(RECEIVED, [told(n, [*ours[2:], "a new one", "another"], 65.0 - n, **failed) for n in range(62)])
    assert "50 of 89" in text
    assert "The last 50 are listed." in text
    after = page.run(LEGEND)
    assert after[2:5] == legend[2:5]
    assert {one[0] for one in after if one} == {*ours[2:], "a new one", "another"}
    assert page.run("return document.querySelectorAll('#main .plot')[1].clientHeight") == high
    new = page.run(
        "return document.querySelectorAll('#main .plot')[1].querySelectorAll('path.line')[0].getAttribute('d')"
    )
    assert new.count("L") == 61, "nothing is known of it before it was chosen"
    lines = page.run("return document.querySelectorAll('#main .plot')[0].querySelector('path.line').getAttribute('d')")
    assert lines.count("M") == 2, "no line where nobody looked"
    page.run(RECEIVED, [told(70, ours, 0.0, held=12.0)])
    assert page.run(f"return {STALE} && {LINK}") == "loop held for 12 s"
    page.run(RECEIVED, [told(71, ours, 0.0)])
    assert page.run(f"return !{STALE} && {LINK}") == "live"


def large_failures(count: int) -> list[dict[str, Any]]:
    about = {"tenant": "t", "status": "failed", "why": "ValueError", "attempt": 1, "ended_at": 1.0, "can_retry": True}
    return [{"id": f"p/{n}", "number": n, **about} for n in range(count)]


def test_o23_a_pool_that_closes_cannot_be_resized_or_drained_and_says_why(told_page: Browser) -> None:
    told_page.press("2")
    told_page.run(RECEIVED, [told(0, [], 0.0, state="closing")])
    acts = "[...document.querySelectorAll('#main .title button')].map(one => [one.innerText, one.disabled, one.title])"
    why = "big is closing: it takes no more tasks"
    assert told_page.run(f"return {acts}") == [[name, True, why] for name in ("Pause", "Resize", "Drain")]
    told_page.run(RECEIVED, [told(1, [], 0.0)])
    assert told_page.run(f"return {acts}") == [[name, False, ""] for name in ("Pause", "Resize", "Drain")]


def test_o20_w67_workers_that_are_missing_are_shown_and_those_that_others_started_are_not_resized(
    told_page: Browser,
) -> None:
    seen = told(0, [], 0.0)
    workers = seen["programs"][0]["look"]["pools"][2]
    workers |= {"size": 0, "expected": 2, "worker_count": 2, "ready": 1, "lost": 1, "losses": 1}
    told_page.press("1")
    assert "1 of 2 ready" in told_page.run(RECEIVED, [seen])
    told_page.press("4")
    text = told_page.run(RECEIVED, [seen])
    assert re.search(r"Ready\s+1\s*of 2", text, re.I), text
    button = "document.querySelector('#main .title button')"
    assert told_page.run(f"return [{button}.disabled, {button}.title]") == [
        True,
        "This pool starts no workers: it discovers those that others started.",
    ]
    workers |= {"size": 2}
    told_page.run(RECEIVED, [seen])
    assert told_page.run(f"return {button}.disabled") is False


def test_o20_headings_fit_their_rows_and_shares_are_of_what_has_ended(told_page: Browser) -> None:
    seen = told(0, [], 0.0, queued=300, oldest=large_look(0)["pools"][0]["oldest"][:3])
    keys, workers = seen["programs"][0]["look"]["pools"][1:]
    keys["resources"] = keys["resources"][:2]
    keys |= {"resource_count": 2, "disabled": 1, "cooling_down": 0}
    keys["resources"][0] |= {"acquires": 198, "successes": 192, "refusals": 2, "in_flight": 4}
    keys["resources"][1] |= {"acquires": 1000, "successes": 999, "refusals": 0, "in_flight": 0}
    workers |= {"losses": 1, "blocked": 1}
    told_page.press("2")
    text = told_page.run(RECEIVED, [seen])
    assert re.search(r"Waiting longest, of each tenant\s+3 of 300", text)
    told_page.press("3")
    assert told_page.run(
        "return [...document.querySelectorAll('#main tbody tr')].map(row => row.cells[8].innerText)"
    ) == ["99 %", "99 %"]
    told_page.press("1")
    text = told_page.text()
    for words in (
        "1 worker of workers-1 was lost",
        "1 worker of workers-1 is blocked",
        "1 of 2 resources of keys is disabled",
    ):
        assert words in text


LONG = "a very long name " + "x" * 190
TURNED = "abc\u202e\u2066 \x1b[2J\u2028 \u05d0\u05d1"


@pytest.mark.parametrize("width", [1280, 390])
def test_o23_names_that_are_long_or_turn_text_around_stay_in_their_places(told_page: Browser, width: int) -> None:
    seen = told(0, [LONG, TURNED], 0.0, name=LONG, failed=2, failures=large_failures(2))
    tasks, keys, workers = seen["programs"][0]["look"]["pools"]
    for rows in (tasks["tenants"], tasks["running"], tasks["oldest"], tasks["failures"]):
        for row, name in zip(rows[:2], (LONG, TURNED), strict=True):
            row |= {"tenant": name, "what": name, "why": name}
    for row, name in zip(keys["resources"], (LONG, TURNED), strict=False):
        row["id"] = name
    keys["name"] = workers["name"] = TURNED
    told_page.size(width, 844)
    for tab in "1234":
        told_page.press(tab)
        text = told_page.run(RECEIVED, [seen])
        assert told_page.run(f"return ({CUT})()") == [], tab
        assert told_page.run("return document.documentElement.scrollWidth") <= width, tab
        assert not {*text} & {*TURNED} - {*"abc [2J\u05d0\u05d1"}, tab
        assert "abc?? ?[2J? \u05d0\u05d1" in text or tab == "4"
        if tab == "2":
            titles = told_page.run("return [...document.querySelectorAll('#main td')].map(one => one.title)")
            assert titles.count(LONG) >= 4
            retry = told_page.run(
                "return [...document.querySelectorAll('td.row-actions button')].at(-1).getBoundingClientRect().right"
            )
            assert retry <= width


def test_o24_an_update_of_a_large_program_is_applied_to_every_view(told_page: Browser) -> None:
    page = told_page
    for tab in "1234":
        assert len(apply_big_updates(page, tab, 3)) == 3
        page.until("return document.querySelectorAll('#main tbody tr').length > 2")
    page.press("2")
    page.until_text("1 to 50 of 10,000")
