"""The worker's side of calls: the gRPC server on one event loop, and the routines on another.

`serve` binds and serves, `service` handles the streams of clients (`client_stream`), `task_loop` runs calls
(`running_call`), `watchdog` notices when a routine holds the loop. Imports `core`, `context`, `workers.protocol`,
`workers.serialization` and, for nested calls, `workers.client`. Begin with `serve`.
"""
