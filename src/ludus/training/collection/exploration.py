"""Exploration in training: how the members of a group are sampled, what a group is rewarded for, and uniform failures.

All decisions depend on seed, step, task and `ExplorationState`, which is in the checkpoint, so that a resumed run is
bit-identical.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pydantic import TypeAdapter

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.kl import Schedule
from ludus.algorithms.spec.resolve import algorithm_of
from ludus.config.schema import Config
from ludus.config.sections.exploration import ExplorationConfig, ScheduleConfig
from ludus.diagnostics.metrics import mean
from ludus.engines.base import seed_for
from ludus.envs.base import World
from ludus.errors import ConfigError, reject_combination
from ludus.rewards.paper_rewards import calls_made
from ludus.rollouts.dialogues.exploring import OBJECTIVE, PREFIX, MemberSampling, is_off_policy, num_forced_calls
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.scheduler import Episode
from ludus.training.credit.advantages import TrainingSample
from ludus.types import Group, Message, StopReason, Task, ToolStatus, Trajectory, grouped

EXPLORES = "exploration"
"""Value of the tag `objective` of a group that is rewarded for coverage."""
CHECKPOINTS = "checkpoints"
"""Tag of a task with its number of exploration checkpoints."""
COUNT_PART = "count_bonus"
"""Reward part of the count-based bonus."""
UNIFORM_FAILURE = "uniform_failure"
"""Mask reason of a group whose members fail alike."""

T = TypeVar("T")

DemonstrationOf = Callable[[Task], Sequence[Message]]
"""Return the assistant messages of a demonstration of a task; empty if there is none."""


@dataclass(frozen=True, slots=True)
class ExplorationState:
    """State of exploration between steps.

    `groups` is the number of groups so far whose task has checkpoints, `counts` the visits by state or call, `solved`
    the tasks that were solved at least once, and `failing` those whose last group failed uniformly.
    """

    groups: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    solved: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()

    @classmethod
    def of(cls, saved: Mapping[str, object]) -> ExplorationState:
        """Restore the state from `asdict`."""
        return TypeAdapter(cls).validate_python(saved)


def failure_signature(trajectory: Trajectory) -> tuple[str, ...]:
    """Return how an episode failed: stop reason, tool and status of the first failed call, and the answer."""
    failed = next((one for one in trajectory.call_outcomes if one.status is not ToolStatus.OK), None)
    call = ("", "") if failed is None else (failed.tool, failed.status.value)
    answer = trajectory.answer.strip() if trajectory.stop_reason is StopReason.ANSWERED else ""
    return (trajectory.stop_reason.value, *call, answer)


def fails_uniformly(trajectories: Sequence[Trajectory], success: str) -> bool:
    """Return whether two or more members all fail (the part `success` is 0 or less), all with one signature."""
    if len(trajectories) < 2 or any(one.failure is not None for one in trajectories):
        return False
    if max(one.rewards.get(success, 0.0) for one in trajectories) > 0:
        return False
    return len({failure_signature(one) for one in trajectories}) == 1


def visited_keys(task: Task, trajectory: Trajectory, of: str) -> list[str]:
    """Return the keys of a trajectory's visits: states by task (`of` = "state"), or calls with their arguments."""
    if of == "state":
        texts = [f"{task.id}:{anchor}" for anchor in trajectory.anchors]
    else:
        texts = [json.dumps([one.name, dict(one.arguments)], sort_keys=True) for one in calls_made(trajectory)]
    return [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() for text in texts]


def count_bonus(keys: Sequence[str], counts: Mapping[str, int]) -> float:
    """Return the mean of `1 / sqrt(n)` over the visits of an episode; 0 without visits.

    `n` is the number of visits before this step plus those of the episode so far, this one included. The bonus of
    MBIE-EB (Strehl and Littman 2008) with the counts of arXiv:1606.01868, in [0, 1].
    """
    own, total = Counter[str](), 0.0
    for key in keys:
        own[key] += 1
        total += 1 / math.sqrt(counts.get(key, 0) + own[key])
    return total / len(keys) if keys else 0.0


def temperature_schedule(config: Config) -> Schedule | None:
    """Return the schedule of the sampling temperature, or None if it is constant."""
    return _schedule(config.exploration.temperature, config.rollout.temperature, config)


def entropy_schedule(config: Config) -> Schedule | None:
    """Return the schedule of the coefficient of the entropy bonus, or None if it is constant."""
    return _schedule(config.exploration.entropy_coef, algorithm_of(config).entropy_coef, config)


def _schedule(settings: ScheduleConfig, start: float, config: Config) -> Schedule | None:
    if settings.kind == "constant" or settings.end is None:
        return None
    return Schedule(settings.kind, start, settings.end, settings.steps or config.training.steps)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How a group is sampled: its temperature (None: that of each member), prefix and objective."""

    config: Config
    temperature: float | None = None
    is_escalated: bool = False
    prefix: tuple[Message, ...] = ()
    explores: bool = False

    def member(self, sample: int) -> MemberSampling:
        """Return the sampling of a member."""
        settings, tags = self.config.exploration, dict[str, str]()
        temperature, top_p = self.temperature, _cycled(settings.group_top_p, sample)
        if temperature is None:
            temperature = _cycled(settings.group_temperatures, sample)
        is_own = bool(settings.group_temperatures) or self.is_escalated
        if is_own and temperature not in (None, self.config.rollout.temperature):
            tags["temperature"] = f"{temperature:g}"
        if top_p is not None and top_p < 1:
            tags["top_p"] = f"{top_p:g}"
        prompt = _cycled(settings.group_prompts, sample) or ""
        if prompt:
            tags["prompt"] = str(sample % len(settings.group_prompts))
        if settings.diverse.tokens and sample:
            tags["diverse"] = str(settings.diverse.tokens)
        if self.prefix:
            tags[PREFIX] = str(len(self.prefix))
        if self.explores:
            tags[OBJECTIVE] = EXPLORES
            prompt = "\n".join(filter(None, [prompt, settings.interleave.prompt]))
        diverse = (settings.diverse.tokens, settings.diverse.tries if settings.diverse.tokens else 0)
        return MemberSampling(temperature, top_p, prompt, self.prefix, settings.epsilon_tool, *diverse, tags)


def _cycled(values: Sequence[T], number: int) -> T | None:
    return values[number % len(values)] if values else None


@dataclass(frozen=True)
class Explorer:
    """The decisions of a run's exploration. `success` names the reward part of the outcome."""

    config: Config
    success: str
    demonstration: DemonstrationOf

    def plan(self, state: ExplorationState, step: int, task: Task) -> tuple[ExplorationState, GroupPlan]:
        """Return the plan of the next group, and the state after it."""
        settings = self.config.exploration
        cycle = settings.interleave.task + settings.interleave.exploration
        has_checkpoints = task.tags.get(CHECKPOINTS) != "0"
        explores = has_checkpoints and state.groups % cycle >= settings.interleave.task
        failing, action = task.id in state.failing, settings.uniform_failures.action
        schedule, escalates = temperature_schedule(self.config), failing and action == "temperature"
        temperature = None if schedule is None else schedule.at(step - 1)
        if escalates:
            temperature = settings.uniform_failures.temperature
        rng = random.Random(seed_for(self.config.run.seed, PREFIX, step, task.id))
        begins = rng.random() < settings.demonstration_prefix.share or (failing and action == "prefix")
        prefix = self._prefix(step, task) if begins else ()
        plan = GroupPlan(self.config, temperature, escalates, prefix, explores)
        return replace(state, groups=state.groups + has_checkpoints), plan

    def _prefix(self, step: int, task: Task) -> tuple[Message, ...]:
        """Return the first turns of a demonstration: a falling share of them, without the last one."""
        settings, messages = self.config.exploration.demonstration_prefix, self.demonstration(task)
        steps = settings.steps or self.config.training.steps
        share = Schedule(settings.kind, settings.start, settings.end, steps).at(step - 1)
        return tuple(messages[: max(0, min(len(messages) - 1, math.floor(share * len(messages) + 1e-9)))])

    def assign_rewards(
        self, state: ExplorationState, groups: Sequence[Sequence[Episode]]
    ) -> tuple[ExplorationState, list[list[Episode]]]:
        """Return the groups with the rewards of their objective and bonus, and the state with their results.

        The counts of the bonus are those before these groups, so that it does not depend on their order.
        """
        settings = self.config.exploration
        counts, rewarded = dict(state.counts), list[list[Episode]]()
        for group in groups:
            keys = [visited_keys(one.task, one.trajectory, settings.count_bonus.of) for one in group]
            rewarded.append([self._rewarded(one, own, state) for one, own in zip(group, keys, strict=True)])
            for key in (key for own in keys for key in own) if settings.count_bonus.weight else ():
                counts[key] = counts.get(key, 0) + 1
        after = replace(state, counts=counts)
        if settings.uniform_failures.action != "off":
            for group in groups:
                after = self._record_outcome(after, group)
        return after, rewarded

    def _rewarded(self, episode: Episode, keys: Sequence[str], state: ExplorationState) -> Episode:
        trajectory, settings = episode.trajectory, self.config.exploration
        if trajectory.failure is not None:
            return episode
        reward, rewards = trajectory.reward, dict(trajectory.rewards)
        if trajectory.tags.get(OBJECTIVE) == EXPLORES:
            reward = rewards.get(settings.interleave.part, 0.0)
        if settings.count_bonus.weight:
            rewards[COUNT_PART] = count_bonus(keys, state.counts)
            reward += settings.count_bonus.weight * rewards[COUNT_PART]
        return replace(episode, trajectory=replace(trajectory, reward=reward, rewards=rewards))

    def _record_outcome(self, state: ExplorationState, group: Sequence[Episode]) -> ExplorationState:
        task, members = group[0].task.id, _members(group)
        solved = {*state.solved, *([task] if any(one.rewards.get(self.success, 0.0) >= 1 for one in members) else [])}
        failing = {*state.failing} - {task} | ({task} if fails_uniformly(members, self.success) else set())
        return replace(state, solved=tuple(sorted(solved)), failing=tuple(sorted(failing)))

    def drop_failures(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples without training of groups that fail uniformly, if these are dropped."""
        if self.config.exploration.uniform_failures.action != "drop":
            return list(samples)
        groups = grouped(samples, lambda one: one.group)
        episodes = {number: [one.episode for one in own] for number, own in groups.items()}
        dropped = {number for number, own in episodes.items() if fails_uniformly(_members(own), self.success)}
        return [
            replace(one, outcome=RolloutOutcome.MASKED, reason=UNIFORM_FAILURE)
            if one.group in dropped and one.outcome is RolloutOutcome.TRAINED
            else one
            for one in samples
        ]

    def metrics(self, step: int, groups: Sequence[Group], solved: Collection[str], num_keys: int) -> dict[str, float]:
        """Return `exploration/...` of a step; `solved` are the tasks that were solved so far.

        A share without members is 0.
        """
        settings = self.config.exploration
        members = [one for group in groups for one in group.trajectories if one.failure is None]
        turns = sum(one.num_turns for one in members)
        prefixes = [int(one.tags.get(PREFIX, "0")) for one in members]
        metrics = {
            "exploration/off_policy": mean([is_off_policy(one) for one in members]),
            "exploration/forced_calls": sum(map(num_forced_calls, members)) / max(turns, 1),
            "exploration/prefix_share": mean([turns > 0 for turns in prefixes]),
            "exploration/prefix_turns": mean([turns for turns in prefixes if turns]),
        }
        if (schedule := temperature_schedule(self.config)) is not None:
            metrics["exploration/temperature"] = schedule.at(step - 1)
        if settings.count_bonus.weight:
            metrics["exploration/counted"] = float(num_keys)
        if settings.interleave.exploration:
            metrics |= self._objective_metrics(members)
        if settings.uniform_failures.action != "off":
            uniform = [group for group in groups if fails_uniformly(group.trajectories, self.success)]
            metrics["exploration/uniform_failures"] = len(uniform) / max(len(groups), 1)
            metrics["exploration/lost_tasks"] = float(sum(group.task.id in solved for group in uniform))
        return metrics

    def _objective_metrics(self, members: Sequence[Trajectory]) -> dict[str, float]:
        """Return share and coverage of the exploration rollouts, and coverage and success of the others."""
        part = self.config.exploration.interleave.part
        exploring = [one for one in members if one.tags.get(OBJECTIVE) == EXPLORES]
        others = [one for one in members if one.tags.get(OBJECTIVE) != EXPLORES]
        return {
            "exploration/share": len(exploring) / max(len(members), 1),
            "exploration/coverage": mean([one.rewards.get(part, 0.0) for one in exploring]),
            "exploration/task_coverage": mean([one.rewards.get(part, 0.0) for one in others]),
            "exploration/task_success": mean([one.rewards.get(self.success, 0.0) for one in others]),
        }


def _members(group: Sequence[Episode]) -> list[Trajectory]:
    return [one.trajectory for one in group if not one.greedy]


def check_exploration(config: Config, world: World) -> None:
    """Raise ConfigError if a setting of exploration has no effect, is not supported, or would train on wrong ratios."""
    settings, algorithm = config.exploration, algorithm_of(config)
    if settings == ExplorationConfig():
        return
    if world.runs_agents or config.rollout.agent.is_set:
        raise ConfigError("The section exploration does not apply to agents.", "Unset it, or use another environment.")
    _check_combinations(config)
    _check_off_policy(config, algorithm)
    _check_world(config, world)
    _check_schedules(config, algorithm)
    _check_bonus(config, world)


def _check_combinations(config: Config) -> None:
    settings, rollout, rewards = config.exploration, config.rollout, config.rewards
    begins = settings.demonstration_prefix.share > 0 or settings.uniform_failures.action == "prefix"
    turns = begins or settings.epsilon_tool > 0 or settings.diverse.tokens > 0
    objective = settings.interleave.exploration > 0 or settings.count_bonus.weight > 0
    stateful = objective or settings.temperature.kind != "constant" or settings.uniform_failures.action != "off"
    normalizes = rewards.normalise_by is not None
    trees = rollout.branch.branches > 0
    cases = {
        "training.mode = 'async'": config.training.streams and (turns or stateful),
        "rollout.partial": rollout.partial.is_set and (turns or stateful),
        "rollout.branch": trees and (turns or objective),
        "rollout.context": rollout.context.max_tokens > 0 and turns,
        "rollout.subagents": rollout.subagents.max_depth > 0 and turns,
        "rollout.guided_tools": rollout.guided_tools and (turns or bool(settings.group_top_p)),
        "training.mask_observations = false": not config.training.mask_observations and turns,
        "rewards.normalise_by": normalizes and objective,
        "rewards.turn_verifier_weight": rewards.verifies_turns and begins,
        "cluster": config.cluster.enabled and settings.diverse.tokens > 0,
        "another setting of how members are sampled": settings.diverse.tokens > 0 and _varies_members(settings),
    }
    reject_combination("This exploration cannot be combined with {}.", cases)


def _varies_members(settings: ExplorationConfig) -> bool:
    lists = settings.group_temperatures or settings.group_top_p or settings.group_prompts
    return bool(lists) or settings.epsilon_tool > 0


def _check_off_policy(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if tokens of another distribution would train without a correction."""
    if not config.exploration.is_off_policy:
        return
    if algorithm.correction == "none" and not algorithm.loss_spec.off_policy:
        raise ConfigError(
            "exploration samples members from another distribution than the trained one (group_temperatures, "
            "group_top_p, diverse or uniform_failures.temperature), and algorithm.correction is 'none'.",
            "Set algorithm.correction (tis).",
        )
    remote = config.engine.is_external or config.engine.plugin is not None or config.cluster.enabled
    if config.exploration.group_top_p and remote:
        text = (
            "exploration.group_top_p needs the probabilities of the truncated distribution, which servers do not send."
        )
        raise ConfigError(text, "Use the embedded engine, or group_temperatures.")
    if config.exploration.diverse.tokens and (config.rollout.top_p < 1 or config.rollout.top_k or config.rollout.min_p):
        text = "exploration.diverse needs untruncated sampling (rollout.top_p, top_k, min_p)."
        raise ConfigError(text, "Unset one of them.")


def _check_world(config: Config, world: World) -> None:
    settings = config.exploration
    part, names = settings.interleave.part, [reward.name for reward in world.rewards]
    if settings.interleave.exploration and part not in names:
        text = f"exploration.interleave.part = {part!r} is not a reward part of {world.name!r}."
        raise ConfigError(text, f"Use a world with exploration checkpoints. Parts: {', '.join(names)}.")
    begins = settings.demonstration_prefix.share > 0 or settings.uniform_failures.action == "prefix"
    if begins and config.experts.path is None and not world.implements("expert"):
        text = f"exploration.demonstration_prefix needs demonstrations, but the world {world.name!r} has none."
        raise ConfigError(text, "Set experts.path to a file of dialogues with task ids (docs/use/data.md).")
    calls = settings.epsilon_tool > 0 or (settings.count_bonus.weight > 0 and settings.count_bonus.of == "call")
    if calls and not world.environment(world.tasks("train")[0]).tools:
        raise ConfigError(
            f"exploration.epsilon_tool and count_bonus.of = 'call' need tools, and {world.name!r} has none.",
            "Unset them; count_bonus.of = 'state' counts states.",
        )
    if settings.epsilon_tool and config.env.rendering != "chat":
        raise ConfigError("exploration.epsilon_tool needs env.rendering = 'chat'.", "Unset one of them.")


def _check_schedules(config: Config, algorithm: Algorithm) -> None:
    settings, start = config.exploration, algorithm.entropy_coef
    if settings.entropy_coef.kind != "constant" and settings.entropy_coef.end == start:
        raise ConfigError(
            f"exploration.entropy_coef goes from algorithm.entropy_coef = {start:g} to the same value.", "Change one."
        )
    if settings.temperature.kind == "constant":
        return
    if settings.temperature.end == config.rollout.temperature or config.rollout.temperature == 0:
        raise ConfigError(
            f"exploration.temperature goes from rollout.temperature = {config.rollout.temperature:g}, "
            "which must be above 0 and differ from its end.",
            "Change one of them.",
        )
    if algorithm.advantage_spec.has(Need.PROCESS_REWARD_MODEL):
        raise ConfigError("exploration.temperature does not apply to a process reward model.", "Unset one of them.")


def _check_bonus(config: Config, world: World) -> None:
    """Raise ConfigError unless solving the task earns more than the whole bonus."""
    weight = config.exploration.count_bonus.weight
    least = min(one.weight for one in world.rewards if one.outcome and one.weight > 0)
    if weight >= least:
        text = f"exploration.count_bonus.weight ({weight:g}) is not below the weight of the outcome ({least:g})."
        raise ConfigError(text, "Lower it, so that solving the task earns more.")
