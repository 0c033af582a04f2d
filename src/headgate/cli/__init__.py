"""The command `headgate`: parses arguments, calls the library, prints.

`main` finds the module of a command by its name and imports it when the command is given, so that ``headgate --help``
imports neither gRPC nor asyncio. A module of a command has `configure`, which describes its arguments, and `run`, which
returns the exit code. The package may import every other package but `testing`.
"""
