"""A PostgreSQL server for the tests that need one."""

from __future__ import annotations

from tests.postgres_server import postgres_dsn, postgres_server

__all__ = ["postgres_dsn", "postgres_server"]
