"""HEADGATE_OBSERVE=1: a program shows itself as soon as it has a pool."""

from __future__ import annotations

from headgate.registry import on_first


def publish_soon() -> None:
    """Publish this program when its first pool is made. A program that cannot be published runs all the same."""
    on_first(_publish)


def _publish() -> None:
    from headgate.core.redaction import log_exception
    from headgate.observe.publishing import publish

    try:
        publish()
    except Exception:
        log_exception("headgate.observe", "this program cannot be observed")
