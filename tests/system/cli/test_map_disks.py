"""`headgate map` on disks that are full, with files that others cut, replace or delete (C15)."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.cli.support import (
    HERE,
    PATIENCE,
    Ended,
    command,
    environment,
    importable,
    killed_at_end,
    run_here,
    until,
)

pytestmark = pytest.mark.integration

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from headgate.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def numbered(path: Path, count: int) -> None:
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(count)), "utf-8")


def lines(path: Path) -> list[Any]:
    data = path.read_bytes() if path.exists() else b""
    assert not data or data.endswith(b"\n"), "a torn line"
    return [json.loads(line) for line in data.splitlines()]


def paid(folder: Path) -> list[int]:
    return [int(number) for number in (folder / "calls").read_text().split()]


def env_of(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": importable(HERE), "CALLS": str(folder / "calls"), "FOLDER": str(folder)}


def ran(arguments: list[str], folder: Path, **options: Any) -> Any:
    return subprocess.run(
        arguments, capture_output=True, text=True, cwd=folder, env=environment(env_of(folder)), timeout=PATIENCE,
        check=False, **options,
    )  # fmt: skip


def limited(folder: Path, size: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a command none of whose files may be longer."""
    return subprocess.Popen(
        [sys.executable, "-c", LIMITED, str(size), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment(env_of(folder)),
    )  # fmt: skip


def check_stopped(process: Any, folder: Path, out: Path, count: int) -> set[int]:
    """A run that a full disk has stopped says what is written; returns the ids of that."""
    assert process.returncode == 1, process.stderr
    assert "Traceback" not in process.stderr
    figures = json.loads(process.stdout)
    assert f"{figures['done']:,} done, {figures['failed']:,} failed" in process.stderr
    assert "cannot be written: " in process.stderr
    assert "Make room, and give the same command: it runs only what is not written" in process.stderr
    called = paid(folder)
    assert len(called) == len(set(called)) == figures["run"] < count, "it stops before the end"
    lost = figures["unwritten"]
    assert figures["done"] + figures["failed"] + lost == figures["run"]
    if lost:
        assert f"{lost:,} results that were finished could not be written" in process.stderr
    written = {one["id"] for one in lines(out)} | {one["record"]["id"] for one in lines(Path(f"{out}.failed.jsonl"))}
    journal = Path(f"{out}.headgate").read_bytes()
    assert journal.endswith(b"\n")
    early = {json.loads(line[9:])["index"] for line in journal.splitlines() if b'"kind":"early"' in line}
    assert len(written | early) == figures["done"] + figures["failed"]
    assert figures["written"] == len(lines(out)) == figures["done"] - figures["kept"]
    assert figures["kept"] + figures["kept_failures"] == len(early - written)
    told = f"  {figures['written']:,} in {output_name(process, out)}, "
    assert (told in process.stderr) == bool(early - written)
    return written | early


def output_name(process: Any, out: Path) -> str:
    """The output as the command was given it."""
    return next(word for word in process.args if word.endswith("out.jsonl")) if process.args else out.name


def check_done(process: Any, folder: Path, out: Path, count: int, kept: set[int], *, ordered: bool) -> None:
    """The same command with room runs what is missing, and no more."""
    assert process.returncode == 1, process.stderr  # every 50th record fails
    calls = Counter(paid(folder))
    assert set(calls) == set(range(count))
    assert {number for number in calls if calls[number] > 1} <= set(calls) - kept
    written = [one["id"] for one in lines(out)]
    failures = [one["record"]["id"] for one in lines(Path(f"{out}.failed.jsonl"))]
    assert sorted(written + failures) == list(range(count)), "each exactly once"
    assert failures == [number for number in range(count) if number % 50 == 49] or not ordered
    assert written == sorted(written) or not ordered


OPTIONS = [
    pytest.param(["--max-concurrent", "20"], id="in order"),
    pytest.param(["--max-concurrent", "20", "--unordered"], id="unordered"),
    pytest.param(["--max-concurrent", "20", "--id", "id", "--fair", "id"], id="pool and ids"),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_c15_a_full_disk_stops_the_run_and_only_what_is_not_written_is_paid_again(
    options: list[str], tmp_path: Path
) -> None:
    """No file may be longer than 100 kB: the kernel refuses writes in the same way as where a disk is full."""
    count, out = 1000, tmp_path / "out.jsonl"
    numbered(tmp_path / "in.jsonl", count)
    arguments = ["map", "map_jobs:long", "in.jsonl", "-o", "out.jsonl", "--json", *options]
    process = ran([sys.executable, "-c", LIMITED, "100000", *arguments], tmp_path)
    kept = check_stopped(process, tmp_path, out, count)
    assert len(kept) >= (80 if "--unordered" in options else 150), "in order, the journal has room for as many more"
    process = ran(command(*arguments), tmp_path)
    check_done(process, tmp_path, out, count, kept, ordered="--unordered" not in options)


@pytest.mark.parametrize("options", OPTIONS)
def test_c15_a_file_system_that_is_full(options: list[str], tmp_path: Path) -> None:
    """In a mount namespace of its own, so that nothing is left mounted whatever happens."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    count, disk, kept = 1000, tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    numbered(tmp_path / "in.jsonl", count)
    arguments = ["map", "map_jobs:long", "in.jsonl", "-o", "disk/out.jsonl", "--json", *options]
    small = 'mount -t tmpfs -o size=256k none disk || exit 77; "$@"; code=$?; cp -p disk/* kept && exit $code'
    process = ran([unshare, "-Urm", "sh", "-c", small, "sh", *command(*arguments)], tmp_path)
    if process.returncode == 77:
        pytest.skip(f"mounting is not permitted: {process.stderr}")
    known = check_stopped(process, tmp_path, kept / "out.jsonl", count)
    assert len(known) >= 150
    for path in kept.iterdir():
        shutil.copy2(path, disk)
    process = ran(command(*arguments), tmp_path)
    check_done(process, tmp_path, disk / "out.jsonl", count, known, ordered="--unordered" not in options)


def test_c15_a_journal_that_has_no_room_for_results_that_wait_for_their_turn(tmp_path: Path) -> None:
    count, out = 1000, tmp_path / "out.jsonl"
    numbered(tmp_path / "in.jsonl", count)
    arguments = ["map", "map_jobs:slow_and_long", "in.jsonl", "-o", "out.jsonl", "--json"]
    with killed_at_end(limited(tmp_path, 60_000, *arguments)) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("stopping: out.jsonl.headgate cannot be written: File too large; what runs is finished")
        (tmp_path / "go").touch()
        stdout, stderr = process.communicate(timeout=PATIENCE)
    ended = subprocess.CompletedProcess([], process.returncode, stdout, first + stderr)
    kept = check_stopped(ended, tmp_path, out, count)
    assert len(kept) >= 30
    check_done(ran(command(*arguments), tmp_path), tmp_path, out, count, kept, ordered=True)


@pytest.mark.parametrize("order", [[], ["--unordered"]])
def test_c15_calls_that_run_when_the_disk_is_full_end_and_their_results_are_kept(
    order: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    numbered(tmp_path / "in.jsonl", 100)
    arguments = ["map", "map_jobs:first_is_huge", "in.jsonl", "-o", "out.jsonl", "--json", *order]
    with killed_at_end(limited(tmp_path, 100_000, *arguments)) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("stopping: out.jsonl cannot be written: File too large; what runs is finished")
        (tmp_path / "go").touch()
        stdout, stderr = process.communicate(timeout=PATIENCE)
    ended = subprocess.CompletedProcess([], process.returncode, stdout, first + stderr)
    kept = check_stopped(ended, tmp_path, out, 100)
    assert kept == set(paid(tmp_path)) - {0}
    assert len(kept) == 10
    assert ran(command(*arguments), tmp_path).returncode == 0
    assert Counter(paid(tmp_path)) == {number: 1 + (number == 0) for number in range(100)}
    written = [one["id"] for one in lines(out)]
    assert sorted(written) == list(range(100))
    assert order or written == list(range(100))


def test_c15_the_summary_tells_what_is_in_the_output_and_what_is_kept_in_the_journal(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 1000)
    arguments = ["map", "map_jobs:long", "in.jsonl", "-o", "out.jsonl"]
    process = ran([sys.executable, "-c", LIMITED, "60000", *arguments], tmp_path)
    written = len(lines(tmp_path / "out.jsonl"))
    done = int(process.stderr.split("this run")[0].splitlines()[-1].split(" done")[0])
    assert done > written
    kept = re.search(
        rf"^  {written} in out\.jsonl, {done - written} more( and \d+ failures?)? kept in out\.jsonl\.headgate; "
        r"run it again with room to write them$",
        process.stderr,
        re.MULTILINE,
    )
    assert kept is not None, process.stderr


@pytest.mark.parametrize("options", [[], ["--id", "id", "--fair", "id"]], ids=["lanes", "pool and ids"])
def test_c15_a_run_that_resumes_without_room_calls_nothing_before_the_kept_results_are_written(
    options: list[str], tmp_path: Path
) -> None:
    count, out = 1000, tmp_path / "out.jsonl"
    numbered(tmp_path / "in.jsonl", count)
    arguments = ["map", "map_jobs:long", "in.jsonl", "-o", "out.jsonl", "--json", *options]
    process = ran([sys.executable, "-c", LIMITED, "60000", *arguments], tmp_path)
    kept = check_stopped(process, tmp_path, out, count)
    assert json.loads(process.stdout)["kept"] > 0
    for _ in range(2):
        before, calls = json.loads(process.stdout), paid(tmp_path)
        written = {one["id"] for one in lines(out)}
        written |= {one["record"]["id"] for one in lines(Path(f"{out}.failed.jsonl"))}
        is_next_kept = min(set(range(count)) - written) in kept  # not if it took long, and the journal was full first
        process = ran([sys.executable, "-c", LIMITED, "60000", *arguments], tmp_path)
        figures = json.loads(process.stdout)
        assert process.returncode == 1, process.stderr
        if is_next_kept:
            assert (figures["run"], paid(tmp_path)) == (0, calls), process.stderr
            assert [figures[name] for name in ("done", "failed")] == [before[name] for name in ("done", "failed")]
            assert "out.jsonl cannot be written: File too large. Make room" in process.stderr
    check_done(ran(command(*arguments), tmp_path), tmp_path, out, count, kept, ordered=True)


def test_c15_a_full_disk_at_the_start_says_what_to_do(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 10)
    arguments = ["map", "map_jobs:long", "in.jsonl", "-o", "out.jsonl"]
    process = ran([sys.executable, "-c", LIMITED, "100", *arguments], tmp_path)
    assert process.returncode == 1
    assert process.stderr == (
        "headgate map: stopped: out.jsonl.headgate.new cannot be written: File too large. Make room, and give the same "
        "command: it runs only what is not written\n"
    )
    assert not (tmp_path / "calls").exists()
    assert not (tmp_path / "out.jsonl.headgate.new").exists(), "a full disk needs the room"
    assert ran(command(*arguments), tmp_path).returncode == 0


def test_c15_stdout_on_a_full_disk(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    numbered(tmp_path / "in.jsonl", 10)
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            command("map", "map_jobs:same", "in.jsonl", "-o", "-"),
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(env_of(tmp_path)),
            timeout=PATIENCE, check=False,
        )  # fmt: skip
    assert process.returncode == 1
    assert "0 done, 0 failed; this run: 10 records" in process.stderr
    assert "stopped: stdout cannot be written: No space left on device. 10 results" in process.stderr


def test_c15_parquet_on_a_full_disk_is_made_by_the_next_command(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    numbered(tmp_path / "in.jsonl", 1)
    arguments = ["map", "map_jobs:wide", "in.jsonl", "-o", "out.parquet"]
    process = ran([sys.executable, "-c", LIMITED, "8000", *arguments], tmp_path)
    assert process.returncode == 1
    assert "the results cannot be written as Parquet: " in process.stderr
    assert "They are kept as JSON lines in out.parquet.part.jsonl; the same command goes on" in process.stderr
    assert not list(tmp_path.glob("*.new")), "a full disk needs the room"
    process = ran(command(*arguments), tmp_path)
    assert (process.returncode, (tmp_path / "out.parquet").exists()) == (0, True)
    assert "this run: 0 records" in process.stderr


def test_c15_a_disk_that_does_not_confirm_what_was_written_stops_the_run(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 10)
    failed = []

    def fsync(file: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            failed.append(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with mock.patch("os.fsync", fsync):
        ended = run_here("map", "map_jobs:same", "in.jsonl", "-o", "out.jsonl", cwd=tmp_path)
    assert (ended.returncode, len(failed)) == (1, 1), "a second sync would confirm what the disk has lost"
    assert "out.jsonl.headgate cannot be written: Input/output error" in ended.stderr
    assert "The disk did not confirm what was written last" in ended.stderr
    ended = run_here("map", "map_jobs:same", "in.jsonl", "-o", "out.jsonl", cwd=tmp_path)
    assert (ended.returncode, "this run: 0 records" in ended.stderr) == (0, True), "it is there, and verifies"


def test_c11_a_journal_that_was_just_replaced_counts_nothing_that_is_not_written(tmp_path: Path) -> None:
    """It is replaced as often as can be, and looked at as a kill would leave it."""
    folder, copies = tmp_path / "run", tmp_path / "copies"
    folder.mkdir()
    copies.mkdir()
    numbered(tmp_path / "in.jsonl", 400)
    arguments = ["map", "map_jobs:copied", str(tmp_path / "in.jsonl"), "-o", "out.jsonl"]
    with mock.patch("headgate.cli.batch.output._SHORT", 0), mock.patch("headgate.cli.batch.flow._SYNC", 0.0):
        ended = run_here(*arguments, cwd=folder, env={"FOLDER": str(folder), "COPIES": str(copies)})
    assert ended.returncode == 0
    for image in copies.iterdir():
        ended = run_here(*arguments, cwd=image, env={"FOLDER": str(image)})
        assert ended.returncode == 0, ended.stderr
        assert [one["id"] for one in lines(image / "out.jsonl")] == list(range(400))


@pytest.mark.parametrize("what", ["deleted", "replaced", "cut", "folder removed"])
def test_c15_an_output_that_is_taken_away_is_noticed(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    numbered(tmp_path / "in.jsonl", 100)
    out = folder / "out.jsonl"
    process = subprocess.Popen(
        command("map", "map_jobs:waits_for_a_file", "in.jsonl", "-o", str(out), "--max-concurrent", "3"),
        stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(env_of(tmp_path)),
    )  # fmt: skip
    with killed_at_end(process):
        until(lambda: (tmp_path / "began-2").exists())
        if what == "deleted":
            out.unlink()
        elif what == "replaced":
            (tmp_path / "other").write_text("other\n")
            os.replace(tmp_path / "other", out)
        elif what == "cut":
            out.write_text("other\n")
        else:
            shutil.rmtree(folder)
        (tmp_path / "go").touch()
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Traceback" not in errors
    told = "somebody else wrote to it, or cut it" if what == "cut" else "it was deleted, moved or replaced"
    assert f"stopped: {out} cannot be written: {told}" in errors
    assert "0 done, 0 failed" in errors


# -- journals and outputs that were cut -------------------------------------------------------------------------------


def in_process(folder: Path, *options: str) -> Ended:
    return run_here(
        "map", "map_jobs:keeps_a_copy", "../in.jsonl", "-o", "out.jsonl", "--max-concurrent", "3", *options,
        cwd=folder, env={"FOLDER": str(folder)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a run that has ended, and in `killed` those of one that was killed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    numbered(folder.parent / "in.jsonl", 8)
    import map_jobs

    map_jobs.calls.clear()
    assert in_process(folder, "--limit", "7").returncode == 1
    return folder


def cuts(data: bytes, scale: float) -> list[int]:
    """Where a file is cut: around every end of a line, and here and there inside of one, where all bytes are alike."""
    ends = [place for place, byte in enumerate(data, 1) if byte == 10]
    near = {place + step for place in (0, *ends) for step in (-1, 0, 1)}
    step = 7 if scale >= 1 else 61
    return sorted(place for place in near | set(range(0, len(data), step)) if 0 <= place < len(data))


def groups(journal: bytes) -> list[int]:
    """The lengths of the output that the states of a journal name."""
    entries = [json.loads(line[9:]) for line in journal.splitlines()]
    return [entry["out"] for entry in entries if entry["kind"] == "state"]


@pytest.mark.parametrize("image", ["ended", "killed"])
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.failed.jsonl", "out.jsonl.headgate"])
def test_c11_c15_after_any_cut_all_is_written_once_or_the_file_is_named(
    image: str, name: str, images: Path, scale: float
) -> None:
    import map_jobs

    source = images if image == "ended" else images / "killed"
    assert len(set(groups((source / "out.jsonl.headgate").read_bytes()))) >= 4
    folder = images.parent / "cut"
    outcomes = Counter[int]()
    for size in cuts((source / name).read_bytes(), scale):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "killed").mkdir()  # nothing is copied again
        for path in source.glob("out.jsonl*"):
            shutil.copy2(path, folder)
        os.truncate(folder / name, size)
        map_jobs.calls.clear()
        before = (folder / "out.jsonl").read_bytes()
        ended = in_process(folder)
        outcomes[ended.returncode] += 1
        where = f"{name} of the run that was {image}, cut to {size} bytes: {ended.stderr}"
        if ended.returncode == 2:
            assert f"{name} " in ended.stderr, where
            assert "Put it back" in ended.stderr, where
            assert "--restart" in ended.stderr or "--continue" in ended.stderr, where
            assert map_jobs.calls == [], where
            assert (folder / "out.jsonl").read_bytes() == before, where
            continue
        assert ended.returncode == 1, where  # record 2 fails
        assert [one["id"] for one in lines(folder / "out.jsonl")] == [0, 1, 3, 4, 5, 6, 7], where
        assert [one["record"]["id"] for one in lines(folder / "out.jsonl.failed.jsonl")] == [2], where
        *_, sure, newest = [0, *sorted(set(groups((source / "out.jsonl.headgate").read_bytes())))]
        if (image, name) == ("killed", "out.jsonl") and sure <= size < newest:
            before = before[:sure]  # as a kill tears it: the last 50 ms run again
        there = [json.loads(line)["id"] for line in before.splitlines(keepends=True) if line.endswith(b"\n")]
        assert not set(there) & set(map_jobs.calls), where
        assert len(map_jobs.calls) == len(set(map_jobs.calls)), where
    assert outcomes[2] > 0
    assert outcomes[1] > 0 or (image, name) not in {("killed", "out.jsonl"), ("ended", "out.jsonl.headgate")}


def test_c15_an_older_copy_of_the_journal_is_refused_and_pays_for_nothing(images: Path) -> None:
    import map_jobs

    folder = images.parent / "older"
    folder.mkdir()
    (folder / "killed").mkdir()
    for path in images.glob("out.jsonl*"):
        shutil.copy2(path, folder)
    shutil.copy2(images / "killed" / "out.jsonl.headgate", folder)
    map_jobs.calls.clear()
    for options in ([], ["--retry-failed"]):
        ended = in_process(folder, *options)
        assert ended.returncode == 2
        assert "out.jsonl.headgate was cut, or is an older copy" in ended.stderr
        assert map_jobs.calls == []
    ended = in_process(folder, "--continue")
    assert ended.returncode == 1
    assert "what it does not know of runs again" in ended.stderr
    assert [one["id"] for one in lines(folder / "out.jsonl")] == [0, 1, 3, 4, 5, 6, 7]


def test_c15_without_a_journal_nothing_that_is_there_is_overwritten(images: Path) -> None:
    folder = images.parent / "without"
    folder.mkdir()
    for path in images.glob("out.jsonl*"):
        shutil.copy2(path, folder)
    (folder / "out.jsonl.headgate").unlink()
    assert "put out.jsonl.headgate back" in in_process(folder).stderr
    (folder / "out.jsonl").unlink()
    ended = in_process(folder)
    assert (ended.returncode, "out.jsonl.failed.jsonl exists" in ended.stderr) == (2, True)
    assert len(lines(folder / "out.jsonl.failed.jsonl")) == 1
