"""The agents of examples/agents: each SDK that is installed samples the same tokens from the cold start."""

import importlib
import sys
from importlib import resources
from pathlib import Path

import pytest

import ludus
from ludus.envs.agent_world import AgentWorld
from ludus.types import StopReason

FOLDER = Path(__file__).parents[1] / "examples" / "agents"
EXAMPLES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "search_tasks")
SETTINGS = {"rollout": {"max_seq_len": 640, "retries": 0, "max_failure_rate": 0.0}, "run": {"threads": 1}}


def sample(name, monkeypatch):
    """The rollouts of an example on two tasks, two of each."""
    monkeypatch.syspath_prepend(FOLDER)
    try:
        example = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"needs {error.name} (examples/agents/requirements.txt)")
    tasks = sys.modules["search_tasks"]
    world = AgentWorld.of(example.agent, {name: found[:4] for name, found in tasks.TASKS.items()}, tasks.reward)
    model = str(resources.files("ludus.recipes") / "search" / "cold_start")
    return ludus.rollout("search", 2, samples=2, world=world, model=model, **SETTINGS).rollouts


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_agent_continues_one_row(name, monkeypatch):
    for one in sample(name, monkeypatch):
        assert one.stop_reason in (StopReason.ANSWERED, StopReason.AGENT_FAILED)
        assert len(one.rows) == 1
        assert one.num_turns >= 2


def test_dialects_sample_the_same_tokens(monkeypatch):
    names = ("openai_chat", "openai_responses", "anthropic_messages")
    chat, responses, messages = ([one.segments for one in sample(name, monkeypatch)] for name in names)
    assert chat == responses == messages
