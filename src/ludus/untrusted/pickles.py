"""Restricted unpickling of plain values: a pickle may not reference globals, and runs no code.

Uses the pure Python interpreter, whose opcode table can be restricted: persistent ids, extension codes, and opcodes
that allocate as many bytes as the file claims are refused.
"""

from __future__ import annotations

import io
import pickle
from pickle import UnpicklingError
from typing import ClassVar

_REFUSED = (
    *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ),
    *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)
_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError, MemoryError)


class _Restricted(pickle._Unpickler):
    dispatch: ClassVar = {
        code: handler for code, handler in pickle._Unpickler.dispatch.items() if bytes([code]) not in _REFUSED
    }

    def find_class(self, module: str, name: str) -> object:
        raise UnpicklingError(f"it references {module}.{name}")


def load_pickle(data: bytes) -> object:
    """Return the object of a pickle of plain values. Raises UnpicklingError for any other."""
    try:
        return _Restricted(io.BytesIO(data)).load()
    except _ERRORS as error:
        raise UnpicklingError(f"{type(error).__name__}: {error}") from error
