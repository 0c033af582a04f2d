"""Functions that the tests of `headgate map` run."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from headgate import CooldownResource, Cost, DisableResource, routine

seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")
calls: list[Any] = []
"""What was called in this process, for tests that run the command in it."""


async def same(record: Any) -> Any:
    return record


def plain(record: Any) -> Any:
    return record


async def later(record: Any) -> Any:
    """Finishes out of order."""
    await asyncio.sleep(0.001 * (record["id"] * 7 % 5))
    return {"id": record["id"]}


def in_a_thread(record: Any) -> Any:
    time.sleep(0.0005 * (record["id"] * 7 % 5))
    return {"id": record["id"]}


async def noted(record: Any) -> Any:
    """Leaves a line for each call in the file that the environment names."""
    with open(os.environ["CALLS"], "a", encoding="utf-8") as file:  # noqa: ASYNC230 - a line, before anything else
        file.write(f"{record['id']}\n")
    await asyncio.sleep(0.001 * (record["id"] * 7 % 5))
    return {"id": record["id"]}


async def odd_fails(record: Any) -> Any:
    calls.append(record)
    if record["id"] % 2:
        raise ValueError(f"{record['id']} is odd")
    return {"id": record["id"]}


async def fails_once(record: Any) -> Any:
    calls.append(record["id"])
    if calls.count(record["id"]) < 2:
        raise ValueError("not yet")
    return record["id"]


def fails_once_in_a_thread(record: Any) -> Any:
    calls.append(record["id"])
    if calls.count(record["id"]) < 2:
        raise ValueError("not yet")
    return record["id"]


async def sets_context(record: Any) -> Any:
    before = seen.get()
    seen.set(str(record["id"]))
    if record["id"] % 3 == 0:
        await asyncio.sleep(0)
    return before


async def leaves(record: Any) -> Any:
    if record["id"] == 1:
        sys.exit(3)
    if record["id"] == 2:
        raise asyncio.CancelledError
    if record["id"] == 3:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
    return record["id"]


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None


async def shapes(record: Any) -> Any:
    """Results of all kinds."""
    import datetime
    import decimal
    import uuid

    import numpy

    return {
        "dataclass": Point(1, Point(2)),
        "date": datetime.date(2026, 1, 2),
        "uuid": uuid.UUID(int=1),
        "decimal": decimal.Decimal("1.5"),
        "array": numpy.array([1, 2]),
        "set": {1},
        "nan": float("nan"),
        "object": object(),
        "surrogate": "\ud800",
        "text": "schön",
    }[record]


async def big(record: Any) -> Any:
    return "x" * 100_000


async def long(record: Any) -> Any:
    """Leaves a line for each call, as `noted` does, and returns about 1 kB."""
    with open(os.environ["CALLS"], "a", encoding="utf-8") as file:  # noqa: ASYNC230 - a line, before anything else
        file.write(f"{record['id']}\n")
    if record["id"] % 50 == 49:
        raise ValueError("no" * 100)
    await asyncio.sleep(0.001 * (record["id"] * 7 % 5))
    return {"id": record["id"], "text": "x" * (500 + record["id"] * 7 % 1000)}


async def slow_and_long(record: Any) -> Any:
    """The first call ends last, so that all others wait for its turn."""
    while record["id"] == 0 and not (Path(os.environ["FOLDER"]) / "go").exists():  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)
    return await long(record)


async def wide(record: Any) -> Any:
    return {f"column-{number}": record["id"] for number in range(200)}


async def copied(record: Any) -> Any:
    """Copies the files of the run, as a kill would leave them, at every tenth call."""
    folder, number = Path(os.environ["FOLDER"]), record["id"]
    await asyncio.sleep(0.001 * (number * 7 % 5))
    if number % 10 == 9 and "COPIES" in os.environ:
        _copy(folder, Path(os.environ["COPIES"]) / str(number))
    return {"id": number}


async def first_is_huge(record: Any) -> Any:
    """The first result is of 200 kB; the others are short, and wait for a file."""
    with open(os.environ["CALLS"], "a", encoding="utf-8") as file:  # noqa: ASYNC230 - a line, before anything else
        file.write(f"{record['id']}\n")
    while record["id"] and not (Path(os.environ["FOLDER"]) / "go").exists():  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)
    return {"id": record["id"], "text": "x" * (1 if record["id"] else 200_000)}


async def keeps_a_copy(record: Any) -> Any:
    """Each result is written in a group of its own, 4 and 5 before the turn of 3; then the files are copied, once."""
    folder, number = Path(os.environ["FOLDER"]), record["id"]
    if not (folder / "killed").exists():
        other = {3: 5, 6: 3}.get(number)
        while _is_unwritten(folder) or (other and other not in calls):  # noqa: ASYNC110 - files tell
            await asyncio.sleep(0.005)
        if number == 6:
            _copy(folder, folder / "killed")
    calls.append(number)
    if number == 2:
        raise ValueError("two")
    return {"id": number}


def _is_unwritten(folder: Path) -> bool:
    """Whether a call of this run has ended and is not written."""
    entries = [json.loads(line[9:]) for line in (folder / "out.jsonl.headgate").read_bytes().splitlines()]
    state = [entry for entry in entries if entry["kind"] == "state"][-1]
    early = [entry for entry in entries if entry["kind"] == "early" and entry["index"] >= state["main"]["low"][0]]
    return bool(state["results"] + state["failures"] + len(early) < len(calls))


def _copy(folder: Path, target: Path) -> None:
    target.mkdir()
    for path in folder.glob("out.jsonl*"):
        shutil.copy2(path, target)


def tells_itself(key: Any, record: Any) -> Any:
    return [key.resource_id, record["id"]]


async def with_key(key: Any, record: Any) -> Any:
    """Limits one key now and then, and revokes another."""
    await asyncio.sleep(0)
    calls.append((key.resource_id, key.value))
    if key.resource_id == "revoked":
        raise DisableResource("401")
    if key.resource_id == "limited" and record["id"] % 5 == 0:
        raise CooldownResource(0.01, "429")
    return {"id": record["id"], "cost": 0.5}


async def revokes(key: Any, record: Any) -> Any:
    raise DisableResource(f"401 for {key.value}")


def answered(status: int) -> Exception:
    """What httpx raises after such an answer."""
    import httpx

    request = httpx.Request("POST", "https://api.example.org/v1")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


async def raises_what_the_client_raises(key: Any, record: Any) -> Any:
    """As everybody writes it first. A revoked key fails at once, and so it is free again at once."""
    await asyncio.sleep(0 if key.resource_id == "revoked" else 0.005)
    calls.append((key.resource_id, record["id"]))
    if key.resource_id == "revoked":
        raise answered(401)
    return {"id": record["id"]}


async def fails_upstream(key: Any, record: Any) -> Any:
    calls.append(record["id"])
    if record["id"] == 1:
        raise answered(500)
    return record["id"]


def judges(outcome: Any) -> Any:
    """A classifier: what a key that is told "no" says about itself."""
    return DisableResource("it said no") if isinstance(outcome, LookupError) else None


async def says_no(key: Any, record: Any) -> Any:
    if key.resource_id == "bad":
        raise LookupError("no")
    return record["id"]


async def judges_later(outcome: Any) -> Any: ...


def takes_two(one: Any, two: Any) -> Any: ...


def tokens_of(record: Any) -> Any:
    """How many tokens a record reserves."""
    return record["size"] * 2


async def tokens_later(record: Any) -> Any: ...


running: dict[str, int] = {"tokens": 0, "most": 0}


async def takes_tokens(key: Any, record: Any) -> Any:
    """Notes how many tokens are reserved by the calls that run at the same time."""
    size = int(record["size"])
    running["tokens"] += size
    running["most"] = max(running["most"], running["tokens"])
    await asyncio.sleep(0.003)
    running["tokens"] -= size
    key.spent(0)
    return {"id": record["id"], "price": 0.5}


def cost_of(record: Any) -> Cost:
    """How many tokens a record reserves, of its input and of its answer."""
    return Cost(**record["size"])


async def takes_split_tokens(key: Any, record: Any) -> Any:
    """Notes how many calls run at the same time."""
    running["tokens"] += 1
    running["most"] = max(running["most"], running["tokens"])
    await asyncio.sleep(0.003)
    running["tokens"] -= 1
    key.spent(input=0, output=0)


async def says_the_key(key: Any, record: Any) -> Any:
    raise ValueError(f"refused: {key.value}")


async def tenants(record: Any) -> Any:
    calls.append(record["tenant"])
    await asyncio.sleep(0.001)
    return record["id"]


async def urgent(record: Any) -> Any:
    calls.append(record["urgency"])
    await asyncio.sleep(0.001)
    return record["id"]


@routine
async def on_a_worker(record: Any) -> Any:
    return [record["id"], os.getpid()]


async def pid(record: Any) -> Any:
    return [record["id"], os.getpid()]


async def generates(record: Any) -> Any:
    yield record


async def waits_for_a_file(record: Any) -> Any:
    """Says that it runs, and waits until it may end."""
    folder = Path(os.environ["FOLDER"])
    (folder / f"began-{record['id']}").touch()
    while not (folder / "go").exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.01)
    return record["id"]


async def prints(record: Any) -> Any:
    print("a word of the function")  # noqa: T201 - as functions do
    return record["id"]
