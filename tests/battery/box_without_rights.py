# expect: tried
# Output files are collected from an unreadable folder, in which a file has become a folder.
import os

from trying import tried

os.makedirs("shut/inner")
open("shut/inner/file", "w").write("x")
os.chmod("shut/inner/file", 0)
os.chmod("shut/inner", 0)
os.remove("target.json")
os.mkdir("target.json")
os.chmod(".", 0)
tried()
