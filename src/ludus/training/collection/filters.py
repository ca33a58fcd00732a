"""Filters on the tasks and samples of a step, and the algorithm state that persists between steps.

GRESO (arXiv:2506.02177) skips tasks that are likely to have zero reward variance: a task whose last groups
had equal rewards is skipped with the probability of `GresoState`, and the next task of the order replaces it.

Staleness: the age of a token trained at step `s` is `s - 1` minus the version that sampled it: the number of
updates between the sampling weights and the weights being updated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from ludus.algorithms.advantages.running_baselines import RoleBaselines
from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.filters import GresoSettings, GresoState, Visit, variance_top, variance_top_p
from ludus.config.sections.staleness import StalenessConfig
from ludus.diagnostics.metrics import MEAN_AGE
from ludus.envs.base import TaskSequence
from ludus.rollout.ledger import RolloutOutcome
from ludus.rollout.scheduler import Episode
from ludus.training.batches.rows import new_actions
from ludus.training.credit.advantages import (
    Estimates,
    TrainingSample,
    compared_rewards,
    role_of,
    varied_groups,
    with_estimates,
)
from ludus.types import WORLD_TAG, Task, Trajectory


@dataclass(frozen=True, slots=True)
class AlgorithmState:
    """`averages`: moving average of rewards per role (`rae`).

    `greso` is the state of GRESO and `position` its place in the task order. `initial_entropy` is the
    policy's mean entropy on the first batch, nats per token (`gtpo`). `owed` are tasks of past steps whose
    groups were not trained, since the run left asynchronous training.
    """

    averages: RoleBaselines = field(default_factory=RoleBaselines)
    greso: GresoState = field(default_factory=GresoState)
    position: int = 0
    initial_entropy: float | None = None
    untrained_tasks: tuple[str, ...] = ()

    @classmethod
    def start(cls, algorithm: Algorithm, text: str = "") -> AlgorithmState:
        """Restore the state from `to_json`, or create an empty one; `decay` is the algorithm's."""
        saved = json.loads(text) if text else {}
        averages = RoleBaselines.from_json(saved["averages"]) if "averages" in saved else RoleBaselines()
        decay = algorithm.number("advantage", "decay") if algorithm.advantage_spec.has(Need.ROLE_BASELINES) else 0.95
        greso = GresoState(**saved.get("greso", {}))
        entropy = saved.get("initial_entropy")
        untrained_tasks = tuple(map(str, saved.get("owed", ())))
        return cls(replace(averages, decay=decay), greso, saved.get("position", 0), entropy, untrained_tasks)

    def to_json(self) -> str:
        """Serialize the state to one line, as read by `start`."""
        greso = asdict(self.greso)
        parts = {"averages": self.averages.to_json(), "greso": greso, "position": self.position}
        if self.initial_entropy is not None:
            parts["initial_entropy"] = self.initial_entropy
        if self.untrained_tasks:
            parts["owed"] = list(self.untrained_tasks)
        return json.dumps(parts, sort_keys=True)


SETTINGS = GresoSettings()


@dataclass(frozen=True, slots=True)
class GresoTasks:
    """Tasks to sample, number of skipped tasks, and the state with its new place in the order."""

    tasks: tuple[Task, ...]
    skipped: int
    memory: AlgorithmState


@dataclass(frozen=True, slots=True)
class GresoDraw:
    """Inputs that determine the random draws of a step."""

    seed: int
    step: int


def choose_tasks(
    order: TaskSequence, num: int, memory: AlgorithmState, taken: Collection[str], draw: GresoDraw
) -> GresoTasks:
    """Return the next `num` tasks that are neither skipped nor in `taken`.

    Scans at most one epoch, or until it finds a task outside `taken`, which does not cover all tasks. If all
    are skipped, the first ones are returned, so that no step is empty.
    """
    seen, found, skipped = set(taken), list[Task](), list[Task]()
    position = memory.position
    end = position + len(order.tasks)
    while len(found) < num and position < end:
        (task,) = order.take(position, 1)
        position += 1
        if position == end and not (found or skipped) and task.id in seen:
            end += len(order.tasks)  # the same task can occur in two epochs
        if task.id in seen:
            continue
        seen.add(task.id)
        skips = memory.greso.skips(task.id, SETTINGS, seed=draw.seed, step=draw.step)
        (skipped if skips else found).append(task)
    if not found:
        found, skipped = skipped[:num], skipped[num:]
    return GresoTasks(tuple(found), len(skipped), replace(memory, position=position))


def record_greso_visits(
    memory: AlgorithmState, samples: Sequence[TrainingSample], success: str, algorithm: Algorithm
) -> AlgorithmState:
    """Return the state updated with the groups of a step. `success` names the outcome reward part.

    A zero-variance group is easy if all members solved the task. Partial groups are ignored.
    """
    compared = [sample for sample in samples if sample.advantages is not None]
    if not compared:
        return memory
    varied = varied_groups(compared, algorithm)
    visits: dict[str, Visit] = {}
    for sample in compared:
        task = sample.episode.task.id
        solved = sample.episode.trajectory.rewards.get(success, 0.0) >= 1
        before = visits.get(task, Visit(task, not varied[sample.group], easy=True))
        visits[task] = replace(before, easy=before.easy and solved)
    return replace(memory, greso=memory.greso.update(list(visits.values()), SETTINGS))


def greso_metrics(memory: AlgorithmState, skipped: int) -> dict[str, float]:
    """Return the number of skipped tasks and the current skip probabilities."""
    return {"greso/skipped": float(skipped), "greso/p_easy": memory.greso.p_easy, "greso/p_hard": memory.greso.p_hard}


def filter_batch(samples: Sequence[TrainingSample], algorithm: Algorithm, max_length: int) -> list[TrainingSample]:
    """Return the samples after the variance filter, with advantages recomputed over the kept groups."""
    kept = filter_low_variance(samples, algorithm)
    if not any(sample.advantages is not None for sample in kept):
        return kept
    return with_estimates(kept, algorithm, max_length, Estimates())


def filter_low_variance(samples: Sequence[TrainingSample], algorithm: Algorithm) -> list[TrainingSample]:
    """Drop the groups of least variance: StarPO-S keeps a fraction of groups, RAGEN-2 of total deviation.

    Dropped groups are excluded from all comparisons, also over the batch; an earlier drop reason is kept.
    """
    compared = [sample for sample in samples if sample.advantages is not None]
    if not algorithm.filters_groups or not compared:
        return list(samples)
    rewards, groups = compared_rewards(compared, algorithm)
    keeps = variance_top_p if algorithm.variance_filter == "top_p" else variance_top
    keep = keeps(rewards=rewards, group=groups, p=algorithm.top_variance_fraction).tolist()
    doomed = {group for group, kept in zip(groups, keep, strict=True) if not kept}
    return [_drop_sample(c) if c.advantages is not None and c.group in doomed else c for c in samples]


EMPTY_BATCHES = 5
"""Consecutive steps without a group after which the filter top_p ends the run (RAGEN-2)."""


@dataclass
class EmptyBatchGuard:
    """Count consecutive steps in which the filter top_p kept no group; stop after five."""

    algorithm: Algorithm
    _empty: int = field(default=0, init=False)

    def verdict(self, metrics: Mapping[str, float]) -> str:
        """Return the reason to stop after a step, or an empty string."""
        if self.algorithm.variance_filter != "top_p":
            return ""
        self._empty = 0 if metrics.get("ledger/trained", 0.0) else self._empty + 1
        if self._empty < EMPTY_BATCHES:
            return ""
        return f"algorithm.variance_filter = top_p kept no group in {self._empty} steps in a row."

    def recall(self, history: Sequence[Mapping[str, float]]) -> None:
        """Restore the count from the steps before a resume; it restarts at 0 after a stop."""
        for metrics in history:
            if self.verdict(metrics):
                self._empty = 0


def with_role_baselines(
    samples: Sequence[TrainingSample], environment: str, averages: RoleBaselines
) -> tuple[list[TrainingSample], RoleBaselines]:
    """Return the samples with their role's average as baseline, and the updated averages.

    In order, each compared trajectory reads the average before its own reward is added.
    """
    compared = [sample for sample in samples if sample.advantages is not None]
    tasks = [sample.episode.task for sample in compared]
    roles = [(task.tags.get(WORLD_TAG, environment), role_of(task)) for task in tasks]
    rewards = torch.tensor([c.episode.trajectory.reward for c in compared], dtype=torch.float64)
    read = iter(averages.read(roles, rewards).tolist())
    found = [c if c.advantages is None else replace(c, baseline=next(read)) for c in samples]
    return found, averages.updated(roles, rewards)


def _drop_sample(sample: TrainingSample) -> TrainingSample:
    if sample.outcome is RolloutOutcome.DROPPED:
        return replace(sample, advantages=None)
    return replace(sample, outcome=RolloutOutcome.DROPPED, reason="variance_top", advantages=None)


ESS = "is/ess"
"""Learner metric of the effective sample share."""
OVER_AGE = "over_age"
"""Mask reason of an episode whose tokens are all older than the bound."""


def ages(trajectory: Trajectory, step: int) -> list[int]:
    """Return the age of each action token at `step`."""
    return [step - 1 - version for s in trajectory.segments for version in s.versions]


def on_policy(samples: Sequence[TrainingSample], step: int) -> list[TrainingSample]:
    """Return the training samples whose tokens were all sampled by the weights that `step` updates."""
    trained = (sample for sample in samples if sample.outcome is RolloutOutcome.TRAINED and not sample.expert)
    return [sample for sample in trained if not any(ages(sample.episode.trajectory, step))]


def age_metrics(samples: Sequence[TrainingSample], step: int) -> dict[str, float]:
    """Return mean, maximum and histogram of the ages of trained tokens."""
    counts: Counter[int] = Counter()
    for sample in samples:
        if sample.outcome is RolloutOutcome.TRAINED and not sample.expert:
            actions = new_actions(sample.episode.trajectory)
            own = [step - 1 - version for action in actions for version in action.versions]
            trains = sample.trains or (True,) * len(own)
            counts.update(age for age, kept in zip(own, trains, strict=True) if kept)
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
    young = tuple(version >= oldest for version in versions)
    if sample.trains is not None:
        young = tuple(a and b for a, b in zip(young, sample.trains, strict=True))
    if all(young):
        return sample
    if not any(young):
        return replace(sample, outcome=RolloutOutcome.MASKED, reason=OVER_AGE)
    return replace(sample, trains=young)


def staleness_metrics(
    samples: Sequence[TrainingSample], step: int, config: StalenessConfig, ended: Sequence[Episode], success: str
) -> dict[str, float]:
    """Return token ages, and statistics of sampled and of trained episodes.

    `staleness/age_K` is the share of tokens of age K, replayed ones included. `staleness/over_age_tokens`
    counts tokens older than the bound, masked or replayed. `sampled/...` covers episodes that ended since the
    last step, `trained/...` those that train now, so that starvation of slow tasks is visible. Means over
    nothing are omitted.
    """
    own = [sample for sample in samples if not (sample.replayed or sample.expert)]
    trained = [sample.episode for sample in own if sample.outcome is RolloutOutcome.TRAINED]
    masked = [sample.episode for sample in own if sample.reason == OVER_AGE]
    bound, masks = config.max_staleness, config.on_stale == "mask"
    again = [c.episode for c in samples if c.replayed and c.outcome is RolloutOutcome.TRAINED]
    every = Counter(age for one in (*trained, *masked, *again) for age in ages(one.trajectory, step))
    late = sum(count for age, count in every.items() if age > bound)
    counts = {age: n for age, n in every.items() if not masks or age <= bound}
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


@dataclass
class EssGuard:
    """Stop the run if the effective sample share is too low for too many steps."""

    config: StalenessConfig
    _low: int = field(default=0, init=False)

    def warning(self, metrics: Mapping[str, float]) -> str:
        """Return a warning if this step's share is below the bound, otherwise an empty string."""
        share = metrics.get(ESS)
        if share is None:
            return ""
        if share >= self.config.min_ess:
            self._low = 0
            return ""
        self._low += 1
        return (
            f"the effective sample share is {share:.2f}, below staleness.min_ess = {self.config.min_ess:g}: "
            "rollouts are too far off-policy"
        )

    def recall(self, history: Sequence[Mapping[str, float]]) -> None:
        """Restore the count from the steps before a resume; it restarts at 0 after a stop."""
        for metrics in history:
            self.warning(metrics)
            if self.verdict:
                self._low = 0

    @property
    def verdict(self) -> str:
        """The reason to stop, or an empty string."""
        patience = self.config.ess_patience
        if not patience or self._low < patience:
            return ""
        return f"The effective sample share was below {self.config.min_ess:g} for {self._low} steps in a row."
