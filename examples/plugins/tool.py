"""A tool for every episode of a world."""

from ludus.tools.base import tool


@tool
def word_count(text: str) -> int:
    """Count the words of a text.

    Args:
        text: the text.
    """
    return len(text.split())
