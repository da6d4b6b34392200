"""An MCP server on its standard streams with one tool, which writes what it was called with to a file."""

import json
import sys
from pathlib import Path

TOOL = {
    "name": "set_timer",
    "description": "Set a timer",
    "inputSchema": {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]},
}

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    result: dict = {}
    match message["method"]:
        case "initialize":
            version = message["params"]["protocolVersion"]
            about = {"name": "timer", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            result = {"tools": [TOOL]}
        case "tools/call":
            with Path(sys.argv[1]).open("a", encoding="utf-8") as calls:
                calls.write(json.dumps(message["params"]["arguments"]) + "\n")
            result = {"content": [{"type": "text", "text": json.dumps({"status": "7 degrees"})}]}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
