"""Python objects as bytes: arguments, results, exceptions, functions, classes and context.

`pickling` writes and reads values and exceptions, `functions` decides how a function gets to a worker,
`dynamic_classes` loads classes that were sent by value, `context_frames` sends context variables with calls. Imports
`core`, `context`, `resources` (for its signals) and `workers.protocol`. Begin with `pickling`.
"""
