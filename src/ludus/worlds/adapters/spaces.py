"""Spaces of gymnasium as text: descriptions, values, and actions parsed from the model's text."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_SIZE = 400
"""Largest number of elements of an array that is shown as text."""


class Space(Protocol):
    """Interface of a space of gymnasium."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def contains(self, x: object) -> bool: ...


def describe(space: Space, names: Sequence[str] = ()) -> str:
    """Return what an action of a space is. Raises ValueError for a space that has no text form."""
    spaces = importlib.import_module("gymnasium.spaces")
    match space:
        case spaces.Discrete():
            first = int(space.start)
            return f"one of: {', '.join(names)}" if names else f"a whole number from {first} to {first + space.n - 1}"
        case spaces.Box():
            return f"{_count(space)} from {_bound(space.low)} to {_bound(space.high)}"
        case spaces.MultiDiscrete():
            highest = _array(np.asarray(space.start) + space.nvec - 1)
            return f"{_count(space)}, whole, from ({_array(space.start)}) to ({highest})"
        case spaces.MultiBinary():
            return f"{_count(space)}, each 0 or 1"
        case spaces.Text():
            return f"a text of {space.min_length} to {space.max_length} characters"
        case spaces.Tuple():
            return f"a JSON list of: {'; '.join(describe(one) for one in space.spaces)}"
        case spaces.Dict():
            return f"a JSON object of: {'; '.join(f'{key}: {describe(one)}' for key, one in space.spaces.items())}"
    raise ValueError(f"the space {type(space).__name__} has no text form")


def whole_numbers(space: Space) -> range:
    """Return the actions of a discrete space; empty for any other."""
    spaces = importlib.import_module("gymnasium.spaces")
    match space:
        case spaces.Discrete():
            return range(int(space.start), int(space.start + space.n))
    return range(0)


def render(space: Space, value: object) -> str:
    """Return a value of a space as text: numbers with four significant digits, the parts of a Dict in lines.

    Raises ValueError for a space that has no text form, and for a large array.
    """
    spaces = importlib.import_module("gymnasium.spaces")
    match space:
        case spaces.Text():
            return str(value)
        case spaces.Dict() if isinstance(value, dict):
            return "\n".join(f"{key}: {render(one, value[key])}" for key, one in space.spaces.items())
        case spaces.Tuple() if isinstance(value, tuple):
            return ", ".join(render(one, part) for one, part in zip(space.spaces, value, strict=True))
        case spaces.Discrete() | spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return _array(np.asarray(value))
    raise ValueError(f"the space {type(space).__name__} has no text form")


def parse(space: Space, text: str, names: Sequence[str] = ()) -> object:
    """Return the action in a text. Raises ValueError if it is not in the space."""
    spaces = importlib.import_module("gymnasium.spaces")
    value: object = text
    match space:
        case spaces.Discrete():
            folded = [name.casefold() for name in names]
            word = text.strip().casefold()
            value = folded.index(word) + int(space.start) if word in folded else _whole(word)
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            value = _numbers(space, text)
        case spaces.Tuple() | spaces.Dict():
            value = _parts(space, text)
    if not space.contains(value):
        raise ValueError("outside of the action space")
    return value


def _parts(space: Space, text: str) -> object:
    spaces = importlib.import_module("gymnasium.spaces")
    try:
        parts = json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None

    def part(one: Space, value: object) -> object:
        return parse(one, value if isinstance(value, str) else json.dumps(value))

    match space:
        case spaces.Tuple() if isinstance(parts, list) and len(parts) == len(space.spaces):
            return tuple(part(one, value) for one, value in zip(space.spaces, parts, strict=True))
        case spaces.Dict() if isinstance(parts, dict) and parts.keys() == space.spaces.keys():
            return {key: part(one, parts[key]) for key, one in space.spaces.items()}
    raise ValueError("other parts than the action space")


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,9}", text, re.A):
        raise ValueError("not a whole number")
    return int(text)


def _numbers(space: Space, text: str) -> object:
    array = np.array([float(word) for word in re.findall(r"[^\s,;\[\]()]+", text)])
    if array.size != math.prod(space.shape) or not np.isfinite(array).all():
        raise ValueError("another number of numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(space.dtype)
    rounding = 1e-3 if np.issubdtype(space.dtype, np.floating) else 0.0
    if not np.isclose(cast, array, rounding, rounding).all():
        raise ValueError("numbers of another type")
    return cast.reshape(space.shape)


def _array(value: NDArray[np.generic]) -> str:
    if value.size > MAX_SIZE:
        raise ValueError(f"an array of {value.size} numbers has no text form")
    if value.ndim > 1:
        return "\n".join(map(_array, value))
    return " ".join(f"{one:.4g}" if isinstance(one, float) else str(int(one)) for one in value.ravel().tolist())


def _count(space: Space) -> str:
    num = math.prod(space.shape)
    return "a number" if num == 1 else f"{num} numbers, separated by spaces,"


def _bound(values: NDArray[np.generic]) -> str:
    once = np.unique(values)
    return _array(once) if once.size == 1 else f"({_array(values.ravel())})"
