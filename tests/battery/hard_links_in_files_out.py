# expect: tried
import os

from trying import tried

open("one.txt", "w").write("twice")
os.link("one.txt", "two.txt")
for path in ("/usr/bin/env", "/etc/passwd"):
    try:
        os.link(path, "linked.txt")
        print("ESCAPED linked", path)
    except OSError:
        pass
tried()
