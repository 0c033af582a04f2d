"""What the headers of an answer say about rate limits. Pure: the time is an argument.

    Retry-After                                             seconds, a duration, or an HTTP date
    retry-after-ms                                          milliseconds; goes before Retry-After
    x-ratelimit-{limit,remaining,reset}-{requests,tokens}   OpenAI, Azure, Groq and others; durations as Go writes them
    x-ratelimit-{limit,...}-{req,tokens}-{minute,...}       Mistral, Cerebras: several windows side by side
    ratelimitbysize-{limit,...}                             Mistral's tokens, also with x- and -{minute,month}
    anthropic-ratelimit-{requests,input-tokens,...}-{limit,...}   Anthropic; dates of RFC 3339
    RateLimit, RateLimit-Policy                             IETF, the current draft and the one before

Headers come from a server, or from whatever stands between: they may be anything. What cannot be read is None, and
nothing here raises.

Dates are compared with the `Date` header of the same answer if it has one, and with `now` otherwise, so that a wrong
clock on either side does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headgate.resources.costs import INPUT, OUTPUT, REQUESTS, TOKENS
from headgate.resources.http_times import YEAR, duration_of, moment_of, number_of, seconds_of, seconds_until


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit that an answer tells of, for example of requests per minute."""

    name: str
    """What is counted: "requests", "tokens", "input_tokens"; "tokens/minute" if there may be several such windows; with
    IETF's headers the name of the policy."""
    limit: float | None = None
    """How much there is in a window."""
    remaining: float | None = None
    """How much of it is left."""
    reset_after: float | None = None
    """Seconds from the answer until all of it is there again."""
    window: float | None = None
    """Length of a window in seconds, if the server tells it."""

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.remaining is not None and self.remaining < 1


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Everything that the headers of one answer say."""

    retry_after: float | None = None
    """Seconds that the server asks to wait before the next request."""
    limits: tuple[Limit, ...] = ()

    @property
    def spent_for(self) -> float | None:
        """Seconds until the last of the spent limits is reset; None if none is spent."""
        return max((one.reset_after for one in self.limits if one.is_spent and one.reset_after), default=None)

    @property
    def wait(self) -> float | None:
        """Seconds to wait: what the server asks for, or else until the last of the spent limits is reset."""
        return self.spent_for if self.retry_after is None else self.retry_after


def read_rate_limits(headers: object, now: float) -> RateLimits | None:
    """Read headers: a mapping, or pairs, of text or bytes. `now` is Unix time. None if they say nothing readable."""
    known = rate_limit_headers(headers)
    if not known:
        return None
    date = moment_of(known["date"]) if "date" in known else None
    at = now if date is None else date
    limits = (*_x_ratelimit(known, at), *_anthropic(known, at), *_ietf(known))
    retry_after = _retry_after(known, at)
    return RateLimits(retry_after, limits) if limits or retry_after is not None else None


def may_be_spent(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether headers may say that nothing remains of a limit. False is certain and quick; True wants a closer look."""
    for place in _telling(b"\n".join([name for name, _ in headers])):
        value = headers[place][1]
        # Only a plain whole number is certain: "1E-1" begins with a digit too, and a list may say 0 after an item.
        if not value.isdigit() or value[:1] == b"0":
            return True
    return False


_SAYS_WHAT_REMAINS = re.compile(rb"ratelimit(?:$|.*remaining)", re.IGNORECASE)


@lru_cache(maxsize=64)  # a service names its headers in the same order again and again
def _telling(names: bytes) -> tuple[int, ...]:
    """The places of the headers that say what remains. IETF's does, in a value that is never a number alone."""
    return tuple(place for place, name in enumerate(names.split(b"\n")) if _SAYS_WHAT_REMAINS.search(name))


# -- families of headers ----------------------------------------------------------------------------------------------

_X_RATELIMIT = re.compile(
    r"x-ratelimit-(limit|remaining|reset)-(requests|req|tokens|input-tokens|output-tokens|tokens-prompt|"
    r"tokens-generated)(?:-(second|minute|hour|day|month))?"
)
_BY_SIZE = re.compile(r"(?:x-)?ratelimitbysize-(limit|remaining|reset)(?:-(minute|month))?")
_COUNTED = {"req": REQUESTS, "tokens-prompt": INPUT, "tokens-generated": OUTPUT}  # the last two are those of Fireworks
_WINDOWS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0, "month": 30 * 86400.0}
_ANTHROPIC = re.compile(r"anthropic-ratelimit-([a-z-]{1,40})-(limit|remaining|reset)")

_Fields = dict[str, float | None]


def _retry_after(known: Mapping[str, str], at: float) -> float | None:
    milliseconds = number_of(known.get("retry-after-ms", ""))
    if milliseconds is not None and milliseconds <= YEAR * 1000:
        return milliseconds / 1000
    return seconds_of(known.get("retry-after", ""), at)


def _x_ratelimit(known: Mapping[str, str], at: float) -> Iterable[Limit]:
    found: dict[str, _Fields] = {}
    for name, text in known.items():
        if match := _X_RATELIMIT.fullmatch(name):
            field, counted, window = match.groups()
        elif match := _BY_SIZE.fullmatch(name):
            field, counted, window = match[1], TOKENS, match[2]
        else:
            continue
        limit = _COUNTED.get(counted, counted.replace("-", "_")) + (f"/{window}" if window else "")
        found.setdefault(limit, {})[field] = seconds_of(text, at) if field == "reset" else _amount(text)
    return _limits(found)


def _anthropic(known: Mapping[str, str], at: float) -> Iterable[Limit]:
    found: dict[str, _Fields] = {}
    for name, text in known.items():
        if match := _ANTHROPIC.fullmatch(name):
            found.setdefault(match[1].replace("-", "_"), {})[match[2]] = (
                _until(text, at) if match[2] == "reset" else _amount(text)
            )
    return _limits(found)


def _limits(found: Mapping[str, _Fields]) -> Iterable[Limit]:
    for name, fields in found.items():
        limit, remaining, reset = fields.get("limit"), fields.get("remaining"), fields.get("reset")
        if (limit, remaining, reset) != (None, None, None):
            yield Limit(name, limit, remaining, reset, _WINDOWS.get(name.partition("/")[2]))


def _amount(text: str) -> float | None:
    """A number; below 0 nothing is left, which some servers write so."""
    text = text.strip()
    if text.startswith("-"):
        return 0.0 if number_of(text[1:]) is not None else None
    return number_of(text)


def _until(text: str, at: float) -> float | None:
    moment = moment_of(text)
    return duration_of(text) if moment is None else seconds_until(moment, at)


# -- IETF -------------------------------------------------------------------------------------------------------------
#
#   RateLimit: "default";r=50;t=30            what is left of a policy, and the seconds until it is reset
#   RateLimit-Policy: "default";q=100;w=60    how much there is in a window of so many seconds
#   RateLimit: limit=100, remaining=50, reset=30    the draft before

_MOST_POLICIES = 16
_ITEM = re.compile(r'\s*(?:"([^"]{0,64})"|([A-Za-z*][\w.:*/-]{0,63}))((?:\s*;[^,;]{0,80}){0,8})\s*', re.ASCII)


def _ietf(known: Mapping[str, str]) -> Iterable[Limit]:
    text = known.get("ratelimit", "")
    policies = _items(known.get("ratelimit-policy", ""))
    if "=" in text.partition(";")[0]:
        return _limits({"requests": _older_draft(text)})
    states = _items(text)
    limits = []
    for name in dict.fromkeys((*states, *policies)):
        state, policy = states.get(name, {}), policies.get(name, {})
        quota, window = policy.get("q"), _seconds(policy.get("w"))
        remaining, reset = state.get("r"), _seconds(state.get("t"))
        if (quota, window, remaining, reset) != (None, None, None, None):
            limits.append(Limit(name, quota, remaining, reset, window))
    return limits


def _older_draft(text: str) -> _Fields:
    fields: _Fields = {}
    for part in text.split(",", _MOST_POLICIES)[:_MOST_POLICIES]:
        name, _, number = part.partition(";")[0].partition("=")
        fields[name.strip().lower()] = _amount(number)
    fields["reset"] = _seconds(fields.get("reset"))
    return fields


def _items(text: str) -> dict[str, _Fields]:
    """Items of a list of structured fields with their numeric parameters, by name; the first of a name counts."""
    items: dict[str, _Fields] = {}
    for part in text.split(",", _MOST_POLICIES)[:_MOST_POLICIES]:
        item = _ITEM.fullmatch(part)
        if item is None:
            continue
        parameters = (parameter.partition("=") for parameter in item[3].split(";"))
        fields = {name.strip().lower(): _amount(number) for name, _, number in parameters if number}
        items.setdefault(item[1] if item[1] is not None else item[2], fields)
    return items


def _seconds(number: float | None) -> float | None:
    return number if number is not None and number <= YEAR else None


# -- headers of any kind ----------------------------------------------------------------------------------------------

_MOST_TEXT = 4096  # characters of one header that are looked at


def rate_limit_headers(headers: object) -> dict[str, str]:
    """The headers that matter here, in lower case. Lists that come in several headers are joined, as IETF says."""
    known: dict[str, str] = {}
    try:
        items = getattr(headers, "items", None)
        pairs: Any = items() if callable(items) else headers
        for key, value in pairs:
            name = _text(key).lower()
            if "ratelimit" in name or name in ("date", "retry-after", "retry-after-ms"):
                texts = [_text(one) for one in value] if isinstance(value, (list, tuple)) else [_text(value)]
                for text in texts:
                    if name not in known:
                        known[name] = text[:_MOST_TEXT]
                    elif name.startswith("ratelimit"):
                        known[name] = f"{known[name]}, {text}"[:_MOST_TEXT]
    except Exception:  # not headers at all; what was read before counts
        pass
    return known


def _text(value: object) -> str:
    if isinstance(value, (bytes, bytearray)):
        return value.decode("latin-1")
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1e18):
        return str(value)
    return value if isinstance(value, str) else ""
