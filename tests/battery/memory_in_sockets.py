# expect: memory_exceeded
# Larger buffers are refused; unaccepted connections count, and connections whose other end is closed.
import socket
import time

from trying import attempt

one, other = socket.socketpair()
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    attempt(f"buffer {option}", one.setsockopt, socket.SOL_SOCKET, option, 1 << 30)
door = socket.socket(socket.AF_UNIX)
door.bind("door")
door.listen(10**6)
for _ in range(1500):
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect("door")
        visitor.setblocking(False)
        try:
            while True:
                visitor.send(b"x" * 65536)
        except BlockingIOError:
            pass
time.sleep(60)
