"""T60, T62 with real processes: the owner of a pipeline of many tasks is killed at random points, and runs again.

Whatever the moment, no acknowledged submit is lost, no key completes twice, and results keep their types. The same with
the power cut instead of the process killed: then what was not synced is forgotten.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import IO

import pytest

from headgate.stores import read_journal
from tests.integration.tasks.pipeline_child import expected

ITEMS = 1_000
CHILD = Path(__file__).with_name("pipeline_child.py")
ROOT = Path(__file__).parents[3]


class Pipeline:
    """One folder, and what its owners said before they were killed."""

    def __init__(self, folder: Path, power: bool, items: int = ITEMS) -> None:
        self.folder = folder
        self.power = power
        self.items = items
        self.submitted: set[int] = set()
        self.completed: set[int] = set()
        self.ran: Counter[int] = Counter()
        self.ran_when_done: dict[int, int] = {}

    def run(self, words: int | None) -> bool:
        """Run it until it has said so many words, then kill it. Has it come to its end?"""
        command = [sys.executable, str(CHILD), str(self.folder), "image" if self.power else "files", str(self.items)]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "PYTHONHASHSEED": str(random.randrange(1000)),
        }
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
            assert child.stdout is not None
            done = self._listen(child.stdout, words, child)
            code = child.wait()
        assert code in (0, -signal.SIGKILL)
        if self.power:
            self._cut_the_power()
        return done

    def _listen(self, out: IO[bytes], words: int | None, child: subprocess.Popen[bytes]) -> bool:
        done = False
        for number, line in enumerate(out):
            if number == words:
                child.send_signal(signal.SIGKILL)
            what, item = line.split()
            done = self._heard(what.decode(), int(item)) or done
        return done

    def _heard(self, what: str, item: int) -> bool:
        if what == "S":
            self.submitted.add(item)
        elif what == "R":
            self.ran[item] += 1
        elif what == "C":
            self.completed.add(item)
            self.ran_when_done.setdefault(item, self.ran[item])
        return what == "E"

    def _cut_the_power(self) -> None:
        for image in self.folder.glob("*.jsonl.image"):
            os.replace(image, image.with_suffix(""))
        for left in self.folder.glob("*.fresh"):
            left.unlink()

    def check(self) -> None:
        tasks = read_journal(self.folder / self.journal())
        known = {task["about"].get("idempotency_key"): task for task in tasks}
        done = Counter(task["about"]["idempotency_key"] for task in tasks if task["status"] == "completed")
        assert not [key for key, times in done.items() if times > 1], "no key completes twice"
        for item in self.submitted:
            assert f"item-{item}" in known, f"the acknowledged submit of {item} is lost"
        for item in self.completed:
            task = next(
                one
                for one in tasks
                if one["about"]["idempotency_key"] == f"item-{item}" and one["status"] == "completed"
            )
            assert (type(task["result"]), task["result"]) == (type(expected(item)), expected(item))
        for item, ran in self.ran_when_done.items():
            assert self.ran[item] == ran, f"{item} was seen completed, and ran again"

    def journal(self) -> str:
        (name,) = (path.name for path in self.folder.glob("*.jsonl"))
        return name


def _run_to_the_end(pipeline: Pipeline, kills: int, chance: random.Random) -> None:
    """Kill it so many times, at random points of what is left, then let it end."""
    for left in range(kills, 0, -1):
        remaining = 3 * (pipeline.items - len(pipeline.completed))
        if pipeline.run(chance.randrange(max(1, remaining // left) + 1)):
            break
        if (pipeline.folder.exists()) and list(pipeline.folder.glob("*.jsonl")):
            pipeline.check()
    else:
        assert pipeline.run(None)
    pipeline.check()
    assert pipeline.completed == set(range(pipeline.items))


@pytest.mark.integration
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_t62_the_owner_is_killed_again_and_again(tmp_path: Path, power: bool, scale: float) -> None:
    kills = max(2, int(100 * scale**2))
    items = ITEMS if scale >= 1 else 120
    chance = random.Random(int(power))
    rounds = max(1, kills // 20)
    for number in range(rounds):
        _run_to_the_end(Pipeline(tmp_path / f"round-{number}", power, items), kills // rounds, chance)


@pytest.mark.integration
def test_t60_a_run_after_the_end_runs_nothing(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "journal", power=False, items=40)
    assert pipeline.run(None)
    before = Counter(pipeline.ran)
    assert pipeline.run(None)
    assert pipeline.ran == before
    lines = [json.loads(line) for line in (pipeline.folder / pipeline.journal()).read_text().splitlines()]
    assert lines[0]["format"] == 1
