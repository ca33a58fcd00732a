"""The package `claude-agent-sdk` as a program of `rollout.agent.command`, with its shell.

    command = ["python", "examples/agents/claude_agent.py"]

Its program finds the policy at `ANTHROPIC_BASE_URL`, with the key in `ANTHROPIC_API_KEY`.
"""

import asyncio
import json
import sys
import tempfile

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query


async def solve(question):
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        variables = {"CLAUDE_CONFIG_DIR": home, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        options = ClaudeAgentOptions(model="policy", cwd=folder, allowed_tools=["Bash"], env=variables)
        async for message in query(prompt=question, options=options):
            if isinstance(message, ResultMessage):
                print(message.result)


if __name__ == "__main__":
    asyncio.run(solve("\n".join(one["content"] for one in json.load(sys.stdin)["messages"])))
