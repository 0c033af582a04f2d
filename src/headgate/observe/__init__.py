"""Listeners of the event stream: logging, later metrics and traces.

They subscribe to topics and do nothing else. May import `combined` and every package below it, and is imported by none
of those. Begin with `logging`.
"""
