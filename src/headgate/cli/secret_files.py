"""Files with secrets in TOML: who may read them, and values from the environment and from commands.

    [keys]
    team-a = "env:OPENAI_KEY_1"
    team-b = "command:pass show openai/b"

No message shows a value, nor what a command printed.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate.cli.output import WrongCall
from headgate.core.checks import nearest

_PATIENCE = 60.0  # seconds for a command to print a value

Environment = Mapping[str, str]
Command = Callable[[Sequence[str]], str]


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


def read_table(path: Path, name: str, value: str, example: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the table `name` of a file, and what else stands there. `value`: the field of an entry that is secret.

    Raises WrongCall if the file cannot be read, has no such table, or shows secrets to others.
    """
    import tomllib

    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno())
            content = tomllib.load(file)
    except OSError as error:
        raise WrongCall(f"the {name} in {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongCall(f"{path} is not TOML: {_without_values(error)}") from None
    table = content.pop(name, None)
    if not isinstance(table, dict) or not table:
        raise WrongCall(f"{path} has no table [{name}] with lines such as {example}")
    secrets = (one[value] if isinstance(one, dict) and value in one else one for one in table.values())
    _check_permissions(path, mode, name, [text for secret in secrets for text in _texts(secret)])
    return table, content


def check_known(name: str, names: Sequence[str], what: str) -> None:
    """Raise WrongCall, with the nearest name, for a name that nobody knows."""
    if name not in names:
        raise WrongCall(f"{name!r} is no {what}. {nearest(name, names)}")


def _without_values(error: Exception) -> str:
    """Where the fault is. What stands there may be a key."""
    text = str(error)
    at = text.rfind("(at ")
    return f"there is a fault {text[at + 1 :].rstrip(')')}" if at >= 0 else "it is not UTF-8"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _check_permissions(path: Path, file: os.stat_result, what: str, texts: Sequence[str]) -> None:
    """Refuse a file that shows keys to others, or in which others can put commands."""
    mode = stat.S_IMODE(file.st_mode)
    remedy = f"`chmod 600 {path}`"
    if file.st_uid not in (os.getuid(), 0):
        raise WrongCall(
            f"{path} belongs to another user, who could put other {what} or commands there: use a file of yours"
        )
    if mode & 0o022:
        raise WrongCall(f"others can write to {path} (mode {mode:03o}), and put commands there: {remedy}")
    if mode & 0o044 and not all(text.startswith(("env:", "command:")) for text in texts):
        raise WrongCall(f"others can read the {what} in {path} (mode {mode:03o}): {remedy}, or name {what} as env:NAME")
