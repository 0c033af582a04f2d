"""The worker's side of calls: the gRPC server, and the event loop on which routines run."""
