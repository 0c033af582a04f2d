"""The command `headgate`: help, exit codes, streams, completion, and what it does not import."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import headgate
from headgate.cli.arguments import memory
from headgate.cli.main import COMMANDS
from tests.support.cli.support import PATIENCE, command, environment, run, run_here

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_c01_every_command_has_help_with_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ran = run_here(*filter(None, [name]), "--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"usage: headgate {name}".rstrip())
    assert re.search(rf"^example:\n  headgate {name or 'worker'}", ran.stdout, re.MULTILINE)
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert "\x1b" not in ran.stdout


def test_c01_help_lists_every_command() -> None:
    printed = run("--help").stdout
    assert all(f"\n  {name} " in printed for name in COMMANDS)


def test_c01_version_is_printed() -> None:
    ran = run("--version")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"headgate {headgate.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["--version"], ["worker", "--help"], ["demo", "--help"], ["map", "--help"], ["wroker"]),
        ["serve-keys", "--help"],
    ],
)
def test_c01_parsing_imports_neither_grpc_nor_asyncio(arguments: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", *command(*arguments)[1:]],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
        check=False,
    )
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if line.startswith("import time:")}
    assert "argparse" in imported
    slow = {"asyncio", "grpc", "google.protobuf", "cloudpickle", "cryptography", "zeroconf", "rich", "ssl", "logging"}
    assert not (slow | {"httpx", "uvicorn"}) & imported


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage: headgate"),
        (["wroker"], "'wroker' is not a command; did you mean 'worker'?"),
        (["docter", "--json"], "did you mean 'doctor'?"),
        (["xyzzy"], "'xyzzy' is not a command. See"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["demo", "--calls"], "expected one argument"),
        (["demo", "--calls", "-3"], "must be at least 0, got -3"),
        (["demo", "--slots", "0"], "must be at least 1, got 0"),
        (["demo", "--cal", "3"], "unrecognized arguments"),
        (["completion", "tcsh"], "invalid choice"),
        (["completion"], "required: shell"),
        (["certs"], "required: DIR"),
        (["certs", "check"], "`check` needs a folder"),
        (["certs", "one", "two"], "give one folder"),
        (["certs", "check", "x", "--name", "y"], "`check` makes none"),
        (["certs", "x", "--name", "not a name"], "neither a host name nor an IP address"),
        (["workers", "--wait", "0"], "above 0"),
        (["workers", "--cert-dir", "nowhere"], "nowhere has no ca-cert.pem"),
        (["doctor", "nonsense"], "is not the address of a worker"),
        (["doctor", "localhost:99999"], "is not the address of a worker"),
        (["doctor", "unix:relative"], "is not the address of a worker"),
    ],
)
def test_c01_a_wrong_call_is_exit_code_2_with_a_reason_on_stderr(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    ran = run_here(*arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["wroker"], ["demo", "--calls", "-3"], ["doctor", "nonsense"]])
def test_c01_a_wrong_call_is_the_exit_code_2_of_the_process(arguments: list[str]) -> None:
    """By the parser of all, by that of a command, and by the command itself."""
    ran, here = run(*arguments), run_here(*arguments)
    assert (ran.returncode, ran.stdout, ran.stderr) == here
    assert ran.returncode == 2


@pytest.mark.parametrize("arguments", [["--help"], ["completion", "bash"], ["worker", "--help"]])
def test_c01_a_reader_that_has_enough_is_no_error_to_talk_about(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(command(*arguments), stdout=writer, stderr=subprocess.PIPE, env=environment()) as process:
        os.close(writer)
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) in (0, 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_c01_output_that_cannot_be_written_is_exit_code_1() -> None:
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            command("completion", "bash"), stdout=full, stderr=subprocess.PIPE, env=environment(), check=False
        )
    assert ran.returncode == 1
    assert b"No space left on device" in ran.stderr
    assert b"Traceback" not in ran.stderr


def test_c01_a_closed_stdout_is_endured() -> None:
    ran = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command("completion", "bash")],
        capture_output=True,
        env=environment(),
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)]
)
def test_c01_a_signal_ends_a_command_without_a_traceback(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        command("demo", "--calls", "5000", "--plain"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment({"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": ""}),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("headgate: ")
        process.send_signal(number)
        rest, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert rest.splitlines()[-1].startswith("stopped by ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 * 2**20), ("2G", 2**31), ("2GiB", 2**31), ("1.5k", 1536), ("1000000", 1000000), ("3 G", 3 * 2**30)],
)
def test_c01_sizes_of_memory_are_read(text: str, size: int) -> None:
    assert memory(text) == size


# -- completion -------------------------------------------------------------------------------------------------------


def completed(*words: str, cwd: Path | None = None) -> list[str]:
    """What a real bash offers after these words."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    script = run_here("completion", "bash")
    assert (script.returncode, script.stderr) == (0, "")
    line = " ".join(f"'{word}'" for word in words)
    asked = f"{script.stdout}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\n_headgate\n"
    asked += "printf '%s\\n' \"${COMPREPLY[@]}\""
    ran = subprocess.run(
        [bash, "--norc", "-u", "-c", asked], capture_output=True, text=True, env=environment(), cwd=cwd, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    return ran.stdout.split()


def test_c01_bash_completes_commands_and_options(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    (tmp_path / "file").touch()
    assert set(completed("headgate", "")) == {*COMMANDS, "--help", "--version"}
    assert completed("headgate", "work") == ["worker", "workers"]
    assert completed("headgate", "worker", "--max") == ["--max-memory", "--max-tasks"]
    assert completed("headgate", "completion", "") == ["--help", "-h", "bash", "fish", "zsh"]
    assert completed("headgate", "workers", "--cert-dir", "", cwd=tmp_path) == ["certs"]
    assert completed("headgate", "worker", "--tag", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_c01_the_script_of_every_shell_knows_every_command(shell: str) -> None:
    ran = run_here("completion", shell)
    assert ran.returncode == 0
    assert all(name in ran.stdout for name in COMMANDS)
    assert "orphan-timeout" in ran.stdout
    assert "@" not in ran.stdout.replace("${COMPREPLY[@]}", "")
    if (installed := shutil.which(shell)) is not None:
        checked = subprocess.run([installed, "-n"], input=ran.stdout, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


# -- certificates -----------------------------------------------------------------------------------------------------


def test_c01_certs_makes_and_checks_certificates(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    folder = tmp_path / "certs"
    made = run("certs", str(folder), "--name", "gpu-3.example.org")
    assert (made.returncode, made.stderr) == (0, "")
    assert re.search(r"^worker: valid until \d{4}-\d\d-\d\d \d\d:\d\d UTC$", made.stdout, re.MULTILINE)
    assert "gpu-3.example.org" in made.stdout
    assert {path.name for path in folder.iterdir()} >= {"ca-cert.pem", "worker-cert.pem", "worker-key.pem"}
    assert (folder / "worker-key.pem").stat().st_mode & 0o777 == 0o600

    checked = run("certs", "check", str(folder), "--json")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert json.loads(checked.stdout)["ok"] is True
    between = run("certs", "check", "--json", str(folder))
    assert (between.returncode, between.stdout) == (0, checked.stdout), between.stderr

    again = run("certs", str(folder))
    assert (again.returncode, again.stdout) == (1, "")
    assert "nothing is overwritten" in again.stderr
    assert "Traceback" not in again.stderr

    missing = run("certs", "check", str(tmp_path / "nowhere"), "--json")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "there is no folder" in missing.stderr

    (folder / "worker-key.pem").chmod(0o644)
    checked = run("certs", "check", str(folder))
    assert checked.returncode == 1
    assert "error: worker-key.pem: others can read it" in checked.stdout


def test_c01_w72_certs_check_lists_each_ca(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    for name in ("old", "new"):
        assert run("certs", str(tmp_path / name)).returncode == 0
    both = (tmp_path / "old" / "ca-cert.pem").read_bytes() + (tmp_path / "new" / "ca-cert.pem").read_bytes()
    (tmp_path / "new" / "ca-cert.pem").write_bytes(both)
    checked = run("certs", "check", str(tmp_path / "new"))
    assert checked.returncode == 0
    line = r"^certificate authority CN=headgate development CA \w+: valid until \d{4}-\d\d-\d\d \d\d:\d\d UTC$"
    assert len(re.findall(line, checked.stdout, re.MULTILINE)) == 2, checked.stdout
    listed = json.loads(run("certs", "check", str(tmp_path / "new"), "--json").stdout)["cas"]
    assert [one["signed_worker"] for one in listed] == [False, True]
    assert all(re.match(r"\d{4}-\d\d-\d\dT", one["expires"]) for one in listed)
    assert len({one["name"] for one in listed}) == 2


def test_c01_certs_says_which_package_is_missing(tmp_path: Path) -> None:
    (tmp_path / "cryptography.py").write_text("raise ImportError('not installed')", "utf-8")
    ran = run("certs", str(tmp_path / "certs"), env={"PYTHONPATH": str(tmp_path)})
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "pip install 'headgate[certs]'" in ran.stderr
