"""The metrics of a page of several programs: labels that a restart does not change, and programs that are gone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headgate import InvalidArgument, TaskPool
from headgate.core.clock import clock
from headgate.dashboard import Dashboard, app, serve, sources
from headgate.dashboard.scraping import KEPT, MOST_KEPT, Labelled, ProgramLabels, joined
from headgate.dashboard.sources import PublishedPrograms, Seen
from tests.support.cli.support import environment
from tests.system.observe.support import SECRET, eventually
from tests.system.observe.test_dashboard_http import ask
from tests.system.observe.test_prometheus import samples, value

SCRIPT = """
import sys, headgate
pool = headgate.TaskPool('reports')
print(flush=True)
sys.stdin.read()
"""


def seen(program: str, pid: int, started: float = 0.0) -> Seen:
    made = Seen(f"{pid}-0123456789ab.sock")
    made.add({"program": program, "pid": pid, "started_at": started, "pools": []}, [])
    return made


class Programs:
    """Programs that come and go, and the labels that they have."""

    def __init__(self) -> None:
        self.alive: dict[str, Seen] = {}
        self.killed: set[str] = set()
        self.labels = ProgramLabels(self.killed.__contains__)

    def start(self, program: str, pid: int, started: float = 0.0) -> None:
        made = seen(program, pid, started)
        self.alive[made.id] = made
        self.labels.note(self.alive)

    def end(self, pid: int, *, killed: bool = False) -> None:
        program_id = f"{pid}-0123456789ab.sock"
        if killed:
            self.killed.add(program_id)
        del self.alive[program_id]
        self.labels.note(self.alive)

    def told(self) -> dict[str, str]:
        """The pid and whether it is alive, by label."""
        self.labels.note(self.alive)
        return {one.label: one.pid + ("" if one.gone is None else " down") for one in self.labels.given()}


def test_o30_a_program_has_the_name_of_its_script_and_the_second_of_a_name_a_number() -> None:
    programs = Programs()
    programs.start("job.py", 30, started=3.0)
    programs.start("job.py", 20, started=2.0)
    programs.start("other.py", 40)
    assert programs.told() == {"job.py": "20", "job.py-2": "30", "other.py": "40"}, "in the order of their start"
    programs.start("job.py", 10, started=1.0)
    assert programs.told()["job.py-3"] == "10", "a label, once given, stays"
    programs.end(20)
    programs.start("job.py", 50)
    assert programs.told() == {"job.py": "50", "job.py-2": "30", "job.py-3": "10", "other.py": "40"}


def test_o30_names_that_look_like_a_number_of_another_do_not_collide() -> None:
    programs = Programs()
    programs.start("job.py-2", 1)
    programs.start("job.py", 2)
    programs.start("job.py", 3)
    programs.start("job.py-2", 4)
    assert sorted(programs.told()) == ["job.py", "job.py-2", "job.py-2-2", "job.py-3"]


def test_o30_a_program_that_was_killed_is_down_for_some_minutes_and_one_that_ended_is_gone() -> None:
    programs, now = Programs(), [100.0]
    with clock.replaced(now=lambda: now[0]):
        programs.start("job.py", 1)
        programs.start("done.py", 2)
        programs.end(1, killed=True)
        programs.end(2)
        assert programs.told() == {"job.py": "1 down"}, "even if nobody scraped while it was there"
        now[0] += KEPT
        assert programs.told() == {"job.py": "1 down"}
        now[0] += 1
        assert programs.told() == {}


def test_o30_a_program_that_is_started_again_has_the_series_of_the_one_that_was_killed() -> None:
    programs = Programs()
    programs.start("job.py", 1)
    programs.start("job.py", 2)
    assert programs.told() == {"job.py": "1", "job.py-2": "2"}
    programs.end(1, killed=True)
    assert programs.told() == {"job.py": "1 down", "job.py-2": "2"}
    programs.start("job.py", 3)
    assert programs.told() == {"job.py": "3", "job.py-2": "2"}
    programs.end(3, killed=True)
    programs.start("job.py", 3)  # it was only unreachable for a moment
    assert programs.told() == {"job.py": "3", "job.py-2": "2"}


def test_o30_programs_that_were_killed_are_remembered_up_to_a_number() -> None:
    programs, now = Programs(), [100.0]
    with clock.replaced(now=lambda: now[0]):
        for pid in range(MOST_KEPT + 20):
            now[0] += 0.1
            programs.start(f"{pid}.py", pid)
            programs.end(pid, killed=True)
        told = programs.told()
    assert len(told) == MOST_KEPT
    assert f"{MOST_KEPT + 19}.py" in told, "the latest of them"


def test_o30_what_a_program_says_of_itself_cannot_break_the_metrics_of_others() -> None:
    odd = Labelled("1-0123456789ab.sock", {"program": 'half \ud83d "quoted"\n# TYPE x', "pid": [1], "started_at": "x"})
    empty, good = Labelled("2-0123456789ab.sock", {}), Labelled("3-0123456789ab.sock", {"program": "good.py"})
    for one in (odd, empty, good):
        one.label = one.name
    text = joined(
        [
            (odd, "headgate_tasks_active{pool=nonsense"),
            (empty, InvalidArgument("no\nheadgate_program_up 7")),
            (good, 'headgate_tasks_active{pool="a"} 2.0\n'),
        ]
    ).decode()
    told = samples(text)
    assert value(told, "headgate_tasks_active", pool="a", program="good.py") == 2
    assert [value(told, "headgate_program_up", program=one.label) for one in (odd, empty, good)] == [0, 0, 1]
    assert len(told) == 1 + 2 * 3


# -- with processes ----------------------------------------------------------------------------------------------------


@contextmanager
def started(script: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A published program, which ends by itself when its input ends."""
    environ = {**environment(), "HEADGATE_OBSERVE": "1"}
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(sources, "RESCAN", 0.05)
    with serve(source=PublishedPrograms()) as page:
        yield page


def up(page: Dashboard) -> dict[str, float]:
    """Which programs are up, and that each series has a program."""
    answer = ask(page, "/metrics")
    told = samples(answer.body.decode())
    assert answer.status == 200
    assert all("program" in dict(labels) for _, labels in told)
    return {dict(labels)["program"]: number for (name, labels), number in told.items() if name == "headgate_program_up"}


@pytest.mark.integration
def test_o30_labels_do_not_change_with_the_number_of_programs_and_a_kill_is_seen(
    page: Dashboard, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    assert up(page) == {}
    with started(script) as first:
        eventually(lambda: up(page) == {"job.py": 1})
        series = 'headgate_tasks_active{pool="reports",program="job.py"} 0.0'
        assert series in ask(page, "/metrics").body.decode()
        with started(script) as second:
            eventually(lambda: up(page) == {"job.py": 1, "job.py-2": 1})
            assert series in ask(page, "/metrics").body.decode()
            second.communicate()  # it ends by itself
            eventually(lambda: up(page) == {"job.py": 1})
        first.send_signal(signal.SIGKILL)
        first.wait()
        eventually(lambda: up(page) == {"job.py": 0})
        assert f'headgate_program_info{{pid="{first.pid}",program="job.py"}} 1.0' in ask(page, "/metrics").body.decode()


@pytest.mark.integration
def test_o30_the_page_inside_a_program_never_has_the_label() -> None:
    pool = TaskPool("o30-inside")
    with serve() as page:
        text = ask(page, "/metrics").body.decode()
    asyncio.run(pool.close())
    assert f'headgate_tasks_active{{pool="{pool.name}"}} 0.0' in text
    assert "program" not in text
    assert SECRET not in text


def test_o30_programs_that_do_not_answer_leave_a_scrape_less_than_two_seconds() -> None:
    assert app.SCRAPED_WITHIN < 2.0, "they are asked at the same time"
