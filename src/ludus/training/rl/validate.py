"""Validate a configuration before anything is written: errors, and warnings about settings without effect.

The algorithm's parts declare what they need (`ludus.algorithms.algorithm`: ratios other than 1, turn
rewards, recurring states), so that no part is checked by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.kl import kl_controller
from ludus.algorithms.spec.resolve import algorithm_of, check_observations, minibatches_of, resolve
from ludus.config.schema import Config
from ludus.config.sections.algorithm import AlgorithmConfig, CriticConfig
from ludus.config.sections.section import Section, changed
from ludus.diagnostics.alarms import rules
from ludus.envs.base import World
from ludus.envs.mixture import worlds_in
from ludus.envs.registry import build_world, check_sandbox
from ludus.errors import ConfigError, did_you_mean, reject_combination
from ludus.evaluation.env_audit import AuditProgress, CheckPlan, reject_cheats
from ludus.evaluation.evaluate import check_evaluation
from ludus.rewards.registry import has_extra_rewards
from ludus.rollouts.dialogues.subagents import DELEGATE
from ludus.rollouts.reward_executor import ProcessRewardExecutor
from ludus.rollouts.scheduler import sampling_params
from ludus.tools.notes import Notes, notes_tools
from ludus.training.collection.demonstrations import uses_demonstrations
from ludus.training.collection.exploration import check_exploration
from ludus.training.collection.guidance import check_guidance, check_self_teacher
from ludus.training.collection.replay_buffer import check_sources
from ludus.training.collection.rewards.reward_plan import check_reward_settings, reward_warnings
from ludus.training.collection.rollout_collector import max_waits_of
from ludus.training.collection.task_categories import check_curriculum
from ludus.training.credit.roles import ROLE, is_proposer
from ludus.training.datasets.token_limits import check_prompts
from ludus.training.rl.role_checks import check_role_policies
from ludus.training.rl.sync_trainer import task_order
from ludus.training.run.preflight import check_plugins
from ludus.training.run.session import TrainingSession, open_session
from ludus.training.value_models.factory import warmup_steps

NO_PROGRESS = AuditProgress()

_ENGINE_WORKERS: Final = ("engines", "engine_cpus", "engine_gpus", "engine_resources")
_REWARD_RESOURCES: Final = ("reward_cpus", "reward_gpus", "reward_resources")
_REWARD_WORKERS: Final = ("scorings_per_worker", "scoring_timeout_s", *_REWARD_RESOURCES)
_RAY: Final = ("address", *_ENGINE_WORKERS[1:], "worker_cpus", "worker_resources", *_REWARD_RESOURCES)
_SERVERS: Final = ("api", "timeout_s", "connect_timeout_s", "weights_folder", "broadcast_host", "weight_delta")


def open_validated_session(
    config: Config, watch: AuditProgress = NO_PROGRESS, world: World | None = None
) -> TrainingSession | None:
    """Check a configuration and load its model, before anything is written; `world` replaces the configured one.

    `watch` receives the progress of the environment audit. Returns None if the model must first be trained
    from scratch. Settings and world are checked before the model is loaded.
    """
    algorithm_of(config)
    world = world or build_world(config.env, config.rollout, config.sandbox)
    check_reward_settings(config, world)
    session = None if config.model.from_scratch else open_session(config, world=world)
    check_settings(config, world)
    check_rollouts(config, world, watch)
    if session is not None:
        check_prompts(session)
    return session


def check_settings(config: Config, world: World) -> None:
    """Raise ConfigError and UserError for settings of the algorithm, rewards, trackers and splits."""
    algorithm = algorithm_of(config)
    check_roles(algorithm, world)
    kl_controller(config, algorithm.kl_coef)
    scheduled = config.exploration.entropy_coef.kind != "constant"
    if algorithm.entropy_target is not None and algorithm.entropy_coef == 0 and not scheduled:
        raise ConfigError(
            "algorithm.entropy_target has no effect: the coefficient of the entropy bonus is 0.",
            "Set algorithm.entropy_coef, such as 0.3.",
        )
    check_teacher(config, algorithm)
    check_critic(config, algorithm)
    check_experts(config, algorithm, world)
    check_guidance(config, world)
    check_self_teacher(config, algorithm)
    check_old_logprobs(config, algorithm)
    check_token_values(config)
    check_replay(config, algorithm)
    check_partial(config, world)
    check_sources(config)
    check_branch(config)
    check_exploration(config, world)
    check_observations(algorithm, config.training.mask_observations)
    check_plugins(config)
    check_alarms(config)
    check_agents(config, world)
    check_notes(config, world)
    check_opponents(config, world)
    check_role_policies(config, algorithm, world)
    check_engine(config)
    check_evaluation(config, world)
    task_order(config, world)
    check_curriculum(config, world, algorithm)
    check_reward_settings(config, world)


def check_rollouts(config: Config, world: World, watch: AuditProgress = NO_PROGRESS) -> None:
    """Raise WorldError if the sandbox does not respond (on Ray the workers check it); raise as `check_cheats`."""
    if config.cluster.kind != "ray":
        check_sandbox(config.sandbox, world)
    check_cheats(config, world, watch)


def check_cheats(config: Config, world: World, watch: AuditProgress = NO_PROGRESS) -> None:
    """Raise ConfigError if cheats earn reward, WorldError if rewards time out repeatedly. `env.check` enables it."""
    if config.env.check:
        for env, env_config in worlds_in(world, config):
            scoring, seed = ProcessRewardExecutor.of(env_config), env_config.run.seed
            reject_cheats(env, CheckPlan(seed=seed, limits=env_config.rollout, scoring=scoring, watch=watch))


def check_alarms(config: Config) -> None:
    """Raise ConfigError for an unknown name in run.alarms.actions."""
    for name in config.run.alarms.actions:
        if name not in rules():
            guess = did_you_mean(name, rules())
            raise ConfigError(f'run.alarms.actions: unknown alarm "{name}".', f"{guess}Known: {', '.join(rules())}.")
    raising = [name for name, action in config.run.alarms.actions.items() if action == "raise_kl"]
    if raising and not kl_controller(config, algorithm_of(config).kl_coef).is_active:
        text = f"run.alarms.actions.{raising[0]} is raise_kl, but the run has no KL term."
        raise ConfigError(text, "Set algorithm.kl_coef above 0, or use lower_learning_rate.")


def check_engine(config: Config) -> None:
    """Raise ConfigError if engine.sleep is not supported, or engine.max_requests has no effect or is too low."""
    engine, limit = config.engine, config.engine.max_requests
    # In async mode, evaluations and weight checks run concurrently with streamed episodes.
    needed = config.rollout.concurrency * (2 if config.training.streams else 1)
    if engine.sleep and engine.is_external:
        raise ConfigError("engine.sleep needs the embedded engine.", "Unset it or engine.url.")
    if engine.sleep and config.training.off_policy:
        text = f"With training.mode = {config.training.mode!r} the engine samples while the learner trains."
        raise ConfigError(text, "Set engine.sleep = false, or training.mode = 'sync'.")
    if limit and engine.is_external:
        hint = "Set it on the server: ludus serve --max-requests."
        raise ConfigError("engine.max_requests needs the embedded engine.", hint)
    if limit and not config.cluster.enabled and limit < needed:
        hint = "Unset it (an engine in this process has no other clients) or lower rollout.concurrency."
        raise ConfigError(f"engine.max_requests ({limit}) is below the {needed} concurrent requests of this run.", hint)


def check_teacher(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if the loss lacks its teacher, or a configured teacher is unused."""
    path, needed = config.teacher.path, algorithm.loss_spec.has(Need.TEACHER)
    if needed and path is None:
        hint = "Set teacher.path to a model folder with the policy's tokenizer."
        raise ConfigError(f"The loss {algorithm.loss} needs a teacher, but teacher.path is not set.", hint)
    if path is not None and not needed:
        text = f"teacher.path = {path} would have no effect: the loss {algorithm.loss} uses no teacher."
        raise ConfigError(text, "Unset it, or set algorithm.preset = 'distill'.")


def check_critic(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError for unused critic settings, and for a critic head on sharded weights."""
    used, reason = _critic_settings(algorithm)
    for key, value in changed(config.critic).items():
        if key not in used:
            hint = "Unset it, or use an algorithm that reads it (ludus algorithms)."
            raise ConfigError(f"critic.{key} = {value} would have no effect: {reason}.", hint)
    if config.critic.model == "head" and config.training.learner.shard:
        text = "critic.model = head reads the policy's states, and training.learner.shard shards its weights."
        raise ConfigError(text, "Unset one of them.")


def _critic_settings(algorithm: Algorithm) -> tuple[set[str], str]:
    """Return the `critic` settings that an algorithm uses, and why it ignores the others."""
    of_critics = CriticConfig.model_fields.keys() - {"prime"}
    name, spec = algorithm.advantage, algorithm.advantage_spec
    if spec.has(Need.PROCESS_REWARD_MODEL):
        return {"prime"}, f"the advantage {name} has a process reward model (critic.prime) and no critic"
    if spec.has(Need.OUTCOME_CRITIC):
        return of_critics - {"clip"}, f"the critic of {name} predicts outcomes and has no values"
    if spec.has(Need.CRITIC):
        return of_critics, f"the advantage {name} has no process reward model"
    return set(), f"the advantage {name} has no critic"


def check_experts(config: Config, algorithm: Algorithm, world: World) -> None:
    """Raise ConfigError if the loss needs experts and has none, or configured experts are unused."""
    path, uses = config.experts.path, uses_demonstrations(algorithm)
    joins, exploration = algorithm.loss_spec.has(Need.DEMONSTRATIONS), config.exploration
    prefixes = exploration.demonstration_prefix.share > 0 or exploration.uniform_failures.action == "prefix"
    unused = {} if joins else changed(config.experts)
    if uses or prefixes:
        unused.pop("path", None)
    for key, value in unused.items():
        why = "shows them to its teacher only" if uses else "uses no experts"
        text = f"experts.{key} = {value} would have no effect: the loss {algorithm.loss} {why}."
        raise ConfigError(text, "Unset it, or set algorithm.preset = 'mixed_policy'.")
    if uses and path is None and not world.implements("expert"):
        hint = "Set experts.path to a file of dialogues with task ids (docs/use/data.md)."
        raise ConfigError(f"The loss {algorithm.loss} needs experts, but the world {world.name!r} has none.", hint)


def check_roles(algorithm: Algorithm, world: World) -> None:
    """Raise ConfigError if the algorithm needs proposers and solvers and no task has roles."""
    if not algorithm.advantage_spec.has(Need.PROPOSALS):
        return
    if not (any(map(is_proposer, world.roles)) or any(ROLE in task.tags for task in world.tasks("train"))):
        raise ConfigError(
            f"The advantage {algorithm.advantage} compares proposers and solvers, but no task of the world "
            f"{world.name!r} has the tag {ROLE!r}.",
            "Give tasks the tags role (proposer or solver) and proposal, or use grpo.",
        )


def check_old_logprobs(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if the engine's log-probabilities cannot replace the learner's."""
    if config.training.learner.old_logprobs != "engine":
        return
    if algorithm.correction != "none":
        reason = f"algorithm.correction = {algorithm.correction!r} compares the two"
    elif algorithm.advantage_spec.has(Need.BEHAVIOR_RATIO):
        reason = f"algorithm.advantage = {algorithm.advantage!r} compares the two"
    elif config.exploration.is_off_policy:
        reason = "exploration samples from other distributions"
    elif _truncates_sampling(config):
        reason = "sampling is truncated (rollout.top_p, top_k, min_p, guided_tools)"
    elif not config.training.mask_observations:
        reason = "observations train (training.mask_observations is off) and have no log-probabilities"
    elif config.training.learner.replay_routing:
        reason = "training.learner.replay_routing records experts in the pass that this skips"
    else:
        return
    hint = "Set training.learner.old_logprobs = 'recomputed'."
    raise ConfigError(f"training.learner.old_logprobs = 'engine' is not possible: {reason}.", hint)


def _truncates_sampling(config: Config) -> bool:
    return sampling_params(config.rollout, config.rollout.temperature).cuts or config.rollout.guided_tools


def check_token_values(config: Config) -> None:
    """Raise ConfigError if the rows of the learner are not rollouts, whose tokens `run.token_values` stores."""
    if config.run.token_values and config.training.transitions:
        text = "run.token_values stores the tokens of whole rollouts, but training.transitions trains each turn apart."
        raise ConfigError(text, "Unset run.token_values or training.transitions.")


def check_replay(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if tokens beyond the staleness bound would train without a correction."""
    bound, replays, mode = config.staleness.max_staleness, config.staleness.replay, config.training.mode
    if not replays.share or algorithm.correction != "none" or algorithm.loss_spec.off_policy:
        return
    note = f" (with training.mode = {mode!r}, none is the default)" if not config.training.off_policy else ""
    if replays.sources:
        text = f"staleness.replay.sources are off-policy rollouts, and algorithm.correction is 'none'{note}."
        raise ConfigError(text, "Set algorithm.correction (tis).")
    if replays.max_age > bound:
        raise ConfigError(
            f"staleness.replay.max_age ({replays.max_age}) replays tokens beyond staleness.max_staleness "
            f"({bound}), and algorithm.correction is 'none'{note}.",
            "Set algorithm.correction (tis), or a max_age within the bound.",
        )


def check_partial(config: Config, world: World) -> None:
    """Raise ConfigError if rollout.partial is set but no episode could wait for the next step."""
    if not config.rollout.partial.is_set or config.training.streams:
        return
    if max_waits_of(config) < 1:
        raise ConfigError(
            f"rollout.partial makes episodes wait for the next step, but staleness.max_staleness "
            f"({config.staleness.max_staleness}) forbids this (training.mode = {config.training.mode!r}).",
            f"Set staleness.max_staleness to {2 if config.training.mode == 'one_step' else 1} or more.",
        )
    if config.cluster.enabled:
        hint = "With --cluster set training.mode = 'async', which streams episodes."
        raise ConfigError("rollout.partial needs episodes that run in the learner's process.", hint)
    if (room := world.episodes_at_once) is not None and room < 2:
        text = "rollout.partial needs at least two sandbox sessions: one may belong to an episode that waits."
        raise ConfigError(text, "Raise sandbox.sessions or unset rollout.partial.")


def check_branch(config: Config) -> None:
    """Raise ConfigError if training episodes cannot branch."""
    rollout = config.rollout
    if not rollout.branch.branches:
        return
    if rollout.partial.is_set:
        text = "rollout.branch cannot be combined with rollout.partial: waiting episodes do not support forks."
        raise ConfigError(text, "Unset one of them.")
    if rollout.temperature == 0:
        hint = "Set rollout.temperature above 0 or unset rollout.branch."
        raise ConfigError("rollout.branch needs sampling: at rollout.temperature = 0 all branches are identical.", hint)
    if too_late := [turn for turn in rollout.branch.turns if turn >= rollout.max_turns]:
        raise ConfigError(
            f"rollout.branch.turns has turn {too_late[0]}, but episodes have turns 0 to "
            f"{rollout.max_turns - 1} (rollout.max_turns).",
            "Choose an earlier turn.",
        )
    if config.training.learner.replay_routing:
        raise ConfigError(
            "rollout.branch cannot be combined with training.learner.replay_routing: the routing of a tree "
            "is not recorded.",
            "Unset one of them.",
        )


def check_agents(config: Config, world: World) -> None:
    """Raise ConfigError for settings that do not apply to agents, sub-agents, or dialogues that are rewritten."""
    rollout, context, subagents = config.rollout, config.rollout.context, config.rollout.subagents
    runs_agents, delegates = world.runs_agents or rollout.agent.is_set, subagents.max_depth > 0
    if not (runs_agents or context.max_tokens or delegates):
        return
    what = "dialogues that are rewritten (rollout.context)"
    if runs_agents or delegates:
        what = "episodes of agents" if runs_agents else "episodes with sub-agents (rollout.subagents)"
    rewrites = bool(context.max_tokens)
    cases = {
        "rollout.partial": rollout.partial.is_set,
        "rollout.branch": rollout.branch.branches > 0,
        "cluster.enabled": config.cluster.enabled and runs_agents,
        "rollout.context": rewrites and runs_agents,
        "rollout.subagents": delegates and runs_agents,
        "training.learner.replay_routing": config.training.learner.replay_routing,
        f"env.rendering = '{config.env.rendering}'": (rewrites or delegates) and config.env.rendering != "chat",
    }
    reject_combination(f"{{}} does not apply to {what}.", cases)
    if context.max_tokens >= rollout.max_seq_len:
        text = f"rollout.context.max_tokens ({context.max_tokens}) is not below max_seq_len ({rollout.max_seq_len})."
        raise ConfigError(text, "Lower it, so that a summary fits.")
    if delegates:
        check_subagent_tools(config, world)


def check_notes(config: Config, world: World) -> None:
    """Raise ConfigError for settings that do not apply to notes."""
    rollout = config.rollout
    if rollout.notes.scope == "none":
        return
    cases = {
        "rollout.agent": rollout.agent.is_set or world.needs_server,
        f"env.rendering = '{config.env.rendering}'": config.env.rendering != "chat",
    }
    if rollout.notes.persists:
        cases |= {
            f"training.mode = '{config.training.mode}'": config.training.mode != "sync",
            "rollout.partial": rollout.partial.is_set,
            "rollout.branch": rollout.branch.branches > 0,
        }
    reject_combination(f"{{}} does not apply to notes (rollout.notes.scope = '{rollout.notes.scope}').", cases)
    names = {tool.name for tool in notes_tools(Notes())}
    if taken := names.intersection(world_tools(config, world)):
        raise ConfigError(f"The world {world.name!r} has a tool {min(taken)!r}.", "Unset rollout.notes.")


def check_subagent_tools(config: Config, world: World) -> None:
    """Raise ConfigError if no world has a tool of `rollout.subagents.tools`, or one has a tool `delegate`."""
    offered = world_tools(config, world)
    if DELEGATE in offered:
        raise ConfigError(f"The world {world.name!r} has a tool {DELEGATE!r}.", "Unset rollout.subagents.")
    if unknown := [name for name in config.rollout.subagents.tools if name not in offered]:
        text = f"rollout.subagents.tools names {unknown[0]!r}, which is not a tool of {world.name!r}."
        raise ConfigError(text, f"{did_you_mean(unknown[0], offered)}Tools: {', '.join(offered) or 'none'}.")


def world_tools(config: Config, world: World) -> list[str]:
    """Return the names of the tools of the first training task of each world."""
    environments = [one.environment(one.tasks("train")[0]) for one, _ in worlds_in(world, config)]
    return list(dict.fromkeys(tool.name for environment in environments for tool in environment.tools))


def check_opponents(config: Config, world: World) -> None:
    """Raise ConfigError unless `rollout.opponents` is set if, and only if, the world needs opponents."""
    is_set = config.rollout.opponents.every > 0
    if world.needs_opponents and not is_set:
        text = f"Training tasks of the world {world.name!r} are played against past versions of the policy."
        raise ConfigError(text, "Set rollout.opponents.every, for example to 10.")
    if not is_set:
        return
    if not world.needs_opponents:
        text = f"rollout.opponents would have no effect: no training task of {world.name!r} has such an opponent."
        raise ConfigError(text, "Unset it, or name the opponent in env.settings.")
    cases = {
        "engine.url": config.engine.is_external,
        "engine.plugin": config.engine.plugin is not None,
        "training.learner.ranks": config.training.learner.ranks > 1,
        "training.mode": config.training.mode != "sync",
    }
    reject_combination("rollout.opponents cannot be combined with {}.", cases)


def config_warnings(config: Config) -> list[str]:
    """Return warnings for settings that are valid but change what training does."""
    found = []
    if not config.training.mask_observations:
        found.append("training.mask_observations is off: observations are in the loss. Use this for comparison only.")
    if resolve(config.algorithm).advantage_spec.has(Need.PRETRAINED_CRITIC) and config.critic.warmup_steps == 0:
        found.append("VAPO pre-trains its critic on a fixed policy, but critic.warmup_steps is 0.")
    if (warmup := warmup_steps(config)) >= config.training.steps:
        found.append(f"The policy is never trained: critic.warmup_steps trains only the critic for {warmup} steps.")
    if config.training.streams and config.rollout.reproducible:
        found.append(
            "Asynchronous runs (training.mode = async) are not reproducible: rollout.reproducible "
            "does not fix the order of episodes."
        )
    if config.training.streams and config.engine.is_external and config.staleness.kv_cache_on_update == "keep":
        found.append(
            "Servers manage their own KV cache on weight updates: "
            "staleness.kv_cache_on_update has no effect with engine.url."
        )
    if _truncates_sampling(config):
        found.append(
            "Actions are sampled from a truncated distribution (rollout.top_p, top_k, min_p, guided_tools), "
            "but ratios use the full one: sampling probabilities are underestimated, and no "
            "correction accounts for it."
        )
    return found + reward_warnings(config) + unused_settings(config)


def unused_settings(config: Config) -> list[str]:
    """Return a warning for each cluster, engine, rollout or staleness setting that has no effect."""
    sections: dict[str, Section] = {
        "cluster": config.cluster,
        "engine": config.engine,
        "rollout": config.rollout,
        "rollout.partial": config.rollout.partial,
        "staleness.replay": config.staleness.replay,
        "staleness": config.staleness,
    }
    reasons = {
        (section, name): reason
        for applies, section, names, reason in _unused(config)
        if applies
        for name in names or type(sections[section]).model_fields
    }
    warnings = [
        f"{section}.{name} = {value} has no effect: {reasons[section, name]}."
        for section, own in sections.items()
        for name, value in changed(own).items()
        if (section, name) in reasons
    ]
    oversample, most = config.staleness.oversample, config.rollout.concurrency
    if config.training.streams and oversample >= most:
        warnings.append(
            f"staleness.oversample = {oversample} has no effect beyond {most - 1}: no further members "
            f"start before the trained ones finish (rollout.concurrency = {most})."
        )
    return warnings


def _unused(config: Config) -> Iterator[tuple[bool, str, Sequence[str], str]]:
    """Yield rules: whether it applies, a section, its settings without effect (empty: all), and the reason.

    Later rules take precedence. Demonstrations and the extra reward parts are scored in processes even if there are
    reward workers.
    """
    cluster, external, streams = config.cluster, config.engine.is_external, config.training.streams
    in_processes = resolve(config.algorithm).loss_spec.has(Need.DEMONSTRATIONS) or has_extra_rewards(config.rewards)
    by_workers = cluster.enabled and cluster.reward_workers > 0 and not in_processes
    always = ("min_ess", "ess_patience", *(["max_staleness"] if config.rollout.partial.is_set else []))
    of_async = [name for name in type(config.staleness).model_fields if name not in always]
    moves, mid_episode = ["moves"], streams and config.staleness.in_flight_weight_updates
    yield cluster.kind == "local", "cluster", _RAY, "cluster.kind is local, and it needs ray"
    yield not cluster.reward_workers, "cluster", _REWARD_WORKERS, "cluster.reward_workers is 0"
    yield external, "cluster", _ENGINE_WORKERS, "the engines are those at engine.url"
    yield not cluster.enabled, "cluster", (), "cluster.kind is none"
    yield external, "engine", ["kv_cache_tokens"], "it needs embedded engines, and engine.url is set"
    samples_here = not external and not cluster.enabled
    yield samples_here, "engine", _SERVERS, "this process samples, without engine.url and cluster"
    why = "cluster.reward_workers score the training episodes, with cluster.scoring_timeout_s"
    yield by_workers, "rollout", ("reward_timeout_s", "reward_processes"), why
    yield streams, "rollout.partial", (), "training.mode is async, which streams episodes"
    yield streams and not config.staleness.replay.share, "staleness.replay", (), "staleness.replay.share is 0"
    why = "no servers at engine.url sample for this process"
    yield streams and (not external or cluster.enabled), "staleness", moves, why
    yield mid_episode, "staleness", moves, "new weights take effect in the middle of episodes"
    yield not streams, "staleness", of_async, f"training.mode is {config.training.mode}, and it needs async"


def inactive_parts(config: Config, world: World) -> list[str]:
    """Return a warning for each inactive part of the algorithm, with reason and remedy."""
    algorithm = algorithm_of(config)
    return [
        *_warn_ratios(config, algorithm),
        *_warn_corrections(config, algorithm),
        *_warn_credit(config, algorithm, world),
        *_warn_overlong(config, algorithm),
    ]


def updates_of(config: Config) -> int:
    """Return the number of optimizer steps per batch."""
    return config.training.epochs * minibatches_of(config)


def _warn_ratios(config: Config, algorithm: Algorithm) -> Iterator[str]:
    part, chosen = algorithm.loss_spec.ratio_part, config.algorithm
    clips = (chosen.loss, chosen.clip_low, chosen.clip_high, chosen.dual_clip, config.training.minibatches)
    chose_clip = chosen.preset != AlgorithmConfig().preset or chosen.options.loss or any(v is not None for v in clips)
    to_engine = algorithm.loss_spec.has(Need.BEHAVIOR_RATIO) or config.training.learner.old_logprobs == "engine"
    if part and updates_of(config) == 1 and chose_clip and not (to_engine and config.training.off_policy):
        yield (
            f"{part} of the loss {algorithm.loss} has no effect: with one update per batch all ratios are 1. "
            "Set training.minibatches = 4, or training.epochs = 2."
        )


def _warn_corrections(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Yield warnings for synchronous runs with an embedded engine, where ratios are 1 up to rounding."""
    if config.training.off_policy or config.engine.is_external or config.exploration.is_off_policy:
        return
    remedy = "Set training.mode = 'async' or 'one_step' for rollouts of older weights."
    why = "with training.mode = 'sync' and the embedded engine, engine and learner hold the same weights"
    if algorithm.correction != "none" and not config.training.guidance.samples:
        yield f"The correction {algorithm.correction} has no effect: {why}. {remedy}"
    if algorithm.opsm_delta is not None and updates_of(config) == 1:
        yield f"The mask of algorithm.opsm_delta has no effect: {why}, with one update per batch. {remedy}"
    if algorithm.advantage_spec.has(Need.BEHAVIOR_RATIO):
        yield f"The weights of the advantage {algorithm.advantage} are 1: {why}. {remedy}"


def _warn_credit(config: Config, algorithm: Algorithm, world: World) -> Iterator[str]:
    of_world = world.emits_turn_rewards or config.rollout.agent.is_set
    has_turn_rewards = of_world or config.rewards.rewards_turns or config.rewards.model is not None
    if algorithm.advantage_spec.has(Need.TURN_REWARDS) and not has_turn_rewards:
        verifier = "rewards.turn_verifier_weight, " if world.turn_verifier is not None else ""
        yield (
            f"The turn term of the advantage {algorithm.advantage} has no effect: the world {world.name} "
            f"declares no rewards of turns. Set {verifier}rewards.turns, or algorithm.preset = 'grpo'."
        )
    compares_states = algorithm.advantage_spec.has(Need.STATE_KEYS)
    if compares_states and not world.environment(world.tasks("train")[0]).implements("state_key"):
        yield (
            f"The comparison of equal states of the advantage {algorithm.advantage} has no effect: the "
            f"world {world.name} has no state keys (`Environment.state_key`). Set algorithm.preset = 'grpo'."
        )
    if algorithm.advantage_spec.has(Need.BRANCHES) and not config.rollout.branch.branches:
        yield (
            f"The comparison of branches of the advantage {algorithm.advantage} has no effect: no episode "
            "branches. Set rollout.branch.branches and rollout.branch.turns, or algorithm.preset = 'grpo'."
        )


def _warn_overlong(config: Config, algorithm: Algorithm) -> Iterator[str]:
    if not algorithm.overlong_buffer:
        return
    if algorithm.overlong_mask:
        yield (
            "The soft overlong punishment has no effect on truncated episodes: algorithm.overlong_mask "
            "masks them. Set algorithm.overlong_mask = false, or algorithm.overlong_buffer = 0."
        )
    longest, limit = algorithm.overlong_length or 0, config.rollout.max_seq_len
    begins = longest - max(1, round(algorithm.overlong_buffer * longest))
    if begins >= limit:
        yield (
            f"The soft overlong punishment begins at {begins} tokens (algorithm.overlong_length, "
            f"overlong_buffer), but episodes are truncated at {limit}. Set a smaller algorithm.overlong_length."
        )
