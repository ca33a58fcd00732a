# expect: tried
# Memory that is charged to no process: memfd, System V segments, message queues.
import os

from trying import attempt, kernel, tried

attempt("memfd", os.memfd_create, "x")
kernel("shmget", 29 if os.uname().machine == "x86_64" else 194, 0, 1 << 24, 0o1600)
kernel("mq_open", 240 if os.uname().machine == "x86_64" else 180, b"/x", 0o102, 0o600, None)
tried()
