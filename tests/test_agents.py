"""The agents of examples/agents: each SDK that is installed samples the same tokens from the cold start.

The programs with a shell, whose prompts are longer than its context, get a scripted policy that calls the shell once.
Other agents with long prompts get a script of their own.
"""

import asyncio
import importlib
import importlib.util
import json
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
from ludus.rollouts.agent_session import AgentSession
from ludus.types import Completion, StopReason
from small_worlds import RecordingWorld, call, end_token, in_order, make_chat, make_task, scripted, tokenizer

FOLDER = Path(__file__).parents[1] / "examples" / "agents"
LONG_PROMPTS = ("mini_swe_agent", "smolagents_code")
SHARED = {"search_tasks", "long_prompts", "claude_agent"}
EXAMPLES = sorted({file.stem for file in FOLDER.glob("*.py")} - {*SHARED, *LONG_PROMPTS})
ADD = "echo sum-$((6 * 7))"
PROGRAMS = {
    "codex": (["sh", f"{FOLDER}/codex.sh"], call("exec_command", cmd=ADD)),
    "claude": ([sys.executable, f"{FOLDER}/claude_agent.py"], call("Bash", command=ADD, description="Add")),
}
SETTINGS = {"rollout": {"max_seq_len": 640, "retries": 0, "max_failure_rate": 0.0}, "run": {"threads": 1}}


def load(name, monkeypatch):
    """The module of an example."""
    monkeypatch.syspath_prepend(FOLDER)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"needs {error.name} (examples/agents/requirements.txt)")


def sample(name, monkeypatch):
    """The rollouts of an example on two tasks, two of each."""
    example = load(name, monkeypatch)
    tasks = sys.modules["search_tasks"]
    world = AgentWorld.of(example.agent, {name: found[:4] for name, found in tasks.TASKS.items()}, tasks.reward)
    model = str(resources.files("ludus.recipes") / "search" / "cold_start")
    return ludus.rollout("search", 2, samples=2, world=world, model=model, **SETTINGS).rollouts


@pytest.fixture(scope="module")
def sampled():
    """The rollouts of the examples that were sampled, by name."""
    return {}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_agent_continues_one_row(name, sampled, monkeypatch):
    sampled[name] = sample(name, monkeypatch)
    for one in sampled[name]:
        assert one.stop_reason in (StopReason.ANSWERED, StopReason.AGENT_FAILED)
        assert len(one.rows) == 1
        assert one.num_turns >= 2


def test_dialects_sample_the_same_tokens(sampled, monkeypatch):
    names = ("openai_chat", "openai_responses", "anthropic_messages")
    found = (sampled[name] if name in sampled else sample(name, monkeypatch) for name in names)
    chat, responses, messages = ([one.segments for one in rollouts] for rollouts in found)
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


@pytest.mark.parametrize("name", LONG_PROMPTS)
@pytest.mark.parametrize("flawed", [False, True])
def test_agent_with_a_long_prompt_continues_one_row(name, flawed, monkeypatch):
    """Its code runs in the sandbox, and follow-ups continue the row of the recorded tokens."""
    example = load(name, monkeypatch)
    shared = sys.modules["long_prompts"]
    tasks, reward = (getattr(example, one, getattr(shared, one)) for one in ("TASKS", "reward"))
    task = next(one for one in tasks["test"] if one.get("word", "sum") == "sum")
    engine = scripted(in_order(*map(completion, example.script(task, flawed))), context_tokens=16384)
    session = AgentSession(lambda: make_chat(engine, max_tokens=16000), RolloutConfig())

    async def play():
        address = await SessionServer().add(session)
        return await asyncio.to_thread(example.agent, task, *address)

    answer = asyncio.run(play())
    assert reward(task, answer) == float(not flawed)
    if "numbers" in task:
        assert answer.strip() == (str(next(iter(task["numbers"].values()))) if flawed else task["answer"])
    assert session.num_turns == len(engine.requests) == len(example.script(task, flawed))
    segments = session.segments()
    assert [one.kind for one in segments] == ["prompt", *["action", "observation"] * session.num_turns][:-1]


def completion(reply):
    """The reply of a script as the policy samples it: to its stop string, or to the end of its turn."""
    text = reply["content"] + reply.get("stop", "")
    for one in reply.get("tool_calls", []):
        text += "\n" + call(one["function"]["name"], **json.loads(one["function"]["arguments"]))
    tokens = (*tokenizer().encode(text, add_special_tokens=False), *[end_token()] * ("stop" not in reply))
    return Completion(tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")


def test_demonstrations_are_the_requests_of_the_sdk(monkeypatch):
    example = load("openai_chat", monkeypatch)
    shared = importlib.import_module("long_prompts")
    function = {"name": "search", "arguments": '{"query": "x"}'}
    calls = [{"id": "a", "type": "function", "function": function}]
    replies = [{"content": "", "tool_calls": calls}, {"content": "y"}]
    first, second = shared.demonstrations(example.agent, lambda *_: replies, [{"question": "q"}])
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert [one.get("train", True) for one in second["messages"] if one["role"] == "assistant"] == [False, True]
    assert first["messages"] == [*second["messages"][:2], {"role": "assistant", **replies[0]}]
    assert first["tools"][0]["function"]["name"] == "search"
