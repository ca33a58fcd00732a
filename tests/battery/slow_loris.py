# expect: timed_out
import time

while True:
    print("x", end="", flush=True)
    time.sleep(0.02)
