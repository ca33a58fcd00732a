# expect: tried
import os

from trying import read, tried

for pid in [name for name in os.listdir("/proc") if name.isdigit()] + ["1", "self"]:
    for name in ("environ", "cmdline", "maps"):
        try:
            print(pid, name, read(f"/proc/{pid}/{name}")[:600])
        except OSError as error:
            print(pid, name, error)
if os.path.exists("/proc/1/environ"):
    print("ESCAPED sees process 1")
tried()
