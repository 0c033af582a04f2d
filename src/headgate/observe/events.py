"""What people do to a running program from outside, as an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headgate.core.events import Event
from headgate.core.topics import topic_named

ACTIONS = topic_named("observe.actions")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTaken(Event):
    """Somebody acted in a terminal or on the page: cancel, retry, enable, disable, pause, resume, resize or drain."""

    name: ClassVar[str] = "action_taken"
    topic: ClassVar[str] = ACTIONS.name

    action: str
    pool: str
    target: str
    """The task, resource or number that was meant."""
    origin: str
    """From where: "terminal", "page" or "program"."""
    outcome: str
    """"done", or why it could not be done."""
