# expect: tried
# Pipes, sockets and devices must not block the collection of output files, and odd names must not confuse it.
import os
import socket

from trying import attempt, tried

os.mkfifo("pipe")
socket.socket(socket.AF_UNIX).bind("socket")
attempt("device", os.mknod, "device", 0o20666, os.makedev(1, 1))
for name in (b"new\nline", b"\xff\xfe", b"bell\x07", b"..a", b"-rf", b" "):
    open(name, "w").write("odd")
with open("sparse", "wb") as file:
    file.truncate(8 * 2**20)
os.mkdir("locked", 0)
tried()
