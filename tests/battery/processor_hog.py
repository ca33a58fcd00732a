# expect: timed_out
# The parent sleeps; its children use the CPU.
import os
import time

for _ in range(8):
    if os.fork() == 0:
        while True:
            pass
time.sleep(3600)
