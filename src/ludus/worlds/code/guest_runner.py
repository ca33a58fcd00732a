"""The part of the grader that runs inside the sandbox: plain values as JSON, and the loops over tests.

The sandbox runs the source of this module in the process of the solution. It has arguments but no expected
values, so a solution that tampers with it can change results but not make them correct. The host treats the
records as untrusted data (`ludus.worlds.code.grader`); `decode` is for the sandbox only.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import sys
from collections.abc import Callable

MAX_DEPTH = 60
MAX_BITS = 1_000
"""Longer integers are sent as hexadecimal: Python converts at most 4,300 decimal digits, in quadratic time."""
MAX_CALLS = 2000
"""Maximum calls of a solution per run of asserts."""


class NotPlain(ValueError):
    """A value cannot be serialized, for example an object of a class that the program defines."""


def encode(value: object, depth: int = 0) -> object:
    """Return a plain value as JSON that preserves types. Raises NotPlain."""
    if depth > MAX_DEPTH:
        raise NotPlain("a value that is nested too deep")
    if value is None or isinstance(value, bool | int | float | str | complex):
        return _encode_one(value)
    if isinstance(value, dict):
        return {"dict": [[encode(key, depth + 1), encode(one, depth + 1)] for key, one in dict.items(value)]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            inner = [encode(one, depth + 1) for one in value]
            return inner if kind is list else {kind.__name__: inner}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    raise NotPlain(f"an object of the type {type(value).__name__}, which is not a plain value")


def _encode_one(value: complex | str | None) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if int.bit_length(value) <= MAX_BITS else {"int": hex(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    return {"complex": [_encode_one(value.real), _encode_one(value.imag)]}


Makers = dict[str, Callable[..., object]]
MAKERS: Makers = {
    **{kind.__name__: kind for kind in (tuple, set, frozenset, dict)},
    "complex": lambda parts: complex(*parts),
    "float": float,
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
}
"""Constructors of containers from lists of decoded items, and of other values from texts."""
_TEXTS = ("float", "int", "bytes")


def decode(value: object, makers: Makers = MAKERS, depth: int = 0) -> object:
    """Return the plain value of JSON written by `encode`. Raises ValueError for other JSON."""
    if depth > 2 * MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [decode(one, makers, depth + 1) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("an object of one key was expected")
    ((kind, inner),) = value.items()
    try:
        if kind in makers and isinstance(inner, str if kind in _TEXTS else list):
            return makers[kind](inner if kind in _TEXTS else [decode(one, makers, depth + 1) for one in inner])
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"unknown kind {kind!r}")


def find_function(names: dict[str, object], wanted: str) -> Callable[..., object]:
    """Return a function of a program, or a method of its class Solution. Raises NameError."""
    found, solution = names.get(wanted), names.get("Solution")
    if isinstance(solution, type) and wanted in dir(solution) and found is None:
        found = solution().__getattribute__(wanted)
    if callable(found):
        return found
    raise NameError(f"the program defines no function {wanted}")


def describe(error: BaseException, file: str) -> str:
    """Return an error as one line, with the last line number in the file that it passed through."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line = error.lineno or 0
    try:
        text = str(error)
    except BaseException:  # boundary: `str` of a program's exception runs its code
        text = ""
    where = f" (line {line})" if line else ""
    return f"{type(error).__name__}: {text}"[:300] + where


class Results:
    """Writer of results to the original standard output, whose descriptor number the program cannot use."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.close(silence)

    def send(self, record: dict[str, object]) -> None:
        """Write one record and flush."""
        self.file.write(f"\n{self.nonce}{json.dumps(record)}\n")
        self.file.flush()


def run_calls() -> None:
    """Call a function of `solution.py` with each of the argument lists on stdin, and send the results.

    The lines of stdin are the nonce, the name of the function, and JSON lists of encoded arguments.
    """
    nonce, wanted, *lines = sys.stdin.read().splitlines()
    results = Results(nonce)
    names: dict[str, object] = {"__name__": "solution", "__file__": "solution.py"}
    try:
        with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
            text = file.read()
        exec(compile(text, "solution.py", "exec", dont_inherit=True), names)
        function = find_function(names, wanted)
    except BaseException as error:  # boundary: exceptions of the program are results
        results.send({"broken": describe(error, "solution.py")})
        return
    results.send({"loaded": True})
    for number, line in enumerate(lines):
        results.send({"number": number, **_called(function, line)})


def _called(function: Callable[..., object], line: str) -> dict[str, object]:
    try:
        arguments = decode(json.loads(line))
        assert isinstance(arguments, list)
        return {"value": encode(function(*arguments))}
    except NotPlain as error:
        return {"error": f"it gave {error}"}
    except BaseException as error:  # boundary: exceptions of the program are results
        return {"raises": type(error).__name__, "error": describe(error, "solution.py")}


def run_checks() -> None:
    """Run asserts against available results of calls, and request missing results.

    stdin is JSON: the nonce, the set-up code, the name of the function, the code of the tests by name, and the
    known results of each test. For a further call the arguments are sent and a `Placeholder` is returned; from
    then on failing asserts are ignored, and the test has no verdict yet.
    """
    import random

    given = json.loads(sys.stdin.read())
    results = Results(given["nonce"])
    for name, code in given["tests"].items():
        random.seed(0)
        proxy = Proxy(results, name, given["known"].get(name, []))
        names: dict[str, object] = {"__name__": "tests"}
        verdict, failure = True, ""
        try:
            exec(compile(given["setup"], "setup.py", "exec", dont_inherit=True), names)
            names |= {given["entry"]: proxy, "candidate": proxy, "_open_": lambda proxy=proxy: proxy.open}
            exec(compile(code, "tests.py", "exec", dont_inherit=True), names)
        except BaseException as error:  # boundary: a test fails by any exception
            verdict, failure = False, describe(error, "tests.py")
        results.send({"test": name, "verdict": verdict, "open": proxy.open, "error": failure})


class Placeholder:
    """Placeholder for a missing result; most operations on it succeed."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return True

    __lt__ = __le__ = __gt__ = __ge__ = __eq__

    def __bool__(self) -> bool:
        return True

    def __float__(self) -> float:
        return 0.0

    def __int__(self) -> int:
        return 0

    __index__ = __len__ = __int__

    def __iter__(self) -> object:
        return iter(())

    def _self(self, *_: object) -> Placeholder:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _self
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _self
    __getitem__ = __round__ = __call__ = _self


class Proxy:
    """Replacement of the function under test in asserts; returns the available results in order."""

    def __init__(self, results: Results, test: str, known: list[object]) -> None:
        self._results, self._test, self._known, self._count = results, test, known, 0
        self.open = False
        """Whether a result was missing."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        number = self._count
        self._count += 1
        if number < len(self._known):
            return self._given(self._known[number])
        self.open = True
        if number >= MAX_CALLS:
            raise RuntimeError("too many calls")
        if kwargs:
            raise NotPlain("arguments that are given by name")
        self._results.send({"test": self._test, "call": [encode(one) for one in args]})
        return Placeholder()

    def _given(self, record: object) -> object:
        assert isinstance(record, dict)
        if "value" in record:
            return decode(record["value"])
        error = vars(builtins).get(str(record.get("raises")))
        if isinstance(error, type) and issubclass(error, Exception):
            raise error(record.get("error"))
        raise RuntimeError(str(record.get("error")))
