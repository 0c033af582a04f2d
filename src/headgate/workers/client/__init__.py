"""The client's side of calls: choose a worker, send the call, report its one outcome."""
