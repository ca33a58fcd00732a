# expect: tried
import os

from trying import attempt, read, tried


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


attempt("core pattern", write, "/proc/sys/kernel/core_pattern", "|/box/x")
attempt("ns limit", write, "/proc/sys/user/max_user_namespaces", "1")
attempt("sysrq", write, "/proc/sysrq-trigger", "h")
attempt("oom", write, "/proc/self/oom_score_adj", "-1000")
attempt("uid map", write, "/proc/self/uid_map", "0 0 1")
attempt("host name", write, "/proc/sys/kernel/hostname", "mine")
attempt("kcore", read, "/proc/kcore")
attempt("memory of 1", open, "/proc/1/mem", "r+b")
attempt("descriptors of 1", os.listdir, "/proc/1/fd")
attempt("program of 1", os.readlink, "/proc/1/exe")
attempt("own program", open, "/proc/self/exe", "r+b")
attempt("/sys", os.listdir, "/sys/kernel")
tried()
