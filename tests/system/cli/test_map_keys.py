"""Keys of `headgate map`: where they come from, who may read them, and what becomes of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.cli.batch.keys import read_keys
from headgate.cli.output import WrongCall
from tests.support.cli.support import Ended, run_here

SECRET = "sk-a-secret-that-nobody-may-see"


def no_command(words: Sequence[str]) -> str:
    raise AssertionError(words)


def keys_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text, "utf-8")
    path.chmod(mode)
    return path


def mapped(folder: Path, function: str, *options: str, count: int = 20) -> Ended:
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"id": number}) + "\n" for number in range(count)), "utf-8")
    return run_here("map", f"map_jobs:{function}", "in.jsonl", "-o", "out.jsonl", *options, cwd=folder)


@pytest.fixture
def calls() -> list[Any]:
    import map_jobs

    map_jobs.calls.clear()
    found: list[Any] = map_jobs.calls
    return found


def test_c14_keys_come_from_files_variables_and_commands(tmp_path: Path) -> None:
    path = keys_file(
        tmp_path,
        """
        strategy = "primary_backup"
        [keys]
        plain = "sk-1"
        variable = "env:KEY_2"
        printed = { value = "command:pass show 'a key'", max_in_flight = 4, tags = ["gpt"], weight = 2.0 }
        proxy = { value = { user = "me", password = "env:KEY_2" } }
        """,
    )
    asked: list[Sequence[str]] = []

    def command(words: Sequence[str]) -> str:
        asked.append(words)
        return "sk-3\nsk-4\n" if words[0] == "all" else "sk-3\n"

    keys = read_keys([str(path), "env:KEY_5", "command:all"], {"KEY_2": "sk-2", "KEY_5": "sk-5"}, command)
    assert {name: fields["value"] for name, fields in keys.fields.items()} == {
        "plain": "sk-1",
        "variable": "sk-2",
        "printed": "sk-3",
        "proxy": {"user": "me", "password": "sk-2"},
        "KEY_5": "sk-5",
        "key-1": "sk-3",
        "key-2": "sk-4",
    }
    assert asked == [["pass", "show", "a key"], ["all"]]
    assert keys.fields["printed"] == {"value": "sk-3", "max_in_flight": 4, "tags": ["gpt"], "weight": 2.0}
    assert keys.settings == {"strategy": "primary_backup"}
    assert "sk-" not in repr(keys)
    assert set(keys.pool().snapshot()) == set(keys.fields)


def test_c14_what_a_command_prints_is_a_key(tmp_path: Path) -> None:
    keys = read_keys([f"command:echo {SECRET}"], {})
    assert keys.fields == {"key-1": {"value": SECRET}}


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (f'[keys]\na = "{SECRET}"', 0o644, "others can read the keys in keys.toml (mode 644): `chmod 600 keys.toml`"),
        (f'[keys]\na = "{SECRET}"', 0o640, "others can read"),
        (f'[keys]\na = "{SECRET}"', 0o602, "others can write to keys.toml (mode 602)"),
        ('[keys]\na = "env:MISSING"', 0o600, "the environment variable MISSING, which is to hold a key, is not set"),
        ('[keys]\na = "command:false"', 0o600, "the command false for a key failed with exit code 1"),
        ('[keys]\na = "command:no-such-command-here"', 0o600, "no-such-command-here for a key failed: No such file"),
        ('[keys]\na = "command:true"', 0o600, "the command true printed no key"),
        (f'[keys]\na = "{SECRET}\n', 0o600, "keys.toml is not TOML: there is a fault at line 2"),
        ('a = "b"', 0o600, "has no table [keys]"),
        (f'[keys]\na = {{ value = "{SECRET}", max_inflight = 3 }}', 0o600, "Did you mean max_in_flight?"),
        (f'[keys]\na = {{ valeu = "{SECRET}" }}', 0o600, "Did you mean value?"),
        ("[keys]\na = { max_in_flight = 3 }", 0o600, "the key a in keys.toml has no value"),
        ('[keys]\na = ""', 0o600, "the key a in keys.toml has no value"),
        ("[keys]\na = 5", 0o600, "the key a in keys.toml has no value"),
        (f'stratgy = "x"\n[keys]\na = "{SECRET}"', 0o600, "Did you mean strategy?"),
        (f'strategy = "x"\n[keys]\na = "{SECRET}"', 0o600, "strategy"),
        (f'[keys]\na = {{ value = "{SECRET}", max_in_flight = 0 }}', 0o600, "max_in_flight"),
    ],
)
def test_c14_a_file_of_keys_that_is_wrong_or_open_to_others_is_refused(
    text: str, mode: int, words: str, tmp_path: Path
) -> None:
    keys_file(tmp_path, text, mode)
    ended = mapped(tmp_path, "with_key", "--keys", "keys.toml")
    assert ended.returncode == 2
    assert words in ended.stderr
    assert SECRET not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_c14_a_file_without_secrets_may_be_read_by_others(tmp_path: Path) -> None:
    path = keys_file(tmp_path, '[keys]\na = "env:KEY"', 0o644)
    assert read_keys([str(path)], {"KEY": SECRET}, no_command).fields == {"a": {"value": SECRET}}


def test_c14_two_keys_with_one_name_are_refused() -> None:
    with pytest.raises(WrongCall, match="two keys have the name 'KEY'"):
        read_keys(["env:KEY", "env:KEY"], {"KEY": SECRET}, no_command)


def test_c10_c13_c14_limited_and_revoked_keys_cost_no_record(tmp_path: Path, calls: list[Any]) -> None:
    keys_file(tmp_path, '[keys]\nlimited = "sk-limited-1"\nrevoked = "sk-revoked-1"\ngood = "sk-good-1"')
    ended = mapped(tmp_path, "with_key", "--keys", "keys.toml", "--cost", "cost", "--json", count=200)
    assert ended.returncode == 0, ended.stderr
    written = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert written == list(range(200))
    figures = json.loads(ended.stdout)
    assert figures["keys"]["revoked"]["status"] == "disabled"
    assert figures["keys"]["limited"]["cooldowns"] > 0
    assert sum(key["done"] for key in figures["keys"].values()) == 200
    assert figures["cost"] == 100.0
    assert "key revoked: 0 done, disabled" in ended.stderr
    assert ("good", "sk-good-1") in calls
    assert "sk-" not in ended.stderr + ended.stdout


def test_c10_a_plain_function_gets_the_key_too(tmp_path: Path) -> None:
    ended = mapped(tmp_path, "tells_itself", "--keys", f"command:echo {SECRET}", count=3)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out.jsonl").read_text("utf-8") == '["key-1", 0]\n["key-1", 1]\n["key-1", 2]\n'


def test_c10_a_function_that_takes_no_key_is_named(tmp_path: Path) -> None:
    ended = mapped(tmp_path, "same", "--keys", "command:echo sk-something")
    assert ended.returncode == 2
    assert "is called with the key and the record, and does not take 2 arguments" in ended.stderr


def test_c11_c14_without_any_key_left_the_run_stops_and_no_record_is_spent(tmp_path: Path, scale: float) -> None:
    many = 5000 if scale >= 1 else 1000
    ended = mapped(tmp_path, "revokes", "--keys", f"command:echo {SECRET}", count=many)
    assert ended.returncode == 1
    assert "stopped: " in ended.stderr
    assert "the same command goes on" in ended.stderr
    assert not (tmp_path / "out.jsonl.failed.jsonl").exists()
    assert re.search(r"^  key \S+: 0 done, .*disabled", ended.stderr, re.MULTILINE), "the summary has its lines"
    ended = mapped(tmp_path, "tells_itself", "--continue", "--keys", f"command:echo {SECRET}", count=many)
    assert ended.returncode == 0, ended.stderr
    assert len((tmp_path / "out.jsonl").read_text("utf-8").splitlines()) == many


def test_c14_a_failure_that_shows_a_key_shows_its_name_instead(tmp_path: Path) -> None:
    os.environ["KEY_OF_A_TEST"] = SECRET
    try:
        ended = mapped(tmp_path, "says_the_key", "--keys", "env:KEY_OF_A_TEST", count=2)
    finally:
        del os.environ["KEY_OF_A_TEST"]
    assert ended.returncode == 1
    for path in tmp_path.iterdir():
        assert SECRET not in path.read_text("utf-8"), path
    first = json.loads((tmp_path / "out.jsonl.failed.jsonl").read_text("utf-8").splitlines()[0])
    assert "KEY_OF_A_TEST" in first["message"]


def test_c14_a_call_that_may_be_paid_for_is_not_interrupted_unless_the_file_says_so(tmp_path: Path) -> None:
    path = keys_file(tmp_path, f'[keys]\na = "{SECRET}"', 0o600)
    assert read_keys([str(path)], {}, no_command).options["cancel_siblings"] is False
    path = keys_file(tmp_path, f'cancel_siblings = true\n[keys]\na = "{SECRET}"', 0o600)
    assert read_keys([str(path)], {}, no_command).options["cancel_siblings"] is True


def test_c14_h10_a_file_of_keys_may_have_quotas(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        'quota = { requests = 5, per = 60.0 }\n[keys]\na = "sk-1"\nb = { value = "sk-2", quota = "learn" }\n'
    )
    path.chmod(0o600)
    seen = read_keys([str(path)], {}).pool().snapshot()
    assert [seen[name]["quota"]["left"] for name in "ab"] == [{"requests": 5.0}, {"requests": None}]


@pytest.mark.parametrize(
    "quota",
    [
        '"lern"',
        "60",
        "{ request = 5 }",
        "{ requests = 0 }",
        "{}",
        "[]",
        '["learn"]',
        "[{ requests = 5 }, 60]",
        "[{ requests = 5 }, { requests = 6 }]",
    ],
)
def test_c14_h10_a_wrong_quota_in_a_file_of_keys_is_named(tmp_path: Path, quota: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'quota = {quota}\n[keys]\na = "sk-1"\n')
    path.chmod(0o600)
    with pytest.raises(WrongCall, match=r'keys\.toml: .*write quota = "learn", {'):
        read_keys([str(path)], {})


def test_l02_c14_a_file_of_keys_may_have_several_quotas(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        "quota = [{ requests = 5, per = 1 }, { requests = 100, per = 3600, input_tokens = 9000 }]\n"
        '[keys]\na = "sk-1"\nb = { value = "sk-2", quota = [{ output_tokens = 70 }] }\n'
    )
    path.chmod(0o600)
    keys = read_keys([str(path)], {})
    assert keys.have_tokens
    seen = keys.pool().snapshot()
    assert [seen[name]["quota"]["left"] for name in "ab"] == [
        {"requests/second": 5.0, "requests/hour": 100.0, "input_tokens": 9000.0},
        {"output_tokens": 70.0},
    ]


def test_c14_l04_a_file_of_keys_may_have_adaptive_limits(tmp_path: Path) -> None:
    path = keys_file(
        tmp_path,
        'max_in_flight = "adaptive"\n[keys]\na = "sk-1"\nb = { value = "sk-2", max_in_flight = 3 }\n'
        'c = { value = "sk-3", max_in_flight = { start = 8, most = 50, pause = 2 } }\n',
        0o600,
    )
    keys = read_keys([str(path)], {})
    assert [one["max_in_flight"] for one in keys.pool().snapshot().values()] == [4, 3, 8]
    assert keys.most_in_flight == 200 + 3 + 50


@pytest.mark.parametrize("limit", ['"adaptiv"', "0", "true", "{ begin = 5 }", "{ start = 0 }", "{ most = 2 }"])
def test_c14_l04_a_wrong_limit_in_a_file_of_keys_is_named(tmp_path: Path, limit: str) -> None:
    path = keys_file(tmp_path, f"max_in_flight = {limit}\n[keys]\na = 'sk-1'\n", 0o600)
    with pytest.raises(WrongCall, match=r'keys\.toml: .*write max_in_flight = 4, "adaptive", or'):
        read_keys([str(path)], {})


# -- what errors say about keys ----------------------------------------------------------------------------------------


def test_c14_c13_r80_a_function_that_raises_the_errors_of_its_client_loses_no_record(
    tmp_path: Path, calls: list[Any]
) -> None:
    keys_file(tmp_path, '[keys]\nrevoked = "sk-revoked-1"\ngood = "sk-good-1"')
    ended = mapped(
        tmp_path, "raises_what_the_client_raises", "--keys", "keys.toml", "--max-concurrent", "5", "--json", count=100
    )
    assert ended.returncode == 0, ended.stderr
    written = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert written == [*range(100)]
    seen = json.loads(ended.stdout)["keys"]
    assert (seen["revoked"]["status"], seen["revoked"]["done"]) == ("disabled", 0)
    assert (seen["good"]["status"], seen["good"]["done"], seen["good"]["failed"]) == ("healthy", 100, 0)
    assert sum(key == "revoked" for key, _ in calls) <= 5, "those that had begun"


def test_c13_c14_what_failed_with_a_key_is_not_done(tmp_path: Path) -> None:
    keys_file(tmp_path, 'classify = "none"\n[keys]\nrevoked = "sk-revoked-1"\ngood = "sk-good-1"')
    ended = mapped(tmp_path, "raises_what_the_client_raises", "--keys", "keys.toml", "--json", count=50)
    assert ended.returncode == 1
    figures = json.loads(ended.stdout)
    seen = figures["keys"]
    assert (seen["revoked"]["status"], seen["revoked"]["done"]) == ("healthy", 0)
    assert seen["revoked"]["failed"] == figures["failed"] > 0
    assert seen["good"]["done"] == figures["done"]
    assert f"key revoked: 0 done, {figures['failed']} failed" in ended.stderr


def test_c14_r77_a_file_of_keys_names_a_classifier(tmp_path: Path) -> None:
    keys_file(tmp_path, 'classify = "map_jobs:judges"\n[keys]\nbad = "sk-bad-1"\ngood = "sk-good-1"')
    ended = mapped(tmp_path, "says_no", "--keys", "keys.toml", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["keys"]["bad"]["status"] == "disabled"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('"http_error"', 'classify must be "http_errors", "none" or "module:function", got \'http_error\''),
        ("3", 'keys.toml: classify must be "http_errors"'),
        ("false", 'keys.toml: classify must be "http_errors"'),
        ('"map_jobs:judge"', "map_jobs has no function judge; did you mean judges?"),
        ('"no_such_module:judge"', "there is no module no_such_module"),
        ('"map_jobs:takes_two"', "is called with an error or a result (classify, in the file of keys)"),
        ('"map_jobs:judges_later"', "classify must be a plain function, got an async one"),
    ],
)
def test_c14_a_wrong_classifier_is_named_before_anything_runs(given: str, words: str, tmp_path: Path) -> None:
    keys_file(tmp_path, f'classify = {given}\n[keys]\na = "{SECRET}"')
    ended = mapped(tmp_path, "with_key", "--keys", "keys.toml")
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.glob("out.jsonl*"))


@pytest.mark.parametrize(
    ("setting", "options", "attempts"),
    [("", (), 3), ("", ("--retries", "4"), 5), ("max_attempts = 7\n", (), 7), ('classify = "none"\n', (), 1)],
)
def test_c14_r80_errors_of_the_service_are_tried_a_few_times(
    setting: str, options: tuple[str, ...], attempts: int, tmp_path: Path, calls: list[Any]
) -> None:
    keys_file(tmp_path, f'{setting}[keys]\na = "sk-a"\nb = "sk-b"')
    ended = mapped(tmp_path, "fails_upstream", "--keys", "keys.toml", *options, count=3)
    assert ended.returncode == 1
    assert (calls.count(1), calls.count(0), calls.count(2)) == (attempts, 1, 1)
    [line] = (tmp_path / "out.jsonl.failed.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["attempts"] == attempts


# -- tokens ------------------------------------------------------------------------------------------------------------


def sized(
    folder: Path, sizes: Sequence[Any], *options: str, quota: str = "{ tokens = 100, per = 600.0, burst = 100 }"
) -> Ended:
    """Map a function over records of these sizes, with a key that has a quota of tokens."""
    import map_jobs

    map_jobs.running.update(tokens=0, most=0)
    keys_file(folder, f'quota = {quota}\n[keys]\na = "sk-a-1"')
    records = [{"id": number, **({} if size is None else {"size": size})} for number, size in enumerate(sizes)]
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    arguments = ("map_jobs:takes_tokens", "in.jsonl", "-o", "out.jsonl", "--keys", "keys.toml", *options)
    return run_here("map", *arguments, cwd=folder)


@pytest.mark.parametrize(("reserve", "most"), [("size", 90), ("map_jobs:tokens_of", 30)])
def test_c10_h10_records_reserve_tokens(reserve: str, most: int, tmp_path: Path) -> None:
    import map_jobs

    ended = sized(tmp_path, [30] * 20, "--reserve", reserve, "--cost", "price", "--json")
    assert ended.returncode == 0, ended.stderr
    assert map_jobs.running["most"] == most, "of 100 tokens, three of 30, or one of 60; 10 run at a time"
    assert json.loads(ended.stdout)["cost"] == 10.0, "--cost is the sum of a field of the results"


@pytest.mark.parametrize("reserve", ["size", "map_jobs:cost_of"])
def test_l02_c10_records_reserve_input_and_output(reserve: str, tmp_path: Path) -> None:
    """Of 100 input and 1000 output tokens, 60 and 30 are reserved: one record runs at a time."""
    import map_jobs

    map_jobs.running.update(tokens=0, most=0)
    quota = "{ input_tokens = 100, output_tokens = 1000, per = 600.0, burst = 100 }"
    keys_file(tmp_path, f'quota = {quota}\n[keys]\na = "sk-a-1"')
    records = [{"size": {"input": 60, "output": 30}}] * 5
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    arguments = ("map_jobs:takes_split_tokens", "in.jsonl", "-o", "out.jsonl", "--keys", "keys.toml")
    ended = run_here("map", *arguments, "--reserve", reserve, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert map_jobs.running["most"] == 1


def test_c10_h10_a_field_of_csv_is_a_number_too(tmp_path: Path) -> None:
    keys_file(tmp_path, 'quota = { tokens = 100, per = 600.0, window = "bucket" }\n[keys]\na = "sk-a-1"')
    (tmp_path / "in.csv").write_text("id,size\n1,30\n2,4.5e1\n3,many\n", "utf-8")
    arguments = ("map_jobs:tells_itself", "in.csv", "-o", "out.jsonl", "--keys", "keys.toml", "--reserve", "size")
    ended = run_here("map", *arguments, cwd=tmp_path)
    assert ended.returncode == 1
    assert len((tmp_path / "out.jsonl").read_text("utf-8").splitlines()) == 2
    [failed] = map(json.loads, (tmp_path / "out.jsonl.failed.jsonl").read_text("utf-8").splitlines())
    assert (failed["line"], failed["message"]) == (
        4,
        'its size is \'many\': --reserve needs a number of tokens, 0 or more, or {"input": number, "output": number}',
    )


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (None, "it has no field 'size': --reserve needs a number of tokens, 0 or more"),
        (-1, "its size is -1: --reserve needs"),
        ("lots", "its size is 'lots': --reserve needs"),
        (True, "its size is True: --reserve needs"),
        ([1], "its size is [1]: --reserve needs"),
        ({"input": -1}, "--reserve needs"),
        ({"input": 1, "words": 1}, "--reserve needs"),
        ({}, "its size is {}: --reserve needs"),
        ("nan", "its size is 'nan': --reserve needs"),
        (10**400, "--reserve needs"),
    ],
)
def test_c10_h10_a_record_without_a_number_of_tokens_fails_and_is_named(size: Any, words: str, tmp_path: Path) -> None:
    ended = sized(tmp_path, [1, size, 1], "--reserve", "size", "--id", "id")
    assert ended.returncode == 1
    [failed] = map(json.loads, (tmp_path / "out.jsonl.failed.jsonl").read_text("utf-8").splitlines())
    assert (failed["line"], failed["id"], failed["attempts"]) == (2, 1, 0)
    assert words in failed["message"]
    assert len((tmp_path / "out.jsonl").read_text("utf-8").splitlines()) == 2


def test_c10_h10_what_the_function_of_a_record_raises_fails_the_record(tmp_path: Path) -> None:
    ended = sized(tmp_path, [1, None, "x"], "--reserve", "map_jobs:tokens_of")
    assert ended.returncode == 1
    first, second = map(json.loads, (tmp_path / "out.jsonl.failed.jsonl").read_text("utf-8").splitlines())
    assert "the function of --reserve failed on it: KeyError: 'size'" in first["message"]
    assert "what the function returned for it is 'xx': --reserve needs a number" in second["message"]


def test_c10_h10_a_record_that_needs_more_than_there_ever_is_fails_alone(tmp_path: Path) -> None:
    ended = sized(tmp_path, [30, 500, 30], "--reserve", "size")
    assert ended.returncode == 1
    assert len((tmp_path / "out.jsonl").read_text("utf-8").splitlines()) == 2
    [failed] = map(json.loads, (tmp_path / "out.jsonl.failed.jsonl").read_text("utf-8").splitlines())
    assert failed["record"]["size"] == 500
    assert "the quota of none of them allows a task with cost=500" in failed["message"]


@pytest.mark.parametrize(
    ("reserve", "quota", "words"),
    [
        ("size", "{ requests = 5 }", "--reserve needs a quota of tokens, and no key has one: write quota = { tokens"),
        ("map_jobs:tokens_off", '"learn"', "map_jobs has no function tokens_off"),
        ("map_jobs:takes_two", '"learn"', "is called with the record (--reserve), and does not take one argument"),
        ("map_jobs:tokens_later", '"learn"', "cannot be async or a routine"),
        ("map_jobs:on_a_worker", '"learn"', "cannot be async or a routine"),
        (" ", '"learn"', "must not be blank"),
    ],
)
def test_c10_h10_a_wrong_reserve_is_named_before_anything_runs(
    reserve: str, quota: str, words: str, tmp_path: Path
) -> None:
    ended = sized(tmp_path, [1], "--reserve", reserve, quota=quota)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert not list(tmp_path.glob("out.jsonl*"))


def test_c10_h10_reserve_needs_keys(tmp_path: Path) -> None:
    ended = mapped(tmp_path, "same", "--reserve", "id")
    assert ended.returncode == 2
    assert "it needs --keys" in ended.stderr
