"""The SQLite backend of shared stores, for the processes of one machine. Begin with `backend`."""
