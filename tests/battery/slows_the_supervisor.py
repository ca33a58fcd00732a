# expect: tried
# Process 1 with the lowest scheduling priority reports late, but it reports.
import ctypes
import os

from trying import tried

libc = ctypes.CDLL(None)
for act in (
    lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.sched_setaffinity(1, {max(os.sched_getaffinity(0))}),
    lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
):
    try:
        act()
    except OSError:
        pass
libc.syscall({"x86_64": 251}.get(os.uname().machine, 30), 1, 1, 3 << 13)  # ioprio_set: idle
tried()
