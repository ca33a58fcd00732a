# expect: failed
# Call numbers of the x32 interface name the same calls, past a filter that knows only the usual numbers.
import ctypes
import os

libc = ctypes.CDLL(None)
if os.uname().machine == "x86_64":
    libc.syscall(0x40000000 + 39)
    print("ESCAPED x32")
raise SystemExit(1)
