# expect: tried
import os

from trying import tried

found = set(os.listdir("/tmp")) | set(os.listdir("/dev/shm")) | set(os.listdir("/store"))
found |= set(os.listdir("/box")) - {"trying.py", "target.json", "__pycache__"}
for name in found:
    print("ESCAPED found", name)
with open("/tmp/left-behind", "w") as file:
    file.write("for the next one")
with open("/dev/shm/left-behind", "w") as file:
    file.write("for the next one")
tried()
