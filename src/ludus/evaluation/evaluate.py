"""Held-out success: the same path during training, offline, and against an endpoint."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ludus.config.schema import Config
from ludus.config.sections.rollout import EnvConfig
from ludus.envs.base import World, check_tasks
from ludus.errors import UserError
from ludus.evaluation.stats import (
    Interval,
    bootstrap_mean,
    detectable_difference,
    pass_at_k,
    pass_hat_k,
    smoothed,
    wilson,
)
from ludus.rewards.base import Reward, success
from ludus.rollout.ledger import RolloutKey, RolloutOutcome
from ludus.rollout.rollout_files import RolloutRecord, replaced_file, write_rollouts
from ludus.rollout.scheduler import Episode, RolloutRequest, Scheduler
from ludus.types import WORLD_TAG, StopReason, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Conditions:
    """Whatever else an evaluation depends on: the world, and how actions and episodes are limited.

    `world_settings` is JSON text with sorted keys.
    """

    world: str
    world_settings: str
    rendering: str
    tool_parser: str
    top_p: float
    top_k: int
    max_turns: int
    max_new_tokens: int
    max_tokens: int
    max_tool_errors: int
    max_tool_output: int
    min_p: float = 0.0
    guided_tools: bool = False

    @classmethod
    def of(cls, config: Config) -> Conditions:
        """The conditions that a configuration sets."""
        env, rollout = config.env, config.rollout
        return cls(
            world=env.name,
            world_settings=json.dumps(_world_settings(env), sort_keys=True, default=str),
            rendering=env.rendering,
            tool_parser=env.tool_parser,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            guided_tools=rollout.guided_tools,
            max_turns=rollout.max_turns,
            max_new_tokens=rollout.max_tokens_per_turn,
            max_tokens=rollout.max_seq_len,
            max_tool_errors=rollout.max_tool_errors,
            max_tool_output=rollout.max_tool_output,
        )


def _world_settings(env: EnvConfig) -> Mapping[str, object]:
    """What a world is made of; of a mixture that of each, without the weights, which only training reads."""
    if not env.mixture:
        return env.settings
    trained = {"weight", "weight_end"}
    return {name: one.model_dump(exclude=trained, exclude_none=True) for name, one in env.mixture.items()}


log = logging.getLogger("ludus.evaluation")


@dataclass(frozen=True, slots=True)
class WorldResult:
    """Held-out success in one world of a mixture."""

    rate: float
    num_tasks: int
    interval: Interval


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """What is evaluated and how it is sampled; saved with the result. `num_tasks` at most are taken.

    `step` is the training step of the weights; `policy` names who played (empty: the run's own weights).
    `conditions` is None where they are not known.
    """

    split: str
    num_tasks: int
    samples: int
    temperature: float
    seed: int
    step: int = 0
    policy: str = ""
    conditions: Conditions | None = None

    def episodes_of(self, tasks: Sequence[Task]) -> int:
        """The number of episodes on these tasks of the split."""
        return min(self.num_tasks, len(tasks)) * self.samples

    @property
    def name(self) -> str:
        """A file name: step, split and way of sampling."""
        how = "greedy" if self.temperature == 0 else f"t{self.temperature:g}"
        times = f"-x{self.samples}" if self.samples > 1 else ""
        return f"step-{self.step:06d}-{self.split}-{how}{times}"


@dataclass(frozen=True)
class Evaluation:
    """Success by task, in the order of the tasks; `successes[i]` of `plan.samples` attempts at task i.

    `worlds` are those of the tasks in a mixture, empty otherwise. `notices` say in which respects the
    policy was not sampled as the plan says, because its server refused to.
    """

    plan: EvaluationPlan
    task_ids: tuple[str, ...]
    successes: tuple[int, ...]
    families: tuple[str, ...]
    parts: Mapping[str, float]
    failed: int
    worlds: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Mean success over tasks and attempts."""
        return sum(self.successes) / (len(self.successes) * self.plan.samples)

    @property
    def interval(self) -> Interval:
        """95 %: Wilson for one attempt a task, a bootstrap over tasks for several.

        From 0 to 1 for several attempts at one task, which say nothing about other tasks.
        """
        return self._interval(self.successes)

    def _interval(self, successes: Sequence[int]) -> Interval:
        if self.plan.samples == 1:
            return wilson(sum(successes), len(successes))
        if len(successes) == 1:
            return Interval(0.0, 1.0)
        shares = [s / self.plan.samples for s in successes]
        return bootstrap_mean(shares, seed=self.plan.seed).interval

    @property
    def detectable(self) -> float:
        """The smallest difference to a run over other tasks that would be seen (80 % power, 5 %)."""
        num, samples = len(self.successes), self.plan.samples
        rate = smoothed(sum(self.successes) / samples, num)
        within = sum(s * (samples - s) for s in self.successes) / (samples * samples * num)
        return detectable_difference(2 * max(rate * (1 - rate) - within, 0.0), num)

    def by_world(self) -> dict[str, WorldResult]:
        """Success in each world of a mixture, in the order of the tasks; empty for a single world."""
        counts: dict[str, list[int]] = {}
        for world, count in zip(self.worlds, self.successes, strict=bool(self.worlds)):
            counts.setdefault(world, []).append(count)
        samples = self.plan.samples
        return {
            world: WorldResult(sum(c) / (len(c) * samples), len(c), self._interval(c)) for world, c in counts.items()
        }

    @property
    def macro(self) -> float:
        """The mean of the worlds' success rates, each counting the same; of a single world its rate."""
        rates = [found.rate for found in self.by_world().values()]
        return sum(rates) / len(rates) if rates else self.rate

    def pass_at(self, k: int) -> float:
        """Unbiased pass@k, averaged over tasks; k at most the attempts."""
        return sum(pass_at_k(self.plan.samples, c, k) for c in self.successes) / len(self.successes)

    def pass_hat(self, k: int) -> float:
        """pass^k: the chance that k attempts all succeed, averaged over tasks."""
        return sum(pass_hat_k(self.plan.samples, c, k) for c in self.successes) / len(self.successes)

    def by_family(self) -> dict[str, tuple[float, int]]:
        """Success rate and number of tasks of each family, in alphabetical order."""
        counts: dict[str, list[int]] = defaultdict(list)
        for family, count in zip(self.families, self.successes, strict=True):
            counts[family].append(count)
        samples = self.plan.samples
        return {f: (sum(c) / (len(c) * samples), len(c)) for f, c in sorted(counts.items())}

    def metrics(self) -> dict[str, float]:
        """The numbers of a training step's row."""
        prefix = f"eval/{self.plan.split}/{'greedy' if self.plan.temperature == 0 else 'sampled'}"
        found = {
            f"{prefix}/success": self.rate,
            f"{prefix}/low": self.interval.low,
            f"{prefix}/high": self.interval.high,
        } | {f"{prefix}/part/{name}": value for name, value in self.parts.items()}
        if self.worlds:
            found[f"{prefix}/macro"] = self.macro
        return found | {f"{prefix}/env/{name}": one.rate for name, one in self.by_world().items()}


def plans(config: Config, step: int, policy: str = "") -> list[EvaluationPlan]:
    """What is evaluated before and after training, and by `ludus eval`: each split at each temperature."""
    settings, conditions = config.evaluation, Conditions.of(config)
    return [
        EvaluationPlan(split, settings.tasks, settings.samples, temperature, config.run.seed, step, policy, conditions)
        for split in settings.splits
        for temperature in settings.temperatures
    ]


def plan_during(config: Config, step: int) -> EvaluationPlan:
    """What is evaluated between the steps of training."""
    settings = config.evaluation
    return EvaluationPlan(
        split=settings.split_during,
        num_tasks=settings.tasks_during,
        samples=1,
        temperature=settings.temperatures[0],
        seed=config.run.seed,
        step=step,
        conditions=Conditions.of(config),
    )


def name_in_run(plan: EvaluationPlan, config: Config) -> str:
    """The name of an evaluation in its run: `NAME-during` where another plan of that step has its name."""
    taken = any(other.name == plan.name and other != plan for other in plans(config, plan.step))
    return f"{plan.name}-during" if taken else plan.name


def check_evaluation(config: Config, world: World) -> None:
    """Raise UserError for an empty split of a run's evaluations or an id that stands twice; log which splits
    have fewer tasks than `evaluation.tasks`."""
    settings = config.evaluation
    for split in settings.splits:
        check_split(world, split)
        if said := short_split(world, split, settings.tasks):
            log.info(said)
    check_split(world, settings.split_during)
    check_tasks("train", world.tasks("train"))


def check_split(world: World, split: str) -> None:
    """Raise UserError for a split without tasks, or with an id twice."""
    tasks = world.tasks(split)
    check_tasks(split, tasks)
    if not tasks:
        sizes = ", ".join(f"{name} {len(world.tasks(name))}" for name in world.splits)
        raise UserError(f"The split {split!r} is empty. Tasks by split: {sizes}.", "Choose another split.")


def short_split(world: World, split: str, num: int) -> str:
    """Return a sentence on a split of fewer than `num` tasks; empty if it has them."""
    size = len(world.tasks(split))
    if size >= num:
        return ""
    points = 100 * detectable_difference(0.5, size)  # 2 p (1 - p) at p = 0.5
    return (
        f"The split {split!r} has {size} tasks, fewer than evaluation.tasks = {num}: all are evaluated. The "
        f"smallest difference that they can show is {points:.1f} points, at 50 % success."
    )


async def evaluate(
    scheduler: Scheduler, tasks: Sequence[Task], plan: EvaluationPlan, on_done: Callable[[Episode], None] | None = None
) -> tuple[Evaluation, list[Episode]]:
    """Play each task `plan.samples` times; gives the result and the episodes.

    An episode that the infrastructure failed for good counts as no success, and in `failed`.
    """
    check_split(scheduler.world, plan.split)
    chosen = tasks[: plan.num_tasks]
    jobs = [
        RolloutRequest(RolloutKey(plan.step, task.id, sample), task)
        for task in chosen
        for sample in range(plan.samples)
    ]
    episodes = await scheduler.run(jobs, on_done)
    for episode in episodes:
        if episode.trajectory.failure is None:  # evaluation trains nothing: dropped, for that reason
            scheduler.ledger.finish(episode.key, RolloutOutcome.DROPPED, "evaluation")
    scheduler.ledger.close(plan.step)
    return summarise(plan, chosen, [e.trajectory for e in episodes], scheduler.world.rewards), episodes


def summarise(
    plan: EvaluationPlan, tasks: Sequence[Task], trajectories: Sequence[Trajectory], rewards: Sequence[Reward]
) -> Evaluation:
    """Count successes by task."""
    counts = dict.fromkeys((task.id for task in tasks), 0)
    for trajectory in trajectories:
        counts[trajectory.task_id] += success(rewards, trajectory)
    world_of = {task.id: task.tags[WORLD_TAG] for task in tasks if WORLD_TAG in task.tags}
    parts: dict[str, float] = {}
    for part in rewards:
        judged = [t for t in trajectories if part.world in ("", world_of.get(t.task_id))]
        if judged:
            parts[part.name] = sum(t.rewards.get(part.name, 0.0) for t in judged) / len(judged)
    return Evaluation(
        plan=plan,
        task_ids=tuple(counts),
        successes=tuple(counts.values()),
        families=tuple(task.tags.get("family", task.tags.get(WORLD_TAG, "all")) for task in tasks),
        parts=parts,
        failed=sum(t.stop_reason is StopReason.FAILED for t in trajectories),
        worlds=tuple(world_of[task_id] for task_id in counts) if world_of else (),
    )


def save_evaluation(folder: Path, result: Evaluation, episodes: Sequence[Episode], name: str | None = None) -> Path:
    """Write `NAME.json` (the result) and `NAME.jsonl.gz` (the rollouts); gives the former's path.

    The name is the plan's own unless another is given.
    """
    path = folder / f"{name or result.plan.name}.json"
    data = {
        "plan": asdict(result.plan),
        "success": result.rate,
        "interval": [result.interval.low, result.interval.high],
        "parts": dict(result.parts),
        "failed": result.failed,
        "by_family": {family: list(pair) for family, pair in result.by_family().items()},
        "tasks": [
            {"id": task_id, "family": family, "successes": count}
            for task_id, family, count in zip(result.task_ids, result.families, result.successes, strict=True)
        ],
    }
    if result.worlds:
        data |= _worlds_data(result)
    if result.notices:
        data["notices"] = list(result.notices)
    records = [_record(episode) for episode in episodes]
    write_rollouts(path.with_suffix(".jsonl.gz"), records)
    with replaced_file(path) as file:
        file.write((json.dumps(data, indent=1) + "\n").encode())
    return path


def _worlds_data(result: Evaluation) -> dict[str, object]:
    """What the file of an evaluation in a mixture has more."""
    by_world = {name: [one.rate, one.num_tasks] for name, one in result.by_world().items()}
    return {"macro": result.macro, "by_world": by_world, "worlds": list(result.worlds)}


def load_evaluation(path: Path) -> Evaluation:
    """Read what `save_evaluation` wrote. Raises UserError for another kind of file."""
    try:
        data = json.loads(path.read_text("utf-8"))
        tasks = data["tasks"]
        return Evaluation(
            plan=_plan(data["plan"]),
            task_ids=tuple(task["id"] for task in tasks),
            successes=tuple(task["successes"] for task in tasks),
            families=tuple(task["family"] for task in tasks),
            parts=data["parts"],
            failed=data["failed"],
            worlds=tuple(data.get("worlds", ())),
            notices=tuple(data.get("notices", ())),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not an evaluation: {error}.", "Give a file that `ludus eval` wrote.") from error


def _plan(data: Mapping[str, Any]) -> EvaluationPlan:
    conditions = data.get("conditions")
    return EvaluationPlan(**{**data, "conditions": Conditions(**conditions) if conditions else None})


def _record(episode: Episode) -> RolloutRecord:
    failure = episode.trajectory.failure
    return RolloutRecord(
        step=episode.key.step,
        group=episode.task.id,
        outcome=RolloutOutcome.DROPPED if failure is None else RolloutOutcome.FAILED,
        reason="evaluation" if failure is None else failure.part,
        trajectory=episode.trajectory,
        attempt=episode.key.attempt,
    )
