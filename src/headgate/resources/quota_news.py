"""Which shared quotas have something to send, noted with the lock held and sent when it is not."""

from __future__ import annotations

from typing import Protocol


class Sender(Protocol):
    """A quota that processes share."""

    def send(self) -> None:
        """Send what there is to tell. Not with the lock held."""


_due: set[Sender] = set()


def note_due(sender: Sender) -> None:
    """Note that a quota has something to send."""
    _due.add(sender)


def is_due(sender: Sender) -> bool:
    """Whether a quota has something to send that was not sent."""
    return sender in _due


def forget_due(sender: Sender) -> None:
    """Note that a quota has nothing more to send."""
    _due.discard(sender)


def send_due() -> None:
    """Send what quotas have to tell."""
    while _due:
        try:
            sender = _due.pop()
        except KeyError:
            return  # another thread was quicker
        sender.send()


def forget_all() -> None:
    """Note that nothing is to be sent: this is a forked child."""
    _due.clear()
