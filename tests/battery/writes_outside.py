# expect: tried
import os

from trying import attempt, target, tried

canary = target["canary"]
for place in ("/", "/usr/", "/usr/local/bin/", "/etc/", "/dev/", "/proc/", "/sys/", canary + "/", "/store/../"):
    attempt(f"write {place}", lambda place=place: open(place + "hello-from-inside", "w").close())
attempt("replace passwd", lambda: open("/etc/passwd", "w").close())
attempt("remove canary", os.unlink, canary + "/file")
attempt("chmod /usr", os.chmod, "/usr", 0o777)
attempt("touch env", os.utime, "/usr/bin/env")
tried()
