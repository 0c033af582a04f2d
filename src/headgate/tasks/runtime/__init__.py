"""Does what `headgate.tasks.scheduling` decides: submits, starts, interrupts, ends, records and reports tasks.

Imports `errors`, `core`, `stores` and the other modules of `headgate.tasks`; never `workers` or `attempts`, which come
in through the ports of `ports`. Begin with `executor.Executor`, which runs tasks, and `submit.Submitter`, which takes
them in.
"""
