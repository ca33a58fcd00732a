"""The agents of examples/agents: each SDK that is installed samples the same tokens from the cold start.

The programs with a shell, whose prompts are longer than its context, get a scripted policy that calls the shell once.
"""

import asyncio
import importlib
import importlib.util
import shutil
import sys
from importlib import resources
from pathlib import Path

import pytest

import ludus
from ludus.chat.render import decode_exactly
from ludus.config.sections.rollout import AgentConfig, RolloutConfig
from ludus.envs.agent_world import AgentWorld
from ludus.gateway.sessions import SessionServer
from ludus.rollouts.agent_runs import AgentRunner, ExternalAgent
from ludus.types import StopReason
from small_worlds import RecordingWorld, call, end_token, make_chat, make_task, scripted, tokenizer

FOLDER = Path(__file__).parents[1] / "examples" / "agents"
EXAMPLES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in ("search_tasks", "claude_agent"))
ADD = "echo sum-$((6 * 7))"
PROGRAMS = {
    "codex": (["sh", f"{FOLDER}/codex.sh"], call("exec_command", cmd=ADD)),
    "claude": ([sys.executable, f"{FOLDER}/claude_agent.py"], call("Bash", command=ADD, description="Add")),
}
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


def run_program(command, script):
    """The rollout of a program, and the prompts that the engine got with the tokens that it returned."""
    done = []

    def reply(request, turn):
        line = script(decode_exactly(tokenizer(), request.token_ids))
        done.append((request.token_ids, (*tokenizer().encode(line), end_token())))
        return line

    engine, server, task = scripted(reply, context_tokens=400_000), SessionServer(), make_task(said="Add 6 * 7.")
    agent = ExternalAgent(
        RecordingWorld().environment(task), AgentConfig(command=command, timeout_s=120), server.offers
    )
    limits = RolloutConfig(max_turns=8)
    dialogue = make_chat(engine, max_tokens=400_000)
    return asyncio.run(AgentRunner(server).run(task, 0, agent, lambda: dialogue, limits)), done


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_with_a_shell_is_one_row_of_the_tokens_of_the_engine(name):
    if not (shutil.which("codex") if name == "codex" else importlib.util.find_spec("claude_agent_sdk")):
        pytest.skip(f"needs {name} (make agents)")
    command, calls = PROGRAMS[name]
    found, done = run_program(command, lambda prompt: "It is 42." if "sum-42" in prompt else calls)
    assert (found.stop_reason, found.answer, len(found.rows)) == (StopReason.ANSWERED, "It is 42.", 1)
    recorded, tokens = [], ()
    for segment in found.segments:
        if segment.kind == "action":
            recorded.append((tokens, segment.tokens))
        tokens += segment.tokens
    assert len(done) == 2
    assert recorded == done
