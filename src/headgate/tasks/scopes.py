"""Who shares a pool's budget: this process, a pipeline across restarts, or several processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from headgate.core.clock import clock
from headgate.errors import InvalidArgument, PipelineIdMissing, ScopeNeedsStore
from headgate.stores.port import Store
from headgate.tasks.model import SCOPES, Scope

_pipeline: ContextVar[str | None] = ContextVar("headgate_pipeline", default=None)


@contextmanager
def pipeline_scope(pipeline_id: str) -> Iterator[str]:
    """Pools with ``scope="pipeline"`` that are made inside belong to this pipeline."""
    token = _pipeline.set(_checked_id(pipeline_id))
    try:
        yield pipeline_id
    finally:
        _pipeline.reset(token)


def checked_scope(scope: object) -> Scope:
    """Return a scope, or raise InvalidArgument if it is none of the four."""
    if scope not in SCOPES:
        raise InvalidArgument(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
    return scope


def pipeline_of(scope: Scope, pipeline_id: object, store: Store | None) -> str | None:
    """The id of the pipeline, None for a session; refuses what does not go together."""
    if scope == "session":
        for name, value in (("store", store), ("pipeline_id", pipeline_id)):
            if _given(value):
                raise InvalidArgument(
                    f"{name}= is given, and the scope is 'session', which writes nothing",
                    remedy='Pass scope="pipeline" too, or leave it out.',
                )
        return None
    if scope != "pipeline":
        if store is None:
            raise ScopeNeedsStore(f"scope {scope!r} shares a budget between processes, and no store= is given")
        raise ScopeNeedsStore(
            f"scope {scope!r} shares a budget between processes, and {type(store).__name__} serves one at a time",
            remedy="Use the scope 'session' or 'pipeline': this release has no shared store.",
        )
    found = pipeline_id if _given(pipeline_id) else _pipeline.get() or os.environ.get("HEADGATE_PIPELINE_ID")
    if not _given(found):
        raise PipelineIdMissing("scope 'pipeline' needs the id of a pipeline")
    return _checked_id(found)


def identity(scope: Scope, scope_id: str | None, name: str) -> str:
    """Make the id of a pool: drawn for a session, the same each time for a pool that is remembered."""
    if scope_id is None:
        return f"pool-{clock.token()}"
    digest = hashlib.sha256(json.dumps((scope, scope_id, name)).encode()).hexdigest()
    return f"pool-{digest[:32]}"


def _given(value: object) -> bool:
    return value is not None and not (isinstance(value, str) and not value.strip())


def _checked_id(pipeline_id: object) -> str:
    if not isinstance(pipeline_id, str) or not pipeline_id.strip():
        raise InvalidArgument(f"pipeline_id must be a non-blank string, got {pipeline_id!r}")
    return pipeline_id
