# expect: tried
import os

from trying import tried

for _ in range(150):
    try:
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
    except OSError:
        pass
tried()
