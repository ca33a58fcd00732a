"""Texts that equal values share, for comparing untrusted values without their hashes.

Python hashes an integer modulo 2**61 - 1, so that whoever chooses the values can make sets and dictionaries
of them take time with the square of their number. Hashes of texts are keyed, and texts can be sorted.
"""

from __future__ import annotations


def number_key(number: float) -> str:
    """The key of an integer or float: 1 and 1.0 share one. In hexadecimal, which takes linear time."""
    if isinstance(number, int) or number.is_integer():
        return hex(int(number))
    return float(number).hex()


def tuple_key(keys: list[str]) -> str:
    """The key of a sequence of values with these keys."""
    return f"{','.join(map(str, map(len, keys)))}:{''.join(keys)}"
