# expect: tried
import os

from trying import target, tried

os.symlink(target["truth"], "truth.txt")
os.symlink("/etc/passwd", "passwd.txt")
os.symlink("/proc/1/environ", "environ.txt")
os.symlink("/usr", "usr")
os.symlink("/", "a_folder")
os.mkdir("inner")
os.symlink("../../../../../../etc/passwd", "inner/up.txt")
tried()
