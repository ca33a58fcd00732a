# expect: tried
import os

from trying import attempt, read, target, tried

truth = target["truth"]
ways = [truth, "../.." + truth, f"/proc/self/root{truth}", f"/proc/1/root{truth}", f"/proc/self/cwd/../..{truth}"]
for way in ways:
    attempt(way, read, way)
for fd in range(256):
    attempt(f"from {fd}", lambda fd=fd: os.open(truth.lstrip("/"), os.O_RDONLY, dir_fd=fd))
attempt("its folder", os.listdir, os.path.dirname(truth))
tried()
