"""Queues of tasks, in the order in which they are to run. Pure."""
