"""Helpers of the programs in `battery/`, which import this file as `trying`.

A program prints ESCAPED for every forbidden operation that succeeded, and TRIED at its end.
"""

import json
import sys

target = json.load(open("target.json"))


def attempt(what, act, *args):
    """Print ESCAPED unless `act` raises."""
    try:
        result = act(*args)
    except Exception as error:
        print("refused", what, type(error).__name__)
    else:
        print("ESCAPED", what, repr(result)[:200])
    sys.stdout.flush()


def kernel(what, number, *args):
    """Print ESCAPED unless the system call fails."""
    import ctypes

    result = ctypes.CDLL(None, use_errno=True).syscall(number, *args)
    print("refused" if result == -1 else "ESCAPED", what)
    sys.stdout.flush()


def read(path):
    with open(path, "rb") as file:
        return file.read(4096)


def tried():
    print("TRIED")
    sys.stdout.flush()
