# expect: tried
import builtins
import json
import sys

from trying import tried

if "marked" in vars(builtins) or "marked" in vars(json) or any(name.startswith("ludus") for name in sys.modules):
    print("ESCAPED into a module")
builtins.marked = json.marked = True
json.loads = None
tried()
