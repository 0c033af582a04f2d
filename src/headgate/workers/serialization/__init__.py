"""Python objects as bytes: arguments, results, exceptions, functions, classes and context variables.

`pickling` writes and reads values and exceptions, `functions` decides how a function is sent to a worker, `settled`
finds out what it sees, `groups` keeps what a worker has loaded, `dynamic_classes` loads classes that were sent by
value, `context_frames` encodes context variables. May import
`errors`, `core`, `context`, `resources` (for its signals), `workers.codec`, `workers.model` and `workers.protocol`.
Entry points: `pickling.dumps`, `dynamic_classes.loads`, `functions.PortableFunction`.
"""
