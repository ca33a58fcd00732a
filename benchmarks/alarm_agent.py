"""An agent program with an error in it, for `alarm_table.py`: it calls the policy once and misreads the reply."""

import json
import os
import sys
from urllib.request import Request, urlopen

task = json.load(sys.stdin)
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
body = json.dumps({"model": "policy", "messages": task["messages"]}).encode()
with urlopen(Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)) as response:
    print(json.load(response)["answer"])
