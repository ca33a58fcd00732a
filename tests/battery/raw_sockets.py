# expect: tried
import socket

from trying import attempt, tried

for family, kind in ((2, 3), (10, 3), (17, 3), (16, 3), (38, 5), (40, 1), (2, 1), (10, 2), (44, 3)):
    attempt(f"socket {family} {kind}", socket.socket, family, kind)
tried()
