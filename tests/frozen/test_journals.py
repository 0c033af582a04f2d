"""Journals that were recorded are read as they were meant, and journals written now have the recorded lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frozen.journals import WRITERS, meaning, written
from tests.frozen.support import ANEW, RECORDED, recorded, same

FOLDER = RECORDED / "journals"


def cases() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def test_every_writer_is_recorded() -> None:
    assert set(WRITERS) <= set(cases())
    assert {"old", "torn"} <= set(cases()), "of an older release, and of a machine that lost power"


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_journal_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    now = written(name, tmp_path)
    then = {path.name: path.read_bytes() for path in (FOLDER / name).iterdir()}
    assert sorted(now) == sorted(then), f"files of other names. {ANEW}"
    for file, data in now.items():
        same(f"the file {file} of {name}", data.decode().splitlines(), then[file].decode().splitlines())


@pytest.mark.parametrize("name", cases())
def test_a_recorded_journal_means_what_it_meant(name: str, tmp_path: Path) -> None:
    then = recorded(f"journals/{name}.json")
    same(f"the meaning of {name}", meaning(then["pool"], FOLDER / name / then["file"], tmp_path), then["meaning"])
