"""The environment variables that gRPC reads when it is imported, and the values that headgate gives them.

A value that somebody else has set is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_VERBOSITY: Final = "GRPC_VERBOSITY"
_QUIET: Final = "Error"
"""No line for each connection that a killed worker resets. People write ERROR or error, and gRPC takes it in any case:
so this value is known to be ours, also in a process that inherits it."""


def grpc_variables(environment: Mapping[str, str], *, logs_refusals: bool = False) -> dict[str, str]:
    """Return the variables to set before gRPC is imported, in this process or in one that it starts.

    With `logs_refusals` gRPC writes a line to stderr for each handshake that fails, and little else. Nobody else knows
    that a worker refused a client, and why.
    """
    verbosity = environment.get(_VERBOSITY, _QUIET)
    if logs_refusals and verbosity == _QUIET:
        verbosity = ""
    return {"GRPC_ENABLE_FORK_SUPPORT": environment.get("GRPC_ENABLE_FORK_SUPPORT", "0"), _VERBOSITY: verbosity}
