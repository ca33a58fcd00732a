# expect: memory_exceeded
# Reads one page in each GiB: almost nothing is resident, but each page needs two pages of page tables.
import ctypes
import mmap
import os
import time

libc = ctypes.CDLL(None)
libc.prctl(15, b"VmRSS: 0\nVmPTE:", 0, 0, 0)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
NO_RESERVE, WHERE = 0x4000, 0x100000

for _ in range(2):
    os.fork()
for n in range(16000):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE | WHERE
    place = libc.mmap(0x100000000000 + (n << 30), 4096, mmap.PROT_READ, flags, -1, 0)
    ctypes.string_at(place, 1)
time.sleep(60)
