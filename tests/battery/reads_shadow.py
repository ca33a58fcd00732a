# expect: tried
import os

from trying import attempt, read, tried

for path in ("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/root/.bashrc", "/var/log/dpkg.log", "/home"):
    attempt(path, read, path)
attempt("/root", os.listdir, "/root")
attempt("/home", os.listdir, "/home")
attempt("/var", os.listdir, "/var")
tried()
