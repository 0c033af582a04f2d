"""Stores that several processes use at once: `SqliteStore` for one machine, `PostgresStore` for many.

Each implements `core.shared_state.SharedState` (budgets, health, idempotency keys) and `stores.port.Store` (journals).
Imports `errors`, `core`, `stores`. Begin with `core/shared_state.py`, the contract.
"""
