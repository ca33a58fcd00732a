# expect: tried
import ctypes
import os

from trying import attempt, kernel, tried

libc = ctypes.CDLL(None, use_errno=True)
for source, place, kind, flags in (
    (b"tmpfs", b"/box", b"tmpfs", 0),
    (b"proc", b"/tmp", b"proc", 0),
    (None, b"/usr", None, 32 | 4096),
    (b"/dev/vda", b"/box", b"ext4", 0),
    (b"/usr", b"/box", None, 4096),
):
    print("refused" if libc.mount(source, place, kind, flags, None) == -1 else "ESCAPED", "mount", place)
for place in (b"/usr", b"/proc", b"/box", b"/"):
    print("refused" if libc.umount2(place, 2) == -1 else "ESCAPED", "umount", place)
attempt("chroot", os.chroot, "/tmp")
kernel("pivot_root", 155 if os.uname().machine == "x86_64" else 41, b"/box", b"/box")
for number in (428, 429, 430, 431, 432, 433, 442):
    kernel(f"mount call {number}", number, 0, b"tmpfs", 0, 0, 0)
tried()
