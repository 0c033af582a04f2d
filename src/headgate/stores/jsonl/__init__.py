"""A store of JSON-lines files: one journal for each pool, one writer for each journal.

`lines` and `journal` say what a line means (pure), `writer` writes groups of them, `store` opens journals, `reader`
reads those of others. Begin with `store`.
"""
