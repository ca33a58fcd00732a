"""Checks of the settings of guidance and of the self-teacher."""

from __future__ import annotations

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.config.schema import Config
from ludus.config.sections.section import changed
from ludus.envs.base import World
from ludus.errors import ConfigError


def check_guidance(config: Config, world: World) -> None:
    """Raise ConfigError for guidance of a world without hints, of episodes of several dialogues, or unused."""
    settings, rollout = config.training.guidance, config.rollout
    if not settings.samples:
        for key, value in changed(settings).items():
            text = f"training.guidance.{key} = {value} would have no effect: training.guidance.samples is 0."
            raise ConfigError(text, f"Set training.guidance.samples, such as 4, or unset training.guidance.{key}.")
        return
    unsupported = {
        "training.mode = 'async'": config.training.streams,
        "rollout.partial": rollout.partial.is_set,
        "rollout.branch": rollout.branch.branches > 0,
        "rollout.context": rollout.context.max_tokens > 0,
        "rollout.subagents": rollout.subagents.max_depth > 0,
        "rollout.agent": rollout.agent.is_set or world.runs_agents,
        "training.learner.old_logprobs = 'engine'": config.training.learner.old_logprobs == "engine",
    }
    if found := [name for name, is_set in unsupported.items() if is_set]:
        raise ConfigError(f"training.guidance.samples does not apply with {found[0]}.", "Unset one of them.")
    if settings.actions and not (world.implements("hint") or world.implements("expert")):
        text = f"The world {world.name!r} has no hints: it has neither an expert nor the method hint."
        raise ConfigError(
            text, "Set training.guidance.actions = 0 for feedback alone, or training.guidance.samples = 0."
        )


def check_self_teacher(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError for unused settings of the self-teacher, and for rows that it cannot be shown anything for."""
    loss, used = algorithm.loss_spec, {"ema_rate", "feedback"}
    if not loss.has(Need.SELF_TEACHER):
        used = set()
    elif loss.has(Need.SHOWN_DEMONSTRATION):
        used = {"ema_rate"}
    for key, value in changed(config.teacher).items():
        if key not in (*used, "path"):
            text = f"teacher.{key} = {value} would have no effect: the loss {algorithm.loss} does not use it."
            raise ConfigError(text, "Unset it, or set algorithm.preset = 'sdpo'.")
    if not used:
        return
    lora = config.model.lora
    unsupported = {
        "training.transitions": config.training.transitions,
        "staleness.replay": config.staleness.replay.share > 0,
        "training.learner.shard": config.training.learner.shard,
        "model.lora.roles": lora is not None and bool(lora.roles),
        "training.learner.replay_routing": config.training.learner.replay_routing,
    }
    if found := [name for name, is_set in unsupported.items() if is_set]:
        raise ConfigError(f"The loss {algorithm.loss} cannot be combined with {found[0]}.", "Unset one of them.")
