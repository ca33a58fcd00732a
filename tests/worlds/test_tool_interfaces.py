"""Worlds of tools that other programs serve: resources servers of NeMo Gym, and MCP servers with a file of tasks."""

import json
import sys
from pathlib import Path

import pytest

from ludus.errors import UserError
from ludus.evaluation.scripted_agents import call_action, text_action
from worlds.test_interfaces import make, play, serving

SERVER = Path(__file__).parents[1] / "nemo_gym_server.py"
TOOL = {"type": "function", "name": "increment", "description": "Add.", "strict": True}
TOOL["parameters"] = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}


def row(start, expected):
    said = [{"role": "developer", "content": "Count."}, {"role": "user", "content": f"From {start} to {expected}."}]
    params = {"input": said, "tools": [TOOL]}
    return {"responses_create_params": params, "initial_count": start, "expected_count": expected, "split": "train"}


def test_nemo_gym_sessions_tools_and_verifier(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row(n, n + 3)) for n in range(3)))
    with serving([sys.executable, str(SERVER)], "/verify") as url:
        world = make("nemo_gym", {"url": url, "tasks": str(path)})
        task = world.tasks("train")[1]
        (tool,) = world.environment(task).tools
        assert [message["role"] for message in task.prompt] == ["system", "user"]
        assert tool.schema["function"]["parameters"] == TOOL["parameters"]
        turns = [call_action(0, ("increment", {"count": 1})), call_action(1, ("increment", {"count": 2}))]
        done = play(world, task, *turns, text_action("4"))
        assert (done.rewards["verified"], done.outcomes[0].output) == (1.0, '{"success":true}')
        assert play(world, task, *turns, text_action("5")).rewards["verified"] == 0.0
        assert play(world, task, turns[0], text_action("4")).rewards["verified"] == 0.0
        assert play(world, task, turns[0]).rewards["verified"] == 0.0
        wrong = play(world, task, call_action(0, ("increment", {"count": "a"}), ("verify", {})), text_action("4"))
        assert [outcome.status for outcome in wrong.call_outcomes] == ["raised", "unknown_tool"]
    path.write_text('{"question": 1}')
    with pytest.raises(UserError, match="line 1, is not a task"):
        make("nemo_gym", {"url": "http://127.0.0.1:1", "tasks": str(path)})


def test_a_configuration_with_an_mcp_server_and_a_file_of_tasks_is_a_world(tmp_path):
    pytest.importorskip("mcp")
    path = tmp_path / "tasks.jsonl"
    rows = [{"question": f"Say {word}.", "answer": word, "type": "text", "split": "train"} for word in ("red", "blue")]
    path.write_text("\n".join(map(json.dumps, rows)))
    small = {"command": sys.executable, "args": ["-S", str(SERVER.with_name("mcp_small_server.py"))], "only": ["echo"]}
    world = make("tools", {"tasks": str(path), "servers": [small], "system": "Echo."})
    task = world.tasks("train")[1]
    done = play(world, task, call_action(0, ("echo", {"text": "blue"})), text_action("Answer: blue"))
    assert ([message["role"] for message in task.prompt], done.rewards["right"]) == (["system", "user"], 1.0)
    assert done.outcomes[0].output == "blue"
    assert play(world, task, text_action("red")).rewards["right"] == 0.0
    world.resources[0].disconnect()
