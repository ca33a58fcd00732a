"""Comparison of a program's results with expected values on the host, in linear time except for sorting.

Results are read from the JSON of `guest_runner.encode`. No set or dictionary of their elements is built, because a
program can choose integers that collide in Python's hash and take quadratic time. Elements of sets and keys of
dictionaries are compared as sorted texts, which are equal if the values are equal in Python (1, 1.0 and True).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ludus.rewards.code.sql_rows import number_key, tuple_key
from ludus.worlds.code import guest_runner

_TOLERANCE = 1e-9
_LONG_BITS = 1000
"""Longer integers are shown in hexadecimal, because decimal conversion takes quadratic time."""


@dataclass(frozen=True, slots=True)
class Unordered:
    """A set, frozenset or dict, sorted by the texts of its elements or keys, which are distinct.

    `shown` are the elements or keys, `values` the values of a dict (the last one of a repeated key).
    """

    kind: str
    keys: tuple[str, ...]
    shown: tuple[object, ...]
    values: tuple[object, ...]


def read_value(encoded: object) -> object:
    """Return a value encoded by `guest_runner.encode`. Raises ValueError for anything else."""
    return guest_runner.decode(encoded, _MAKERS)


def same_value(value: object, due: object, loose: bool = False) -> bool:
    """Return whether a result equals the expected plain value.

    Tuples equal lists, and floats may differ by 1e-9 relatively.
    `loose` also accepts a value if a list of it is expected, as APPS does.
    """
    try:
        wanted = read_value(guest_runner.encode(due))
    except ValueError:  # such a value equals no result
        return False
    if _equal(value, wanted):
        return True
    return loose and isinstance(wanted, list) and len(wanted) == 1 and _equal(value, wanted[0])


def show_value(value: object, longest: int) -> str:
    """Return the value as Python source, truncated."""
    found, length = [], 0
    for part in _source_parts(value):
        found.append(part)
        length += len(part)
        if length > longest:
            return f"{''.join(found)[:longest]}..."
    return "".join(found)


def _unordered(kind: str, items: list[object]) -> Unordered:
    by_key: dict[str, list[object]] = {}
    for pair in items if kind == "dict" else [[item, None] for item in items]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("a dictionary is made of pairs")
        by_key[_key(pair[0])] = pair
    keys = tuple(sorted(by_key))
    return Unordered(kind, keys, tuple(by_key[key][0] for key in keys), tuple(by_key[key][1] for key in keys))


_MAKERS = guest_runner.MAKERS | {kind: partial(_unordered, kind) for kind in ("set", "frozenset", "dict")}


def _key(value: object) -> str:
    """Return a text that equal elements share. Raises ValueError for unhashable values."""
    match value:
        case None:
            return "none"
        case str():
            return f"str {value}"
        case bytes():
            return f"bytes {value.hex()}"
        case complex() if value.imag:
            return f"complex {value.real.hex()} {value.imag.hex()}"
        case int() | float() | complex():
            return f"number {number_key(value.real)}"
        case tuple():
            return f"tuple {tuple_key([_key(one) for one in value])}"
        case Unordered(kind="frozenset"):
            return f"frozenset {tuple_key([*value.keys])}"
    raise ValueError("an element of a set or a key that cannot be hashed")


def _equal(value: object, due: object) -> bool:
    if isinstance(value, list | tuple) and isinstance(due, list | tuple):
        return len(value) == len(due) and all(map(_equal, value, due))
    if isinstance(value, Unordered) and isinstance(due, Unordered):
        same_keys = value.kind == due.kind and value.keys == due.keys
        return same_keys and all(map(_equal, value.values, due.values))
    if isinstance(value, int | float) and isinstance(due, int | float):
        if isinstance(value, int) and isinstance(due, int):
            return value == due
        try:
            return value == due or math.isclose(value, due, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        except OverflowError:
            return False
    return type(value) is type(due) and value == due


def _source_parts(value: object) -> Iterator[str]:
    match value:
        case Unordered(kind="dict"):
            yield from _listed(zip(value.shown, value.values, strict=True), "{", "}")
        case Unordered(shown=()):
            yield f"{value.kind}()"
        case Unordered(kind="set"):
            yield from _listed(zip(value.shown), "{", "}")
        case Unordered():
            yield from _listed(zip(value.shown), "frozenset({", "})")
        case list():
            yield from _listed(zip(value), "[", "]")
        case tuple():
            yield from _listed(zip(value), "(", ",)" if len(value) == 1 else ")")
        case int() if value.bit_length() > _LONG_BITS:
            yield hex(value)
        case _:
            yield repr(value)


def _listed(items: Iterable[Sequence[object]], begin: str, end: str) -> Iterator[str]:
    """Yield items of one value, or of key and value."""
    yield begin
    for place, item in enumerate(items):
        yield ", " if place else ""
        for part, one in enumerate(item):
            yield ": " if part else ""
            yield from _source_parts(one)
    yield end
