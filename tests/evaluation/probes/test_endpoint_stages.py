"""The first stage at which an endpoint's agent fails, one planted fault after the other."""

import asyncio
import json
from dataclasses import replace

import pytest

from chat_server import Reply, error, say, serving
from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.tool_env import ToolLimits
from ludus.evaluation.probes.endpoint import diagnose_endpoint
from ludus.rollouts.ledger import Ledger
from ludus.rollouts.openai_client import OpenAIClient, OpenAIClientSettings, endpoint_chat_factory
from ludus.rollouts.scheduler import scheduler
from tests.evaluation.probes.scripted_policies import PLAN
from tiny_world import PRICES, make_world

WORLD = make_world({}, ToolLimits())


def look(item, content=None, name="look"):
    function = {"name": name, "arguments": json.dumps({"item": item})}
    return Reply(say(content, {"type": "function", "id": "a", "function": function}))


def agent(answer, first=look, again=None):
    """Return a script: `first` of the item in the first turn, then `answer` of the item, or `again`."""

    def play(body):
        item = body["messages"][1]["content"].split()[2]
        if body["messages"][-1]["role"] != "tool":
            return first(item)
        return again(item) if again else Reply(say(answer(item)))

    return play


AGENTS = {
    "answers": lambda body: Reply(error("out of order"), 400),
    "chat format": lambda body: Reply(say("3<|im_end|>")),
    "tool call parsed": lambda body: Reply(say('<tool_call>{"name": "look"}</tool_call>')),
    "tool call valid": agent(lambda item: "3", lambda item: look(item, name="lok")),
    "tool result used": agent(lambda item: "unknown"),
    "answer found": agent(None, again=lambda item: look(item, "It costs what?")),
    "success above chance": agent(lambda item: "it costs nothing"),
    "": agent(lambda item: PRICES[item]),
}


def diagnosed(url):
    async def measure():
        rollout = RolloutConfig(retries=0)
        async with OpenAIClient(OpenAIClientSettings(url, "m", retries=0)) as client:
            plan = replace(PLAN, tasks=WORLD.tasks("test")[:6])
            return await diagnose_endpoint(
                lambda sampling: scheduler(WORLD, endpoint_chat_factory(client, rollout, sampling), rollout, Ledger()),
                plan,
            )

    return asyncio.run(measure())


@pytest.mark.parametrize("stage", AGENTS)
def test_diagnosis_stops_at_the_first_failing_stage(stage):
    with serving(AGENTS[stage]) as server:
        report = diagnosed(server.url)
    assert report.failed == bool(stage)
    assert [bool(row["remedy"]) for row in report.rows] == [False] * (len(report.rows) - 1) + [bool(stage)]
    assert report.rows[-1]["stage"] == (stage or "success above chance")


def test_unreachable_server_fails_the_reachable_stage_with_a_remedy():
    report = diagnosed("http://127.0.0.1:9/v1")
    assert [row["stage"] for row in report.rows] == ["reachable"]
    assert "Check that the server is running" in report.rows[0]["remedy"]
