"""JSON as written by models: strict decoding, helpful errors, and objects parsed as calls."""

from __future__ import annotations

import json
import re
from typing import NoReturn, cast

from ludus.chat.parse_draft import Malformed, check_plain
from ludus.types import JSON

_SNIPPET_CHARS = 20
_TOO_DEEP = "The JSON nests too deeply. Make the arguments flatter."
_BLANKS = re.compile(r"[ \t\n\r]*")
_PYTHON_WORD = re.compile(r"(None|True|False)\b")
_TRAILING_COMMA = re.compile(r",\s*[}\]]")
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}


def skip_blanks(text: str, start: int) -> int:
    """Return the offset of the first character at or after `start` that is not blank in JSON."""
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks else start


def decode_prefix(text: str, start: int = 0) -> tuple[object, int]:
    """Decode the JSON value at `start`, skipping blanks; return it and the offset after it.

    The last value of a repeated key wins. Raises Malformed for broken JSON, NaN and infinities, numbers
    beyond a float, and too many digits or levels.
    """
    begin = skip_blanks(text, start)
    try:
        return _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise Malformed(_reason(error, begin)) from None
    except Malformed:
        raise
    except ValueError:
        raise Malformed("The JSON holds a number with far too many digits.") from None
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None


def decode(text: str) -> object:
    """Decode a text that is exactly one JSON value. Raises Malformed as `decode_prefix`."""
    value, end = decode_prefix(text)
    after = text[end:].strip()
    if after:
        raise Malformed(f"The JSON ends before {_snippet(after)}. Write one JSON object and nothing after it.")
    return value


def call_of(value: object, key: str) -> tuple[str, dict[str, JSON]]:
    """Parse a decoded value as a call; return name and arguments. Raises Malformed.

    The arguments are an object, or JSON text of one, under `arguments` or else `parameters`; missing
    arguments are empty. `key` is the name used in error messages.
    """
    if not isinstance(value, dict):
        raise Malformed(f'A call is a JSON object with "name" and "{key}", not {_kind(value)}.')
    if "name" not in value:
        raise Malformed(f'The call has no "name". Write {{"name": ..., "{key}": {{...}}}}.')
    name = value["name"]
    if not isinstance(name, str):
        raise Malformed(f'The "name" of a call is a string, not {_kind(name)}.')
    if not name.strip():
        raise Malformed('The "name" of the call is empty. Write the name of a tool.')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _decode_string(arguments)
    if not isinstance(arguments, dict):
        raise Malformed(f"The arguments of a call are a JSON object, not {_kind(arguments)}.")
    check_plain({name: None})
    return name, check_plain(cast("dict[str, JSON]", arguments))


def _decode_string(text: str) -> object:
    try:
        return decode(text)
    except Malformed as error:
        raise Malformed(f"The arguments are a string that holds no JSON object. {error.reason}") from None


def _refuse_constant(word: str) -> NoReturn:
    raise Malformed(f"{word} is no JSON. Write a finite number, a string or null.")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise Malformed("The JSON holds a number that is too large.")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _reason(error: json.JSONDecodeError, begin: int) -> str:
    """Describe the JSON error and its position, independently of Python's version."""
    rest = error.doc[error.pos :]
    if not rest.strip():
        return "The JSON ends too early. Close every quote, bracket and brace."
    if rest.startswith("'") or _PYTHON_WORD.match(rest):
        return f"This is Python, not JSON, at {_snippet(rest)}. Use double quotes, null, true and false."
    last = error.doc[begin : error.pos].rstrip()[-1:]
    if _TRAILING_COMMA.match(last + rest if last == "," else rest):
        return "The JSON has a comma after the last item. Remove it."
    if error.msg.startswith("Invalid control character"):
        return "A string in the JSON holds a raw line break or control character. Write it as \\n or \\t."
    if error.msg.startswith("Unterminated string"):
        return f"A string in the JSON is not closed: {_snippet(rest)}."
    if error.msg.startswith("Invalid \\"):
        return f"A backslash in the JSON is not escaped, at {_snippet(rest)}. Write it twice."
    message = error.msg[:1].lower() + error.msg[1:]
    return f"The JSON is broken at character {error.pos - begin}, {_snippet(rest)}: {message}."


def _snippet(text: str) -> str:
    return repr(text[:_SNIPPET_CHARS])


def _kind(value: object) -> str:
    return "null" if value is None else _KINDS.get(type(value), "that")
