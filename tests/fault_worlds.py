"""The world of prices with its tool in another process (an MCP or a sandbox server), or with an agent function."""

import json
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import tiny_world
from ludus.envs.agent_world import AgentWorld
from ludus.envs.tool_env import ToolEnv
from ludus.envs.tool_world import ToolWorld
from ludus.errors import WorldError
from ludus.sandbox.base import Sandbox
from ludus.tools.base import tool
from ludus.tools.mcp.client import mcp_server

PROGRAM = "print({item!r}, 'costs', {prices!r}[{item!r}])"


@dataclass(frozen=True)
class PriceWorld(ToolWorld):
    """Looks up prices with a program in a sandbox."""

    sandbox: Sandbox | None = None

    def environment(self, task):
        @tool
        async def look(item: str) -> str:
            """Look up a price.

            Args:
                item: what it is.
            """
            outcome = await self.sandbox.run(PROGRAM.format(item=item, prices=tiny_world.PRICES))
            if not outcome.ok and "KeyError" not in outcome.error_text:
                raise WorldError(f"The sandbox failed: {outcome.error_text[-200:]}")
            return outcome.text or "KeyError"

        return ToolEnv([look], self.rewards, self.limits)

    def with_sandbox(self, sandbox):
        return replace(self, sandbox=sandbox)

    async def close(self):
        await self.sandbox.close()


def agent_world(order: Path):
    """Return the world of an agent function that raises or hangs once if the file `order` says so."""

    def obey():
        with suppress(FileNotFoundError):
            way = order.read_text()
            order.unlink()
            if "hangs" in way:
                threading.Event().wait()
            raise RuntimeError("The agent was told to raise.")

    def agent(name, policy):
        messages = list(tiny_world.opening(name))
        for _ in range(3):
            obey()
            messages.append(policy.chat(messages, [tiny_world.look]))
            calls = messages[-1].get("tool_calls", [])
            for call in calls:
                item = json.loads(call["function"]["arguments"]).get("item")
                found = f"{item} costs {tiny_world.PRICES.get(item)}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": "look", "content": found})
            if not calls:
                break
        return messages[-1]["content"]

    def reward(name, answer):
        return float(answer.strip() == tiny_world.PRICES[name])

    return AgentWorld.of(agent, {split: list(names) for split, names in tiny_world.SPLITS.items()}, reward)


def make_world(settings, limits):
    if settings["behind"] == "agent":
        return agent_world(Path(settings["order"]))
    plain = tiny_world.make_world({}, limits)
    if settings["behind"] == "pool":
        return PriceWorld(plain.name, plain.task_lists, plain.tools, plain.rewards, limits, plain.show)
    program = str(Path(__file__).with_name("price_server.py"))
    served = mcp_server(command=sys.executable, args=("-S", program, json.dumps(tiny_world.PRICES)))
    return replace(plain, tools=served.tools, resources=(served,))
