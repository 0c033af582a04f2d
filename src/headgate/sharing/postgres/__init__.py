"""The PostgreSQL backend of shared stores, for processes on many machines. Begin with `backend`."""
