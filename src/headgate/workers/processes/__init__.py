"""Starting the worker processes of a pool, replacing those that end, and ending all of them.

`placement.Placement` is the port through which a WorkerPool does that, and `kept_workers.KeptWorkers` decides which
workers are started, replaced and ended. Their processes are started by the port `keepers.Keepers`. On this machine
(`local_placement.LocalPlacement`) that is one keeper process (`keeper_client` here, `keeper` there), with a fork server
where there can be one (`fork_server`); each worker runs `worker_main`. On a cluster (`engine_placement`) an engine runs
hosts: `host_process` starts one, `worker_host` is its program, `host_link` the connection to it. `keeper` imports
nothing of headgate; the other modules import what `workers` may.
"""
