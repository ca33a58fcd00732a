"""The example of a custom environment, and the loading of such a file as a world."""

import asyncio
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from ludus.cli.main import main
from ludus.config.load import load_config
from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.envs.registry import build_world
from ludus.envs.tool_world import call_and_result
from ludus.errors import ConfigError, UserError
from ludus.rewards.base import check_rewards
from ludus.tools.base import ArgumentError, tool
from ludus.types import StopReason, ToolStatus
from small_worlds import call, play, scripted

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "stock.py"
TINY = {
    "model.init.hidden_size": "16",
    "model.init.intermediate_size": "16",
    "model.init.num_layers": "1",
    "sft.steps": "4",
    "sft.batch_size": "4",
    "training.steps": "2",
    "training.prompts_per_step": "2",
    "algorithm.group_size": "2",
    "rollout.max_tokens_per_turn": "8",
    "evaluation.tasks": "4",
    "run.threads": "1",
}


@pytest.fixture
def stock(monkeypatch):
    """The world as its TOML file names it, from the root of the repository."""
    monkeypatch.chdir(ROOT)
    config = load_config("examples/stock.toml")
    return build_world(config.env, config.rollout)


def test_example_file_has_at_most_60_lines():
    assert FILE.read_text("utf-8").count("\n") <= 60


def test_example_rewards_are_valid_and_splits_have_enough_tasks(stock):
    check_rewards(stock.rewards)
    tasks = [task for split in stock.splits for task in stock.tasks(split)]
    assert len({task.id for task in tasks}) == len(tasks) == 8 * 12
    config = load_config(ROOT / "examples" / "stock.toml")
    assert len(stock.tasks("test")) >= config.evaluation.tasks
    assert len(stock.tasks(config.evaluation.split_during)) >= config.evaluation.tasks_during


def test_look_tool_call_solves_every_held_out_task(stock):
    for task in stock.tasks("test"):
        thing, place = task.id.split()
        assert task.prompt[0]["content"] == f'How many "{thing}" are in "{place}"?'
        lines = [call("look", thing=thing, place=place), f" {task.truth} "]
        episode = play(scripted(lines), world=stock, task=task)
        assert episode.outcomes[0].output == f"{task.truth} {thing}"
        assert (episode.stop_reason, episode.reward) == (StopReason.ANSWERED, 1.0)


def test_wrong_answer_earns_zero_and_wrong_tool_call_returns_error(stock):
    task = stock.tasks("test")[0]
    lines = [call("look", thing="unicorns", place="Oslo"), call("look", thing="nails"), "many"]
    episode = play(scripted(lines), world=stock, task=task)
    assert [o.status for o in episode.outcomes] == [ToolStatus.RAISED, ToolStatus.BAD_ARGUMENTS]
    assert episode.reward == 0.0


def test_demonstrations_use_training_tasks_and_half_of_them_guess(stock):
    shown = list(islice(stock.demonstrations(seed=1), 400))
    truths = {task.prompt[0]["content"]: task.truth for task in stock.tasks("train")}
    looked = [d for d in shown if len(d.messages) == 4]
    guessed = [d for d in shown if len(d.messages) == 2]
    assert len(looked) + len(guessed) == 400
    assert 0.4 < len(guessed) / 400 < 0.6
    assert {d.messages[0]["content"] for d in shown} <= set(truths)
    assert all(d.messages[-1]["content"] == truths[d.messages[0]["content"]] for d in looked)
    right = sum(d.messages[-1]["content"] == truths[d.messages[0]["content"]] for d in guessed)
    assert right / len(guessed) < 0.15
    assert shown == list(islice(stock.demonstrations(seed=1), 400))
    assert shown != list(islice(stock.demonstrations(seed=2), 400))
    assert stock.implements("demonstrations")
    assert not replace(stock, show=None).implements("demonstrations")


def test_commands_of_the_example_docstring_run(tmp_path, monkeypatch):
    """`ludus sft` from scratch, then `ludus train` on its checkpoint, both as small as they get."""
    monkeypatch.chdir(ROOT)
    tiny = [word for key, value in TINY.items() for word in (f"--{key}", value)]
    first, second = tmp_path / "sft", tmp_path / "rl"
    assert main(["sft", "examples/stock.toml", "--from-scratch", "--run.dir", str(first), *tiny]) == 0
    model = str(first / "checkpoints" / "step-000004")
    words = ["train", "examples/stock.toml", "--model", model, "--run.dir", str(second), *tiny]
    assert main(words) == 0
    rows = [json.loads(line) for line in (second / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["episodes/count"] == 4 for row in rows)
    assert (second / "checkpoints" / "step-000002" / "model.safetensors").is_file()


def test_docstring_names_the_checkpoint_written_by_fine_tuning():
    steps = load_config(ROOT / "examples" / "stock.toml").sft.steps
    assert f"checkpoints/step-{steps:06d}" in FILE.read_text("utf-8")


def built(path):
    return build_world(EnvConfig(name=str(path)), RolloutConfig())


def test_missing_environment_file_error_explains_path_resolution(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"examples/stock\.py does not exist") as caught:
        built("examples/stock.py")
    assert "relative to its folder, on the command line to the working directory" in caught.value.hint


def test_a_file_without_a_factory_is_refused(tmp_path):
    (tmp_path / "empty.py").write_text("", "utf-8")
    with pytest.raises(ConfigError, match="make_world"):
        built(tmp_path / "empty.py")


def test_a_file_may_define_dataclasses_and_have_any_name(tmp_path):
    """Dataclasses look their module up by name; `json` must stay the one of the standard library."""
    text = """
from __future__ import annotations
from dataclasses import dataclass
from ludus.envs.tool_world import ToolWorld
from ludus.rewards.base import Reward

@dataclass
class Settings:
    name: str = "mine"

def make_world(settings, limits):
    rewards = [Reward("right", lambda task, trajectory: 1.0, outcome=True)]
    return ToolWorld(Settings().name, {"train": []}, [], rewards, limits)
"""
    (tmp_path / "json.py").write_text(text, "utf-8")
    assert built(tmp_path / "json.py").name == "mine"
    import json as standard

    assert standard.loads("1") == 1


def test_unknown_split_error_suggests_the_nearest_name(stock):
    with pytest.raises(UserError, match="no split 'validate'") as caught:
        stock.tasks("validate")
    assert "Did you mean 'validation'? Splits: train, validation, test." in caught.value.hint


@tool
def double(number: int) -> str:
    """Twice the number."""
    return str(2 * number)


@tool
async def slowly(text: str) -> str:
    """The text, later."""
    await asyncio.sleep(0)
    return f"{text}, later"


@pytest.mark.parametrize(
    ("used", "arguments", "said"), [(double, {"number": 4}, "8"), (slowly, {"text": "Ü"}, "Ü, later")]
)
def test_demonstrated_call_contains_the_tool_output(used, arguments, said):
    asked, answered = call_and_result(used, arguments, turn=2)
    (made,) = asked["tool_calls"]
    assert made["function"]["name"] == answered["name"] == used.name
    assert json.loads(made["function"]["arguments"]) == arguments
    assert made["id"] == answered["tool_call_id"] == "call_2_0"
    assert (asked["role"], answered["role"], answered["content"]) == ("assistant", "tool", said)


def test_demonstrated_call_with_wrong_arguments_raises_argument_error():
    with pytest.raises(ArgumentError, match="'number' is missing"):
        call_and_result(double, {})
