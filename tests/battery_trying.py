"""What the programs of `battery/` share: it is put beside each of them as `trying.py`.

A program says ESCAPED for anything that it should not have been able to do, and TRIED at its end.
"""

import json
import sys

target = json.load(open("target.json"))


def attempt(what, act, *args):
    """Say ESCAPED unless `act` raises."""
    try:
        result = act(*args)
    except Exception as error:
        print("refused", what, type(error).__name__)
    else:
        print("ESCAPED", what, repr(result)[:200])
    sys.stdout.flush()


def kernel(what, number, *args):
    """Say ESCAPED unless a system call fails."""
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
