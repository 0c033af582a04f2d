"""Loading pickles on an event loop without importing modules on it: ask first, import in a thread, then load."""

from __future__ import annotations

import sys
from collections.abc import Callable

Require = Callable[[str], None]
"""Called with the name of a module before something is loaded from it. Raises ImportNeeded if that would import it."""


class ImportNeeded(BaseException):
    """Loading something would import `module`. Whoever loads it has that imported, and then loads it again.

    Not an Exception: code that turns what loading raises into an error of its own must let this pass.
    """

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module: str = module


def is_imported(name: str) -> bool:
    """True if a module is imported completely: an import statement for it neither runs code nor waits for a lock."""
    module = sys.modules.get(name)
    if module is None:
        return False
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)
