"""Worlds of environments of other packages, against the packages themselves (`make foreign` installs them)."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.registry import resolve_name
from ludus.envs.registry import WORLDS
from ludus.envs.tool_env import ToolLimits
from ludus.evaluation.env_audit import CheckPlan, run_agent
from ludus.evaluation.scripted_agents import Agent, AgentKind, call_action, text_action
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
