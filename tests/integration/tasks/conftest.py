"""A PostgreSQL server and programs for the tests that need them."""

from __future__ import annotations

from tests.integration.tasks.programs import warm_programs
from tests.postgres_server import postgres_dsn, postgres_server

__all__ = ["postgres_dsn", "postgres_server", "warm_programs"]
