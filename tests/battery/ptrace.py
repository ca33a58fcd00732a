# expect: tried
import ctypes
import os

from trying import kernel, target, tried

x86 = os.uname().machine == "x86_64"
PTRACE, READ_OTHER = (101, 310) if x86 else (117, 270)
for pid in (1, os.getppid(), target["pid"]):
    kernel(f"attach {pid}", PTRACE, 16, pid, None, None)
    kernel(f"seize {pid}", PTRACE, 0x4206, pid, None, None)
kernel("traced by its parent", PTRACE, 0, 0, None, None)
vector = (ctypes.c_size_t * 2)(0, 8)
kernel("read memory", READ_OTHER, 1, vector, 1, vector, 1, 0)
kernel("pidfd_getfd", 438, 0, 0, 0)
tried()
