"""`headgate ps`, `top`, `show`, `cancel`, `retry`, `enable`, `disable`, `resize`: what they print and do."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate import ResourcePool, TaskPool, registry
from headgate.cli import ps, top
from headgate.cli.output import print_table
from headgate.cli.ps import rows_of
from headgate.cli.top_frame import Settings, frame
from headgate.observe import programs, publish
from headgate.observe.history import DROPPED
from tests.support.cli.support import command, environment, run_here
from tests.system.observe.conftest import Program
from tests.system.observe.support import PATIENCE, SECRET, eventually, published_program

pytestmark = pytest.mark.integration

AS_IT_WAS = "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""What is written when the terminal is given back."""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def published(program: Program) -> Iterator[Program]:
    publication = publish()
    yield program
    publication.close()


def test_o10_ps_lists_programs_and_their_pools(published: Program) -> None:
    ran = run_here("ps")
    assert (ran.returncode, ran.stderr) == (0, "")
    [tasks] = [line for line in ran.stdout.splitlines() if published.pool.name in line]
    assert re.search(rf"^{os.getpid()} .* tasks +open +2/2 +2 +4 +1 ", tasks), tasks
    assert "1 healthy, 1 cooling, 0 disabled" in ran.stdout
    [seen] = json.loads(run_here("ps", "--json").stdout)
    assert seen["pid"] == os.getpid()
    other = run_here("ps", "--pid", "1")
    assert other.stdout == ""
    assert (other.returncode, "no program with pid 1 can be seen" in other.stderr) == (2, True)


def test_o10_without_a_program_it_says_how_one_is_seen() -> None:
    ran = run_here("ps")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "HEADGATE_OBSERVE=1" in ran.stderr
    for asked in (["show", "x/1"], ["cancel", "x/1"], ["resize", "x", "3"]):
        ran = run_here(*asked)
        assert ran.returncode == 2
        assert "no program can be seen" in ran.stderr
    shown = run_here("top", "--once").stdout
    assert "No program can be seen" in shown
    assert "headgate.observe.publish()" in shown


def test_l05_pause_and_resume_a_pool_a_tenant_and_a_key(published: Program) -> None:
    pool, keys = published.pool, published.keys
    assert run_here("pause", pool.name).stdout == f"{pool.name} is paused; what runs continues\n"
    assert pool.stats().paused
    [tasks] = [line for line in run_here("ps").stdout.splitlines() if pool.name in line]
    assert re.search(r" tasks +paused +2/2 +2 ", tasks), tasks
    assert "paused" in run_here("top", "--once").stdout
    assert run_here("resume", pool.name).stdout == f"{pool.name} is resumed\n"
    assert not pool.stats().paused
    done = json.loads(run_here("pause", pool.name, "<b>eve</b>", "--json").stdout)["done"]
    assert done == f"the tenant <b>eve</b> of {pool.name} is paused; what runs continues"
    assert pool.stats().paused_tenants == {"<b>eve</b>"}
    assert run_here("resume", pool.name, "<b>eve</b>").returncode == 0
    assert pool.stats().paused_tenants == frozenset()
    assert run_here("pause", keys.name, "key-1").stdout == "key-1 is paused; what runs continues\n"
    assert keys.stats().resources["key-1"].paused
    assert "1 healthy, 1 cooling, 0 disabled, 1 paused" in run_here("ps").stdout
    assert run_here("resume", keys.name, "key-1").returncode == 0
    assert keys.stats().paused == 0
    for wrong, why in (
        ([keys.name], "is a pool of resources"),
        ([keys.name, "key-9"], "has no resource"),
        (["x"], "no such pool"),
    ):
        ran = run_here("pause", *wrong)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert why in ran.stderr


def test_o10_show_prints_a_story_and_actions_act(published: Program) -> None:
    pool, keys = published.pool, published.keys
    ran = run_here("show", f"{pool.name}/1")
    assert ran.returncode == 0
    assert "failed: ValueError: refused by <key-" in ran.stdout
    assert SECRET not in ran.stdout
    assert json.loads(run_here("show", f"{pool.id}/1", "--json").stdout)["title"].startswith(pool.name)
    number = next(task.id.rpartition("/")[2] for task in pool.snapshot().tasks if task.status == "queued")
    assert run_here("cancel", f"{pool.name}#{number}").stdout == f"{pool.name}#{number} is cancelled\n"
    assert run_here("retry", f"{pool.name}/1").returncode == 0
    assert run_here("disable", "key-1", "--pool", keys.name).returncode == 0
    assert keys.snapshot()["key-1"]["status"] == "disabled"
    done = json.loads(run_here("enable", "key-1", "--pool", keys.name, "--json").stdout)
    assert done == {"action": "enable", "target": "key-1", "pool": keys.name, "done": "key-1 is enabled"}
    assert run_here("resize", pool.name, "9").returncode == 0
    assert pool.max_concurrent == 9
    eventually(lambda: pool.snapshot().cancelled == 1)
    closing = run_here("drain", pool.name)
    assert closing.stdout == f"{pool.name} takes no more tasks, and is closed when those that it has have ended\n"
    assert run_here("ps", "--json").stdout.count('"closing"') == 1
    refused = run_here("cancel", f"{pool.name}/{number}")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "has ended already" in refused.stderr


def test_o10_names_with_slashes_and_pools_of_one_name_can_be_acted_on(published: Program) -> None:
    twins = [ResourcePool({"twin": "value"}, name="team/keys") for _ in range(2)]

    async def begin() -> TaskPool:
        pool = TaskPool("team/calls#new")
        await pool.submit(asyncio.sleep, 600)
        await pool.submit(asyncio.sleep, 600)
        return pool

    pool = published.do(begin())
    try:
        for task in ("team/calls#new#1", "team/calls#new/2"):
            assert run_here("cancel", task).stdout == f"team/calls#new#{task[-1]} is cancelled\n"
        numbers = [one.number for one in registry.pools("resources") if one.pool in twins]
        listed = [f"team/keys (#{number})" for number in numbers]
        refused = run_here("disable", "twin")
        assert refused.returncode == 1
        assert f"could be of several pools: {', '.join(listed)}." in refused.stderr
        assert all(name in run_here("ps").stdout for name in listed)
        assert run_here("disable", "twin", "--pool", f"#{numbers[1]}").returncode == 0
        assert [twin.snapshot()["twin"]["status"] for twin in twins] == ["healthy", "disabled"]
    finally:
        published.do(pool.close(cancel=True))


def test_o10_top_prints_once_and_as_json(published: Program) -> None:
    printed = run_here("top", "--once").stdout
    for heading in ("Task pools", "Tenants", "Resources", "Slowest tasks", "Ended badly"):
        assert heading in printed
    assert re.search(r"key-2 +keys \S+ +cooling +[23]\d\d\.\d s", printed)
    [seen] = json.loads(run_here("top", "--json").stdout)
    assert {view["kind"] for view in seen["pools"]} >= {"tasks", "resources"}
    assert run_here("top").returncode == 2, "without a terminal there is nothing to draw on"


# -- a live screen -----------------------------------------------------------------------------------------------------


def _as_a_shell_starts_it() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests run under nohup


class Terminal:
    """A pseudo-terminal with a screen that is kept: what a person would see now."""

    def __init__(self, columns: int, lines: int, *through: str) -> None:
        """`through`: a command that gets the command of the live view as its arguments."""
        self.ours, theirs = pty.openpty()
        self.resize(columns, lines)
        env = {**environment(), "TERM": "xterm", "PYTHONUTF8": "1"}
        self.process = subprocess.Popen(
            [*through, *command("top", "--every", "0.3")],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=_as_a_shell_starts_it,
        )
        os.close(theirs)
        self.written = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self) -> None:
        while select.select([self.ours], [], [], 0.05)[0]:
            try:
                self.written += os.read(self.ours, 65536).decode("utf-8", "replace")
            except OSError:  # nobody writes here any more
                return

    def screen(self) -> list[str]:
        """The lines of the last whole frame."""
        self.read()
        frames = self.written.split("\x1b[H")[1:]
        whole = [one for one in frames if "\x1b[J" in one]
        if not whole:
            return []
        text = re.sub(r"\x1b\[[0-9;]*m", "", whole[-1].partition("\x1b[J")[0]).replace("\r\n", "\n")
        return [line.removesuffix("\x1b[K").rstrip() for line in text.split("\n")]

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def shows(self, pattern: str) -> list[str]:
        """Wait until a line of the screen matches, and return the screen."""
        limit = time.monotonic() + PATIENCE
        while True:
            screen = self.screen()
            if any(re.search(pattern, line) for line in screen):
                return screen
            assert time.monotonic() < limit, "\n".join(screen)

    def until(self, text: str) -> str:
        """Wait until this is written, and return what was written so far."""
        eventually(lambda: (self.read(), text in self.written)[1])
        return self.written


@pytest.fixture
def terminal(published: Program) -> Iterator[Terminal]:
    with opened(100, 40) as terminal:
        yield terminal


@contextmanager
def opened(columns: int, lines: int, *through: str) -> Iterator[Terminal]:
    terminal = Terminal(columns, lines, *through)
    yield terminal
    if terminal.process.poll() is None:
        terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.ours)


def test_o10_top_is_a_live_screen_that_is_sorted_filtered_and_paused(published: Program, terminal: Terminal) -> None:
    screen = terminal.shows(r"^key-2 .*cooling")
    assert screen[0].startswith("headgate top: 1 program, ")
    assert max(map(len, screen)) < 100
    assert len(screen) < 40
    left = float(re.search(r"(\d+\.\d) s", next(line for line in screen if line.startswith("key-2")))[1])  # type: ignore[index]
    terminal.shows(rf"^key-2 .*cooling +(?!{left})2\d\d\.\d s")  # it counts down
    published.do(published.keys.disable("key-1"))
    terminal.shows(r"^key-1 .*disabled")
    terminal.press("s")
    terminal.shows("sorted by name")
    terminal.press("/eve")
    terminal.shows("^filter: eve_")
    terminal.press("\r")
    screen = terminal.shows("only 'eve'")
    assert any(line.startswith("<b>eve</b>") for line in screen)
    assert not any(line.startswith("ann") for line in screen)
    terminal.press("\x1b")
    terminal.shows("^ann ")
    terminal.press("p")
    terminal.shows("PAUSED")
    terminal.press("q")
    assert terminal.process.wait(PATIENCE) == 0
    terminal.read()
    assert terminal.written.endswith(AS_IT_WAS)


def test_o10_top_survives_the_end_of_a_program_and_ctrl_c_ends_it(published: Program, terminal: Terminal) -> None:
    terminal.shows("^key-2 ")
    publish().close()
    terminal.shows("No program can be seen")
    publication = publish()
    terminal.shows("^key-2 ")
    terminal.press("\x03")
    assert terminal.process.wait(PATIENCE) == 130
    publication.close()


def test_o10_top_gives_the_terminal_back_while_it_is_stopped(published: Program) -> None:
    shell = ("bash", "-mc", '"$@"; echo IT IS STOPPED; read -r line; fg; echo THE END', "bash")
    with opened(100, 40, *shell) as terminal:
        terminal.shows("^key-2 ")
        terminal.press("\x1a")
        before, _, _ = terminal.until("IT IS STOPPED").rpartition("IT IS STOPPED")
        assert AS_IT_WAS in before[-200:]
        terminal.written = ""
        terminal.press("\r")
        terminal.until("\x1b[?1049h")
        terminal.shows("^key-2 ")
        terminal.press("q")
        assert AS_IT_WAS in terminal.until("THE END")


def test_o10_top_follows_the_size_of_the_terminal_and_a_hangup_ends_it(published: Program, terminal: Terminal) -> None:
    terminal.shows("^key-2 ")
    for columns, lines in ((10, 3), (1, 1), (500, 200), (40, 12)):
        terminal.resize(columns, lines)
        terminal.written = ""
        eventually(lambda: (terminal.read(), terminal.written.count("\x1b[J") > 2)[1])
        screen = terminal.screen()
        assert max(map(len, screen)) < max(columns, 2)
        assert len(screen) <= lines
    terminal.process.send_signal(signal.SIGHUP)
    assert terminal.process.wait(PATIENCE) == 129
    terminal.read()
    assert terminal.written.endswith(AS_IT_WAS)


def test_o10_top_ends_with_its_terminal_also_if_it_hears_no_hangup(published: Program) -> None:
    with opened(80, 24, "sh", "-c", 'trap "" HUP; exec "$@"', "sh") as terminal:
        terminal.shows("^key-2 ")
        os.close(terminal.ours)
        terminal.ours = os.open(os.devnull, os.O_RDONLY)
        assert terminal.process.wait(PATIENCE) == 0


@contextmanager
def another_program(program: Program) -> Iterator[int]:
    """A program whose pools have the same names as those of this one. Gives its pid."""
    code = (
        "import asyncio, sys, headgate\n"
        "async def main():\n"
        "    async with headgate.TaskPool(sys.argv[1], max_concurrent=1) as pool:\n"
        "        keys = headgate.ResourcePool({'key-1': 'value'}, name=sys.argv[2])\n"
        "        for _ in range(20): await pool.submit(asyncio.sleep, 600)\n"
        "        print(flush=True)\n"
        "        await asyncio.to_thread(sys.stdin.read)\n"
        "asyncio.run(main())\n"
    )
    with published_program(code, program.pool.name, program.keys.name) as pid:
        yield pid


def test_o10_of_several_programs_that_have_what_is_meant_none_is_acted_on(published: Program) -> None:
    pool, here = published.pool, os.getpid()
    number = next(task.id.rpartition("/")[2] for task in pool.snapshot().tasks if task.status == "queued")
    with another_program(published) as there:
        for asked in (["show", f"{pool.name}/{number}"], ["cancel", f"{pool.name}/{number}"],
                      ["disable", "key-1"], ["resize", pool.name, "9"]):  # fmt: skip
            ran = run_here(*asked)
            assert (ran.returncode, ran.stdout) == (2, ""), asked
            assert f"several programs have it: {min(here, there)}, {max(here, there)}" in ran.stderr
            assert "--pid" in ran.stderr
        assert (pool.snapshot().queued, pool.max_concurrent) == (2, 2)
        assert run_here("resize", pool.name, "3", "--pid", str(there)).returncode == 0
        assert pool.max_concurrent == 2
        assert run_here("disable", "key-2").returncode == 0, "only one program has it"
        assert published.keys.snapshot()["key-2"]["status"] == "disabled"
        assert run_here("cancel", f"{pool.id}/{number}").returncode == 0, "the id of a pool is of one program alone"
        missing = run_here("cancel", f"{pool.name}/99999")
        assert (missing.returncode, missing.stderr.count("is not known")) == (1, 2)


def test_o10_a_program_that_is_stopped_is_not_asked_to_do_what_another_may_have_done(
    published: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "PATIENCE", 0.5)
    monkeypatch.setattr(ps, "PATIENCE", 0.5)
    monkeypatch.setattr(top, "PATIENCE", 0.5)
    with another_program(published) as there:
        os.kill(there, signal.SIGSTOP)
        os.waitpid(there, os.WUNTRACED)
        ran = run_here("cancel", f"{published.pool.name}/6")
        assert (ran.returncode, ran.stdout) == (1, "")
        assert f"pid {there} does not answer" in ran.stderr
        assert "--pid" in ran.stderr
        assert published.pool.snapshot().cancelled == 0
        listed = run_here("ps")
        assert (listed.returncode, published.pool.name in listed.stdout) == (1, True)
        alone = run_here("ps", "--pid", str(there))
        assert alone.returncode == 1
        assert f"pid {there} does not answer" in alone.stderr
        assert "can be seen" not in alone.stderr
        looked = {one["pid"]: one.get("silent", 0.0) for one in json.loads(run_here("top", "--json").stdout)}
        assert looked.keys() == {os.getpid(), there}
        assert looked[os.getpid()] == 0.0
        assert looked[there] >= 0.5
        shown = run_here("top", "--once", "--pid", str(there)).stdout
        assert "headgate top: 0 programs," in shown
        assert re.search(rf"Programs that give no answer\n.*\n\(never answer\S* +{there} +[12] s", shown), shown


def test_o10_top_shows_a_stopped_program_as_silent_and_goes_on_with_it(published: Program, terminal: Terminal) -> None:
    def screen() -> str:
        return "\n".join(terminal.screen())

    with another_program(published) as there:
        eventually(lambda: "2 programs" in screen())
        os.kill(there, signal.SIGSTOP)
        eventually(lambda: re.search(rf"1 program,(.*\n)+.*give no answer\n.*\n.* {there} ", screen()))
        os.kill(there, signal.SIGCONT)
        eventually(lambda: "2 programs" in screen() and "no answer" not in screen())


def test_o10_what_a_stopped_program_was_asked_is_not_done_when_it_goes_on(
    published: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "PATIENCE", 0.5)
    with another_program(published) as there:
        os.kill(there, signal.SIGSTOP)
        os.waitpid(there, os.WUNTRACED)
        ran = run_here("resize", published.pool.name, "9", "--pid", str(there))
        assert ran.returncode == 1
        assert "It will not do it later" in ran.stderr
        os.kill(there, signal.SIGCONT)
        monkeypatch.setattr(programs, "PATIENCE", 15.0)
        [seen] = json.loads(run_here("ps", "--json", "--pid", str(there)).stdout)
        sizes = {one["name"]: one["max_concurrent"] for one in seen["pools"] if one["kind"] == "tasks"}
        assert sizes == {published.pool.name: 1}
        assert run_here("resize", published.pool.name, "9", "--pid", str(there)).returncode == 0


# -- frames, without a terminal ----------------------------------------------------------------------------------------


def seen(**more: Any) -> dict[str, Any]:
    tenants = [
        {"tenant": f"t{n}", "queued": n, "active": 0, "lag": float(n), "started": 1, "p50": 0.1, "p99": 0.2}
        for n in range(50)
    ]
    return {
        "pid": 1, "program": "p", "at": 0.0, "started_at": 0.0,
        "pools": [
            {"kind": "tasks", "name": "calls\x1b[2J", "number": 1, "state": "open", "active": 1, "max_concurrent": 2,
             "queued": 3, "completed": 4, "failed": 0, "jain": 1.0, "lag": 9.0, "tenants": tenants, "running": [],
             **dict.fromkeys(DROPPED, 0),
             "held": None, "waiting_for": {"cause": "cooldown", "seconds": 3}, **more},
        ],
    }  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(40, 12), (80, 24), (200, 60), (20, 5)])
def test_o10_a_frame_fits_its_terminal_and_moves_no_cursor(width: int, height: int) -> None:
    lines = frame([seen()], Settings(), width, height)
    texts = ["".join(piece.text for piece in line) for line in lines]
    assert len(texts) <= height
    assert max(map(len, texts)) <= max(width, 20)
    assert not any("\x1b" in text for text in texts)
    assert any(text.startswith("t49") for text in texts) or height < 10


def test_o10_keys_change_the_settings() -> None:
    def after(keys: str) -> Settings | None:
        settings: Settings | None = Settings()
        for key in keys:
            settings = settings.pressed(key) if settings is not None else None
        return settings

    assert after("ss") == Settings(sort="load")
    assert after("sss") == Settings()
    assert after("/aqb\x7f\r") == Settings(filter="aq")
    assert after("/a\x1b") == Settings()
    assert after("/a\r\x1b") == Settings()
    assert after("p ") == Settings()
    assert after("q") is None
    assert after("/\x03") is None


def test_o10_pools_of_several_programs_are_told_apart_and_what_failed_is_listed() -> None:
    failure = {"number": 7, "tenant": "ann", "status": "failed", "why": "ValueError: no\x1b", "can_retry": True}
    first = seen(name="calls", failures=[{**failure, "ended_at": 5.0}])
    second = {**seen(name="calls", failures=[{**failure, "number": 8, "ended_at": 6.0}]), "pid": 22}
    texts = ["".join(piece.text for piece in line) for line in frame([first, second], Settings(paused=True), 120, 40)]
    assert texts[0].startswith("headgate top: PAUSED, 2 programs")
    assert any(text.startswith("t49 ") and " calls 22 " in text for text in texts)
    failed = texts[texts.index("Ended badly") + 2 :]
    assert [text.split() for text in failed] == [
        [f"calls/{number}", pid, "failed", "0", "s", "yes", "ann", "ValueError:", r"no\x1b"]
        for number, pid in ((8, "22"), (7, "1"))
    ]
    alone = ["".join(piece.text for piece in line) for line in frame([first], Settings(), 80, 40)]
    assert any(text.split()[:2] == ["t49", "calls"] and " 1 " not in text[:40] for text in alone)


def test_o10_columns_that_nobody_fills_give_their_room_to_others_and_a_filter_without_a_match_says_so() -> None:
    row = {
        "number": 5,
        "seconds": 2.0,
        "tenant": "ann",
        "what": "jobs.ask",
        "attempt": 1,
        "resource": None,
        "worker": None,
    }
    failure = {"number": 7, "tenant": "ann", "status": "failed", "why": "ValueError: no", "can_retry": False}
    first = {**seen(name="calls", running=[row], failures=[{**failure, "ended_at": 5.0}]), "at": 35.0}
    second = {**first, "pid": 22}

    def drawn(programs: list[dict[str, Any]], settings: Settings, width: int) -> list[list[str]]:
        lines = frame(programs, settings, width, 60)
        return ["".join(piece.text for piece in line).split() for line in lines]

    one, two = drawn([first], Settings(), 80), drawn([first, second], Settings(), 80)
    assert ["task", "running", "for", "tenant", "function", "try"] in one
    assert ["task", "pid", "running", "for", "tenant", "function", "try"] in two
    assert ["task", "ended", "ago", "tenant", "why"] in drawn([first], Settings(), 120)
    assert ["calls/7", "failed", "30", "s", "ann", "ValueError:", "no"] in drawn([first], Settings(), 120)
    assert ["pool", "state", "running", "queued", "done/s", "failed", "fair"] in one
    assert ["Nothing", "here", "has", "'zebra'", "in", "its", "name."] in drawn([first], Settings(filter="zebra"), 80)


def test_o10_tasks_that_were_dropped_are_not_among_the_failed_ones() -> None:
    one = seen(name="calls", failed=2, rejected=30, expired=4, stale=1, waiting_for=None)
    lines = ["".join(piece.text for piece in line).split() for line in frame([one], Settings(), 120, 40)]
    at = lines.index(["Task", "pools"])
    shown = dict(zip(lines[at + 1], lines[at + 2], strict=True))
    assert (shown["failed"], shown["dropped"]) == ("2", "35")
    [row] = [dict(zip(ps.TITLES, row, strict=True)) for row in ps.rows_of(one)]
    assert (row["failed"], row["dropped"]) == ("2", "35")


def test_o10_a_spent_quota_is_shown_in_a_frame() -> None:
    row = {"id": "k", "status": "healthy", "cooldown": 0.0, "in_flight": 0, "max_in_flight": None}
    row |= {"refusals": 0, "successes": 1, "quota": {"left": {}, "seconds_until_open": 9.0}}
    keys = {"kind": "resources", "name": "keys", "in_flight": 0, "resources": [row]}
    lines = frame([{**seen(), "pools": [keys]}], Settings(), 120, 40, since=2.0)
    assert any(
        " ".join(piece.text for piece in line).split()[:6] == ["k", "keys", "no", "quota", "7.0", "s"] for line in lines
    )


@pytest.mark.parametrize("sort", ["age", "name", "load"])
@pytest.mark.parametrize("at_work", ["in use", "awaited", "cooling", "out of quota"])
def test_o10_keys_of_idle_pools_come_after_those_of_pools_at_work(at_work: str, sort: str) -> None:
    plain = {"status": "healthy", "cooldown": 0.0, "in_flight": 0, "max_in_flight": None, "refusals": 0, "successes": 1}
    idle = {"in_flight": 0, "waiting": 0, "kind": "resources"}
    disabled = {**plain, "id": "a", "status": "disabled"}
    forgotten = [{**idle, "name": f"forgotten-{n}", "resources": [disabled]} for n in range(20)]
    row, pool = {**plain, "id": "z"}, {**idle, "name": "keys"}
    if at_work == "in use":
        row["in_flight"] = pool["in_flight"] = 1
    elif at_work == "awaited":
        pool["waiting"] = 1
    elif at_work == "cooling":
        row |= {"status": "cooling_down", "cooldown": 9.0}
    else:
        row["quota"] = {"left": {}, "seconds_until_open": 9.0}
    pool["resources"] = [row]

    def listed(since: float) -> list[str]:
        lines = frame([{**seen(), "pools": [*forgotten, pool]}], Settings(sort=sort), 120, 12, since=since)
        return ["".join(piece.text for piece in line).split()[0] for line in lines[4:]]

    assert listed(2.0) == ["z", *["a"] * 7]
    if at_work in ("cooling", "out of quota"):
        assert listed(10.0) == ["a"] * 8, "it is back, and its pool is as idle as the others"


def test_o10_w67_a_frame_and_ps_say_how_many_workers_are_missing() -> None:
    states = dict.fromkeys(("starting", "cooling", "blocked", "stopping"), 0)
    gone = {"uid": "w-2", "pid": 0, "state": "lost", "in_flight": 0, "memory": None, "host": "", "address": "unix:/x"}
    pool = {"kind": "workers", "name": "fleet", "number": 1, "state": "open", "size": 0, **states}
    pool |= {"ready": 1, "lost": 1, "expected": 2, "worker_count": 2, "in_flight": 0, "losses": 1, "workers": [gone]}
    one = {**seen(), "pools": [pool]}
    texts = ["".join(piece.text for piece in line) for line in frame([one], Settings(), 120, 40)]
    assert any(text.startswith("Workers, 1 of 2 ready") for text in texts), texts
    assert any(text.startswith("w-2") and "lost" in text for text in texts), texts
    assert rows_of(one)[0][4] == "1 of 2 ready"


def test_o10_a_held_loop_is_shown_in_a_frame() -> None:
    lines = frame([seen(held=12.0)], Settings(), 120, 40)
    assert any("loop held 12 s" in piece.text for line in lines for piece in line)


@pytest.mark.parametrize("kind", ["tasks", "resources", "workers"])
def test_o10_a_pool_whose_state_cannot_be_read_is_listed_beside_the_others(kind: str) -> None:
    broken = {"kind": kind, "name": "odd", "number": 2, "held": None, "broken": "ValueError\x1b"}
    changing = {"kind": kind, "name": "fast", "number": 3, "held": None, "changing": True}
    one = seen()
    one["pools"] += [broken, changing]
    rows = {row[2]: row for row in ps.rows_of(one)}
    assert rows["odd"][4].startswith("cannot be read: ValueError")
    assert rows["fast"][4] == "changes too fast to be read"
    texts = ["".join(piece.text for piece in line) for line in frame([one], Settings(), 120, 40)]
    assert texts[texts.index("State cannot be read") + 2].split() == ["odd", kind, r"ValueError\x1b", "1"]
    assert any(text.startswith("calls") for text in texts)


def test_o10_a_table_has_a_line_for_each_row_whatever_a_cell_says(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("uid", "why"), [("w-1\nw-2", "a\u2028b\x1b[2J"), ("w-3", "c")])
    assert capsys.readouterr().out.splitlines() == ["uid       why", r"w-1\nw-2  a\u2028b\x1b[2J", "w-3       c"]
