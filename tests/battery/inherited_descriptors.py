# expect: tried
import os

print("start")
for fd in range(3, 1024):
    try:
        os.fstat(fd)
        print("ESCAPED descriptor", fd, os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        pass
from trying import tried

tried()
