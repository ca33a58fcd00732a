# expect: tried
import socket

from trying import attempt, tried

attempt("tcp", socket.create_connection, ("1.1.1.1", 53), 0.5)
attempt("dns", socket.getaddrinfo, "example.com", 80)
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53)))
attempt("metadata", socket.create_connection, ("169.254.169.254", 80), 0.5)
tried()
