# expect: tried
import os
import subprocess

from trying import tried

known = {"PATH", "HOME", "LANG", "PWD", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "SHLVL", "_", "LC_CTYPE"}
print(dict(os.environ))
print(subprocess.run(["env"], capture_output=True, text=True).stdout)
if set(os.environ) - known:
    print("ESCAPED", set(os.environ) - known)
tried()
