"""The three pools together: a TaskPool with `resources=` and `workers=`.

May import `resources`, `tasks`, `stores`, `workers`, `discovery`, `context` and what is below them; it is the only
package that joins tasks with workers. Entry point: `TaskPool` in `pool`, which gives the pool of `headgate.tasks` other
ports: `allocator` reserves a resource for each task, `launcher` starts tasks here or on a worker, `verdicts` learns
from their ends, `explainer` says what they wait for.
"""
