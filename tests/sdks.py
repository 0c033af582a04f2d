"""SDKs of released clients, imported by the test that first uses one.

Each process of pytest imports all test modules, and these two packages take three seconds of CPU.
"""

from __future__ import annotations

import importlib
from typing import Any


class Sdk:
    """Stands for a module, and imports it when one of its names is asked for."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # pytest looks at everything that a test module holds
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


openai: Any = Sdk("openai")
anthropic: Any = Sdk("anthropic")
