"""Text that somebody else wrote, as it may be shown on a terminal."""

from __future__ import annotations


def visible(text: str) -> str:
    """The text with nothing hidden: no character in it moves the cursor, changes colours or the reading order.

    A line ends where Python ends it.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in lines)
