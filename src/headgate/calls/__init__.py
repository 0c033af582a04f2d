"""What every kind of call has in common: which errors are tried again, after which pause, and how often in all.

Pure. Tasks, calls of resource pools and routines use the same policies. Imports `errors` and `core`.
"""
