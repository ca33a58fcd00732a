"""Measure held-out success: one code path during training, offline, and against an endpoint."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import count as numbers_from
from itertools import product, starmap
from pathlib import Path
from typing import Literal

from ludus.config.schema import Config
from ludus.envs.base import World, check_tasks
from ludus.errors import UserError
from ludus.evaluation import stats
from ludus.evaluation.analysis.cost import EvaluationCost
from ludus.evaluation.stats import Interval, detectable_difference, smoothed, wilson
from ludus.rewards.base import Reward, success
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, replaced_file, rollout_line, write_rollouts
from ludus.rollouts.scheduler import Episode, RolloutRequest, Scheduler
from ludus.types import WORLD_TAG, StopReason, Task, Trajectory, grouped

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The world, its settings as JSON text with sorted keys, and the settings of the section `rollout`."""

    world: str
    world_settings: str
    rendering: str
    tool_parser: str
    top_p: float
    top_k: int
    max_turns: int
    max_tokens_per_turn: int
    max_seq_len: int
    max_tool_errors: int
    max_tool_output: int
    min_p: float = 0.0
    guided_tools: bool = False
    hide_tools: bool = False

    @classmethod
    def of(cls, config: Config) -> Conditions:
        env, names = config.env, {one.name for one in fields(cls)}
        without = {"weight", "weight_end"}  # sampling weights of training
        members = {name: one.model_dump(exclude=without, exclude_none=True) for name, one in env.mixture.items()}
        settings = json.dumps(members or env.settings, sort_keys=True, default=str)
        return cls(env.name, settings, env.rendering, env.tool_parser, **config.rollout.model_dump(include=names))


@dataclass(frozen=True, slots=True)
class SubsetResult:
    """Held-out success on some of the tasks: those of one world of a mixture, or with one value of a tag."""

    rate: float
    num_tasks: int
    interval: Interval


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The tasks of an evaluation, at most `num_tasks`, and their sampling; saved with the result.

    `step` is the training step of the weights; `policy` names the model (empty: the run's). `conditions` are None if
    unknown.
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
        return min(self.num_tasks, len(tasks)) * self.samples

    @property
    def name(self) -> str:
        """File name of the result, without suffix: step, split and sampling."""
        how = "greedy" if self.temperature == 0 else f"t{self.temperature:g}"
        times = f"-x{self.samples}" if self.samples > 1 else ""
        return f"step-{self.step:06d}-{self.split}-{how}{times}"


@dataclass(frozen=True)
class Evaluation:
    """Success by task, in task order; `successes[i]` is out of `plan.samples` attempts at task i.

    `worlds` holds the world of each task in a mixture, and is empty otherwise. `notices` lists the sampling parameters
    that the server rejected. `tags` holds the tags of each task; it and `stop_reasons`, the number of episodes by
    stop reason, are empty for files of older versions. Only `ludus eval` measures the `cost` and `best_of`, which
    `load_evaluation` does not read: `best_of` is the success (0 or 1) of the attempt at each task that a reward model
    selected, empty without one.
    """

    plan: EvaluationPlan
    task_ids: tuple[str, ...]
    successes: tuple[int, ...]
    families: tuple[str, ...]
    parts: Mapping[str, float]
    failed: int
    worlds: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    tags: tuple[Mapping[str, str], ...] = field(default=(), compare=False)
    stop_reasons: Mapping[str, int] = field(default_factory=dict, compare=False)
    cost: EvaluationCost | None = field(default=None, compare=False)
    best_of: tuple[int, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        """Return the main facts in one line: the fields have one entry per task."""
        found = f"{len(self.successes)} tasks, samples={self.plan.samples}, failed={self.failed}"
        if self.successes:
            found = f"success={self.rate:.4g} [{self.interval.low:.4g}, {self.interval.high:.4g}], {found}"
        return f"Evaluation({self.plan.name!r}, {found})"

    @property
    def rate(self) -> float:
        """Mean success over tasks and attempts."""
        return self._rate(self.successes)

    @cached_property
    def scores(self) -> dict[str, float]:
        """Share of solved attempts by task."""
        return {one: n / self.plan.samples for one, n in zip(self.task_ids, self.successes, strict=True)}

    @property
    def interval(self) -> Interval:
        """95 % interval: `wilson` for one attempt per task, else `clustered_interval` ([0, 1] for a single task)."""
        return self._interval(self.successes)

    def _interval(self, successes: Sequence[int]) -> Interval:
        if self.plan.samples == 1:
            return wilson(sum(successes), len(successes))
        return _task_interval([s / self.plan.samples for s in successes])

    @property
    def detectable(self) -> float:
        """Minimum detectable difference to a run over other tasks (80 % power, 5 % significance)."""
        num, samples = len(self.successes), self.plan.samples
        rate = smoothed(sum(self.successes) / samples, num)
        within = sum(s * (samples - s) for s in self.successes) / (samples * samples * num)
        return detectable_difference(2 * max(rate * (1 - rate) - within, 0.0), num)

    def by_world(self) -> dict[str, SubsetResult]:
        """Return the success in each world of a mixture, in the order of the tasks; empty for a single world."""
        return self._subsets(self.worlds) if self.worlds else {}

    def by_tag(self) -> dict[str, dict[str, SubsetResult]]:
        """Return the success by tag and value, both in alphabetical order; tasks without a tag do not count for it."""
        names = sorted({name for tags in self.tags for name in tags})
        return {name: dict(sorted(self._subsets([t.get(name) for t in self.tags]).items())) for name in names}

    def _subsets(self, keys: Sequence[str | None]) -> dict[str, SubsetResult]:
        counts: dict[str, list[int]] = {}
        for key, count in zip(keys, self.successes, strict=True):
            if key is not None:
                counts.setdefault(key, []).append(count)
        return {key: SubsetResult(self._rate(c), len(c), self._interval(c)) for key, c in counts.items()}

    def _rate(self, successes: Sequence[int]) -> float:
        return sum(successes) / (len(successes) * self.plan.samples)

    @property
    def macro(self) -> float:
        """Unweighted mean of the success rates of the worlds; for a single world its rate."""
        rates = [found.rate for found in self.by_world().values()]
        return sum(rates) / len(rates) if rates else self.rate

    def pass_at(self, k: int) -> float:
        """Return the unbiased pass@k, averaged over tasks; `k` is at most `plan.samples`."""
        return sum(stats.pass_at_k(self.plan.samples, c, k) for c in self.successes) / len(self.successes)

    def pass_hat(self, k: int) -> float:
        """Return pass^k, the probability that k attempts all succeed, averaged over tasks."""
        return sum(stats.pass_hat_k(self.plan.samples, c, k) for c in self.successes) / len(self.successes)

    @property
    def best_of_rate(self) -> tuple[float, Interval]:
        """The share of tasks whose selected attempt succeeds, with its 95 % interval; `best_of` must not be empty."""
        num = len(self.best_of)
        return sum(self.best_of) / num, wilson(sum(self.best_of), num)

    def attempt_intervals(self, k: int) -> tuple[Interval, Interval]:
        """Return the 95 % intervals of pass@k and pass^k over tasks; [0, 1] for a single task."""
        if self.plan.samples == 1:
            return self.interval, self.interval
        counts = [(self.plan.samples, c, k) for c in self.successes]
        at, hat = (_task_interval([*starmap(one, counts)]) for one in (stats.pass_at_k, stats.pass_hat_k))
        return at, hat

    def by_family(self) -> dict[str, tuple[float, int]]:
        """Return success rate and number of tasks of each family, in alphabetical order."""
        found = sorted(self._subsets(self.families).items())
        return {family: (one.rate, one.num_tasks) for family, one in found}

    def metrics(self) -> dict[str, float]:
        prefix = f"eval/{self.plan.split}/{'greedy' if self.plan.temperature == 0 else 'sampled'}"
        found = {"success": self.rate, "low": self.interval.low, "high": self.interval.high}
        found |= {f"part/{name}": value for name, value in self.parts.items()}
        if self.worlds:
            found["macro"] = self.macro
        found |= {f"env/{name}": one.rate for name, one in self.by_world().items()}
        return {f"{prefix}/{name}": value for name, value in found.items()}


def _task_interval(values: Sequence[float]) -> Interval:
    return Interval(0.0, 1.0) if len(values) == 1 else stats.clustered_interval(values)


def plans(config: Config, step: int, policy: str = "") -> list[EvaluationPlan]:
    """Return the plans of full evaluations and of `ludus eval`: each split at each temperature."""
    settings, conditions = config.evaluation, Conditions.of(config)
    rest = (config.run.seed, step, policy, conditions)
    pairs = product(settings.splits, settings.temperatures)
    return [EvaluationPlan(split, settings.tasks, settings.samples, heat, *rest) for split, heat in pairs]


def plans_before(config: Config) -> list[EvaluationPlan]:
    """Return the plans of the evaluation before training: those of `plans` on at most `evaluation.tasks_before`."""
    most = config.evaluation.tasks_before
    return [replace(plan, num_tasks=min(plan.num_tasks, most)) for plan in plans(config, 0)] if most else []


def plan_during(config: Config, step: int) -> EvaluationPlan:
    """Return the plan of the evaluations between training steps."""
    settings, conditions = config.evaluation, Conditions.of(config)
    sampling = (1, settings.temperatures[0], config.run.seed)
    return EvaluationPlan(settings.split_during, settings.tasks_during, *sampling, step, conditions=conditions)


def name_in_run(plan: EvaluationPlan, config: Config) -> str:
    """Return the file name of an evaluation in a run: `NAME-during` if another plan of the step has the same name."""
    full = plans(config, plan.step) if plan.step else plans_before(config)
    taken = any(other.name == plan.name and other != plan for other in full)
    return f"{plan.name}-during" if taken else plan.name


def check_evaluation(config: Config, world: World) -> None:
    """Raise UserError for an empty evaluation split or a duplicate task id; log smaller splits than configured."""
    settings = config.evaluation
    for split in settings.splits:
        check_split(world, split)
        if warning := short_split(world, split, settings.tasks):
            log.info(warning)
    check_split(world, settings.split_during, "evaluation.split_during")
    check_tasks("train", world.tasks("train"))


def check_split(world: World, split: str, setting: str = "evaluation.splits") -> None:
    """Raise UserError, naming `setting`, if a split does not exist, is empty, or has a duplicate id."""
    try:
        tasks = world.tasks(split)
    except UserError as error:
        raise UserError(f"{setting}: {error.message}", f"Set --{setting.removeprefix('--')}. {error.hint}") from error
    check_tasks(split, tasks)
    if not tasks:
        sizes = ", ".join(f"{name} {len(world.tasks(name))}" for name in world.splits)
        raise UserError(f"{setting}: the split {split!r} is empty. Tasks by split: {sizes}.", "Choose another split.")


def short_split(world: World, split: str, num: int) -> str:
    """Return a warning if a split has fewer than `num` tasks, else an empty string."""
    size = len(world.tasks(split))
    if size >= num:
        return ""
    points = 100 * detectable_difference(0.5, size)  # 2 p (1 - p) at p = 0.5
    fewer = f"The split {split!r} has {size} tasks, fewer than evaluation.tasks = {num}: all are evaluated."
    return f"{fewer} Their minimum detectable difference is {points:.1f} points at 50 % success."


async def evaluate(
    scheduler: Scheduler, tasks: Sequence[Task], plan: EvaluationPlan, on_done: Callable[[Episode], None] | None = None
) -> tuple[Evaluation, list[Episode]]:
    """Run `plan.samples` episodes per task; infrastructure failures count as unsuccessful and are in `failed`."""
    check_split(scheduler.world, plan.split)
    chosen = tasks[: plan.num_tasks]
    keys = ((RolloutKey(plan.step, task.id, sample), task) for task in chosen for sample in range(plan.samples))
    episodes = await scheduler.run([RolloutRequest(key, task) for key, task in keys], on_done)
    for episode in episodes:
        if episode.trajectory.failure is None:
            scheduler.ledger.finish(episode.key, RolloutOutcome.DROPPED, "evaluation")
    scheduler.ledger.close(plan.step)
    return summarise(plan, chosen, [e.trajectory for e in episodes], scheduler.world.rewards), episodes


def summarise(
    plan: EvaluationPlan, tasks: Sequence[Task], trajectories: Sequence[Trajectory], rewards: Sequence[Reward]
) -> Evaluation:
    """Return success and mean rewards over the trajectories of an evaluation."""
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
        tags=tuple(task.tags for task in tasks),
        stop_reasons=dict(Counter(t.stop_reason.value for t in trajectories).most_common()),
    )


def best_attempt(attempts: Sequence[Trajectory], scores: Sequence[float]) -> Trajectory:
    """Return the attempt with the largest score; ties go to the first."""
    return max(zip(attempts, scores, strict=True), key=lambda one: one[1])[0]


def successes_of_best(
    result: Evaluation, trajectories: Sequence[Trajectory], scores: Sequence[float], rewards: Sequence[Reward]
) -> tuple[int, ...]:
    """Return the success of the best attempt at each task of `result`."""
    by_task = grouped(zip(trajectories, scores, strict=True), lambda one: one[0].task_id)
    groups = (by_task[task_id] for task_id in result.task_ids)
    best = (best_attempt([one for one, _ in group], [score for _, score in group]) for group in groups)
    return tuple(int(success(rewards, one)) for one in best)


def save_evaluation(folder: Path, result: Evaluation, episodes: Sequence[Episode], name: str | None = None) -> Path:
    """Write `NAME.json` (result) and `NAME.jsonl.gz` (rollouts), named as the plan by default; return the JSON path."""
    path = folder / f"{name or result.plan.name}.json"
    save_episodes(path.with_suffix(".jsonl.gz"), episodes)
    with replaced_file(path) as file:
        file.write((json.dumps(evaluation_data(result), indent=1) + "\n").encode())
    return path


def save_episodes(path: Path, episodes: Sequence[Episode]) -> None:
    """Write the rollouts of an evaluation."""
    write_rollouts(path, [_record(episode) for episode in episodes])


def evaluation_data(result: Evaluation) -> dict[str, object]:
    """Return an evaluation as JSON data, the content of its file."""
    tags = map(dict, result.tags or ({},) * len(result.task_ids))
    tasks = zip(result.task_ids, result.families, result.successes, tags, strict=True)
    attempts = []
    for k in powers_of_two(result.plan.samples):
        at, hat = map(_bounds, result.attempt_intervals(k))
        attempts.append({"k": k, "pass_at": [result.pass_at(k), *at], "pass_hat": [result.pass_hat(k), *hat]})
    data: dict[str, object] = {
        "plan": asdict(result.plan),
        "success": result.rate,
        "interval": _bounds(result.interval),
        "parts": dict(result.parts),
        "failed": result.failed,
        "by_family": {family: list(pair) for family, pair in result.by_family().items()},
        "by_tag": {
            tag: {value: [one.rate, one.num_tasks, *_bounds(one.interval)] for value, one in found.items()}
            for tag, found in result.by_tag().items()
        },
        "attempts": attempts,
        "stop_reasons": dict(result.stop_reasons),
        "tasks": [dict(zip(("id", "family", "successes", "tags"), task, strict=True)) for task in tasks],
    }
    if result.worlds:
        by_world = {name: [one.rate, one.num_tasks] for name, one in result.by_world().items()}
        data |= {"macro": result.macro, "by_world": by_world, "worlds": list(result.worlds)}
    if result.notices:
        data["notices"] = list(result.notices)
    if result.best_of:
        rate, interval = result.best_of_rate
        data["best_of"] = {"n": result.plan.samples, "success": rate, "interval": _bounds(interval)}
    if result.cost is not None:
        per_task, per_solved_task = map(result.cost.per, (result.cost.num_tasks, result.cost.num_solved))
        data["cost"] = {"total": dict(result.cost.totals), "per_task": per_task, "per_solved_task": per_solved_task}
    return data


def _bounds(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def powers_of_two(last: int) -> list[int]:
    """Return 1, 2, 4, ... below `last`, and `last`."""
    return [*(2**i for i in range((last - 1).bit_length())), last]


def load_evaluation(path: Path) -> Evaluation:
    """Load an evaluation that `save_evaluation` wrote. Raises UserError for any other file."""
    try:
        data = json.loads(path.read_text("utf-8"))
        plan = data["plan"]
        conditions = plan.pop("conditions", None)
        plan = EvaluationPlan(**plan, conditions=Conditions(**conditions) if conditions else None)
        names = ("id", "successes", "family")
        ids, successes, families = (tuple(task[name] for task in data["tasks"]) for name in names)
        worlds, notices = (tuple(data.get(name, ())) for name in ("worlds", "notices"))
        tags = tuple(task.get("tags", {}) for task in data["tasks"])
        also = (worlds, notices, tags, data.get("stop_reasons", {}))
        return Evaluation(plan, ids, successes, families, data["parts"], data["failed"], *also)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not an evaluation: {error}.", "Name a file that `ludus eval` wrote.") from error


def _record(episode: Episode) -> RolloutRecord:
    key, failure = episode.key, episode.trajectory.failure
    ending = (RolloutOutcome.DROPPED, "evaluation") if failure is None else (RolloutOutcome.FAILED, failure.part)
    return RolloutRecord(key.step, episode.task.id, *ending, episode.trajectory, attempt=key.attempt)


@dataclass(frozen=True, slots=True)
class SavedEvaluation:
    """File of an evaluation, and an earlier evaluation of the same plan, if any.

    Verdicts: `new`: no earlier evaluation; `same`: numbers and rollouts are identical, and nothing was written;
    `differs`: `note` describes the difference, and the new evaluation was saved under another name.
    """

    path: Path
    verdict: Literal["new", "same", "differs"]
    earlier: Path | None = None
    note: str = ""


def save_or_compare(folder: Path, result: Evaluation, episodes: Sequence[Episode], label: str = "") -> SavedEvaluation:
    """Save an evaluation as PLAN or PLAN-LABEL, with the next free number if that file exists. Never overwrites.

    If that file has another number of tasks, the name is PLAN-200-tasks (for 200 tasks).
    """
    base = "-".join(filter(None, [result.plan.name, label]))
    first = folder / f"{base}.json"
    if first.exists() and load_evaluation(first).plan.num_tasks != result.plan.num_tasks:
        base += f"-{result.plan.num_tasks}-tasks"
    earlier, note = None, ""
    for number in numbers_from(1):
        name = base if number == 1 else f"{base}-{number}"
        path = folder / f"{name}.json"
        if not path.exists():
            save_evaluation(folder, result, episodes, name)
            return SavedEvaluation(path, "differs" if earlier else "new", earlier, note)
        stored = load_evaluation(path)
        conditions = stored.plan.conditions or result.plan.conditions
        if replace(stored.plan, conditions=conditions) == result.plan:
            earlier, note = path, _difference(path, stored, result, episodes)
            if not note:
                return SavedEvaluation(path, "same", path)
    raise AssertionError("unreachable")


def _difference(path: Path, stored: Evaluation, result: Evaluation, episodes: Sequence[Episode]) -> str:
    if replace(stored, plan=result.plan) != result:
        pairs = zip(stored.task_ids, stored.successes, result.successes, strict=True)
        changed = [task_id for task_id, before, now in pairs if before != now]
        first = f", the first is {changed[0]}" if changed else ""
        return f"success was {stored.rate:.4f} and is {result.rate:.4f}; {len(changed)} tasks differ{first}"
    file = path.with_suffix(".jsonl.gz")
    before = gzip.decompress(file.read_bytes()).decode().splitlines() if file.is_file() else []
    same = before == [rollout_line(_record(episode)) for episode in episodes]
    return "" if same else "success is the same, and the rollouts differ"
