"""Who shares a pool's budget: this process, a pipeline across restarts, or several processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from headgate.core.clock import clock
from headgate.errors import InvalidArgument, PipelineIdMissing, ScopeNeedsStore
from headgate.sharing.states import SharedState
from headgate.stores.addresses import store_from_environment, store_of
from headgate.tasks.model import SCOPES, Scope

POOL_ID: Final = "pool-"
"""What the ids of pools begin with. Ids of calls are hexadecimal."""
_pipeline: ContextVar[str | None] = ContextVar("headgate_pipeline", default=None)


@contextmanager
def pipeline_scope(pipeline_id: str) -> Iterator[str]:
    """Pools with ``scope="pipeline"`` that are made inside belong to this pipeline."""
    token = _pipeline.set(_checked_id("pipeline_id", pipeline_id))
    try:
        yield pipeline_id
    finally:
        _pipeline.reset(token)


def checked_scope(scope: object) -> Scope:
    """Return a scope, or raise InvalidArgument if it is none of the four."""
    if scope not in SCOPES:
        raise InvalidArgument(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
    return scope


def scope_id_of(scope: Scope, pipeline_id: object, scope_id: object, store: object) -> str | None:
    """The id of the pipeline, tenant or organisation, None for a session; refuses what does not go together."""
    if scope == "session":
        for name, value in (("store", store), ("pipeline_id", pipeline_id), ("scope_id", scope_id)):
            if _given(value):
                raise InvalidArgument(
                    f"{name}= is given, and the scope is 'session', which writes nothing",
                    remedy='Pass scope="pipeline", "tenant" or "org" too, or leave it out.',
                )
        return None
    if _given(pipeline_id) and _given(scope_id):
        raise InvalidArgument(
            "pipeline_id= and scope_id= are given, which are names of one option", remedy="Pass scope_id alone."
        )
    given = scope_id if _given(scope_id) else pipeline_id
    if scope != "pipeline":
        return _shared_id(scope, given)
    found = given if _given(given) else _pipeline.get() or os.environ.get("HEADGATE_PIPELINE_ID")
    if not _given(found):
        raise PipelineIdMissing("scope 'pipeline' needs the id of a pipeline")
    return _checked_id("pipeline_id", found)


def _shared_id(scope: Scope, scope_id: object) -> str:
    variable = f"HEADGATE_{scope.upper()}_ID"
    found = scope_id if _given(scope_id) else os.environ.get(variable)
    if not _given(found):
        whose = "a tenant" if scope == "tenant" else "an organisation"
        raise InvalidArgument(
            f"scope {scope!r} needs the id of {whose}, and none is given",
            remedy=f'Pass scope_id="acme", set {variable}, or use the scope "session".',
        )
    return _checked_id("scope_id", found)


def shared_state_of(scope: Scope, store: object) -> tuple[object | None, SharedState | None]:
    """The store of a pool, made from a string if it is one, and what processes share through it.

    The second is None where the scope shares nothing. Raises ScopeNeedsStore if the scope needs a shared store.
    """
    found = store_of(store)
    if scope not in ("tenant", "org"):
        return found, None
    if found is None:
        found = store_from_environment()
    if found is None:
        raise ScopeNeedsStore(f"scope {scope!r} shares a budget between processes, and no store= is given")
    if not isinstance(found, SharedState):
        raise ScopeNeedsStore(
            f"scope {scope!r} shares a budget between processes, and {type(found).__name__} serves one at a time"
        )
    return found, found


def identity(scope: Scope, scope_id: str | None, name: str) -> str:
    """Make the id of a pool: drawn for a session, the same each time for a pool that is remembered."""
    if scope_id is None:
        return f"{POOL_ID}{clock.token()}"
    digest = hashlib.sha256(json.dumps((scope, scope_id, name)).encode()).hexdigest()
    return f"{POOL_ID}{digest[:32]}"


def _given(value: object) -> bool:
    return value is not None and not (isinstance(value, str) and not value.strip())


def _checked_id(name: str, given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        raise InvalidArgument(f"{name} must be a non-blank string, got {given!r}")
    return given
