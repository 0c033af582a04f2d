"""Listeners of the event stream: logging, later metrics and traces. They subscribe and do nothing else."""
