"""Warn about parts of an algorithm that have no effect under the run's settings or in its world.

Each part declares what it needs (`ludus.algorithms.spec.algorithm`: ratios other than 1, turn rewards,
recurring states).
"""

from __future__ import annotations

from collections.abc import Iterator

from ludus.algorithms.parts import Need
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.algorithms.spec.resolve import algorithm_of, minibatches_of
from ludus.config.schema import Config
from ludus.envs.base import World

_MORE_UPDATES = "Set training.minibatches = 4, or training.epochs = 2"


def inactive_parts(config: Config, world: World) -> list[str]:
    """Return a warning per inactive part of the algorithm: which, why, and what to set."""
    algorithm = algorithm_of(config)
    return [
        *_of_ratios(config, algorithm),
        *_of_corrections(config, algorithm),
        *_of_turns(config, algorithm, world),
        *_of_branches(config, algorithm),
        *_of_length(config, algorithm),
    ]


def updates_of(config: Config) -> int:
    """Return the number of optimizer steps per batch."""
    return config.training.epochs * minibatches_of(config)


def _of_ratios(config: Config, algorithm: Algorithm) -> Iterator[str]:
    part = algorithm.loss_spec.ratio_part
    if not part or updates_of(config) > 1:
        return
    to_engine = algorithm.loss_spec.has(Need.BEHAVIOR_RATIO) or config.training.learner.old_logprobs == "engine"
    if to_engine and config.training.off_policy:
        return
    yield (
        f"{part} of the loss {algorithm.loss} has no effect: with one update per batch all ratios are 1. "
        f"{_MORE_UPDATES}."
    )


def _of_corrections(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Yield warnings for synchronous runs with an embedded engine, where ratios are 1 up to rounding."""
    if config.training.off_policy or config.engine.is_external:
        return
    remedy = "Set training.mode = 'async' or 'one_step' for rollouts of older weights."
    why = "with training.mode = 'sync' and the embedded engine, engine and learner hold the same weights"
    if algorithm.correction != "none":
        yield f"The correction {algorithm.correction} has no effect: {why}. {remedy}"
    if algorithm.opsm_delta is not None and updates_of(config) == 1:
        yield f"The mask of algorithm.opsm_delta has no effect: {why}, with one update per batch. {remedy}"
    if algorithm.advantage_spec.has(Need.BEHAVIOR_RATIO):
        yield f"The weights of the advantage {algorithm.advantage} are 1: {why}. {remedy}"


def _of_turns(config: Config, algorithm: Algorithm, world: World) -> Iterator[str]:
    emits = world.emits_turn_rewards
    given = config.rewards.rewards_turns or config.rewards.model is not None
    if algorithm.advantage_spec.has(Need.TURN_REWARDS) and not emits and not given:
        yield (
            f"The turn term of the advantage {algorithm.advantage} has no effect: the world {world.name} "
            f"declares no rewards of turns. Set {_remedy(world)}rewards.turns, or algorithm.preset = 'grpo'."
        )
    if algorithm.advantage_spec.has(Need.STATE_KEYS):
        environment = world.environment(world.tasks("train")[0])
        if not environment.implements("state_key"):
            yield (
                f"The comparison of equal states of the advantage {algorithm.advantage} has no effect: the "
                f"world {world.name} has no state keys (`Environment.state_key`). Set algorithm.preset = 'grpo'."
            )


def _remedy(world: World) -> str:
    return "rewards.turn_verifier_weight, " if world.turn_verifier is not None else ""


def _of_branches(config: Config, algorithm: Algorithm) -> Iterator[str]:
    if algorithm.advantage_spec.has(Need.BRANCHES) and not config.rollout.branch.branches:
        yield (
            f"The comparison of branches of the advantage {algorithm.advantage} has no effect: no episode "
            "branches. Set rollout.branch.branches and rollout.branch.turns, or algorithm.preset = 'grpo'."
        )


def _of_length(config: Config, algorithm: Algorithm) -> Iterator[str]:
    if not algorithm.overlong_buffer:
        return
    if algorithm.overlong_mask:
        yield (
            "The soft overlong punishment has no effect on truncated episodes: algorithm.overlong_mask "
            "keeps them from training. Set algorithm.overlong_mask = false, or algorithm.overlong_buffer = 0."
        )
    longest, limit = algorithm.overlong_length or 0, config.rollout.max_seq_len
    begins = longest - max(1, round(algorithm.overlong_buffer * longest))
    if begins >= limit:
        yield (
            f"The soft overlong punishment begins at {begins} tokens (algorithm.overlong_length, "
            f"overlong_buffer), and episodes are cut at {limit}. Set a smaller algorithm.overlong_length."
        )
