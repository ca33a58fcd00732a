# expect: tried
import os

from trying import tried

for _ in range(400):
    os.mkdir("d")
    os.chdir("d")
open("deep.txt", "w").write("deep")
tried()
