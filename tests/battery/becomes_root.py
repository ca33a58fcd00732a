# expect: tried
import ctypes
import os
import subprocess

from trying import attempt, tried

attempt("setuid", os.setuid, 0)
attempt("setgid", os.setgid, 0)
attempt("setgroups", os.setgroups, [0])
attempt("chown", os.chown, "/box", 0, 0)
attempt("nice", os.nice, -5)
print(open("/proc/self/status").read())
header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
print("refused" if ctypes.CDLL(None).capset(header, rights) else "ESCAPED", "capset")
for command in (["su", "-c", "id"], ["mount"], ["sudo", "-n", "id"], ["chsh"], ["passwd", "-S"]):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1, stdin=subprocess.DEVNULL)
        print(command, done.returncode, "ESCAPED" if "uid=0" in done.stdout else done.stderr[:100])
    except (OSError, subprocess.TimeoutExpired) as error:
        print(command, error)
tried()
