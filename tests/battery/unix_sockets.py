# expect: tried
import socket

from trying import attempt, target, tried

for path in (target["socket"], "\0" + target["abstract"], "/var/run/docker.sock", "/run/systemd/private", "\0"):
    attempt(repr(path), socket.socket(socket.AF_UNIX).connect, path)
tried()
