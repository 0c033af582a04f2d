"""T15c: progress on a real terminal, beside others who write there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

PROGRAM = """
import asyncio, logging, sys
if "plain" in sys.argv:
    sys.modules["rich"] = None
if "configured" in sys.argv:
    logging.basicConfig(format="%(name)s: %(message)s")
own = logging.StreamHandler(sys.stdout)
own.setFormatter(logging.Formatter("own: %(message)s"))
logging.getLogger("mine").addHandler(own)
logging.getLogger("mine").propagate = False
from headgate import CooldownResource, Resource, ResourcePool, TaskPool

async def work(key, number):
    if number % 3 == 0 and number not in seen:
        seen.add(number)
        raise CooldownResource(0.05, reason=f"limit at {number}")
    await asyncio.sleep(0.02)
    logging.getLogger("mine").warning("did %d", number)
    print(f"printed {number}")
    return number

async def main():
    keys = ResourcePool([Resource(f"key-{n}", n) for n in range(2)], name="keys")
    async with TaskPool("crunch", max_concurrent=2, resources=keys) as pool:
        async for _ in pool.map(work, range(12), progress=True):
            pass
    logging.getLogger("mine").warning("over")
    print("the end", file=sys.stderr)

seen = set()
asyncio.run(main())
"""


def on_a_terminal(*words: str, stdout: Path | None = None) -> str:
    """What a terminal receives from the program."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 150, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": "150"}
    with open(stdout or os.devnull, "wb") as file:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=theirs,
            stdout=theirs if stdout is None else file,
            stderr=theirs,
            env=environment,
        )
    os.close(theirs)
    received = b""
    try:
        while data := os.read(ours, 65536):
            received += data
    except OSError:  # how a terminal says that nobody is left
        pass
    finally:
        os.close(ours)
        assert program.wait(60) == 0, received.decode()
    return received.decode()


def screen(received: str) -> list[str]:
    """The lines that somebody sees in the end."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", received):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, column  # the terminal adds the carriage return
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\x1b["):
            if part.endswith("A"):
                row -= int(part[2:-1] or 1)
            elif part == "\x1b[2K":
                lines[row] = ""
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("plain", "configured"),
        *(pytest.param((word,), marks=pytest.mark.soak) for word in ("configured", "plain")),
    ],
)
def test_t15c_what_others_write_does_not_tear_a_bar(words: tuple[str, ...]) -> None:
    if "plain" not in words:
        pytest.importorskip("rich")
    lines = screen(on_a_terminal(*words))
    bars = [line for line in lines if line.startswith("crunch") and "cools down" not in line]
    cooled = [line for line in lines if "cools down" in line]
    assert len(cooled) == 2, lines  # one for each key: four cooldowns within a minute
    begin = "headgate.resources: keys: key-" if "configured" in words else "keys: key-"
    for line in cooled:
        assert re.fullmatch(rf"{begin}\d cools down for 0\.\d+ s \(\d in a row\): limit at \d+", line), lines
    assert {line for line in lines if line.startswith("own: ")} == {*(f"own: did {n}" for n in range(12)), "own: over"}
    assert {line for line in lines if line.startswith("printed")} == {f"printed {n}" for n in range(12)}
    assert lines[-2:] == ["own: over", "the end"]
    if "plain" in words:
        assert bars[-1].startswith("crunch: 12 of 12")
    else:
        assert len(bars) == 1, lines
        assert re.match(r"crunch \S+ +12/12 0:00:\d\d", bars[0])
        assert lines[-3] == bars[0], "everything else stands above it"
    assert len(lines) == len(bars) + 2 + 13 + 12 + 1, lines


def test_t15c_what_is_printed_into_a_file_goes_there(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    lines = screen(on_a_terminal("configured", stdout=tmp_path / "out"))
    assert not any("printed" in line or "own:" in line for line in lines)
    printed = (tmp_path / "out").read_text().splitlines()
    assert {line for line in printed if line.startswith("printed")} == {f"printed {n}" for n in range(12)}
    assert "own: over" in printed
