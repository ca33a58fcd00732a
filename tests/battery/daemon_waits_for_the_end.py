# expect: tried
# Descendants wait until their parent has exited, and then begin.
import os

from trying import tried

main = os.getpid()
for _ in range(6):
    if os.fork() == 0:
        while os.getppid() == main:
            pass
        while True:
            print("ESCAPED" if os.path.exists("/usr/after") else "", end="")
tried()
