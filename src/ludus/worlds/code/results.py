"""Compare the results of a program with the expected values, on the host, in linear time except for sorting.

Results are read from the JSON of `guest_runner.encode`. No set or dictionary of their elements is built, because a
program can choose integers that collide in Python's hash and take quadratic time. Elements of sets and keys of
dictionaries are compared as sorted texts, which are equal if the values are equal in Python (1, 1.0 and True).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ludus.untrusted.keys import number_key, tuple_key
from ludus.worlds.code import guest_runner

_CLOSE = 1e-9
_LONG_BITS = 1000
"""Longer integers are shown in hexadecimal, because decimal conversion takes quadratic time."""


@dataclass(frozen=True, slots=True)
class Members:
    """A set or frozenset: the sorted distinct texts of its elements, and the elements to show."""

    kind: str
    keys: tuple[str, ...]
    shown: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dictionary sorted by the texts of its keys; a repeated key has the last value."""

    keys: tuple[str, ...]
    shown: tuple[Value, ...]
    values: tuple[Value, ...]


Value = None | bool | int | float | complex | str | bytes | list["Value"] | tuple["Value", ...] | Members | Pairs


def read_value(encoded: object, depth: int = 0) -> Value:
    """Return a value encoded by `guest_runner.encode`. Raises ValueError for anything else."""
    if depth > 2 * guest_runner.MAX_DEPTH:
        raise ValueError("nested too deep")
    if encoded is None or isinstance(encoded, bool | int | float | str):
        return encoded
    if isinstance(encoded, list):
        return [read_value(one, depth + 1) for one in encoded]
    if not isinstance(encoded, dict) or len(encoded) != 1:
        raise ValueError("an object of one key was expected")
    ((kind, inner),) = encoded.items()
    if isinstance(inner, str):
        return _read_text(kind, inner)
    if not isinstance(inner, list):
        raise ValueError(f"there is no kind {kind!r}")
    if kind == "dict":
        return _pairs([_pair(one, depth + 1) for one in inner])
    return _read_many(kind, [read_value(one, depth + 1) for one in inner])


def same_value(value: Value, due: object, loose: bool = False) -> bool:
    """Return whether a result equals the expected plain value.

    Tuples equal lists, and floats may differ by 1e-9 relatively.
    `loose` also accepts a value if a list of it is expected, as APPS does.
    """
    try:
        wanted = read_value(guest_runner.encode(due))
    except ValueError:  # no result can equal such a value
        return False
    if _equal(value, wanted):
        return True
    return loose and isinstance(wanted, list) and len(wanted) == 1 and _equal(value, wanted[0])


def show_value(value: Value, longest: int) -> str:
    """Return the value as Python source, truncated."""
    found, length = [], 0
    for part in _written(value):
        found.append(part)
        length += len(part)
        if length > longest:
            return f"{''.join(found)[:longest]}..."
    return "".join(found)


def _read_text(kind: str, text: str) -> Value:
    if kind == "float":
        return float(text)
    if kind == "int":
        return int(text, 16)
    if kind == "bytes":
        return bytes.fromhex(text)
    raise ValueError(f"there is no kind {kind!r}")


def _read_many(kind: str, inner: list[Value]) -> Value:
    if kind == "tuple":
        return tuple(inner)
    if kind in ("set", "frozenset"):
        by_key = {}
        for one in sorted(((_key(one), place) for place, one in enumerate(inner))):
            by_key[one[0]] = inner[one[1]]
        return Members(kind, tuple(by_key), tuple(by_key.values()))
    parts = [part for part in inner if isinstance(part, int | float)]
    if kind == "complex" and len(parts) == len(inner) == 2:
        try:
            return complex(*parts)
        except OverflowError as error:
            raise ValueError(str(error)) from error
    raise ValueError(f"there is no kind {kind!r}")


def _pair(encoded: object, depth: int) -> tuple[Value, Value]:
    if not isinstance(encoded, list) or len(encoded) != 2:
        raise ValueError("a dictionary is made of pairs")
    return read_value(encoded[0], depth), read_value(encoded[1], depth)


def _pairs(pairs: list[tuple[Value, Value]]) -> Pairs:
    by_key: dict[str, tuple[Value, Value]] = {}
    for key, place in sorted((_key(key), place) for place, (key, _) in enumerate(pairs)):
        by_key[key] = pairs[place]
    return Pairs(tuple(by_key), tuple(key for key, _ in by_key.values()), tuple(one for _, one in by_key.values()))


def _key(value: Value) -> str:
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
        case Members(kind="frozenset"):
            return f"frozenset {tuple_key([*value.keys])}"
    raise ValueError("an element of a set or a key that cannot be hashed")


def _equal(value: Value, due: Value) -> bool:
    if isinstance(value, list | tuple) and isinstance(due, list | tuple):
        return len(value) == len(due) and all(map(_equal, value, due))
    if isinstance(value, Pairs) and isinstance(due, Pairs):
        return value.keys == due.keys and all(map(_equal, value.values, due.values))
    if isinstance(value, Members) and isinstance(due, Members):
        return value.kind == due.kind and value.keys == due.keys
    if isinstance(value, int | float) and isinstance(due, int | float):
        if isinstance(value, int) and isinstance(due, int):
            return value == due
        try:
            return value == due or math.isclose(value, due, rel_tol=_CLOSE, abs_tol=_CLOSE)
        except OverflowError:
            return False
    return type(value) is type(due) and value == due


def _written(value: Value) -> Iterator[str]:
    match value:
        case Pairs():
            yield "{"
            for place, (key, one) in enumerate(zip(value.shown, value.values, strict=True)):
                yield ", " if place else ""
                yield from _written(key)
                yield ": "
                yield from _written(one)
            yield "}"
        case Members(shown=()):
            yield f"{value.kind}()"
        case Members(kind="set"):
            yield from _listed(value.shown, "{", "}")
        case Members():
            yield from _listed(value.shown, "frozenset({", "})")
        case list():
            yield from _listed(value, "[", "]")
        case tuple():
            yield from _listed(value, "(", ",)" if len(value) == 1 else ")")
        case _:
            yield _one(value)


def _one(value: Value) -> str:
    if isinstance(value, int) and value.bit_length() > _LONG_BITS:
        return hex(value)
    return repr(value)


def _listed(values: list[Value] | tuple[Value, ...], begin: str, end: str) -> Iterator[str]:
    yield begin
    for place, one in enumerate(values):
        yield ", " if place else ""
        yield from _written(one)
    yield end
