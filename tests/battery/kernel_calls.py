# expect: tried
import os

from trying import kernel, tried

calls = {"bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248, "keyctl": 250, "syslog": 103}
calls |= {"open_by_handle_at": 304, "kexec_load": 246, "init_module": 175, "personality": 135, "swapon": 167}
calls |= {"settimeofday": 164, "sethostname": 170, "reboot": 169, "iopl": 172, "acct": 163, "vmsplice": 278}
if os.uname().machine == "x86_64":
    for name, number in calls.items():
        kernel(name, number, 0, 0, 0, 0, 0)
for name, number in {"io_uring_setup": 425, "pidfd_getfd": 438, "memfd_secret": 447}.items():
    kernel(name, number, 1, 0, 0)
tried()
