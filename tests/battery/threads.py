# expect: tried
import threading
import time

from trying import tried

count = 0
try:
    while count < 400:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except (RuntimeError, MemoryError):
    pass
if count > 20:
    print("ESCAPED started", count)
tried()
