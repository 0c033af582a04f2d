"""gRPC, imported in one place: with its handlers of forks switched off, and with what it does not declare to checkers.

Its C core runs handlers at ``os.fork``, in the parent and in the child, that have crashed children which never touched
gRPC (seen with 1.85). A forked child cannot use our workers anyhow, and is told so; without the handlers it lives.
"""

from __future__ import annotations

import os
from typing import Any, Final

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # both are read when the library is first used
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else each connection that a killed worker resets is a line of stderr

import grpc
import grpc.aio

LOADED_IN: int = os.getpid()
"""The process that may use it. In a child forked from that one gRPC would hang."""

EOF: Final[Any] = vars(grpc.aio)["EOF"]
"""What a stream reads at its end."""

__all__ = ["EOF", "LOADED_IN", "grpc"]
