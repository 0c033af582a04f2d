"""Make the recordings anew: `python -m tests.frozen.record [traces journals frames pickles]`, on the oldest Python.

Tests never write. What this changes is to be read before it is committed: each difference is a promise that is broken,
or a text that was meant to change.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import sys
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from tests.frozen import frames, live, pickles, playing
from tests.frozen.inside import NEWEST, OLDEST
from tests.frozen.journals import WRITERS, meaning, without_checksums, written
from tests.frozen.support import RECORDED, text_of


def traces() -> None:
    """One file for each scenario."""
    _write("traces", {name: playing.played(name) for name in playing.scenario_names()})


def journals() -> None:
    """A folder with the files of each journal, and beside it what they mean."""
    place, meanings = RECORDED / "journals", {}
    for old in place.glob("*/"):
        shutil.rmtree(old)
    for name in WRITERS:
        with TemporaryDirectory() as temporary:
            files = written(name, Path(temporary))
        meanings[name] = _journal(name, name, files)
        (file,) = [file for file in files if file.endswith(".jsonl")]
        if name == "unfinished":
            killed = files[file].index(b'{"kind":"open","at":1700000075')
            meanings["killed"] = _journal("killed", name, {file: files[file][:killed]})
            meanings["old"] = _journal("old", name, {file: without_checksums(files[file])})
            damaged = files[file].replace(b'"first"', b'"fiRst"')
            meanings["torn"] = _journal("torn", name, {file: damaged[:-30]})
    _write("journals", meanings)


def _journal(name: str, pool: str, files: dict[str, bytes]) -> dict[str, object]:
    place = RECORDED / "journals" / name
    place.mkdir(parents=True)
    for file, data in files.items():
        (place / file).write_bytes(data)
    (file,) = [file for file in files if file.endswith(".jsonl")]
    with TemporaryDirectory() as temporary:
        return {"pool": pool, "file": file, "meaning": meaning(pool, place / file, Path(temporary))}


def messages() -> None:
    """Conversations of sessions, contexts, and what a real worker hears and says."""
    context = frames.contexts()
    client = live.messages_of_a_client()
    recordings: dict[str, object] = {
        "sessions": {name: frames.play(name) for name in frames.SCRIPTS},
        "contexts": {"frames": context, "meaning": frames.context_meaning(context)},
        "protocols": [OLDEST, NEWEST],
        "client": client,
        "live": asyncio.run(live.talk_to_a_worker(client)),
    }
    _write("frames", recordings)


def things() -> None:
    """Pickles, what they mean, and the names in them."""
    numbers = (uuid.UUID(int=number) for number in itertools.count(1))
    with mock.patch.object(uuid, "uuid4", side_effect=numbers):  # else a class by value had another id each time
        made = pickles.made_now()
    root = str(Path(__file__).parents[2]).encode()
    names: dict[str, set[str]] = {"public": set(), "payload": set()}
    recordings: dict[str, object] = {}
    for name, one in made.items():
        kind = "public" if name.startswith("public: ") else "payload"
        names[kind] |= pickles.ours(pickles.names_in(one.data))
        data = one.data.replace(root, (b"headgate" * len(root))[: len(root)])  # code names its file; lengths stay
        recordings[name] = {
            "pickle": base64.b64encode(data).decode(),
            "meaning": pickles.meaning(one._replace(data=data)),
        }
    large = pickles.large_payload()
    _write(
        "pickles",
        {
            "pickles": recordings,
            "large": {"payload": large, "meaning": pickles.large_meaning(large)},
            "globals": {
                "python": pickles.PYTHON,
                "in payloads": sorted(names["payload"]),
                "in public things only": sorted(names["public"] - names["payload"]),
                "public names": pickles.importable_names(),
            },
        },
    )


def _write(folder: str, recordings: dict[str, object]) -> None:
    place = RECORDED / folder
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob("*.json"):
        old.unlink()
    for name, value in recordings.items():
        (place / f"{name}.json").write_text(text_of(value), "utf-8")


KINDS = {"traces": traces, "journals": journals, "frames": messages, "pickles": things}


def main(wanted: list[str]) -> None:
    """Record these kinds, or all."""
    if sys.version_info[:2] != (3, 11):
        raise SystemExit("record with Python 3.11: recordings of the oldest Python can be read by all")
    for name in wanted or KINDS:
        KINDS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
