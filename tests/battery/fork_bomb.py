# expect: timed_out
import os

while True:
    try:
        os.fork()
    except OSError:
        pass
