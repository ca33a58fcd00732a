# expect: truncated
import sys

for _ in range(200_000):
    print("out", "x" * 50)
    print("err", "x" * 50, file=sys.stderr)
