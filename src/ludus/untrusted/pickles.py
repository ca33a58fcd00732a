"""Restricted unpickling: a pickle may only reference listed globals, and runs no code.

Uses the pure Python interpreter, whose opcode table can be restricted: persistent ids, extension codes,
`BUILD` on a class, and opcodes that allocate as many bytes as the file claims are refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pickle import UnpicklingError
from types import MappingProxyType
from typing import ClassVar

_REFUSED = (
    *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ),
    *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)
_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError, MemoryError)


def _build(unpickler: pickle.Unpickler) -> None:
    assert isinstance(unpickler, _Restricted)
    if isinstance(unpickler.stack[-2], type):
        raise UnpicklingError("it modifies a class")
    _OPCODES[pickle.BUILD[0]](unpickler)


_OPCODES = pickle._Unpickler.dispatch
_ALLOWED = {code: handler for code, handler in _OPCODES.items() if bytes([code]) not in _REFUSED}


class _Restricted(pickle._Unpickler):
    dispatch: ClassVar = _ALLOWED | {pickle.BUILD[0]: _build}
    stack: list[object]

    def __init__(self, data: bytes, allowed: Mapping[str, object]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> object:
        """Raise UnpicklingError unless the global is listed."""
        if f"{module}.{name}" not in self._allowed:
            raise UnpicklingError(f"it references {module}.{name}")
        return self._allowed[f"{module}.{name}"]


def load_pickle(data: bytes, known: Mapping[str, object] = MappingProxyType({})) -> object:
    """Return the object of a pickle whose globals are all `known` by dotted name. Raises UnpicklingError otherwise."""
    try:
        return _Restricted(data, known).load()
    except _ERRORS as error:
        raise UnpicklingError(f"{type(error).__name__}: {error}") from error
