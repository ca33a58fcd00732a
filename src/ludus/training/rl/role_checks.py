"""Checks of the settings of roles with their own adapter (`model.lora.roles`) or model (`model.roles`)."""

from __future__ import annotations

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.config.schema import Config
from ludus.envs.base import World
from ludus.errors import ConfigError, did_you_mean, reject_combination
from ludus.types import POLICY


def check_role_policies(config: Config, algorithm: Algorithm, world: World) -> None:
    """Raise ConfigError if no agent has a role with its own adapter or model, or a setting does not support it."""
    setting = "model.roles" if config.model.roles else "model.lora.roles"
    roles = [*config.model.roles, *(config.model.lora.roles if config.model.lora is not None else ())]
    if not roles:
        return
    cases = _unsupported(config, algorithm) | (_of_models(config, algorithm) if config.model.roles else {})
    reject_combination(setting + " cannot be combined with {}.", cases)
    named = [*world.roles, *(["sub"] if config.rollout.subagents.max_depth else []), POLICY]
    known = list(dict.fromkeys(role.partition(":")[0] for role in named))
    unknown = [role for role in roles if role not in known]
    if unknown and (world.roles or not (world.runs_agents or config.rollout.agent.is_set)):
        text = f"{setting} names {unknown[0]!r}, which is not a role of the world {world.name!r}."
        raise ConfigError(text, f"{did_you_mean(unknown[0], known)}Roles: {', '.join(known)}.")


def _unsupported(config: Config, algorithm: Algorithm) -> dict[str, bool]:
    models = (Need.CRITIC, Need.OUTCOME_CRITIC, Need.PROCESS_REWARD_MODEL)
    return {
        "engine.url": config.engine.is_external,
        "engine.plugin": config.engine.plugin is not None,
        "cluster.enabled": config.cluster.enabled,
        "training.learner.shard": config.training.learner.shard,
        "training.learner.replay_routing": config.training.learner.replay_routing,
        "staleness.replay.sources": bool(config.staleness.replay.sources),
        f"algorithm.loss = {algorithm.loss!r}": algorithm.loss_spec.has(Need.DEMONSTRATIONS),
        f"algorithm.advantage = {algorithm.advantage!r}": any(map(algorithm.advantage_spec.has, models)),
    }


def _of_models(config: Config, algorithm: Algorithm) -> dict[str, bool]:
    """Return what only separate models do not support."""
    teachers = (Need.TEACHER, Need.SELF_TEACHER)
    return {
        "training.mode = 'async'": config.training.streams,
        "training.learner.ranks": config.training.learner.ranks > 1,
        "rollout.opponents": config.rollout.opponents.every > 0,
        "run.token_values": config.run.token_values,
        "run.diagnostics.collapse_every": config.run.diagnostics.collapse_every > 0,
        f"algorithm.loss = {algorithm.loss!r}": any(map(algorithm.loss_spec.has, teachers)),
    }
