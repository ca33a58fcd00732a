# expect: memory_exceeded
import os
import time

for _ in range(12):
    if os.fork() == 0:
        block = b"x" * 2**20 * 60
        time.sleep(60)
time.sleep(60)
