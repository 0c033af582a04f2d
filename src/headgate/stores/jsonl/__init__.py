"""A store of JSON-lines files: one journal for each pool, one writer for each journal."""
