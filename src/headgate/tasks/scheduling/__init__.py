"""Decides for a task pool: who may enter, who goes next, who has a slot.

Everything here is pure: it takes `now` and events as arguments, returns what to do, and imports no asyncio, clock or
random numbers. Imports `errors`, `core` and the values of `headgate.tasks`; never `headgate.tasks.runtime`.
Begin with `scheduler.Scheduler`; `budget` has the port that says how many slots there are.
"""
