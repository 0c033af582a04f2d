"""`headgate demo` ends by itself and loses nothing, in a pipe and on a terminal; Ctrl-C ends it cleanly."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.integration

COLOUR = re.compile(r"\x1b\[\d+m")


def command(*options: str, flags: tuple[str, ...] = ("-X", "dev", "-W", "error")) -> list[str]:
    return [sys.executable, *flags, "-m", "headgate", "demo", *options]


def run_piped(*options: str) -> str:
    """What it prints, after it has ended well."""
    ran = subprocess.run(command(*options), capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert (ran.returncode, quiet(ran.stderr)) == (0, ""), ran.stdout
    return ran.stdout


def quiet(stderr: str) -> str:
    """Without what asyncio's debug mode says of a machine that is busy."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("Executing <"))


def count(what: str, printed: str) -> int:
    """A figure of the summary at the end."""
    found = re.search(rf"^  {what} +(\d+)", printed, re.MULTILINE)
    assert found, printed
    return int(found[1])


class Served(NamedTuple):
    """A line of the table of tenants: in turn, then first in first out."""

    calls: int
    p50: float
    p99: float
    first: int
    fifo_p50: float
    fifo_p99: float
    fifo_first: int


def served(tenant: str, printed: str) -> Served:
    """How it says that this tenant was served."""
    found = re.search(rf"^  {tenant} (.*)$", printed, re.MULTILINE)
    assert found, printed
    calls, p50, p99, first, *line = found[1].replace(" s ", " ").split()
    return Served(int(calls), float(p50), float(p99), int(first), float(line[0]), float(line[1]), int(line[2]))


@pytest.mark.alone
@pytest.mark.parametrize("options", [("--calls", "320"), pytest.param((), marks=pytest.mark.soak)], ids=str)
def test_in_a_pipe_it_tells_the_whole_story_in_plain_lines(options: tuple[str, ...]) -> None:
    printed = run_piped(*options)
    assert "\x1b" not in printed
    assert count("lost results", printed) == 0
    assert count("answered", printed) == count("calls", printed) >= 300
    assert count("disabled", printed) == count("workers killed", printed) == 1
    for much in ("failovers", "cooldowns", "sibling cancels", "run again", "queued again"):
        assert count(much, printed) > 0
    for told in (
        r"key-\d cools down for \d\.\d s: rate limited",
        r"key-5 is disabled: key revoked",
        r"key-\d is back",
        r"call \d+: key-\d (429|502|stopped|lost) -> .*key-\d ok",
        r"worker \d+ is killed, with [1-9]\d* calls in flight",
        r"worker \d+ is lost: killed by SIGKILL",
        r"worker \d+ takes its place",
    ):
        assert re.search(rf"^ +\d+\.\d s  {told}$", printed, re.MULTILINE), told
    assert "sk-" not in printed
    assert printed.splitlines()[-1].split()[:3] == ["lost", "results", "0"], "that is how it ends"
    tenants_do_not_wait_behind_the_flood(printed)
    an_unlucky_call_has_its_story(printed)


def an_unlucky_call_has_its_story(printed: str) -> None:
    """Each attempt with its key and worker, why it was not the last, and that it was answered in the end."""
    title, *story = printed.partition("\nThe call that had most trouble\n")[2].partition("\n\n")[0].splitlines()
    found = re.fullmatch(
        r"calls#(\d+) \((flood|ann|bob)\), \S+/(\d+): completed after \d+\.\d+ s, (\d+) attempts", title
    )
    assert found, printed
    assert found[1] == found[3]
    attempts = int(found[4])
    assert attempts > 1, "nothing went wrong: is there no 429 any more?"
    lines = [re.fullmatch(r"  [\d:.]+ +\+(\d+\.\d+) s  (.*)", line) for line in story]
    times, told = zip(*(line.groups() for line in lines if line), strict=True)
    assert len(told) == len(story), story
    assert list(map(float, times)) == sorted(map(float, times)), story
    assert (told[0], told[-1]) == ("submitted with retries 5", "completed")
    for attempt in range(1, attempts + 1):
        assert any(re.fullmatch(rf"attempt {attempt} begins with key-\d on worker \S+", one) for one in told), story
    for attempt in range(1, attempts):
        why = r"key-\d: (rate limited|key revoked|bad gateway) \(\w+\)|WorkerLost: .*"
        assert any(re.fullmatch(rf"attempt {attempt} ends: ({why}); queued again", one) for one in told), story
    route = re.search(rf"  call {found[1]}: (.*)$", printed, re.MULTILINE)
    assert route, "it was told when it ended"
    assert len(route[1].split(" -> ")) >= attempts


def tenants_do_not_wait_behind_the_flood(printed: str) -> None:
    flood, *others = (served(tenant, printed) for tenant in ("flood", "ann", "bob"))
    assert flood.calls + sum(other.calls for other in others) == count("calls", printed)
    for other in others:
        assert other.first > 0 == other.fifo_first
        assert other.p99 < other.fifo_p50
        assert other.p50 < flood.p50
    jain = re.search(r"Jain's index of fairness: ([\d.]+) in turn, ([\d.]+) first in first out", printed)
    assert jain, printed
    assert float(jain[1]) > 0.95 > 0.7 > float(jain[2])


def test_ctrl_c_ends_it_with_one_line() -> None:
    with subprocess.Popen(
        command("--calls", "5000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "cools down" in line:  # it is in full swing
                break
        demo.send_signal(signal.SIGINT)
        rest, errors = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert re.fullmatch(r"stopped by Ctrl-C: \d+ of 5000 calls were answered", rest.splitlines()[-1])
    assert quiet(errors) == ""


# -- on a terminal ----------------------------------------------------------------------------------------------------


@contextmanager
def terminal(columns: int, lines: int) -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of this size."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        yield ours, theirs
    finally:
        os.close(ours)


def run_on_terminal(columns: int, lines: int, *, calls: int = 15, **environment: str) -> str:
    """All that it wrote to a terminal, after it has ended well."""
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    env = known | {"TERM": "xterm", "PYTHONUTF8": "1"} | environment
    with terminal(columns, lines) as (ours, theirs):
        with subprocess.Popen(
            command("--calls", str(calls), flags=("-W", "error")), stdin=theirs, stdout=theirs, stderr=theirs, env=env
        ) as demo:
            os.close(theirs)
            written = b"".join(iter(lambda: read(ours), b""))
            assert demo.wait(timeout=60) == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that nobody writes here any more
        return b""


def last_frame(written: str) -> list[str]:
    """The lines of the last frame, as they stay on the screen."""
    *_, frame, _ = re.split(r"\x1b\[\d+F|\x1b\[\?25[lh]", written)
    return [line.removesuffix("\x1b[K") for line in COLOUR.sub("", frame).removesuffix("\x1b[J").split("\n")]


@pytest.mark.alone
def test_a_terminal_gets_a_table_drawn_in_place() -> None:
    written = run_on_terminal(80, 24, calls=220)  # enough for a key to cool down
    frame = last_frame(written)
    assert " ".join(frame[2].split()) == "key status cooling left in flight ok 429 401 502 stopped"
    assert [line.split()[0] for line in frame[3:9]] == [f"key-{number}" for number in range(1, 7)]
    assert [line.split()[0] for line in frame[10:14]] == ["tenant", "flood", "ann", "bob"]
    assert re.fullmatch(r" +workers: \d+ \w+, \d+ in flight; \d+ \w+, \d+ in flight", frame[16])
    assert len(frame) < 24
    assert re.search(r"^key-4 +cooling(?: x\d)? +█+░* +\d\.\d s", COLOUR.sub("", written), re.MULTILINE)
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1  # the cursor comes back
    assert COLOUR.search(written)
    assert count("lost results", written) == 0


@pytest.fixture(scope="module")
def narrow() -> str:
    """What it writes to a narrow terminal without colours."""
    return run_on_terminal(30, 24, NO_COLOR="1")


@pytest.mark.parametrize("columns", [30, pytest.param(60, marks=pytest.mark.soak)])
def test_a_narrow_terminal_gets_fewer_columns_and_no_line_that_wraps(columns: int, narrow: str) -> None:
    frame = last_frame(narrow if columns == 30 else run_on_terminal(columns, 24))
    assert max(len(line) for line in frame) < columns
    assert frame[2].split()[:2] == ["key", "status"]


def test_a_terminal_can_be_without_colours(narrow: str) -> None:
    assert "\x1b[K" in narrow
    assert not COLOUR.search(narrow)


@pytest.mark.parametrize(("lines", "term"), [(10, "xterm"), pytest.param(24, "dumb", marks=pytest.mark.soak)])
def test_a_terminal_that_cannot_be_drawn_on_gets_lines(lines: int, term: str) -> None:
    assert "\x1b" not in run_on_terminal(80, lines, TERM=term)
