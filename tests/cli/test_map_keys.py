"""Keys of `headgate map`: where they come from, who may read them, and what becomes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.cli.batch.keys import read_keys
from headgate.cli.output import WrongCall
from tests.cli.support import Ended, run_here

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


@pytest.mark.parametrize("quota", ['"lern"', "60", "{ request = 5 }", "{ requests = 0 }", "{}"])
def test_c14_h10_a_wrong_quota_in_a_file_of_keys_is_named(tmp_path: Path, quota: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'quota = {quota}\n[keys]\na = "sk-1"\n')
    path.chmod(0o600)
    with pytest.raises(WrongCall, match=r'keys\.toml: .*write quota = "learn" or'):
        read_keys([str(path)], {})
