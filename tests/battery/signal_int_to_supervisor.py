# expect: tried
# Process 1 must not receive signals from inside, not even SIGINT, for which Python has a handler.
import os
import signal
import time

from trying import tried

deadly = {signal.SIGKILL, signal.SIGSTOP}
for number in (signal.SIGINT, *sorted(signal.valid_signals() - deadly)):
    for send in (os.kill, lambda pid, n: signal.pidfd_send_signal(os.pidfd_open(pid), n)):
        try:
            send(1, number)
        except OSError:
            pass
time.sleep(0.2)
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    tried()
