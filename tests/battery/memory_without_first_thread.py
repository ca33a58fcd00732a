# expect: memory_exceeded
# A process whose first thread has exited looks dead, but its other threads run.
import ctypes
import os
import threading
import time


def eat():
    time.sleep(0.3)
    block = b"x" * 2**20 * 60
    time.sleep(60)
    os._exit(len(block) % 2)


for _ in range(6):
    if os.fork() == 0:
        threading.Thread(target=eat).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
time.sleep(60)
