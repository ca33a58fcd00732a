# expect: failed
import sys

sys.setrecursionlimit(10**9)


def dig(n):
    return repr([dig(n + 1)])


dig(0)
