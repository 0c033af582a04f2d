"""What we use of gRPC that its package does not declare to type checkers."""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

EOF: Final[Any] = vars(grpc.aio)["EOF"]
"""What a stream reads at its end."""
