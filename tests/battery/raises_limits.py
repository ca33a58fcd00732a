# expect: tried
import resource

from trying import attempt, tried

for name in ("AS", "NPROC", "NOFILE", "FSIZE", "CORE", "CPU"):
    kind = vars(resource)[f"RLIMIT_{name}"]
    now = resource.getrlimit(kind)[1]
    attempt(name, resource.setrlimit, kind, (now + 1, now + 1))
tried()
