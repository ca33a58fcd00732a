# expect: tried
# Its grandchild leaves the session and keeps the pipes open.
import os
import time

from trying import tried

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            time.sleep(0.01)
            with open("/tmp/alive", "a") as file:
                file.write("x")
    os._exit(0)
os.wait()
tried()
