"""`one_line`: the text of others in one line, for stories, terminals and logs.

Names of pools, tenants, resources and workers, ids, and reasons may contain anything. A line break in one of them would
make a second line that says what its author wants, and codes for terminals could do worse.
"""

from __future__ import annotations


def one_line(text: str) -> str:
    r"""Return a text with all that is no printable character written as Python writes it: ``\n``, ``\x1b``."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
