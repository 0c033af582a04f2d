"""Queues of tasks, one for each order. Pure.

`simple` has the protocol `Queue` and the orders without tenants; `by_key` can pass over tenants, `fair` shares between
them, and `by_requirement` passes over tasks that nothing can serve now. `headgate.tasks.strategies` chooses.
"""
