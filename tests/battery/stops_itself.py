# expect: timed_out
import os
import signal

os.kill(os.getpid(), signal.SIGSTOP)
