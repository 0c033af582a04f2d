"""Finds the function that is to run, and notices when it has changed."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from headgate.cli.output import WrongCall
from headgate.errors import InvalidType
from headgate.tasks.runtime.functions import check_function, is_async
from headgate.workers.serialization.settled import routine_of


@dataclass(frozen=True, slots=True)
class Function:
    """A function, and what is to be known of it."""

    name: str
    """As it was given, with a module in place of a file."""
    call: Callable[..., Any]
    is_async: bool
    is_routine: bool
    digest: str | None
    """Of the source of its module, without comments; None: there is no source."""


def find_function(text: str, arguments: int, called_with: str | None = None) -> Function:
    """Import `module:function` or `file.py:function`, and check that it takes so many arguments.

    `called_with` says what they are, for functions other than the one that is mapped.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise WrongCall(f"{text!r} names no function: write module:function or file.py:function")
    module = _from_file(Path(place)) if place.endswith(".py") else _imported(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise WrongCall(f"{place} has no function {name}{_nearest(part, found)}")
        found = getattr(found, part)
    try:
        check_function(found)
    except InvalidType as error:
        raise WrongCall(f"{text}: {error.message}") from None
    _check_arguments(text, found, arguments, called_with)
    routine = routine_of(found) is not None
    return Function(f"{module.__name__}:{name}", found, is_async(found), routine, _digest(module))


def _imported(name: str) -> ModuleType:
    _search(os.getcwd())  # as `python -m` does, and the installed command does not
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise WrongCall(f"there is no module {name}: it is looked for in {os.getcwd()} and in PYTHONPATH") from None
        raise _broken(name, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(name, error) from error


def _from_file(path: Path) -> ModuleType:
    """Import a file under its own name: workers import it as well."""
    if not path.is_file():
        raise WrongCall(f"there is no file {path}")
    _search(str(path.resolve().parent))
    try:
        module = import_module(path.stem)
    except (Exception, SystemExit) as error:
        raise _broken(str(path), error) from error
    if not os.path.samefile(getattr(module, "__file__", None) or os.devnull, path):
        raise WrongCall(f"{path} cannot be imported: another module has the name {path.stem}. Rename the file")
    return module


def _search(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _broken(name: str, error: BaseException) -> WrongCall:
    import traceback

    shown = traceback.format_exception(error)
    return WrongCall(f"{name} cannot be imported: {type(error).__name__}: {error}\n{''.join(shown[-3:]).rstrip()}")


def _nearest(name: str, owner: Any) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, [known for known in dir(owner) if not known.startswith("_")], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _check_arguments(text: str, fn: Callable[..., Any], count: int, called_with: str | None) -> None:
    try:
        inspect.signature(fn).bind(*range(count))
    except TypeError:
        wanted = called_with or ("the record" if count == 1 else "the key and the record")
        more = "" if called_with or count == 2 else "; a function of key and record needs --keys"
        some = f"{count} arguments" if count > 1 or not called_with else "one argument"
        raise WrongCall(f"{text} is called with {wanted}, and does not take {some}{more}") from None
    except ValueError:
        pass  # a builtin without a signature


def _digest(module: ModuleType) -> str | None:
    """A digest of what the module's source means. Comments and layout do not count."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return None
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
