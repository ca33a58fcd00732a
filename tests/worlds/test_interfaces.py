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
from ludus.envs.registry import WORLDS, resolve_name
from ludus.envs.tool_env import ToolLimits
from ludus.evaluation.env_audit import CheckPlan, run_agent
from ludus.evaluation.scripted_agents import Agent, AgentKind, actions_of, call_action, text_action
from waiting import free_port

pytestmark = pytest.mark.foreign


def make(name, settings):
    return resolve_name(WORLDS[name])(settings, ToolLimits())


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
