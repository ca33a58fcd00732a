"""An MCP server of prices over standard streams that needs no package. Its argument is the table as JSON."""

import json
import sys

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
LOOK = {"name": "look", "description": "Look up a price.", "inputSchema": ITEM, "annotations": {"readOnlyHint": True}}


def answer(prices, method, given):
    match method:
        case "initialize":
            info = {"name": "prices", "version": "1"}
            version = given["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": [LOOK]}
        case "tools/call":
            item = given["arguments"]["item"]
        case _:
            return None
    text = f"{item} costs {prices[item]}" if item in prices else "KeyError"
    return {"content": [{"type": "text", "text": text}], "isError": item not in prices}


if __name__ == "__main__":
    table = json.loads(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            result = answer(table, request["method"], request.get("params", {}))
            unknown = {"error": {"code": -32601, "message": "there is no such method"}}
            body = unknown if result is None else {"result": result}
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"]} | body), flush=True)
