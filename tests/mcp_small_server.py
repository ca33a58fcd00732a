"""A small MCP server over standard streams that needs no package, starts at once, and can be made to fail.

Arguments: with `dies` it exits before it answers, with `mute` it never answers. The tool `die_once` exits if the
file in the environment variable FLAG is missing, and creates it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
SAFE = {"readOnlyHint": True}
KIND = {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]}
BACKTRACKS = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}}
TOOLS = [
    {"name": "echo", "description": "Say it again.", "inputSchema": TEXT, "annotations": SAFE},
    {"name": "many.kinds", "description": "Of each kind one.", "inputSchema": NONE},
    {"name": "data", "description": "Data alone.", "inputSchema": NONE},
    {"name": "nothing", "inputSchema": NONE},
    {"name": "fail", "description": "An error.", "inputSchema": NONE},
    {"name": "refuse", "description": "A protocol error.", "inputSchema": NONE},
    {"name": "hang", "description": "Never answers.", "inputSchema": NONE},
    {"name": "die", "description": "Ends.", "inputSchema": NONE},
    {"name": "die_once", "description": "Ends.", "inputSchema": NONE, "annotations": SAFE},
    {"name": "die_once_unsafe", "description": "Ends.", "inputSchema": NONE},
    {"name": "count", "description": "Calls so far.", "inputSchema": NONE},
    {"name": "hostile", "description": "Sends lines that harm.", "inputSchema": KIND},
    {"name": "pattern", "description": "Data.", "inputSchema": NONE, "outputSchema": BACKTRACKS},
    {"name": "pid", "description": "Processes.", "inputSchema": NONE},
]
KINDS = [
    {"type": "text", "text": "seen"},
    {"type": "image", "data": "AAAAAAA=", "mimeType": "image/png"},
    {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
    {"type": "resource", "resource": {"uri": "memo://a", "text": "a memo"}},
    {"type": "resource", "resource": {"uri": "memo://b", "blob": "AAAA", "mimeType": "x/y"}},
    {"type": "resource_link", "uri": "memo://c", "name": "c", "description": "another"},
]
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
HOSTILE = {
    "long": '{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"' + "a" * 200_000 + '"}]}}',
    "id last": '{"result":{"content":[{"type":"text","text":"' + "a" * 200_000 + '"}]},"id":%d,"jsonrpc":"2.0"}',
    "long and nothing else": "a" * 200_000 + '\n{"id": %d}',
    "values": '{"jsonrpc":"2.0","id":%d,"result":{"content":[],"x":[' + "0," * 70_000 + "0]}}",
    "pieces": '{"jsonrpc":"2.0","id":%d,"result":{"content":[' + "0," * 2_000 + "0]}}",
    "deep": '{"jsonrpc":"2.0","id":%d,"result":{"content":' + "[" * 60_000 + "}}",
    "no JSON": '{"jsonrpc":"2.0","id":%d,"result":nothing',
    "digits": '{"jsonrpc":"2.0","id":%d,"result":{"content":[],"x":' + "9" * 5_000 + "}}",
    "structured": '{"jsonrpc":"2.0","id":%d,"result":{"content":[],"structuredContent":{"x":['
    + "0," * 60_000
    + "0]}}}",
    "texts": '{"jsonrpc":"2.0","id":%d,"result":{"content":['
    + '{"type":"text","text":"a"},' * 2_000
    + '{"type":"text","text":"\\ud800"}]}}',
}
calls = 0
child = None


def answer(name, arguments):
    global calls, child
    calls += 1
    said = {
        "echo": lambda: {"content": [{"type": "text", "text": arguments["text"]}]},
        "many.kinds": lambda: {"content": KINDS, "structuredContent": {"kinds": 6}},
        "data": lambda: {"content": [], "structuredContent": {"a": [1, "é"]}},
        "nothing": lambda: {"content": []},
        "pattern": lambda: {"content": [], "structuredContent": {"x": "a" * 60 + "b"}},
        "fail": lambda: {"content": [{"type": "text", "text": "no such thing: try echo"}], "isError": True},
        "count": lambda: {"content": [{"type": "text", "text": str(calls)}]},
    }
    if name == "hang":
        return None
    if name == "pid":
        child = child or subprocess.Popen(SLEEP, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        return {"content": [{"type": "text", "text": f"{os.getpid()} {child.pid}"}]}
    if name.startswith("die"):
        flag = Path(os.environ.get("FLAG", "/nowhere"))
        if name == "die" or not flag.exists():
            if name != "die":
                flag.write_text("died")
            os._exit(3)
        return {"content": [{"type": "text", "text": "alive"}]}
    return said[name]()


def reply(request):
    method, given = request["method"], request.get("params", {})
    if method == "initialize":
        info = {"name": "small", "version": "1"}
        version = given["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        first = "cursor" not in given
        return {"tools": TOOLS[:5], "nextCursor": "5"} if first else {"tools": TOOLS[5:]}
    if method == "tools/call" and given["name"] != "refuse":
        return answer(given["name"], given.get("arguments") or {})
    raise KeyError(method)


def serve():
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        given = request.get("params", {})
        if given.get("name") == "hostile":
            print(HOSTILE[given["arguments"]["kind"]] % request["id"], flush=True)
            continue
        head = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            result = reply(request)
        except KeyError:
            body = {"error": {"code": -32601, "message": "there is no such method"}}
        else:
            if result is None:
                continue
            body = {"result": result}
        print(json.dumps(head | body), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["dies"]:
        sys.exit("the licence has run out")
    if sys.argv[1:] == ["mute"]:
        time.sleep(600)
    serve()
