"""String keys of equal values, to compare untrusted values without hashing them.

Python hashes an integer modulo 2**61 - 1, so chosen values can make sets and dictionaries take quadratic
time. String hashes are keyed, and strings can be sorted.
"""

from __future__ import annotations


def number_key(number: float) -> str:
    """Return the key of an integer or float, equal for 1 and 1.0; hexadecimal, which takes linear time."""
    if isinstance(number, int) or number.is_integer():
        return hex(int(number))
    return float(number).hex()


def tuple_key(keys: list[str]) -> str:
    """Return the key of a sequence of values with these keys."""
    return f"{','.join(map(str, map(len, keys)))}:{''.join(keys)}"
