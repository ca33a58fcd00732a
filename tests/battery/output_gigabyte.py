# expect: truncated
import os

for _ in range(1024):
    os.write(1, b"x" * 2**20)
