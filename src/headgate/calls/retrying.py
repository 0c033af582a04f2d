"""Trying again after an error of the caller's own function: `retries=`, `backoff=` and `retry_on=`.

What an answer says about its resource is a verdict, which `max_attempts` and `retry_delay` govern. The two are counted
separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from headgate.core.checks import checked_flag, is_finite
from headgate.errors import InvalidArgument, InvalidType

RetryOn: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
"""Which errors are tried again: a class, several of them, or a function that is given the error."""

_MOST_DOUBLINGS: Final = 1_000  # beyond it a power is no float any more


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before an attempt is repeated: `first` seconds, then `factor` times as long each time.

    No pause is longer than `most` seconds. With `jitter` a pause is drawn from between half of that and all of it, so
    that calls which failed together are not repeated together. `Backoff(0.5)` waits for 0.5, 1, 2, ... up to 60
    seconds.
    """

    first: float = 0.5
    factor: float = 2.0
    most: float = 60.0
    jitter: bool = True

    def __post_init__(self) -> None:
        for name, least in (("first", 0.0), ("factor", 1.0), ("most", 0.0)):
            value = getattr(self, name)
            if not is_finite(value) or value < least:
                raise InvalidArgument(
                    f"{name} of a Backoff must be a finite number >= {least:g}, got {value!r}",
                    remedy="Backoff(first=0.5, factor=2, most=60) waits for 0.5, 1, 2, ... 60 seconds.",
                )
        checked_flag("jitter", self.jitter)

    def seconds(self, failures: int, chance: float, at_least: float = 0.0) -> float:
        """The pause after this many failures; `chance` is drawn from 0 to 1.

        `at_least` is what an upstream asked for. It may be longer than `most`.
        """
        try:
            longest = min(self.most, self.first * self.factor ** min(failures - 1, _MOST_DOUBLINGS))
        except OverflowError:
            longest = self.most
        return max(at_least, longest * (1.0 + chance) / 2 if self.jitter else longest)


def checked_backoff(value: object) -> Backoff | None:
    """Return a backoff; None is none. A number is the first pause, which doubles each time."""
    if value is None or isinstance(value, Backoff):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Backoff(first=value)
    if isinstance(value, Mapping):
        raise InvalidType("backoff must be a Backoff, got a mapping", remedy="Write Backoff(**options).")
    raise InvalidType(
        f"backoff must be a Backoff or a number of seconds, got {type(value).__name__}",
        remedy="Pass Backoff(first=0.5, factor=2, most=60).",
    )


def checked_retry_on(value: object) -> RetryOn | None:
    """Return which errors are tried again; None is the default of whatever it is given to."""
    if value is None:
        return None
    classes = value if isinstance(value, tuple) else (value,) if isinstance(value, type) else None
    if classes is None:
        if callable(value):
            return cast("RetryOn", value)
    elif classes and all(isinstance(one, type) and issubclass(one, BaseException) for one in classes):
        for one in classes:
            if not issubclass(one, Exception):
                raise InvalidArgument(
                    f"retry_on cannot name {one.__name__}, which is no Exception: it ends what it meets",
                    remedy="Name classes of errors, such as (ConnectionError, TimeoutError).",
                )
        return classes
    raise InvalidType(
        f"retry_on must be exception classes or a function of the error, got {value!r}",
        remedy="Pass retry_on=(ConnectionError, TimeoutError), or a function that returns True for what to repeat.",
    )


def is_retried(retry_on: RetryOn, error: BaseException) -> bool:
    """Whether an error is among those that are tried again.

    A function that raises answers no, and the error gets a note that says so: the first failure must not be hidden.
    """
    if isinstance(retry_on, (type, tuple)):
        return isinstance(error, retry_on)
    try:
        return bool(retry_on(error))
    except Exception as broken:
        try:
            text = str(broken)
        except Exception:  # it runs code of users
            text = "(it cannot be shown)"
        add_note(error, f"It was not tried again: retry_on raised {type(broken).__name__}: {text}")
        return False


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error that a user's code raised, unless its class does not let us: the error is what matters."""
    with suppress(Exception):
        error.add_note(note)
