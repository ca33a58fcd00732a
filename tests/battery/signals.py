# expect: tried
# Process 1 receives no signal from inside; no other process can be addressed.
import os
import signal

from trying import attempt, target, tried

attempt("kill the host", os.kill, target["pid"], signal.SIGUSR1)
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV, signal.SIGUSR1):
    for pid in (1, os.getppid()):
        try:
            os.kill(pid, number)
        except OSError:
            pass
tried()
