"""`headgate demo` runs from an installed package, without a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest

from headgate.cli.demo.tenants import Turn, first_in_first_out
from headgate.tasks import TaskPool, fifo
from headgate.testing import run as run_virtually
from tests.support.cli.support import PATIENCE, command, environment, run

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.integration


def test_c02_it_runs_from_an_empty_folder_and_prints_its_figures_as_json(tmp_path: Path) -> None:
    ran = run("demo", "--calls", "18", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout)
    assert (figures["calls"], figures["answered"], figures["lost_results"]) == (18, 18, 0)
    assert figures["workers_killed"] == 1
    assert "What happened in" in ran.stderr
    assert "sk-" not in ran.stdout + ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_c01_a_reader_that_has_enough_is_not_ctrl_c(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("demo", "--calls", "60", "--plain"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) == 1


def test_o20_it_serves_its_page_while_it_runs_and_goes_on_without_the_extra(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("demo", "--calls", "60", "--plain", "--dashboard"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        url, _, token = process.stdout.readline().removeprefix("Watch it at ").strip().partition("#token=")
        asked = urllib.request.Request(f"{url}api/stream", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            assert answer.readline().startswith(b"data: {")
        rest, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "lost results        0" in rest
    (tmp_path / "starlette.py").write_text("raise ImportError('not here')", "utf-8")
    ran = run("demo", "--calls", "6", "--plain", "--dashboard", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert (ran.returncode, "Watch it" in ran.stdout) == (0, False)
    assert "pip install 'headgate[dashboard]'" in ran.stderr


def test_c02_a_cluster_of_ray_that_does_not_start_is_explained(tmp_path: Path) -> None:
    package = tmp_path / "ray"
    package.mkdir()
    (package / "__init__.py").write_text("", "utf-8")
    (package / "cluster_utils.py").write_text(SLOW_RAY, "utf-8")
    ran = run("demo", "--on", "ray", "--calls", "6", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 1
    assert "the cluster of Ray did not start: Timed out while waiting for nodes to join." in ran.stderr
    assert "Try again when the machine is less busy" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "shut down" in ran.stdout, "no node is left"


SLOW_RAY = """
class Cluster:
    def add_node(self, **options):
        return object()

    def wait_for_nodes(self, timeout=30):
        raise TimeoutError("Timed out while waiting for nodes to join.")

    def shutdown(self):
        print("shut down", flush=True)
"""


def test_c02_no_calls_are_fine_too(tmp_path: Path) -> None:
    ran = run("demo", "--calls", "0", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["answered"] == 0


def test_c02_it_computes_first_in_first_out_as_a_pool_would_serve() -> None:
    turns = [Turn("flood", 0.0, 0.0), Turn("flood", 0.0, 3.0), Turn("ann", 1.0, 1.0), Turn("bob", 1.5, 2.0)]
    turns += [Turn("ann", 2.0, 4.0), Turn("flood", 2.0, 5.0)]
    starts = iter(sorted(turn.started for turn in turns)[1:])

    async def replayed() -> tuple[list[tuple[str, float]], float]:
        import asyncio

        loop = asyncio.get_running_loop()
        began, served = loop.time(), list[tuple[str, float]]()

        async def until(time: float) -> None:
            await asyncio.sleep(max(0.0, began + time - loop.time()))

        async def again(turn: Turn) -> None:
            now = loop.time() - began
            served.append((turn.tenant, now))
            await until(next(starts, now))

        async with TaskPool("first in first out", max_concurrent=1, queue=fifo()) as pool:
            for turn in sorted(turns, key=lambda turn: turn.submitted):
                await until(turn.submitted)
                await pool.submit(again, turn, key=turn.tenant)
        return served, pool.stats().jain

    served, jain = run_virtually(replayed())
    computed = first_in_first_out(turns)
    assert [(turn.tenant, turn.started) for turn in computed.turns] == served
    assert computed.jain == pytest.approx(jain)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of an environment in which a wheel of headgate is installed."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=5 * PATIENCE,
        check=False,
    )
    wheels = list(folder.glob("headgate-*.whl"))
    if built.returncode or not wheels:
        pytest.skip(f"no wheel can be built here (it needs pip and hatchling): {built.stderr.strip()[-300:]}")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=PATIENCE)
    python = folder / "venv" / "bin" / "python"
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheels[0])],
        check=True,
        timeout=PATIENCE,
    )
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    # What headgate depends on comes from this environment; its link to the checkout is not followed from there.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    return folder / "venv" / "bin"


@pytest.mark.soak  # the next one runs a command of the wheel too
def test_c02_it_runs_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    env = environment({"PYTHONPATH": "", "PYTHONSAFEPATH": "1"})
    where = subprocess.run(
        [installed / "python", "-c", "import headgate; print(headgate.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        env=env,
        cwd=tmp_path,
    )
    assert where.stdout.startswith(str(installed.parent)), "it is the wheel, and not the checkout"
    ran = subprocess.run(
        [installed / "headgate", "demo", "--calls", "18", "--json"],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["lost_results"] == 0


def test_c01_the_installed_command_finds_modules_of_the_current_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('imported', flush=True)", "utf-8")
    ran = subprocess.run(
        [installed / "headgate", "worker", "--none", "--module", "mine", "--orphan-timeout", "0.1"],
        capture_output=True,
        text=True,
        env=environment({"PYTHONPATH": ""}),
        cwd=tmp_path,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said, line = ran.stdout.splitlines()
    assert said == "imported"
    assert json.loads(line)["namespace"] is None
    assert os.listdir(tmp_path) == ["mine.py"] or "__pycache__" in os.listdir(tmp_path)
