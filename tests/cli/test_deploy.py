"""The files of deploy/ call commands with options that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from headgate.cli.main import command_parser
from headgate.discovery.dns import PORT

DEPLOY = Path(__file__).parents[2] / "deploy"


def commands() -> list[tuple[str, list[str]]]:
    """Each command of headgate in these files, with the name of the file."""
    found: list[tuple[str, list[str]]] = []
    for path in sorted(DEPLOY.iterdir()):
        text = path.read_text("utf-8")
        found += [(path.name, json.loads(words)) for words in re.findall(r'\["headgate".*?\]', text)]
        unit = re.findall(r"^ExecStart=\S+/headgate (.*)$", text, re.MULTILINE)
        found += [(path.name, ["headgate", *shlex.split(line)]) for line in unit]
        said = re.findall(r"`(headgate [a-z]+ [^`]*)`", text)
        found += [(path.name, shlex.split(line)) for line in said]
    return found


def test_c01_every_command_of_the_files_can_be_parsed() -> None:
    found = commands()
    assert {name for name, _ in found} == {"Dockerfile", "headgate-worker@.service", "kubernetes.yaml"}
    for _, (program, name, *arguments) in found:
        assert program == "headgate"
        given = [argument for argument in arguments if argument != "$OPTIONS"]
        assert command_parser(name).parse_args(given)


def test_c01_arguments_of_the_deployment_go_with_the_entry_point_of_the_image() -> None:
    [entry] = re.findall(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    text = (DEPLOY / "kubernetes.yaml").read_text("utf-8")
    [more] = re.findall(r"^ +args: (\[.*\])$", text, re.MULTILINE)
    _, name, *arguments = [*json.loads(entry), *json.loads(more)]
    options = command_parser(name).parse_args(arguments)
    assert options.bind == ("0.0.0.0", PORT)
    assert f"containerPort: {PORT}" in text
    assert f"\n      port: {PORT}\n" in text


def test_c01_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    unit = tmp_path / "headgate-worker@test.service"
    text = (DEPLOY / "headgate-worker@.service").read_text("utf-8")
    unit.write_text(text.replace("/srv/headgate/venv/bin/headgate", "/bin/true"), "utf-8")
    ran = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
