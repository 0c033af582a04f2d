"""What runs on a worker in the tests of logs."""

from __future__ import annotations

import logging

from headgate.observe import logging as observed


def log_to(path: str) -> None:
    """Write JSON lines to a file from now on."""
    observed.json(open(path, "a", buffering=1, encoding="utf-8"), logger="jobs")  # noqa: SIM115 - while the worker lives


async def far(path: str, text: str) -> None:
    """Write a record on a worker."""
    if not logging.getLogger("jobs").handlers:
        log_to(path)
    logging.getLogger("jobs").info("far: %s", text)


async def plain(text: str) -> None:
    """Write a record on a worker that its setup has prepared."""
    logging.getLogger("jobs").info("plain: %s", text)
