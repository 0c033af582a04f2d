"""Idempotency keys that several processes share: pure steps on the text of one key.

Whoever submits a key first claims it and runs the task. Others follow: they are woken when it has ended, and get its
result. A claim of a member that is gone is free for the next who asks. Only the owner of a claim can end it, so a late
result of a process that lost its lease changes nothing.

    claim    "yours": run it; "follow": somebody else does; "ended": this is what became of it
    follow   ask again, when woken: the same answers
    settle   the task of the owner has ended
    release  the task of the owner was never accepted

The text of a key that is held no longer is kept for `SLACK` seconds, for those who follow it and have not looked yet,
and for messages that are under way. Then the store may delete it.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, NamedTuple

from headgate.core.key_windows import Window, checked_window, holds_key
from headgate.errors import StoreFormatTooNew, StoreWriteFailed
from headgate.sharing.states import Outcome, Seen

FORMAT: Final = 1
SLACK: Final = 3600.0
"""Seconds for which the text of a key is kept although nobody can hold it by that text any more."""


class Work(NamedTuple):
    """What a key stands for."""

    function: str
    """The function by name."""
    digest: str
    """Of the function and its arguments; "" if there is none."""
    window: Window


class Ended(NamedTuple):
    """What became of a task."""

    status: str
    result: Any = None
    """With "completed": what JSON can hold."""
    error: tuple[str, str] = ("", "")
    """The type and the text of the exception, with "failed"; reason and policy, with "rejected"."""
    is_lost: bool = False
    """With "completed": the result could not be kept."""


class Answer(NamedTuple):
    """What somebody who submits a key is told."""

    kind: Literal["yours", "follow", "ended"]
    owner: str = ""
    """With "yours": under which name the claim is settled. With "follow": whose claim it is."""
    work: Work | None = None
    """With the others: what the key stands for."""
    ended: Ended | None = None


def claim(serial: int, work: Work, text: str | None, seen: Seen, *, reruns: bool = False) -> Outcome:
    """Ask for a key. `serial` tells the claims of one process apart: the same one again is the same claim.

    With `reruns` a key whose result could not be kept is free.
    """
    owner = f"{seen.member}/{serial}"
    found = _read(text)
    if found is None or not _is_held(found, seen) or (reruns and _is_lost(found)):
        return Outcome(_text({"by": owner, "work": work, "status": "active"}), Answer("yours", owner))
    if found["status"] != "active":
        return Outcome(None, Answer("ended", "", found["work"], found["ended"]))
    if found["by"] == owner:
        return Outcome(None, Answer("yours", owner))
    followers = [one for one in found["tell"] if not seen.is_gone(one)]
    if seen.member not in followers:
        followers.append(seen.member)
    return Outcome(_text({**found, "tell": followers}), Answer("follow", found["by"], found["work"]))


def follow(followed: str, serial: int, work: Work, text: str | None, seen: Seen, *, reruns: bool = False) -> Outcome:
    """Ask what became of a claim that somebody else has. If its owner is gone, this is a `claim`."""
    found = _read(text)
    is_over = found is not None and found["by"] == followed and found["status"] != "active"
    if found is not None and is_over and not (reruns and _is_lost(found)):
        return Outcome(None, Answer("ended", "", found["work"], found["ended"]))  # even if it holds its key no longer
    return claim(serial, work, text, seen, reruns=reruns)


def settle(owner: str, ended: Ended, text: str | None, seen: Seen) -> Outcome:
    """Say what became of the task of a claim, and wake those who follow it. Replies whether it was still held."""
    found = _read(text)
    is_owner = found is not None and found["by"] == owner and owner.startswith(f"{seen.member}/")
    if found is None or not is_owner or found["status"] != "active":
        return Outcome(None, reply=False)
    settled = {**found, "status": ended.status, "ended": ended, "at": seen.now, "tell": []}
    return Outcome(_text(settled), True, found["tell"], _expires(found["work"].window, ended.status, seen.now))


def release(owner: str, text: str | None, seen: Seen) -> Outcome:
    """Give a claim back: nothing was run. Who follows it is woken, and asks again."""
    found = _read(text)
    if found is None or found["by"] != owner or found["status"] != "active":
        return Outcome(None)
    return Outcome("", None, found["tell"], seen.now + SLACK)


def _expires(window: Window, status: str, now: float) -> float | None:
    """When nobody can ask any more for a key whose task has ended now; None: never."""
    if not holds_key(window, status, now, now):
        return now + SLACK
    return None if isinstance(window, str) else now + window + SLACK


def _is_lost(found: dict[str, Any]) -> bool:
    """Has the task completed with a result that could not be kept?"""
    return found["status"] == "completed" and bool(found["ended"].is_lost)


def _is_held(found: dict[str, Any], seen: Seen) -> bool:
    if found["status"] == "active":
        return not seen.is_gone(found["by"].rpartition("/")[0])
    return holds_key(found["work"].window, found["status"], found["at"], seen.now)


def _read(text: str | None) -> dict[str, Any] | None:
    """What is known of a key; None if it is free. Raises StoreWriteFailed for what is not ours."""
    if not text:
        return None
    try:
        found = json.loads(text)
        if isinstance(found["f"], int) and found["f"] > FORMAT:
            raise StoreFormatTooNew(f"an idempotency key has the format {found['f']}, and this release knows {FORMAT}")
        function, digest, window = found["work"]
        status, result, error, is_lost = found.get("ended") or Ended("")
        return {
            "by": str(found["by"]),
            "work": Work(str(function), str(digest), checked_window(window)),
            "status": str(found["status"]),
            "ended": Ended(str(status), result, (str(error[0]), str(error[1])), is_lost is True),
            "at": float(found.get("at", 0.0)),
            "tell": [str(one) for one in found.get("tell", ())],
        }
    except StoreFormatTooNew:
        raise
    except Exception:
        raise StoreWriteFailed(
            "the record of an idempotency key cannot be read: it was not written by headgate, or it was damaged",
            remedy="Delete that row of the store while no pool uses it, or use another key.",
        ) from None


def _text(found: dict[str, Any]) -> str:
    kept = {name: value for name, value in found.items() if value or name in ("by", "work", "status")}
    if kept["status"] == "active":
        kept.pop("ended", None)
    return json.dumps({"f": FORMAT, **kept}, separators=(",", ":"))
