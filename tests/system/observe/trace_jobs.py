"""What runs on workers in the tests of traces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headgate import CooldownResource, Resource, routine
from headgate.observe import opentelemetry

EXPORTER: Any = None


def trace_here() -> None:
    """The setup of a worker: its spans are kept in memory, to be asked for."""
    global EXPORTER
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    EXPORTER = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    opentelemetry.install(provider)


async def work(key: Resource[str], number: int) -> int:
    """A task on a worker."""
    if number < 0:
        raise ValueError(f"negative with {key.value}")
    return number


async def limited(key: Resource[str]) -> str:
    """A task on a worker that one of its keys does not serve."""
    if key.resource_id == "key-1":
        raise CooldownResource(60, f"429 for {key.value}")
    return key.resource_id


@routine
async def double(number: int) -> int:
    return 2 * number


@routine
async def quadruple(number: int) -> int:
    """A routine that calls a routine."""
    return await double(2 * number)


@routine(retries=1)
def dies_once(path: str) -> None:
    """End the worker at the first attempt."""
    if not Path(path).exists():
        Path(path).touch()
        os._exit(3)


@routine
async def spans_here() -> list[dict[str, Any]]:
    """The spans that have ended on this worker."""
    return [told_of(span) for span in EXPORTER.get_finished_spans()]


def told_of(span: Any) -> dict[str, Any]:
    """A span as it is sent."""
    return {
        "name": span.name,
        "id": span.context.span_id,
        "trace": span.context.trace_id,
        "parent": span.parent.span_id if span.parent else None,
        "text": span.to_json(),
        "attributes": dict(span.attributes or {}),
        "status": (span.status.status_code.name, span.status.description),
    }


async def spend_there(key: Resource[str], read: float, written: float) -> None:
    """A task on a worker that reports how many tokens it used."""
    key.spent(input=read, output=written)
