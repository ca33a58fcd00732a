# expect: failed
# System calls by their x32 numbers, which bypass a filter of the usual numbers.
import ctypes
import os

libc = ctypes.CDLL(None)
if os.uname().machine == "x86_64":
    libc.syscall(0x40000000 + 39)
    print("ESCAPED x32")
raise SystemExit(1)
