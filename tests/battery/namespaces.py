# expect: tried
import ctypes
import os

from trying import kernel, tried

x86 = os.uname().machine == "x86_64"
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x80):
    print("refused" if libc.unshare(flag) == -1 else "ESCAPED", "unshare", hex(flag))
for flag in (0x10000000, 0x10020000, 0x20000000):
    pid = libc.syscall(56 if x86 else 220, ctypes.c_ulong(flag | 17), 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    print("refused" if pid == -1 else "ESCAPED", "clone", hex(flag))
arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
kernel("clone3", 435, arguments, 88)
for name in ("user", "mnt", "pid", "net"):
    fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
    print("refused" if libc.setns(fd, 0) == -1 else "ESCAPED", "setns", name)
tried()
