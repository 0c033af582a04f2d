"""Starting the worker processes of a pool, replacing those that end, and ending all of them.

`placement.Placement` is the port through which a WorkerPool does that. `local_placement.LocalPlacement`, its
implementation for this machine, has a keeper process start workers (`keeper_client` here, `keeper` there), from a fork
server where there can be one (`fork_server`); each runs `worker_main`. `keeper` imports nothing of headgate; the other
modules import what `workers` may.
"""
