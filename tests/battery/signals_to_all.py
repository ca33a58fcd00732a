# expect: tried
import os
import signal

from trying import tried

signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in (signal.SIGTERM, signal.SIGKILL):
    try:
        os.kill(-1, number)
    except OSError:
        pass
tried()
