"""Keys for `headgate map`: from a TOML file, from environment variables, from the output of commands.

    strategy = "primary_backup"               # and other options of ResourcePool
    [keys]
    team-a = "env:OPENAI_KEY_1"
    team-b = { value = "command:pass show openai/b", max_in_flight = 4, tags = ["gpt"] }

No message shows a value, nor what a command printed.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headgate.cli.output import WrongCall
from headgate.core.checks import nearest

if TYPE_CHECKING:
    from headgate.resources.pool import ResourcePool

ATTEMPTS = 20
"""How many verdicts about keys a record may get before it fails. A batch must outlast many rate limits."""

_SETTINGS = ("strategy", "cooldown_table", "max_attempts", "probe_on_recovery", "cancel_siblings")
_FIELDS = ("value", "max_in_flight", "tags", "weight")
_PATIENCE = 60.0  # seconds for a command to print a key

Environment = Mapping[str, str]
Command = Callable[[Sequence[str]], str]


@dataclass(slots=True)
class Keys:
    """The keys of a run, and the options of the pool that they go into. Its repr shows no values."""

    fields: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """By id: the arguments of Resource."""
    settings: dict[str, Any] = field(default_factory=dict)

    def pool(self) -> ResourcePool[Any]:
        """Make the pool."""
        from headgate.resources.model import Resource
        from headgate.resources.pool import ResourcePool

        resources = [Resource(name, **fields) for name, fields in self.fields.items()]
        return ResourcePool(resources, name="keys", **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the pool. A call that was accepted is paid for, so others that find its key limited do not
        interrupt it."""
        return {"max_attempts": ATTEMPTS, "cancel_siblings": False, **self.settings}


def read_keys(given: Sequence[str], environment: Environment, command: Command | None = None) -> Keys:
    """Collect the keys that the command line names: files, `env:NAME`, `command:...` (a key for each line)."""
    keys = Keys()
    resolve = Resolver(environment, command or run_command)
    for place in given:
        if place.startswith("env:"):
            _add(keys, place.removeprefix("env:"), {"value": resolve(place)})
        elif place.startswith("command:"):
            printed = [line.strip() for line in resolve(place).splitlines() if line.strip()]
            for number, value in enumerate(printed, 1):
                _add(keys, f"key-{number}", {"value": value})
        else:
            _read_file(keys, Path(place), resolve)
    return keys


def run_command(words: Sequence[str]) -> str:
    """Return what a command prints. Its own complaints go to stderr."""
    import subprocess

    try:
        ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise WrongCall(f"the command {words[0]} for a key failed: {_cause(error)}") from None
    if ran.returncode:
        raise WrongCall(f"the command {words[0]} for a key failed with exit code {ran.returncode}")
    return ran.stdout


def _cause(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else type(error).__name__


class Resolver:
    """Turns `env:NAME` and `command:...` into values."""

    def __init__(self, environment: Environment, command: Command) -> None:
        self._environment = environment
        self._command = command

    def __call__(self, text: str) -> str:
        """Return the value that a text names, or the text itself."""
        if text.startswith("env:"):
            name = text.removeprefix("env:")
            value = self._environment.get(name, "")
            if not value:
                raise WrongCall(f"the environment variable {name}, which is to hold a key, is not set")
            return value
        if text.startswith("command:"):
            words = shlex.split(text.removeprefix("command:"))
            if not words:
                raise WrongCall("`command:` names no command")
            value = self._command(words).strip()
            if not value:
                raise WrongCall(f"the command {words[0]} printed no key")
            return value
        return text

    def everywhere(self, value: Any) -> Any:
        """The same for all texts in a table or a list."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {name: self.everywhere(part) for name, part in value.items()}
        return [self.everywhere(part) for part in value] if isinstance(value, list) else value


def _read_file(keys: Keys, path: Path, resolve: Resolver) -> None:
    import tomllib

    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno())
            content = tomllib.load(file)
    except OSError as error:
        raise WrongCall(f"the keys in {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongCall(f"{path} is not TOML: {_without_values(error)}") from None
    table = content.pop("keys", None)
    if not isinstance(table, dict) or not table:
        raise WrongCall(f'{path} has no table [keys] with lines such as team-a = "env:OPENAI_KEY_1"')
    _check_permissions(path, mode, [text for value in table.values() for text in _texts(_value_of(value))])
    for name in content:
        _known(name, _SETTINGS, f"option in {path}")
    keys.settings |= content
    for name, value in table.items():
        fields = dict(value) if isinstance(value, dict) else {"value": value}
        for known in fields:
            _known(known, _FIELDS, f"field of the key {name} in {path}")
        if not isinstance(fields.get("value"), (str, dict, list)) or not fields["value"]:
            raise WrongCall(f'the key {name} in {path} has no value: write {name} = "env:NAME" or {{ value = ... }}')
        _add(keys, name, {**fields, "value": resolve.everywhere(fields["value"])})


def _without_values(error: Exception) -> str:
    """Where the fault is. What stands there may be a key."""
    text = str(error)
    at = text.rfind("(at ")
    return f"there is a fault {text[at + 1 :].rstrip(')')}" if at >= 0 else "it is not UTF-8"


def _value_of(value: Any) -> Any:
    return value["value"] if isinstance(value, dict) and "value" in value else value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _check_permissions(path: Path, file: os.stat_result, texts: Sequence[str]) -> None:
    """Refuse a file that shows keys to others, or in which others can put commands."""
    mode = stat.S_IMODE(file.st_mode)
    remedy = f"`chmod 600 {path}`"
    if file.st_uid not in (os.getuid(), 0):
        raise WrongCall(
            f"{path} belongs to another user, who could put other keys or commands there: use a file of yours"
        )
    if mode & 0o022:
        raise WrongCall(f"others can write to {path} (mode {mode:03o}), and put commands there: {remedy}")
    if mode & 0o044 and not all(text.startswith(("env:", "command:")) for text in texts):
        raise WrongCall(f"others can read the keys in {path} (mode {mode:03o}): {remedy}, or name keys as env:NAME")


def _known(name: str, names: Sequence[str], what: str) -> None:
    if name not in names:
        raise WrongCall(f"{name!r} is no {what}. {nearest(name, names)}")


def _add(keys: Keys, name: str, fields: dict[str, Any]) -> None:
    if name in keys.fields:
        raise WrongCall(f"two keys have the name {name!r}")
    keys.fields[name] = fields
