"""The experiments of benchmarks/experiments.toml: their settings are valid, and each has a baseline."""

import json
import sys
from pathlib import Path

import pytest

from ludus.config.load import load_config
from ludus.envs.registry import build_world
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan, save_evaluation

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from algorithms import experiments, games, read_experiment, until, words_of


@pytest.mark.parametrize("name", experiments())
def test_settings_of_every_arm_are_valid_and_different(name):
    one = experiments()[name]
    game, seen = games()[one.game], set()
    for arm in one.arms:
        config = load_config(game.recipe, [*game.settings, *arm.settings, *arm.reward_model])
        seen.add((config.model_dump_json(), arm.stage, arm.fine_tunes))
        episodes = config.training.prompts_per_step * config.algorithm.group_size
        assert arm.stage != "train" or episodes == game.episodes
    assert len(seen) == len(one.arms)


def test_words_and_cumulative_arms():
    assert words_of({"a.b": True, "c": "x", "d": [1, 2]}) == ("--a.b", "true", "--c", "x", "--d", "[1, 2]")
    arms = [{"name": "A", "settings": {"a": 1}}, {"name": "B", "settings": {"b": 2}}]
    fields = {"about": "", "game": "guess", "arms": arms}
    assert [arm.settings for arm in read_experiment(fields).arms] == [("--a", "1"), ("--b", "2")]
    assert read_experiment(fields | {"cumulative": True}).arms[1].settings == ("--a", "1", "--b", "2")


@pytest.mark.slow
@pytest.mark.parametrize("name", games())
def test_world_of_every_game_can_be_built(name):
    config = load_config(games()[name].recipe, [*games()[name].settings])
    assert build_world(config.env, config.rollout, config.sandbox).tasks("train")


def test_episodes_and_seconds_until_a_target(tmp_path):
    for name, row in {"metrics": {"ledger/started": 96.0}, "timings": {"time/step_s": 2.0}}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"step": i, **row}) + "\n" for i in range(1, 5)))
    (tmp_path / "evaluations").mkdir()
    for step, solved in ((0, 0), (2, 1), (3, 0)):
        result = Evaluation(EvaluationPlan("test", 2, 1, 1.0, 0, step), ("a", "b"), (solved, 0), ("f", "f"), {}, 0)
        save_evaluation(tmp_path / "evaluations", result, [])
    assert until(tmp_path, 0.5) == "192 in 4 s"
    assert until(tmp_path, 0.6) == "never: 384 in 8 s"
