"""Worlds of environments of other packages, against the packages themselves (`make foreign` installs them)."""

import asyncio
import json
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.registry import ADAPTERS, resolve_name
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import ToolWorld
from ludus.errors import UserError
from ludus.evaluation.env_audit import CheckPlan, run_agent
from ludus.evaluation.scripted_agents import Agent, AgentKind, actions_of, call_action, text_action
from ludus.rewards.base import Reward
from ludus.types import Message, Task
from ludus.worlds.guess.world import make_guess_world
from waiting import free_port

pytestmark = pytest.mark.foreign


def make(name, settings):
    return resolve_name(ADAPTERS[name])(settings, ToolLimits())


def play(world, task, *actions):
    """Play scripted turns; return the trajectory with its rewards."""
    agent = Agent("scripted", AgentKind.ORACLE, "", lambda task, tools: actions)
    plan = CheckPlan(limits=RolloutConfig(max_turns=len(actions)))
    played = asyncio.run(run_agent(world, task, agent, plan))
    assert not played.failure, played.failure
    return played.trajectory


@contextmanager
def serving(command, path, **options):
    """Run a server until `path` responds; yield its URL."""
    port = free_port()
    with subprocess.Popen([*command, "--port", str(port)], **options) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                try:
                    httpx.get(url + path, trust_env=False)
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            yield url
        finally:
            process.kill()


def test_openenv_server_of_the_packages_template(tmp_path):
    pytest.importorskip("openenv.core.generic_client")
    subprocess.run([sys.executable, "-m", "openenv.cli", "init", "echoer", "-o", str(tmp_path)], check=True)
    (folder,) = (path.parent.parent for path in tmp_path.rglob("server/app.py"))
    app = folder / "server" / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=8"))
    with serving([sys.executable, "-m", "uvicorn", "server.app:app"], "/schema", cwd=folder) as url:
        world = make("openenv", {"url": url, "field": "message", "success_return": 1.0, "tasks": 3})
        task = world.tasks("test")[1]
        assert (task.seed, '"message"' in task.prompt[0]["content"]) == (7, True)
        done = play(world, task, text_action('{"message": "four"}'), text_action("<action>six characters</action>"))
        assert json.loads(done.messages[3]["content"]) == {"echoed_message": "four", "message_length": 4}
        assert done.turn_rewards == pytest.approx((0.4, 1.4))
        assert done.rewards["success"] == 1.0
        wrong = play(world, task, text_action('{"text": "four"}'), text_action("a"))
        assert "The action is invalid" in wrong.messages[3]["content"]
        assert (wrong.rewards["success"], wrong.rewards["valid_actions"]) == (0.0, 0.5)


def test_tau2_gold_actions_earn_one_and_nothing_earns_nothing():
    pytest.importorskip("tau2.registry")
    world = make("tau2", {})
    assert [len(world.tasks(split)) for split in ("train", "test")] == [74, 40]
    tasks = world.tasks("test")
    nulls = [task for task in tasks if task.tags["null"] == "true"]
    acting = [task for task in tasks if task.tags["null"] == "false"]
    for task in acting[:4]:
        done = play(world, task, *actions_of(world.expert(task).messages))
        assert (done.rewards["solved"], done.stop_reason) == (1.0, "answered")
        assert "Yusuf" not in done.messages[0]["content"]
        assert play(world, task, text_action("Done.")).rewards["solved"] == 0.0
    for task in nulls[:1]:
        assert play(world, task, text_action("Done.")).rewards["solved"] == 1.0
    wrong = play(world, acting[0], call_action(0, ("no_such_tool", {}), ("calculate", {"wrong": 1})), text_action("a"))
    assert [outcome.status for outcome in wrong.call_outcomes] == ["raised", "raised"]
    assert wrong.rewards["solved"] == 0.0


def test_miniwob_task_in_a_browser():
    pytest.importorskip("browsergym.miniwob.base")
    world = make("browsergym", {"tasks": ["click-test", "enter-text"], "seeds": 1})
    click, enter = world.tasks("train")
    first = play(world, click, text_action("noop()")).messages[1]["content"]
    assert "Goal: Click the button." in first
    (button,) = re.findall(r"\[(\d+)\] button 'Click Me!'", first)
    done = play(world, click, text_action(f"click('{button}')"))
    assert (done.rewards["success"], done.stop_reason) == (1.0, "answered")
    refused = ("goto('file:///etc/passwd')", "import os", f"click('{button}", "click('9999')")
    wrong = play(world, click, *map(text_action, refused))
    assert (wrong.rewards["success"], wrong.rewards["valid_actions"]) == (0.0, 0.0)
    assert all("Error:" in message["content"] for message in wrong.messages[3::2])
    assert "root:" not in str(wrong.messages)
    text = play(world, enter, text_action("noop()")).messages[1]["content"]
    (word,), (box,) = re.findall(r'Enter "(\w+)"', text), re.findall(r"\[(\d+)\] textbox", text)
    (submit,) = re.findall(r"\[(\d+)\] button 'Submit'", text)
    done = play(world, enter, text_action(f"fill('{box}', '{word}')"), text_action(f"click('{submit}')"))
    assert done.rewards["success"] == 1.0


TASKSET = '''
import verifiers.v1 as vf


class SumData(vf.TaskData):
    a: int
    b: int


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(trace.branches[-1].messages[-1].content.strip() == str(self.data.a + self.data.b))

    @vf.metric
    async def calls(self, trace) -> float:
        return float(sum(bool(node.message.tool_calls) for node in trace.nodes if node.sampled))

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]


class SumConfig(vf.TasksetConfig):
    num: int = 3


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.num):
            yield SumTask(SumData(prompt=f"What is {n} + {n + 1}?", system_prompt="Use add.", a=n, b=n + 1))


__all__ = ["Sums"]
'''


def test_a_taskset_of_verifiers_is_a_world(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    (tmp_path / "small_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    world = make("verifiers", {"taskset": "small_sums", "config": {"num": 30}})
    assert sum(len(world.tasks(split)) for split in world.splits) == 30
    task = next(task for task in world.tasks("train") if task.id == "5")
    assert [message["content"] for message in task.prompt] == ["Use add.", "What is 5 + 6?"]
    called = play(world, task, call_action(0, ("add", {"a": 5, "b": 6})), text_action("11"))
    assert (called.outcomes[0].output, called.rewards["reward"]) == ("11", 1.0)
    assert play(world, task, text_action("12")).rewards["reward"] == 0.0
    wrong = play(world, task, call_action(0, ("add", {"a": "x"})), text_action("11"))
    assert wrong.outcomes[0].status == "bad_arguments"


def test_a_world_is_a_taskset_of_verifiers():
    pytest.importorskip("verifiers.v1")
    from ludus.worlds.interfaces.verifiers import make_trace, to_verifiers

    questions = [Task(f"{n}", (Message(role="user", content=f"{n} + 1?"),), str(n + 1)) for n in range(5)]
    rewards = [Reward("right", lambda task, t: float(t.answer == task.truth), weight=2.0, outcome=True)]
    world = ToolWorld("sums", {"test": questions}, [], rewards)
    taskset = list(to_verifiers(world, "test"))
    assert [one.data.id for one in taskset] == [task.id for task in questions]
    for task, one in zip(questions, taskset, strict=True):
        for answer, value in ((str(task.truth), 2.0), ("no idea", 0.0)):
            trace = make_trace(one, [*task.prompt, {"role": "assistant", "content": answer}])
            asyncio.run(one.score(trace))
            assert trace.reward == play(world, task, text_action(answer)).reward == value
    with pytest.raises(UserError, match="more than one answer"):
        to_verifiers(make_guess_world({}, ToolLimits()))
