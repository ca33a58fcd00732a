"""Ludus as a library: train, evaluate, rollout and load, and agent functions."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import openai
import pytest

import ludus
import ludus.api
from ludus.envs.agent_world import AgentWorld
from ludus.errors import ConfigError, UserError
from ludus.types import Message, StopReason

TABLES = {
    "training": {"steps": 2, "prompts_per_step": 2},
    "algorithm": {"group_size": 2},
    "evaluation": {"tasks": 2, "tasks_during": 2, "splits": ["test"], "temperatures": [0.0]},
    "env": {"check": False},
}


def tables(folder, **changes):
    return TABLES | {"run": {"dir": str(folder), "threads": 1}} | changes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return ludus.train("search", progress=False, **tables(tmp_path_factory.mktemp("api") / "run"))


@pytest.mark.slow
def test_run_exposes_metrics_rollouts_evaluations_checkpoint_and_plot(run):
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert len(run.rollouts) == 8
    assert [one.plan.step for one in run.evaluations if one.plan.split == "test"] == [0, 2]
    assert run.checkpoint.name == "step-000002"
    assert run.config.training.steps == 2
    assert len(run.plot().axes[0].lines) >= 2
    assert run.plot("reward/mean").axes[0].lines[0].get_xydata().tolist() == [
        [row["step"], row["reward/mean"]] for row in run.metrics
    ]
    assert ludus.load(run.path) == run


def test_evaluate_reproduces_the_evaluation_made_during_training(run):
    found = ludus.evaluate(run, progress=False)
    (last,) = [one for one in run.evaluations if one.plan.split == "test" and one.plan.step == 2]
    assert found.evaluations[0].successes == last.successes
    assert found.metrics["eval/test/greedy/success"] == last.rate
    assert len(found.rollouts) == 2
    (thrice,) = ludus.evaluate(run, progress=False, evaluation={"samples": 3}).evaluations
    assert thrice.plan.episodes_of(run.rollouts[:1]) == 3
    assert found.plot().axes


def test_rollout_functions_work_in_a_running_event_loop(run):
    async def notebook():
        inside = ludus.rollout(run, 2, samples=2)
        return inside, await ludus.rollout_async(run.path, 2, samples=2)

    one, two = asyncio.run(notebook())
    assert [t.segments for t in one.rollouts] == [t.segments for t in two.rollouts]
    assert one.metrics["turns"] >= 1
    assert one.plot().axes


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("Set --evaluation.split_during. Splits: a.", 'Set evaluation={"split_during": ...}. Splits: a.'),
        ("--rollout.max_seq_len 640 fits.", 'rollout={"max_seq_len": 640} fits.'),
        ("Set --run.threads 1.", 'Set run={"threads": 1}.'),
        ("Set --model.lora.rank=4, or none.", 'Set model={"lora": {"rank": 4}}, or none.'),
        ("Remove it with --env.mixture.NAME none.", 'Remove it with env={"mixture": {"NAME": None}}.'),
        ("Use it with `ludus train --rewards.model`.", "Use it with `ludus train --rewards.model`."),
    ],
)
def test_hints_name_settings_as_keyword_arguments(hint, expected):
    with pytest.raises(UserError) as caught, ludus.api.keyword_hints():
        raise UserError("It failed.", hint)
    assert str(caught.value) == f"It failed. {expected}"


def test_library_error_names_the_keyword_argument():
    with pytest.raises(UserError, match=r'Set evaluation=\{"split_during": \.\.\.\}'):
        ludus.train("guess", evaluation={"split_during": "nope"}, progress=False)


def test_settings_are_validated_as_on_the_command_line(tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm\.group_size"):
        ludus.train("search", algorithm={"group_sise": 2})
    with pytest.raises(UserError, match="not a table"):
        ludus.train("search", training=3)
    with pytest.raises(UserError, match=r"not a table of settings. The nearest is algorithm\.group_size"):
        ludus.train("search", group_size=3)
    with pytest.raises(UserError, match="does not exist"):
        ludus.load(tmp_path / "none")
    config = ludus.configuration("search", training={"steps": 7}, model="some/path")
    assert (config.training.steps, config.model.path) == (7, "some/path")
    assert ludus.configuration(config, training={"steps": 8}).model.path == "some/path"
    assert ludus.configuration("search", model=tmp_path).model.path == str(tmp_path)
    with pytest.raises(UserError, match="not a table"):
        ludus.configuration("search", model=3)
    free = ludus.configuration("search", env={"settings": {"text": "3", "empty": "", "flag": True}}).env.settings
    assert free == {"text": "3", "empty": "", "flag": True}
    lora = ludus.configuration("search", model={"lora": {"rank": 4}}, run={"dir": None})
    assert (lora.model.lora.rank, lora.run.dir) == (4, None)
    with pytest.raises(AttributeError, match="nothing"):
        _ = ludus.nothing


def test_importing_the_package_imports_neither_torch_nor_the_commands():
    code = "import ludus, sys; print([m for m in sys.modules if m in ('torch', 'ludus.api', 'pydantic')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


async def twice(task, policy):
    messages = [Message(role="user", content=task)]
    messages.append(await policy.chat(messages))
    messages.append(Message(role="user", content="again"))
    return (await policy.chat(messages))["content"]


def test_agents_without_tasks_are_refused():
    with pytest.raises(UserError, match="at least five tasks"):
        AgentWorld.of(twice, ["a", "b"], float)
    with pytest.raises(UserError, match="tasks and a reward"):
        ludus.train(twice)


def test_agent_function_can_be_trained(run, tmp_path):
    settings = tables(tmp_path / "run", training={"steps": 1, "prompts_per_step": 2})
    found = ludus.train(
        twice, ["a", "b", "c", "d", "e"] * 2, lambda task, answer: float(len(answer) % 2), progress=False,
        model=str(run.checkpoint), **settings,
    )  # fmt: skip
    ended = [one for one in found.rollouts if one.stop_reason is StopReason.ANSWERED]
    assert ended
    for one in ended:
        assert [m["role"] for m in one.messages] == ["user", "assistant", "user", "assistant"]
        assert one.reward == len(one.messages[-1]["content"]) % 2


def test_run_of_an_agent_function_is_resumed(run, tmp_path):
    def train(name, steps, **options):
        settings = {} if options else tables(tmp_path / name, training={"prompts_per_step": 2}) | {"model": model}
        settings["training"] = settings.get("training", {}) | {"steps": steps}
        tasks = ["a", "b", "c", "d", "e"] * 2
        return ludus.train(twice, tasks, lambda _, answer: len(answer) % 2, progress=False, **options, **settings)

    model = str(run.checkpoint)
    whole, first = train("whole", 2), train("parts", 1)
    resumed = train("parts", 2, resume=first)
    assert (resumed.path, len(resumed.metrics)) == (first.path, 2)
    weights = [(one.checkpoint / "model.safetensors").read_bytes() for one in (whole, resumed)]
    assert weights[0] == weights[1]
    assert train("parts", 2, resume=str(first.path)).metrics == resumed.metrics  # complete: nothing to do
    with pytest.raises(UserError, match="agent function"):
        ludus.train(resume=first, training={"steps": 3}, progress=False)
    with pytest.raises(UserError, match="from its folder"):
        ludus.train("search", resume=first)


def with_sdk(task, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": task}]
    for again in ("again", "and again"):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [said, {"role": "user", "content": again}]
    return client.chat.completions.create(model="policy", messages=messages[:3]).choices[0].message.content


def test_agent_that_knows_only_a_base_url_can_be_trained(run, tmp_path):
    settings = tables(tmp_path / "run", training={"steps": 1, "prompts_per_step": 2})
    found = ludus.train(
        with_sdk, ["a", "b", "c", "d", "e"] * 2, lambda task, answer: float(len(answer or "") % 2), progress=False,
        model=str(run.checkpoint), **settings,
    )  # fmt: skip
    ended = [one for one in found.rollouts if one.stop_reason is StopReason.ANSWERED]
    assert ended
    for one in ended:
        assert (one.num_turns, len(one.rows), one.shared_reward) == (3, 2, True)
        assert one.reward == len(one.messages[-1]["content"]) % 2
    assert len(found.metrics) == 1
