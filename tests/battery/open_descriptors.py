# expect: tried
import os

from trying import tried

held = []
try:
    while len(held) < 5000:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
if len(held) > 130:
    print("ESCAPED opened", len(held))
for fd in held:
    os.close(fd)
tried()
