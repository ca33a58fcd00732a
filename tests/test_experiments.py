"""The experiments of benchmarks/experiments.toml: their settings are valid, and each has a baseline."""

import sys
from pathlib import Path

import pytest

from ludus.config.load import load_config
from ludus.envs.registry import build_world

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from algorithms import experiments, games, read_experiment, words_of


@pytest.mark.parametrize("name", experiments())
def test_settings_of_every_arm_are_valid_and_different(name):
    one = experiments()[name]
    game, seen = games()[one.game], set()
    for arm in one.arms:
        config = load_config(game.recipe, [*game.settings, *arm.settings])
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
