# expect: tried
import socket
import urllib.request

from trying import attempt, target, tried

for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
    attempt(host, socket.create_connection, (host, target["port"]), 0.5)
attempt("http", urllib.request.urlopen, f"http://127.0.0.1:{target['port']}/")
tried()
