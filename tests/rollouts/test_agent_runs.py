"""External agents: a program per rollout, and clients that ask for tasks over HTTP."""

import asyncio
import json
import sys
from contextlib import nullcontext

import httpx
import pytest

from ludus.config.sections.rollout import AgentConfig, RolloutConfig
from ludus.errors import ConfigError, WorldError
from ludus.gateway.sessions import SessionServer
from ludus.rewards.base import check_scored_elsewhere, score
from ludus.rollouts.agent_runs import AgentRunner, ExternalAgent
from ludus.types import StopReason
from small_worlds import RecordingWorld, in_order, make_chat, make_task, scripted

PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def ask(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""
ASKS = PROGRAM + "reply = ask(task['messages'])\n"


def play(settings, *lines, client=None, server=None):
    """Return the scored trajectory of an external agent."""
    engine = scripted(in_order(*lines))
    server = server or SessionServer()

    async def episode():
        world, task = RecordingWorld(), make_task()
        agent = ExternalAgent(world.environment(task), settings, server.offers)
        runner = AgentRunner(server).run(task, 0, agent, lambda: make_chat(engine), RolloutConfig())
        found, *_ = await asyncio.gather(runner, *([] if client is None else [client(server)]))
        reads_environment = agent.rewards != world.rewards  # then scored in this process
        with pytest.raises(ConfigError) if reads_environment else nullcontext():
            check_scored_elsewhere(world.rewards, agent.rewards, agent)
        return score(agent.rewards, task, found)

    return asyncio.run(episode())


def program(code, **settings):
    return AgentConfig(command=[sys.executable, "-c", code], **settings)


def test_program_answers_with_its_output_or_the_last_reply():
    found = play(program(ASKS + "print(reply['content'].upper())"), "paris")
    assert (found.stop_reason, found.answer, found.num_turns) == (StopReason.ANSWERED, "PARIS", 1)
    assert found.reward == 0.0
    found = play(program(ASKS), "Paris")
    assert (found.answer, found.reward) == ("Paris", 1.0)
    assert [m["role"] for m in found.messages] == ["user", "assistant"]


def test_program_that_fails_or_hangs_is_a_failure_of_the_agent():
    found = play(program(ASKS + "sys.exit('no idea')"), "Paris")
    assert (found.stop_reason, found.reward) == (StopReason.AGENT_FAILED, 0.0)
    found = play(program(ASKS + "import time; time.sleep(60)", timeout_s=1.0), "Paris")
    assert (found.stop_reason, found.num_turns) == (StopReason.AGENT_FAILED, 1)
    with pytest.raises(WorldError, match="exited with 3"):
        play(program("import sys; sys.exit(3)"), "Paris")
    with pytest.raises(WorldError, match="does not start"):
        play(AgentConfig(command=["no-such-program"]))


def test_background_process_of_a_program_does_not_hold_the_rollout():
    code = ASKS + "import subprocess; subprocess.Popen(['sleep', '30']); print('Paris')"
    found = play(program(code, timeout_s=5.0), "Lyon")
    assert (found.answer, found.reward) == ("Paris", 1.0)


def remote(**settings):
    return AgentConfig(remote=True, token_file="unused", port=1, **settings)


def client_that(*acts, token="t" * 20):
    """A client that takes a task and does the acts with it."""

    async def client(server):
        while not server._url:
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=server._url, timeout=30) as http:
            assert (await http.get("/tasks", headers={"Authorization": "Bearer guess"})).status_code == 401
            offer = (await http.get("/tasks", headers={"Authorization": f"Bearer {token}"})).json()
        headers = {"Authorization": f"Bearer {offer['api_key']}"}
        async with httpx.AsyncClient(base_url=offer["base_url"], headers=headers, timeout=30) as http:
            for act in acts:
                await act(http, offer["task"])

    return client


async def asks(http, task):
    assert (await http.post("/chat/completions", json={"messages": task["messages"]})).status_code == 200


def ends(**result):
    async def end(http, task):
        assert (await http.post("/done", json=result)).status_code == 200

    return end


def served():
    return SessionServer(token="t" * 20)


def test_remote_agent_takes_a_task_and_ends_with_answer_reward_or_error():
    found = play(remote(), "Lyon", client=client_that(asks, ends(answer="Paris")), server=served())
    assert (found.answer, found.reward) == ("Paris", 1.0)
    found = play(remote(), "Lyon", client=client_that(asks, ends(reward=0.25)), server=served())
    assert (found.reward, found.rewards) == (0.25, {"right": 0.25})
    found = play(remote(), "Paris", client=client_that(asks, ends(error="lost")), server=served())
    assert (found.stop_reason, found.reward) == (StopReason.AGENT_FAILED, 0.0)


def test_silent_remote_agent_loses_its_task():
    with pytest.raises(WorldError, match="silent"):
        play(remote(lease_s=0.2), "Paris", client=client_that(), server=served())


def test_settings_of_agents_are_checked():
    with pytest.raises(ValueError, match="mutually exclusive"):
        AgentConfig(command=["a"], remote=True, token_file="t")
    with pytest.raises(ValueError, match="token_file"):
        AgentConfig(remote=True)
    with pytest.raises(ValueError, match="where clients ask"):
        AgentConfig(remote=True, token_file="t")
    assert not RolloutConfig().agent.is_set
    assert json.loads(AgentConfig(command=["a"]).model_dump_json())["command"] == ["a"]
