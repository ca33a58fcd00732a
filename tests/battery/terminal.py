# expect: tried
import fcntl
import os

from trying import attempt, tried

attempt("/dev/tty", os.open, "/dev/tty", os.O_RDWR)
attempt("/dev/console", os.open, "/dev/console", os.O_RDWR)
attempt("/dev/ptmx", os.open, "/dev/ptmx", os.O_RDWR)
for fd in (0, 1, 2):
    attempt(f"TIOCSTI {fd}", fcntl.ioctl, fd, 0x5412, b"x")
    attempt(f"TIOCSTI {fd} with high bits", fcntl.ioctl, fd, 0x5412 | 0x100000000 if fd == 9 else 0x5412, b"x")
    attempt(f"TIOCLINUX {fd}", fcntl.ioctl, fd, 0x541C, b"\2")
    attempt(f"TIOCSCTTY {fd}", fcntl.ioctl, fd, 0x540E, 1)
tried()
