"""Lightweight replacements of slow-to-import standard modules, for a fast start of cells.

`json` imports `re`, `signal` imports `enum`, `contextlib` imports `collections` and `functools`: together
they take as long as the interpreter's start. Programs find them preloaded, except the first program of a
cell.
"""

from __future__ import annotations

from _json import encode_basestring_ascii

__all__ = ["Suppress", "as_json", "signal"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal


class Suppress:
    """Replacement of `contextlib.suppress`."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        return kind is not None and issubclass(kind, self._kinds)


def as_json(value: object) -> str:
    """Encode numbers, strings, lists and dicts as ASCII JSON. Raises TypeError for other types."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(as_json, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{as_json(str(key))}: {as_json(one)}' for key, one in value.items())}}}"
    raise TypeError(f"{type(value).__name__} is not JSON serializable")
