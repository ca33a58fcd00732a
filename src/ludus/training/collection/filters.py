"""Filters on the tasks and samples of a step, and the algorithm state that persists between steps.

GRESO (arXiv:2506.02177) skips tasks that probably have zero reward variance, with the probability of `GresoState`.
Staleness: the age of a token trained at step `s` is `s - 1` minus the version that sampled it: the number of
updates between the sampling weights and the weights being updated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from statistics import fmean
from typing import NamedTuple

import torch
from pydantic import TypeAdapter

from ludus.algorithms.advantages.running_baselines import RoleBaselines
from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.curricula import CurriculumState
from ludus.algorithms.filters import AUTHORS_GRESO, GresoState, Visit, variance_top, variance_top_p
from ludus.config.schema import Config
from ludus.config.sections.curriculum import GresoConfig
from ludus.config.sections.training import StalenessConfig
from ludus.diagnostics.alarms import MEAN_AGE
from ludus.envs.base import TaskSequence
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.scheduler import Episode
from ludus.training.batches.rows import new_actions
from ludus.training.collection.exploration import ExplorationState
from ludus.training.credit.advantages import TrainingSample, any_of_group, compared_rewards, varied_groups
from ludus.training.credit.roles import role_of
from ludus.types import WORLD_TAG, Task, Trajectory, grouped

_NO_RESULTS = RoleBaselines(decay=0.98, initial=0.5)


@dataclass(frozen=True, slots=True)
class AlgorithmState:
    """State of an algorithm between steps. `averages`: moving average of rewards per role (`rae`).

    `greso` is the state of GRESO and `position` its place in the task order. `initial_entropy` is the
    policy's mean entropy on the first batch, nats per token (`gtpo`). `untrained_tasks` are earlier tasks whose
    groups were not trained because the run left asynchronous mode. `untrained_counts` are counts of
    `sample_metrics.count_untrained`. `opponents`: moving average of rewards against past versions. `curriculum` and
    `exploration` are the states of `training.curriculum` and `exploration`.
    """

    averages: RoleBaselines = field(default_factory=RoleBaselines)
    greso: GresoState = field(default_factory=GresoState)
    position: int = 0
    initial_entropy: float | None = None
    untrained_tasks: tuple[str, ...] = ()
    untrained_counts: Mapping[str, int] = field(default_factory=dict)
    opponents: RoleBaselines = _NO_RESULTS
    curriculum: CurriculumState = field(default_factory=CurriculumState)
    exploration: ExplorationState = field(default_factory=ExplorationState)

    @classmethod
    def start(cls, algorithm: Algorithm, text: str = "", rule: GresoConfig = AUTHORS_GRESO) -> AlgorithmState:
        """Restore the state from `to_json`, or create an empty one; `decay` is the algorithm's, `rule` GRESO's."""
        saved = json.loads(text) if text else {}
        averages = RoleBaselines.from_json(saved["averages"]) if "averages" in saved else RoleBaselines()
        decay = algorithm.number("advantage", "decay") if algorithm.advantage_spec.has(Need.ROLE_BASELINES) else 0.95
        return cls(
            averages=replace(averages, decay=decay),
            greso=GresoState(**saved.get("greso", {}), rule=rule),
            position=saved.get("position", 0),
            initial_entropy=saved.get("initial_entropy"),
            untrained_tasks=tuple(saved.get("owed", ())),
            untrained_counts=saved.get("untrained_counts", {}),
            opponents=RoleBaselines.from_json(saved["opponents"]) if "opponents" in saved else _NO_RESULTS,
            curriculum=TypeAdapter(CurriculumState).validate_python(saved.get("curriculum", {})),
            exploration=ExplorationState.of(saved.get("exploration", {})),
        )

    def to_json(self) -> str:
        greso = {"p_easy": self.greso.p_easy, "p_hard": self.greso.p_hard, "streaks": self.greso.streaks}
        parts = {"averages": self.averages.to_json(), "greso": greso, "position": self.position}
        optional = {
            "initial_entropy": self.initial_entropy,
            "owed": self.untrained_tasks or None,
            "untrained_counts": self.untrained_counts or None,
            "opponents": self.opponents.to_json() if self.opponents.means else None,
            "curriculum": asdict(self.curriculum) if self.curriculum != CurriculumState() else None,
            "exploration": asdict(self.exploration) if self.exploration != ExplorationState() else None,
        }
        parts |= {name: value for name, value in optional.items() if value is not None}
        return json.dumps(parts, sort_keys=True)


class ChosenTasks(NamedTuple):
    """Tasks to sample, number of skipped tasks, and the state with its new position in the order."""

    tasks: tuple[Task, ...]
    skipped: int
    state: AlgorithmState


def choose_tasks(
    order: TaskSequence, num: int, state: AlgorithmState, taken: Collection[str], *, seed: int, step: int
) -> ChosenTasks:
    """Return the next `num` tasks that are neither skipped nor in `taken`; `seed` and `step` determine the draws.

    Scans at most one epoch, or until it finds a task outside `taken`, which does not cover all tasks. If all
    are skipped, the first ones are returned, so that no step is empty.
    """
    seen, chosen, skipped = set(taken), list[Task](), list[Task]()
    position = state.position
    end = position + len(order.tasks)
    while len(chosen) < num and position < end:
        (task,) = order.take(position, 1)
        position += 1
        if position == end and not (chosen or skipped) and task.id in seen:
            end += len(order.tasks)  # the same task can occur in two epochs
        if task.id in seen:
            continue
        seen.add(task.id)
        skips = state.greso.skips(task.id, seed=seed, step=step)
        (skipped if skips else chosen).append(task)
    if not chosen:
        chosen, skipped = skipped[:num], skipped[num:]
    return ChosenTasks(tuple(chosen), len(skipped), replace(state, position=position))


def record_greso_visits(
    state: AlgorithmState, samples: Sequence[TrainingSample], success: str, algorithm: Algorithm, epoch: int = 0
) -> AlgorithmState:
    """Return the state after the groups of a step, by their mean of the part `success`.

    The base probabilities adapt after the first `epoch` tasks of the order.
    """
    compared = [sample for sample in samples if sample.advantages is not None]
    if not compared:
        return state
    varied = varied_groups(compared, algorithm)
    visits = []
    for number, group in grouped(compared, lambda one: one.group).items():
        solved = fmean(one.episode.trajectory.rewards.get(success, 0.0) for one in group)
        visits.append(Visit(group[0].episode.task.id, not varied[number], solved))
    return replace(state, greso=state.greso.update(visits, adapts=state.position >= epoch))


def filter_low_variance(samples: Sequence[TrainingSample], algorithm: Algorithm) -> list[TrainingSample]:
    """Drop groups of low variance: `variance_top` keeps a fraction of groups, `variance_top_p` of total deviation."""
    compared = [sample for sample in samples if sample.advantages is not None]
    if not algorithm.filters_groups or not compared:
        return list(samples)
    rewards, groups = compared_rewards(compared, algorithm)
    kept_groups = variance_top_p if algorithm.variance_filter == "top_p" else variance_top
    keep = kept_groups(rewards=rewards, group=groups, p=algorithm.top_variance_fraction).tolist()
    kept = any_of_group(compared, keep)
    return [c if c.advantages is None or kept[c.group] else _drop_sample(c) for c in samples]


def with_role_baselines(
    samples: Sequence[TrainingSample], environment: str, averages: RoleBaselines
) -> tuple[list[TrainingSample], RoleBaselines]:
    """Return the samples with the averages of their roles before them as baselines, and the updated averages."""
    roles: list[tuple[str, str]] = []
    rewards: list[float] = []
    counts = [0] * len(samples)
    for i, sample in enumerate(samples):
        if sample.advantages is not None:
            task, trajectory = sample.episode.task, sample.episode.trajectory
            paths = trajectory.paths() if trajectory.agent_rewards else []
            names = [path.role for path in paths] or [role_of(task)]
            roles += [(task.tags.get(WORLD_TAG, environment), name) for name in names]
            rewards += [path.trajectory.reward for path in paths] or [trajectory.reward]
            counts[i] = len(names)
    table = torch.tensor(rewards, dtype=torch.float64)
    read = iter(averages.read(roles, table).tolist())
    updated = [
        replace(one, baselines=tuple(islice(read, count))) if count else one
        for one, count in zip(samples, counts, strict=True)
    ]
    return updated, averages.updated(roles, table)


def _drop_sample(sample: TrainingSample) -> TrainingSample:
    if sample.outcome is RolloutOutcome.DROPPED:
        return replace(sample, advantages=None)
    return replace(sample, outcome=RolloutOutcome.DROPPED, reason="variance_top", advantages=None)


ESS = "is/ess"
"""Learner metric of the effective sample size."""
OVER_AGE = "over_age"
"""Mask reason of an episode whose tokens are all older than the bound."""


def ages(trajectory: Trajectory, step: int) -> list[int]:
    """Return the age of each action token at `step`."""
    return [step - 1 - version for s in trajectory.segments for version in s.versions]


def age_metrics(samples: Sequence[TrainingSample], step: int) -> dict[str, float]:
    """Return mean, maximum and histogram of the ages of trained tokens."""
    counts: Counter[int] = Counter()
    for sample in samples:
        if sample.outcome is RolloutOutcome.TRAINED and not sample.expert:
            actions = new_actions(sample.episode.trajectory)
            token_ages = [step - 1 - version for action in actions for version in action.versions]
            trains = sample.trains or (True,) * len(token_ages)
            counts.update(age for age, trained in zip(token_ages, trains, strict=True) if trained)
    return _age_histogram(counts, max(counts, default=0))


def _age_histogram(counts: Mapping[int, int], most: int) -> dict[str, float]:
    """Return mean and maximum of ages weighted by token counts, and the share of each age up to `most`."""
    total = sum(counts.values())
    shares = {f"staleness/age_{age}": counts.get(age, 0) / max(total, 1) for age in range(most + 1)}
    mean = sum(age * n for age, n in counts.items()) / total if total else 0.0
    return {MEAN_AGE: mean, "staleness/max": float(max(counts, default=0))} | shares


def mask_over_age(samples: Sequence[TrainingSample], step: int, bound: int) -> list[TrainingSample]:
    """Mask tokens older than `bound`; mask the whole sample if no token is left."""
    return [
        _mask_old_tokens(sample, step - 1 - bound) if sample.outcome is RolloutOutcome.TRAINED else sample
        for sample in samples
    ]


def _mask_old_tokens(sample: TrainingSample, oldest: int) -> TrainingSample:
    """Mask tokens of versions before `oldest`; expert tokens have no version."""
    actions = new_actions(sample.episode.trajectory)
    versions = (v for action in actions for v in (action.versions or (oldest,) * len(action.tokens)))
    masked = sample.masked([version >= oldest for version in versions])
    trains = masked.trains or ()
    if all(trains):
        return sample
    return masked if any(trains) else replace(sample, outcome=RolloutOutcome.MASKED, reason=OVER_AGE)


def staleness_metrics(
    samples: Sequence[TrainingSample], step: int, config: StalenessConfig, ended: Sequence[Episode], success: str
) -> dict[str, float]:
    """Return token ages, and statistics of sampled and of trained episodes.

    `staleness/age_K` is the share of tokens of age K, including replayed ones. `staleness/over_age_tokens`
    counts tokens older than the bound, masked or replayed. `sampled/...` covers episodes that ended since the
    last step, `trained/...` those trained now, so that starvation of slow tasks is visible. Means over
    no episodes are omitted.
    """
    current = [sample for sample in samples if not (sample.replayed or sample.expert)]
    trained = [sample.episode for sample in current if sample.outcome is RolloutOutcome.TRAINED]
    masked = [sample.episode for sample in current if sample.reason == OVER_AGE]
    bound, masks = config.max_staleness, config.on_stale == "mask"
    replayed = [c.episode for c in samples if c.replayed and c.outcome is RolloutOutcome.TRAINED]
    sampled = Counter(age for one in (*trained, *masked, *replayed) for age in ages(one.trajectory, step))
    late = sum(count for age, count in sampled.items() if age > bound)
    counts = {age: n for age, n in sampled.items() if not masks or age <= bound}
    most = max(bound, config.replay.max_age if config.replay.share else 0)
    metrics = _age_histogram(counts, most) | {"staleness/over_age_tokens": float(late)}
    return metrics | _episode_metrics("sampled", ended, success) | _episode_metrics("trained", trained, success)


def _episode_metrics(name: str, episodes: Sequence[Episode], success: str) -> dict[str, float]:
    whole = [e.trajectory for e in episodes if e.trajectory.failure is None and not e.greedy]
    count = len(whole)
    if not count:
        return {f"{name}/episodes": 0.0}
    return {
        f"{name}/episodes": float(count),
        f"{name}/action_tokens": sum(t.num_action_tokens for t in whole) / count,
        f"{name}/turns": sum(t.num_turns for t in whole) / count,
        f"{name}/success": sum(t.rewards.get(success, 0.0) for t in whole) / count,
    }


EMPTY_BATCHES = 5
"""Consecutive steps without a group after which the filter top_p ends the run (RAGEN-2)."""


@dataclass
class StreakGuard:
    """Pause a run after `patience` steps in a row (0: never) for which `is_bad` is true, not counting those of None."""

    is_bad: Callable[[Mapping[str, float]], bool | None]
    patience: int
    reason: str
    remedy: str
    _count: int = field(default=0, init=False)

    def update(self, metrics: Mapping[str, float]) -> str:
        """Count a step; return the reason to pause, or an empty string."""
        bad = self.is_bad(metrics)
        if bad is not None:
            self._count = self._count + 1 if bad else 0
        return f"{self.reason} {self._count} steps in a row." if 0 < self.patience <= self._count else ""

    def restore(self, history: Sequence[Mapping[str, float]]) -> None:
        """Count the steps before a resume; the count restarts at 0 after a pause."""
        for metrics in history:
            if self.update(metrics):
                self._count = 0


def empty_batch_guard(algorithm: Algorithm) -> StreakGuard:
    """Return the guard against batches from which the filter top_p removes every group."""
    return StreakGuard(
        lambda metrics: not metrics.get("ledger/trained", 0.0),
        EMPTY_BATCHES if algorithm.variance_filter == "top_p" else 0,
        "algorithm.variance_filter = top_p kept no group for",
        "tasks that are sometimes solved, or a larger algorithm.group_size",
    )


def ess_guard(config: Config) -> StreakGuard:
    """Return the guard against effective sample sizes that stay below `staleness.min_ess`."""
    least = config.staleness.min_ess
    bound = "a lower staleness.max_staleness or " if config.training.streams else "a lower "
    return StreakGuard(
        lambda metrics: None if ESS not in metrics else metrics[ESS] < least,
        config.staleness.ess_patience,
        f"The effective sample size was below {least:g} for",
        f"{bound}training.learning_rate, or another staleness.min_ess",
    )


def ess_warning(metrics: Mapping[str, float], config: StalenessConfig) -> str:
    """Return a warning if the effective sample size of a step is below the bound, otherwise an empty string."""
    if metrics.get(ESS, config.min_ess) >= config.min_ess:
        return ""
    return (
        f"the effective sample size is {metrics[ESS]:.2f}, below staleness.min_ess = {config.min_ess:g}: "
        "rollouts are too far off-policy"
    )
