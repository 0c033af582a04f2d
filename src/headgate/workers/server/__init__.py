"""The worker's side of calls: the gRPC server on one event loop, and the routines on another.

`serve` starts the server, `service` handles the streams of clients (`client_stream`), `task_loop` runs the calls
(`running_call`), `watchdog` notices when a routine holds the loop. May import `errors`, `core`, `context`,
`workers.protocol`, `workers.serialization` and, for calls that routines make, `workers.client`. Entry point:
`serve.serve`.
"""
