"""The client's side of calls: choose a worker, send the call, report its one outcome.

A `Dispatcher` calls routines from one event loop, over a `connection` to each worker; `balancing` chooses the worker,
and `failures` makes the errors and events. `any_function` calls functions that are no routines, for tasks.

Imports `core`, `context`, `resources` (the rotation chooses workers too), `workers.protocol`, `workers.serialization`,
`workers.routines`, and of `workers.processes` only how a process ended. Begin with `dispatcher`.
"""
