"""Attempts of tasks that run with resources and on workers: `TaskPool(resources=, workers=)`.

Imports `resources` and, when a pool is given workers, `workers`. Begin with `assembly.ports_with`.
"""
