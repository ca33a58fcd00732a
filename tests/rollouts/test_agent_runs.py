"""External agents: a program per rollout, and clients that ask for tasks over HTTP."""

import asyncio
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.sections.rollout import AgentConfig, RolloutConfig
from ludus.envs.agent_world import AgentWorld
from ludus.errors import ConfigError, WorldError
from ludus.gateway.sessions import SessionServer
from ludus.rewards.base import check_scored_elsewhere, score
from ludus.rollouts.agent_runs import AgentRunner, ExternalAgent
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import Episode
from ludus.training.credit.advantages import assign_credit, turns_of_actions
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


def test_refused_requests_that_an_agent_hides_are_named(caplog):
    hides = PROGRAM + (
        "def refused(messages):\n"
        "    try: ask([{'role': 'user', 'content': [{'type': 'image_url'}]}])\n"
        "    except OSError: pass\n"
    )
    with pytest.raises(WorldError, match=r"without a reply\. A request was refused: messages\.0"):
        play(program(hides + "refused([])"), "Paris")
    found = play(program(hides + "ask(task['messages']); refused([])"), "Paris")
    assert found.stop_reason is StopReason.ANSWERED
    assert "A request of the agent was refused: messages.0" in caplog.text


def test_temporary_files_of_a_killed_program_are_removed(tmp_path):
    code = f"import tempfile, time; open('{tmp_path}/name', 'w').write(tempfile.mkdtemp()); time.sleep(60)"
    play(program(ASKS + code, timeout_s=2.0), "Paris")
    folder = Path((tmp_path / "name").read_text()).parent
    assert folder.name.startswith("ludus-agent-")
    assert not folder.exists()


def test_rewards_of_responses_are_those_of_turns():
    code = (
        PROGRAM.replace('["choices"][0]["message"]', "")
        + """
def reward(**body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/reward"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
first = ask(task["messages"])
second = ask([*task["messages"], first["choices"][0]["message"], {"role": "user", "content": "Sure?"}])
ask([{"role": "user", "content": "else"}])
reward(response_id=second["id"], reward=1.0)
"""
    )
    found = play(program(code), "Paris", "yes", "other")
    assert (found.turn_rewards, found.num_turns, len(found.rows)) == ((0.0, 1.0, 0.0), 3, 2)
    other = replace(found, sample=1, turn_rewards=())
    group = [Episode(RolloutKey(1, "t", one.sample), make_task(), replace(one, reward=0.0)) for one in (found, other)]
    better, worse = assign_credit([group], PRESETS["turn_return"])
    for (one, other), turn in zip(zip(better.advantages, worse.advantages, strict=True), turns(found), strict=True):
        assert one > other if turn < 2 else one == other  # the return of the first two turns has the reward
    known = AgentWorld.of(lambda task, base_url, api_key: "", ["x"] * 5, lambda task, answer: 0.0)
    assert known.emits_turn_rewards


def turns(trajectory):
    """The turn of each action token."""
    return turns_of_actions(trajectory.paths()[0].trajectory)


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
    with pytest.raises(WorldError, match="made no request"):
        play(remote(lease_s=0.2), "Paris", client=client_that(), server=served())


def test_settings_of_agents_are_checked():
    with pytest.raises(ValueError, match="mutually exclusive"):
        AgentConfig(command=["a"], remote=True, token_file="t")
    with pytest.raises(ValueError, match="token_file"):
        AgentConfig(remote=True)
    with pytest.raises(ValueError, match=r"needs rollout\.agent\.port"):
        AgentConfig(remote=True, token_file="t")
    assert not RolloutConfig().agent.is_set
    assert json.loads(AgentConfig(command=["a"]).model_dump_json())["command"] == ["a"]
