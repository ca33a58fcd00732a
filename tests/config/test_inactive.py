"""Algorithm parts without effect: each one is reported before the run, and no others."""

from __future__ import annotations

import pytest

from algorithm_parts import CLIPPING_LOSSES, CRITIC_ADVANTAGES, RATIO_PARTS
from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.load import load_config
from ludus.envs.registry import build_world
from ludus.training.rl.validate import inactive_parts, updates_of

WORLDS = {
    name: build_world(config.env, config.rollout, config.sandbox)
    for name in ("guess", "math")
    for config in [load_config(name, ["--env.settings.num_tasks", "20"])]
}


def said(world: str, *words: str) -> list[str]:
    return inactive_parts(load_config(world, list(words)), WORLDS[world])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_with_ratio_losses_use_several_updates_or_warn(name):
    """Or the start says that it has one update per batch; with more nothing is said, with one always."""
    preset, words = PRESETS[name], ("--algorithm.preset", name)
    if preset.loss not in RATIO_PARTS:
        assert not any("ratios are 1" in text for text in said("guess", *words))
        return
    found = [text for text in said("guess", *words) if "ratios are 1" in text]
    assert (len(found) == 0) == (preset.minibatches > 1 or name == "grpo")  # the default is not explained to itself
    (one,) = [t for t in said("guess", *words, "--training.minibatches", "1") if "ratios are 1" in t]
    assert "Set training.minibatches" in one
    for more in (("--training.minibatches", "2"), ("--training.minibatches", "1", "--training.epochs", "2")):
        assert not any("ratios are 1" in text for text in said("guess", *words, *more))


def test_ratio_based_presets_use_several_updates_per_batch():
    named = ("dapo", "gspo", "gspo_token", "luspo", "cispo", "gmpo", "sapo", "clip_cov", "kl_cov", "rloo_ppo")
    assert {name for name, preset in PRESETS.items() if preset.minibatches > 1} == set(named)
    assert updates_of(load_config("guess", ["--algorithm.preset", "dapo", "--training.epochs", "2"])) == 32
    assert updates_of(load_config("guess", [])) == 1


@pytest.mark.parametrize("loss", CLIPPING_LOSSES)
def test_clip_warning_is_absent_when_ratios_use_stale_engine_logprobs(loss):
    words = ("--algorithm.loss", loss, "--training.minibatches", "1")
    stale = ("--training.mode", "async", "--training.learner.old_logprobs", "engine")
    assert any(f"of the loss {loss} has no effect" in text for text in said("guess", *words))
    assert any(f"of the loss {loss} has no effect" in t for t in said("guess", *words, "--training.mode", "async"))
    words += ("--algorithm.correction", "none")
    assert not any("has no effect" in text for text in said("guess", *words, *stale))


def test_dppo_trust_region_warns_on_policy_but_not_in_async_mode():
    words = ("--algorithm.preset", "dppo")
    assert any("The trust region" in text for text in said("guess", *words))
    assert said("guess", *words, "--training.mode", "async") == []


@pytest.mark.parametrize("name", ["turn_grpo", "turn_return", "turn_return_hybrid"])
def test_turn_advantage_in_a_world_without_turn_rewards_warns(name):
    words = ("--algorithm.preset", name, "--training.minibatches", "2")
    (found,) = said("math", *words)
    assert f"advantage {name} has no effect: the world math declares no rewards of turns" in found
    assert "rewards.turns" in found
    assert said("guess", *words) == []
    assert said("math", *words, "--rewards.turns.answer", "0.1") == []


def test_gigpo_warns_when_the_environment_has_no_state_keys():
    words = ("--algorithm.preset", "gigpo", "--training.minibatches", "2")
    assert said("guess", *words) == []
    (found,) = said("math", *words)
    assert "has no state keys" in found


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--algorithm.correction", "tis"), "The correction tis has no effect"),
        (("--algorithm.preset", "ppo", "--algorithm.advantage", "vtrace"), "advantage vtrace are 1"),
        (("--algorithm.preset", "dapo", "--algorithm.overlong_mask"), "algorithm.overlong_mask masks them"),
        (("--algorithm.preset", "dapo", "--algorithm.overlong_length", "9999"), "begins at 7999 tokens"),
    ],
)
def test_other_inactive_algorithm_parts_warn(given, why):
    (found,) = said("guess", *given, "--training.minibatches", "2")
    assert why in found
    assert "Set " in found


def test_every_critic_preset_warns_about_its_inactive_clip():
    for name, preset in PRESETS.items():
        if preset.advantage in CRITIC_ADVANTAGES and preset.loss in CLIPPING_LOSSES:
            assert any("The clip" in text for text in said("guess", "--algorithm.preset", name)), name
