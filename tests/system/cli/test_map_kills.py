"""`headgate map` that is killed or interrupted: the same command goes on."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.cli.support import HERE, PATIENCE, command, environment, importable, killed_at_end, until

pytestmark = pytest.mark.integration


def numbered(path: Path, count: int) -> None:
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(count)), "utf-8")


@contextmanager
def running(folder: Path, function: str, *options: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own."""
    path = importable(HERE)
    with subprocess.Popen(
        command("map", f"map_jobs:{function}", "in.jsonl", "-o", "out.jsonl", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment({"PYTHONPATH": path, "CALLS": str(folder / "calls"), "FOLDER": str(folder), **env}),
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def has_grown(path: Path, size: int, process: subprocess.Popen[str]) -> bool:
    return process.poll() is not None or (path.exists() and path.stat().st_size >= size)


def ids(path: Path) -> list[int]:
    return [json.loads(line)["id"] for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("order", [[], ["--unordered"]])
def test_c11_after_kills_at_random_points_every_record_is_written_once(
    order: list[str], tmp_path: Path, scale: float
) -> None:
    """The moment of a kill is a length of the output that it is waited for: time means nothing on a busy machine."""
    kills = max(2, round(50 * scale**1.4))
    count = 60 * kills
    chance = random.Random(f"kills {order}")
    numbered(tmp_path / "in.jsonl", count)
    out = tmp_path / "out.jsonl"
    options = [*order, "--max-concurrent", "8"]
    size = 0
    for _ in range(kills):
        with running(tmp_path, "noted", *options) as process:
            until(partial(has_grown, out, size + chance.randrange(1, 60) * 8, process))
            time.sleep(chance.uniform(0, 0.03))
            process.kill()
            process.wait(PATIENCE)
        size = out.stat().st_size
    with running(tmp_path, "noted", *options) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    written = ids(out)
    assert sorted(written) == list(range(count))
    if not order:
        assert written == list(range(count))
    paid = Counter((tmp_path / "calls").read_text().split())
    # What was in flight, and what was finished in the last 50 ms, or in a longer time if the machine was busy.
    assert sum(paid.values()) - count <= kills * 200


def test_c11_c12_a_retry_that_is_killed_goes_on(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 300)
    with running(tmp_path, "odd_fails") as process:
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    with running(tmp_path, "noted", "--retry-failed") as process:
        until(lambda: process.poll() is not None or (tmp_path / "calls").exists())
        process.kill()
    with running(tmp_path, "noted", "--retry-failed") as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert sorted(ids(tmp_path / "out.jsonl")) == list(range(300))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)]
)
def test_c01_c11_a_signal_lets_what_runs_finish_and_starts_nothing(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    numbered(tmp_path / "in.jsonl", 100)
    with running(tmp_path, "waits_for_a_file", "--max-concurrent", "3") as process:
        until(lambda: len(list(tmp_path.glob("began-*"))) == 3)
        process.send_signal(number)
        assert process.stderr is not None
        first = process.stderr.readline()
        (tmp_path / "go").touch()
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "stopping" in first
    assert "the same command goes on" in errors
    assert len([first, *errors.splitlines()]) <= 10
    assert (tmp_path / "out.jsonl").read_text().split() == ["0", "1", "2"]
    with running(tmp_path, "waits_for_a_file", "--max-concurrent", "3") as process:
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert (tmp_path / "out.jsonl").read_text().split() == [str(number) for number in range(100)]


@pytest.mark.parametrize("options", [[], pytest.param(["--fair", "id"], marks=pytest.mark.soak)])
def test_c01_a_second_signal_ends_at_once(options: list[str], tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 100)
    with running(tmp_path, "waits_for_a_file", *options) as process:
        until(lambda: len(list(tmp_path.glob("began-*"))) == 10)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert len([first, *errors.splitlines()]) <= 10


def test_c01_a_second_signal_ends_at_once_although_nobody_reads_stdout(tmp_path: Path) -> None:
    """Two that differ: the system keeps a signal only once until the process has seen it."""
    numbered(tmp_path / "in.jsonl", 100_000)
    reader, writer = os.pipe()
    started = subprocess.Popen(
        command("map", "map_jobs:same", "in.jsonl", "-o", "-"),
        stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=environment({"PYTHONPATH": importable(HERE)}),
    )  # fmt: skip
    with killed_at_end(started) as process:
        os.close(writer)
        until(lambda: process.poll() is not None or _unread(reader) >= 50_000)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    os.close(reader)
    assert process.returncode in (130, 143), errors
    assert "Traceback" not in errors
    assert "stopped by" in errors


def _unread(pipe: int) -> int:
    """Bytes that a pipe holds."""
    found = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, found)
    return int.from_bytes(found, sys.byteorder)


def test_c10_a_stdout_that_does_not_wait_gets_all_results(tmp_path: Path) -> None:
    """A pipe that another program has set so."""
    numbered(tmp_path / "in.jsonl", 20_000)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    started = subprocess.Popen(
        command("map", "map_jobs:same", "in.jsonl", "-o", "-"),
        stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=environment({"PYTHONPATH": importable(HERE)}),
    )  # fmt: skip
    with killed_at_end(started) as process:
        os.close(writer)
        with open(reader, "rb") as file:
            until(lambda: process.poll() is not None or _unread(reader) >= 50_000)
            written = [json.loads(line)["id"] for line in file]
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, written) == (0, list(range(20_000))), errors


def test_c11_with_a_pool_a_signal_stops_what_is_queued(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 100)
    with running(tmp_path, "waits_for_a_file", "--fair", "id", "--max-concurrent", "3") as process:
        until(lambda: len(list(tmp_path.glob("began-*"))) == 3)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        process.stderr.readline()
        (tmp_path / "go").touch()
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert len((tmp_path / "out.jsonl").read_text().split()) == 3


def test_c11_a_slow_stdin_is_not_waited_for_after_a_signal(tmp_path: Path) -> None:
    path = importable(HERE)
    with subprocess.Popen(
        command("map", "map_jobs:same", "-", "-o", "out.jsonl"),
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment({"PYTHONPATH": path}),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write('{"id": 1}\n')
        process.stdin.flush()
        until(lambda: (tmp_path / "out.jsonl").exists() and (tmp_path / "out.jsonl").read_text() == '{"id": 1}\n')
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    for text, code in (('{"id": 2}\n{"id": 1}\n', 2), ('{"id": 1}\n{"id": 2}\n', 0)):
        ran = subprocess.run(
            command("map", "map_jobs:same", "-", "-o", "out.jsonl"), input=text,
            capture_output=True, text=True, cwd=tmp_path, env=environment({"PYTHONPATH": path}), check=False,
        )  # fmt: skip
        assert ran.returncode == code, ran.stderr
    assert ids(tmp_path / "out.jsonl") == [1, 2]
