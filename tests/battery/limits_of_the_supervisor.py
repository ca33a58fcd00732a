# expect: tried
# Lowers the limits of process 1: without descriptors, address space or CPU time it could not report.
import ctypes
import os
import resource

from trying import attempt, tried

kinds = {name: kind for name, kind in vars(resource).items() if name.startswith("RLIMIT_")}
for name, kind in kinds.items():
    for pid in {1, os.getppid()}:
        attempt(f"{name} of {pid}", resource.prlimit, pid, kind, (0, 0))
        attempt(f"{name} of {pid}, read", resource.prlimit, pid, kind)
fields = (ctypes.c_ulong * 2)(0, 0)
prlimit = ctypes.CDLL(None, use_errno=True).prlimit
if prlimit(1, resource.RLIMIT_NOFILE, fields, None) == 0:
    print("ESCAPED", "by the C library")
assert resource.getrlimit(resource.RLIMIT_NOFILE) == resource.prlimit(0, resource.RLIMIT_NOFILE)
tried()
