"""`headgate map`: what it runs, what it writes, and how it goes on."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.support import HERE, Ended, importable, run, run_here

pytestmark = pytest.mark.integration


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    import map_jobs

    map_jobs.calls.clear()
    yield map_jobs.calls
    map_jobs.calls.clear()


def numbered(path: Path, count: int, **more: Any) -> Path:
    """Write records with an id each."""
    path.write_text("".join(json.dumps({"id": number, **more}) + "\n" for number in range(count)), "utf-8")
    return path


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def mapped(folder: Path, function: str, *options: str, source: str = "in.jsonl", out: str = "out.jsonl") -> Ended:
    return run_here("map", f"map_jobs:{function}", source, "-o", out, *options, cwd=folder)


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- C10: functions, formats, options ---------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["same", "plain", "later", "in_a_thread"])
@pytest.mark.parametrize("order", [[], ["--unordered"]])
def test_c10_c12_every_record_is_run_once_and_written_in_order(function: str, order: list[str], tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 500)
    ended = mapped(tmp_path, function, "--max-concurrent", "7", *order)
    assert (ended.returncode, ended.stdout) == (0, "")
    written = [line["id"] for line in lines(tmp_path / "out.jsonl")]
    assert sorted(written) == list(range(500))
    if not order:
        assert written == list(range(500))
    assert left(tmp_path) == {"in.jsonl", "out.jsonl", "out.jsonl.headgate"}
    assert ended.stderr.startswith("500 done, 0 failed; this run: 500 records in ")


def test_c12_a_slow_record_does_not_hold_back_others_unless_in_order(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 50)
    assert mapped(tmp_path, "later", "--unordered").returncode == 0
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] != list(range(50))


def test_c10_a_function_of_a_file_needs_no_package(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "my-job.py").write_text(
        "class Here:\n    @staticmethod\n    def twice(r): return 2 * r\n", "utf-8"
    )
    (tmp_path / "in.jsonl").write_text("1\n\n2\n3", "utf-8")
    ended = run_here("map", "work/my-job.py:Here.twice", "in.jsonl", "-o", "out.jsonl", cwd=tmp_path)
    assert (ended.returncode, lines(tmp_path / "out.jsonl")) == (0, [2, 4, 6])


def test_c10_stdin_and_stdout(tmp_path: Path) -> None:
    import subprocess

    from tests.support.cli.support import HERE, PATIENCE, command, environment

    ran = subprocess.run(
        command("map", "map_jobs:prints", "-", "-o", "-"),
        input='{"id": 1}\nnonsense\n{"id": 2}',
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment({"PYTHONPATH": importable(HERE)}),
        timeout=PATIENCE,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (1, "1\n2\n")
    assert ran.stderr.count("a word of the function") == 2
    assert '"line": 2, "error": "Unreadable"' in ran.stderr
    assert left(tmp_path) == set()


def test_c10_csv_in_and_out(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('\ufeffid,text\n1,"two\nlines"\n\n2,a,b\n3,"x, y"\n4\n', "utf-8")
    ended = mapped(tmp_path, "same", source="in.csv", out="out.csv")
    assert ended.returncode == 1
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [["id", "text"], ["1", "two\nlines"], ["3", "x, y"]]
    failures = lines(tmp_path / "out.csv.failed.jsonl")
    assert [(one["line"], one["text"]) for one in failures] == [(5, "2,a,b"), (7, "4")]
    assert failures[0]["message"] == "it has 3 fields, and there are 2 columns"


def test_c10_results_of_csv_need_the_columns_of_the_first(tmp_path: Path) -> None:
    records = [{"a": 1, "b": [1, "x"]}, {"a": True}, {"a": None, "c": 1}, "text", {}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), "utf-8")
    assert mapped(tmp_path, "same", "--max-concurrent", "1", out="out.csv").returncode == 1
    assert (tmp_path / "out.csv").read_text("utf-8") == 'a,b\n1,"[1, ""x""]"\ntrue,\n'
    assert [one["message"] for one in lines(tmp_path / "out.csv.failed.jsonl")] == [
        "the result has a field 'c', and the columns are a, b",
        "the result has a field 'result', and the columns are a, b",
        "the result cannot be written as CSV: its fields have no names",
    ]


def test_c10_c11_parquet_in_and_out_and_what_is_new(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.table({"id": list(range(2500)), "text": [f"t{number}" for number in range(2500)]})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=700)
    assert mapped(tmp_path, "same", "--limit", "1000", source="in.parquet", out="out.parquet").returncode == 0
    assert parquet.read_table(tmp_path / "out.parquet").num_rows == 1000
    assert mapped(tmp_path, "same", source="in.parquet", out="out.parquet").returncode == 0
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == table.to_pylist()


def test_c10_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    numbered(tmp_path / "in.jsonl", 1)
    ended = mapped(tmp_path, "same", out="out.parquet")
    assert ended.returncode == 2
    assert "Parquet needs pyarrow: `pip install pyarrow`" in ended.stderr
    assert left(tmp_path) == {"in.jsonl"}


def test_c10_limit_runs_the_first_records_and_a_later_command_the_rest(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 100)
    assert "3 done" in mapped(tmp_path, "same", "--limit", "3").stderr
    assert len(lines(tmp_path / "out.jsonl")) == 3
    ended = mapped(tmp_path, "same")
    assert "100 done, 0 failed; this run: 97 records" in ended.stderr
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == list(range(100))
    assert "this run: 0 records" in mapped(tmp_path, "same").stderr


@pytest.mark.parametrize("function", ["fails_once", "fails_once_in_a_thread"])
def test_c10_retries_try_a_record_again(function: str, tmp_path: Path, calls: list[Any]) -> None:
    numbered(tmp_path / "in.jsonl", 5)
    assert mapped(tmp_path, function, "--retries", "1").returncode == 0
    assert lines(tmp_path / "out.jsonl") == [0, 1, 2, 3, 4]
    assert len(calls) == 10


def test_c10_the_pool_takes_turns_between_the_values_of_a_field(tmp_path: Path, calls: list[Any]) -> None:
    records = [{"id": number, "tenant": "big" if number < 40 else "small"} for number in range(44)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), "utf-8")
    ended = mapped(tmp_path, "tenants", "--fair", "tenant", "--max-concurrent", "1")
    assert ended.returncode == 0
    assert lines(tmp_path / "out.jsonl") == list(range(44)), "in order all the same"
    assert "small" in calls[:4]
    assert calls[:10].count("small") == 4
    assert "  tenant big: 40 done, p50 " in ended.stderr
    assert "  tenant small: 4 done, p50 " in ended.stderr


def test_c10_urgent_records_go_first(tmp_path: Path, calls: list[Any]) -> None:
    records = [{"id": number, "urgency": number % 3} for number in range(30)] + [{"id": 30, "urgency": "soon"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), "utf-8")
    assert mapped(tmp_path, "urgent", "--priority", "urgency", "--max-concurrent", "1").returncode == 1
    assert calls[1:] == sorted(calls[1:], reverse=True)
    [failure] = lines(tmp_path / "out.jsonl.failed.jsonl")
    assert failure["message"] == "its urgency must be a whole number, got 'soon'"


def test_c10_functions_and_routines_run_on_workers(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 20)
    for function in ("pid", "on_a_worker"):
        arguments = ["map", f"map_jobs:{function}", "in.jsonl", "-o", f"{function}.jsonl", "--workers", "1"]
        ended = run(*arguments, cwd=tmp_path, env={"PYTHONPATH": importable(HERE)})
        assert ended.returncode == 0, ended.stderr
        found = lines(tmp_path / f"{function}.jsonl")
        assert [number for number, _ in found] == list(range(20))
        assert len({pid for _, pid in found}) == 1
        assert os.getpid() not in {pid for _, pid in found}


def test_c10_no_record_sees_the_context_of_another(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 20)
    assert mapped(tmp_path, "sets_context", "--max-concurrent", "2").returncode == 0
    assert set(lines(tmp_path / "out.jsonl")) == {"nothing"}


def test_c10_a_function_that_exits_or_is_cancelled_fails_alone(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 10)
    assert mapped(tmp_path, "leaves").returncode == 1
    assert lines(tmp_path / "out.jsonl") == [0, 4, 5, 6, 7, 8, 9]
    assert [one["error"] for one in lines(tmp_path / "out.jsonl.failed.jsonl")] == [
        "SystemExit", "CancelledError", "CancelledError",
    ]  # fmt: skip


def test_c12_results_are_written_by_value_or_fail_with_their_type(tmp_path: Path) -> None:
    names = ["dataclass", "date", "uuid", "decimal", "array", "text", "set", "nan", "object", "surrogate"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(name) + "\n" for name in names), "utf-8")
    assert mapped(tmp_path, "shapes").returncode == 1
    one = "00000000-0000-0000-0000-000000000001"
    assert lines(tmp_path / "out.jsonl") == [
        {"x": 1, "y": {"x": 2, "y": None}}, "2026-01-02", one, "1.5", [1, 2], "schön",
    ]  # fmt: skip
    failures = lines(tmp_path / "out.jsonl.failed.jsonl")
    assert [one["record"] for one in failures] == names[6:]
    assert "builtins.set has no form in JSON" in failures[0]["message"]
    assert "builtins.object" in failures[2]["message"]


# -- C01: wrong calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["map_jobs", "in.jsonl", "-o", "x.jsonl"], "names no function"),
        (["nowhere_at_all:f", "in.jsonl", "-o", "x.jsonl"], "there is no module nowhere_at_all"),
        (["nowhere.py:f", "in.jsonl", "-o", "x.jsonl"], "there is no file nowhere.py"),
        (["map_jobs:sane", "in.jsonl", "-o", "x.jsonl"], "has no function sane; did you mean same?"),
        (["map_jobs:calls", "in.jsonl", "-o", "x.jsonl"], "must be callable"),
        (["map_jobs:generates", "in.jsonl", "-o", "x.jsonl"], "must not be an async generator"),
        (["map_jobs:with_key", "in.jsonl", "-o", "x.jsonl"], "a function of key and record needs --keys"),
        (["map_jobs:same", "nowhere.jsonl", "-o", "x.jsonl"], "nowhere.jsonl cannot be read: No such file"),
        (["map_jobs:same", "in.jsonl", "-o", "nowhere/x.jsonl"], "nowhere/x.jsonl cannot be written: No such file"),
        (["map_jobs:same", "in.xls", "-o", "x.jsonl"], "format of in.xls is not known"),
        (["map_jobs:same", "in.jsonl", "-o", "x.jsonl", "--limit", "0"], "must be at least 1"),
        (["map_jobs:same", "in.jsonl", "-o", "x.jsonl", "--fair", "a", "--priority", "b"], "not allowed with"),
        (["map_jobs:same", "in.jsonl", "-o", "x.jsonl", "--retry-failed"], "there is no run to x.jsonl"),
        (["map_jobs:same", "in.jsonl", "-o", "-", "--json"], "results on stdout are not remembered"),
        (["map_jobs:same", "-", "-o", "-", "--input-format", "parquet"], "cannot be read from stdin"),
        (["map_jobs:same", "in.jsonl"], "required: -o/--output"),
    ],
)
def test_c01_c10_wrong_calls_are_named(arguments: list[str], words: str, tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 1)
    ended = run_here("map", *arguments, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_c10_a_module_that_cannot_be_imported_is_shown(tmp_path: Path) -> None:
    (tmp_path / "broken_job.py").write_text("import json\n1 / 0\n", "utf-8")
    (tmp_path / "json.py").write_text("def f(record): ...\n", "utf-8")
    numbered(tmp_path / "in.jsonl", 1)
    ended = run_here("map", "broken_job.py:f", "in.jsonl", "-o", "out.jsonl", cwd=tmp_path)
    assert ended.returncode == 2
    assert "broken_job.py cannot be imported: ZeroDivisionError" in ended.stderr
    ended = run_here("map", "json.py:f", "in.jsonl", "-o", "out.jsonl", cwd=tmp_path)
    assert ended.returncode == 2
    assert "another module has the name json" in ended.stderr


# -- C11: going on ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "more"),
    [("out.jsonl", ()), ("out.jsonl", ("--restart",)), ("out.jsonl.failed.jsonl", ()), ("link.jsonl", ("--restart",))],
)
def test_c11_the_input_is_never_overwritten(tmp_path: Path, source: str, more: tuple[str, ...]) -> None:
    if source == "link.jsonl":
        numbered(tmp_path / "out.jsonl", 2)
        (tmp_path / "link.jsonl").symlink_to("out.jsonl")
    else:
        numbered(tmp_path / source, 2)
    ended = mapped(tmp_path, "same", *more, source=source)
    assert ended.returncode == 2
    assert f"{source} is the input, and the run would overwrite it" in ended.stderr
    assert len(lines(tmp_path / source)) == 2


def test_c11_what_others_left_is_not_overwritten(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 2)
    (tmp_path / "out.jsonl").write_text("precious\n", "utf-8")
    ended = mapped(tmp_path, "same")
    assert ended.returncode == 2
    assert "was not begun by `headgate map`: --restart overwrites it" in ended.stderr
    assert (tmp_path / "out.jsonl").read_text("utf-8") == "precious\n"
    assert mapped(tmp_path, "same", "--restart").returncode == 0
    assert len(lines(tmp_path / "out.jsonl")) == 2


def test_c11_restart_begins_anew(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 4)
    assert mapped(tmp_path, "odd_fails").returncode == 1
    assert mapped(tmp_path, "odd_fails").returncode == 1, "nothing is left to do, and there are failures"
    assert mapped(tmp_path, "odd_fails", "--restart").returncode == 1
    assert len(lines(tmp_path / "out.jsonl")) == 2
    assert len(lines(tmp_path / "out.jsonl.failed.jsonl")) == 2


def test_c11_an_input_that_has_grown_goes_on(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 5)
    assert mapped(tmp_path, "same").returncode == 0
    with source.open("a", encoding="utf-8") as file:
        file.write('{"id": 5}\n')
    ended = mapped(tmp_path, "same")
    assert ended.returncode == 0
    assert "in.jsonl has grown since the run began" in ended.stderr
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == list(range(6))


def test_c11_a_changed_input_is_named(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 9)
    assert mapped(tmp_path, "same", "--limit", "5").returncode == 0
    source.write_text(source.read_text("utf-8").replace('{"id": 3}', '{"id": 33}'), "utf-8")
    ended = mapped(tmp_path, "same")
    assert ended.returncode == 2
    assert "the input in.jsonl has changed since the run began, in the part that is done already" in ended.stderr
    assert len(lines(tmp_path / "out.jsonl")) == 5
    assert mapped(tmp_path, "same", "--continue").returncode == 0
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == list(range(9))


def test_c11_a_file_that_was_only_touched_or_changed_later_goes_on(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 9)
    assert mapped(tmp_path, "same", "--limit", "5").returncode == 0
    source.write_text(source.read_text("utf-8").replace('{"id": 8}', '{"id": 88}'), "utf-8")
    os.utime(source, ns=(1, 1))
    assert mapped(tmp_path, "same").returncode == 0
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == [0, 1, 2, 3, 4, 5, 6, 7, 88]


def test_c11_with_ids_a_changed_input_goes_on_by_its_ids(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 6)
    assert mapped(tmp_path, "same", "--id", "id", "--limit", "4").returncode == 0
    source.write_text("".join(f'{{"id": {number}}}\n' for number in (9, 2, 5, 0, 7)), "utf-8")
    ended = mapped(tmp_path, "same", "--id", "id")
    assert ended.returncode == 0
    assert "records whose id is done are passed over" in ended.stderr
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == [0, 1, 2, 3, 9, 5, 7]


def test_c11_a_run_over_a_changed_input_that_was_stopped_goes_on_by_its_ids(tmp_path: Path) -> None:
    """What the first input had is done in the third command too, and is no second record with that id."""
    source = numbered(tmp_path / "in.jsonl", 4)
    assert mapped(tmp_path, "same", "--id", "id").returncode == 0
    source.write_text("".join(f'{{"id": {number}}}\n' for number in (9, 2, 5, 0, 7, 9)), "utf-8")
    assert mapped(tmp_path, "same", "--id", "id", "--limit", "1").returncode == 0
    assert mapped(tmp_path, "same", "--id", "id").returncode == 1
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == [0, 1, 2, 3, 9, 5, 7]
    failures = lines(tmp_path / "out.jsonl.failed.jsonl")
    assert [one["message"] for one in failures] == ["its id 9 is that of line 1 too"]


def test_c11_a_changed_function_is_named(tmp_path: Path) -> None:
    job = tmp_path / "changing_job.py"
    job.write_text("PROMPT = 'a'\ndef f(record): return PROMPT\n", "utf-8")
    numbered(tmp_path / "in.jsonl", 4)
    arguments = ["map", "changing_job:f", "in.jsonl", "-o", "out.jsonl"]
    assert run_here(*arguments, "--limit", "2", cwd=tmp_path).returncode == 0
    del sys.modules["changing_job"]
    job.write_text("# a remark\nPROMPT = 'a'\n\n\ndef f(record):\n    return PROMPT\n", "utf-8")
    os.utime(job, (1, 1))
    assert run_here(*arguments, "--limit", "3", cwd=tmp_path).returncode == 0, "it means the same"
    del sys.modules["changing_job"]
    job.write_text("PROMPT = 'bb'\ndef f(record): return PROMPT\n", "utf-8")
    ended = run_here(*arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert "the source of changing_job:f has changed since the run began: --continue goes on with it" in ended.stderr
    assert run_here(*arguments, "--continue", cwd=tmp_path).returncode == 0
    assert lines(tmp_path / "out.jsonl") == ["a", "a", "a", "bb"]
    ended = run_here("map", "map_jobs:same", *arguments[2:], cwd=tmp_path)
    assert ended.returncode == 2
    assert "the function was changing_job:f and is map_jobs:same" in ended.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--id", "id"], "the run was begun without --id"), (["--output-format", "csv"], "begun with jsonl as format")],
)
def test_c11_other_options_for_the_same_output_are_named(options: list[str], words: str, tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 2)
    assert mapped(tmp_path, "same").returncode == 0
    ended = mapped(tmp_path, "same", *options)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "--restart begins anew" in ended.stderr


def test_c11_an_output_that_somebody_cut_is_named(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 4)
    assert mapped(tmp_path, "same", "--limit", "3").returncode == 0
    os.truncate(tmp_path / "out.jsonl", 5)
    ended = mapped(tmp_path, "same")
    assert ended.returncode == 2
    assert "it was changed by somebody else" in ended.stderr


def test_c11_a_group_that_a_kill_tore_is_cut_off(tmp_path: Path) -> None:
    """The journal says what is about to be written; a torn line at its end does not matter."""
    numbered(tmp_path / "in.jsonl", 4)
    assert mapped(tmp_path, "same", "--limit", "3").returncode == 0
    journal = tmp_path / "out.jsonl.headgate"
    *kept, synced = journal.read_bytes().splitlines(keepends=True)
    assert b'"kind":"synced"' in synced
    journal.write_bytes(b"".join(kept) + b'0000000f {"kind":"state"')
    os.truncate(tmp_path / "out.jsonl", 15)
    assert mapped(tmp_path, "same").returncode == 0
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == list(range(4))


def test_c11_only_a_file_can_be_continued(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 4)
    os.mkfifo(tmp_path / "pipe.jsonl")
    ended = mapped(tmp_path, "same", out="pipe.jsonl")
    assert (ended.returncode, "pipe.jsonl is not a file: only a file can be continued" in ended.stderr) == (2, True)
    (tmp_path / "out.jsonl.headgate").mkdir()
    ended = mapped(tmp_path, "same")
    assert (ended.returncode, "out.jsonl.headgate cannot be read: Is a directory" in ended.stderr) == (2, True)


def test_c15_what_somebody_else_wrote_to_the_output_is_not_cut_off(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 4)
    assert mapped(tmp_path, "same", "--limit", "3").returncode == 0
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"id": "mine"}\n')
    ended = mapped(tmp_path, "same")
    assert ended.returncode == 2
    assert "out.jsonl has 45 bytes, and its journal knows of 30: out.jsonl.headgate was cut" in ended.stderr
    assert len(lines(tmp_path / "out.jsonl")) == 4
    assert mapped(tmp_path, "same", "--continue").returncode == 0
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == list(range(4))


def test_c11_two_runs_do_not_write_to_one_output(tmp_path: Path) -> None:
    import fcntl

    numbered(tmp_path / "in.jsonl", 4)
    with (tmp_path / "out.jsonl").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = mapped(tmp_path, "same")
    assert ended.returncode == 2
    assert "another `headgate map` is writing to out.jsonl" in ended.stderr


@pytest.mark.parametrize("order", [[], ["--unordered"]])
def test_c11_the_order_may_change_between_two_runs(order: list[str], tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 30)
    other = [] if order else ["--unordered"]
    assert mapped(tmp_path, "later", "--limit", "17", *order).returncode == 0
    assert mapped(tmp_path, "later", *other).returncode == 0
    assert sorted(line["id"] for line in lines(tmp_path / "out.jsonl")) == list(range(30))


# -- C12: failures ----------------------------------------------------------------------------------------------------


def test_c12_failures_stand_in_a_file_with_their_errors(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"id": 0}\n{"id": 1}\n\n{"id"\n\xff\n{"id": 2} 3\n[1\n')
    ended = mapped(tmp_path, "odd_fails")
    assert ended.returncode == 1
    assert lines(tmp_path / "out.jsonl") == [{"id": 0}]
    failures = lines(tmp_path / "out.jsonl.failed.jsonl")
    assert [one["line"] for one in failures] == [2, 4, 5, 6, 7]
    assert failures[0] | {"where": ""} == {
        "line": 2, "error": "ValueError", "message": "1 is odd", "where": "", "attempts": 1, "record": {"id": 1},
    }  # fmt: skip
    assert "map_jobs.py:" in failures[0]["where"]
    assert failures[1]["text"] == '{"id"'
    assert [one["error"] for one in failures[1:]] == ["Unreadable"] * 4
    assert failures[2]["message"].startswith("not UTF-8: ")
    assert "failures: out.jsonl.failed.jsonl (--retry-failed runs them again)" in ended.stderr


def test_c12_retry_failed_runs_only_those(tmp_path: Path, calls: list[Any]) -> None:
    numbered(tmp_path / "in.jsonl", 6)
    assert mapped(tmp_path, "odd_fails").returncode == 1
    calls.clear()
    ended = mapped(tmp_path, "odd_fails", "--retry-failed")
    assert ended.returncode == 1, "they fail again"
    assert [record["id"] for record in calls] == [1, 3, 5]
    assert [one["line"] for one in lines(tmp_path / "out.jsonl.failed.jsonl")] == [2, 4, 6]
    ended = mapped(tmp_path, "same", "--retry-failed")
    assert ended.returncode == 0
    assert "it has changed since the run began" in ended.stderr, "named, and no reason to stop"
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == [0, 2, 4, 1, 3, 5]
    assert left(tmp_path) == {"in.jsonl", "out.jsonl", "out.jsonl.headgate"}
    ended = mapped(tmp_path, "same", "--retry-failed")
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (0, "nothing has failed")


def test_c12_what_could_not_be_read_fails_again_as_it_did(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 0}\n{"id": 1\n', "utf-8")
    assert mapped(tmp_path, "same").returncode == 1
    before = lines(tmp_path / "out.jsonl.failed.jsonl")
    assert mapped(tmp_path, "same", "--retry-failed").returncode == 1
    assert lines(tmp_path / "out.jsonl.failed.jsonl") == before


@pytest.mark.parametrize("moment", ["before", "after"])
def test_c11_c12_a_kill_at_the_begin_or_end_of_a_retry_loses_nothing(moment: str, tmp_path: Path) -> None:
    """Between the two renames at its begin, or between the last state and the removal of what was retried."""
    numbered(tmp_path / "in.jsonl", 4)
    assert mapped(tmp_path, "odd_fails").returncode == 1
    failed, retrying = tmp_path / "out.jsonl.failed.jsonl", tmp_path / "out.jsonl.retrying.jsonl"
    if moment == "before":
        failed.rename(retrying)
    else:
        retrying.write_bytes(failed.read_bytes())
    assert mapped(tmp_path, "same", "--retry-failed").returncode == 0
    assert sorted(line["id"] for line in lines(tmp_path / "out.jsonl")) == [0, 1, 2, 3]
    assert left(tmp_path) == {"in.jsonl", "out.jsonl", "out.jsonl.headgate"}


def test_c12_two_records_with_one_id_are_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n{"id": "a"}\n{"name": 1}\n7\n', "utf-8")
    assert mapped(tmp_path, "same", "--id", "id", "--limit", "2").returncode == 0
    assert mapped(tmp_path, "same", "--id", "id").returncode == 1
    assert [(one["line"], one.get("id"), one["message"]) for one in lines(tmp_path / "out.jsonl.failed.jsonl")] == [
        (3, "a", "its id 'a' is that of line 1 too"),
        (4, None, "it has no field 'id'"),
        (5, None, "it has no field 'id'"),
    ]


def test_c12_the_order_holds_behind_a_record_that_takes_longest(tmp_path: Path) -> None:
    numbered(tmp_path / "in.jsonl", 3000)
    assert mapped(tmp_path, "later", "--max-concurrent", "300").returncode == 0
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == list(range(3000))


# -- C13: summary -----------------------------------------------------------------------------------------------------


def test_c13_the_summary_as_json(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"id": 1, "cost": 0.25, "who": "a"}\n{"id": 2, "cost": 1, "who": "b"}\n3\n', "utf-8"
    )
    ended = mapped(tmp_path, "same", "--json", "--cost", "cost", "--fair", "who")
    figures = json.loads(ended.stdout)
    assert ended.returncode == 0
    assert (figures["complete"], figures["done"], figures["failed"], figures["run"]) == (True, 3, 0, 3)
    assert figures["cost"] == 1.25
    assert figures["tenants"]["a"]["cost"] == 0.25
    assert set(figures["tenants"]) == {"a", "b", "None"}
    assert 0 < figures["p50"] <= figures["p99"]
    assert "cost 1.25" in ended.stderr
    again = json.loads(mapped(tmp_path, "same", "--json", "--cost", "cost", "--fair", "who").stdout)
    assert (again["run"], again["done"], again["cost"]) == (0, 3, 1.25)
