"""Staleness of tokens: ages, masking, metrics and the ESS guard.

The age of a token trained at step `s` is `s - 1` minus the version that sampled it: the number of updates
between the sampling weights and the weights being updated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ludus.config.sections.staleness import StalenessConfig
from ludus.diagnostics.metrics import MEAN_AGE
from ludus.rollout.ledger import RolloutOutcome
from ludus.rollout.scheduler import Episode
from ludus.training.batches.trajectory_tree import new_actions
from ludus.training.credit.advantages import TrainingSample
from ludus.types import Trajectory

ESS = "is/ess"
"""Learner metric of the effective sample share."""
OVER_AGE = "over_age"
"""Mask reason of an episode whose tokens are all older than the bound."""


def ages(trajectory: Trajectory, step: int) -> list[int]:
    """Return the age of each action token at `step`."""
    return [step - 1 - version for s in trajectory.segments for version in s.versions]


def on_policy(credits: Sequence[TrainingSample], step: int) -> list[TrainingSample]:
    """Return the training samples whose tokens were all sampled by the weights that `step` updates."""
    trained = (credit for credit in credits if credit.outcome is RolloutOutcome.TRAINED and not credit.expert)
    return [credit for credit in trained if not any(ages(credit.episode.trajectory, step))]


def age_metrics(credits: Sequence[TrainingSample], step: int) -> dict[str, float]:
    """Return mean, maximum and histogram of the ages of trained tokens."""
    counted: Counter[int] = Counter()
    for credit in credits:
        if credit.outcome is RolloutOutcome.TRAINED and not credit.expert:
            actions = new_actions(credit.episode.trajectory)
            own = [step - 1 - version for action in actions for version in action.versions]
            trains = credit.trains or (True,) * len(own)
            counted.update(age for age, kept in zip(own, trains, strict=True) if kept)
    return _histogram(counted, max(counted, default=0))


def _histogram(counted: Mapping[int, int], most: int) -> dict[str, float]:
    """Return mean and maximum of ages weighted by token counts, and the share of each age up to `most`."""
    total = sum(counted.values())
    shares = {f"staleness/age_{age}": counted.get(age, 0) / max(total, 1) for age in range(most + 1)}
    mean = sum(age * n for age, n in counted.items()) / total if total else 0.0
    return {MEAN_AGE: mean, "staleness/max": float(max(counted, default=0))} | shares


def mask_over_age(credits: Sequence[TrainingSample], step: int, bound: int) -> list[TrainingSample]:
    """Mask tokens older than `bound`; mask the whole sample if no token is left."""
    return [
        _without_old(credit, step - 1 - bound) if credit.outcome is RolloutOutcome.TRAINED else credit
        for credit in credits
    ]


def _without_old(credit: TrainingSample, oldest: int) -> TrainingSample:
    """Mask tokens of versions before `oldest`; expert tokens have no version."""
    actions = new_actions(credit.episode.trajectory)
    versions = (v for action in actions for v in (action.versions or (oldest,) * len(action.tokens)))
    young = tuple(version >= oldest for version in versions)
    if credit.trains is not None:
        young = tuple(a and b for a, b in zip(young, credit.trains, strict=True))
    if all(young):
        return credit
    if not any(young):
        return replace(credit, outcome=RolloutOutcome.MASKED, reason=OVER_AGE)
    return replace(credit, trains=young)


def staleness_metrics(
    credits: Sequence[TrainingSample], step: int, config: StalenessConfig, ended: Sequence[Episode], success: str
) -> dict[str, float]:
    """Return token ages, and statistics of sampled and of trained episodes.

    `staleness/age_K` is the share of tokens of age K, replayed ones included. `staleness/over_age_tokens`
    counts tokens older than the bound, masked or replayed. `sampled/...` covers episodes that ended since the
    last step, `trained/...` those that train now, so that starvation of slow tasks is visible. Means over
    nothing are omitted.
    """
    own = [credit for credit in credits if not (credit.replayed or credit.expert)]
    trained = [credit.episode for credit in own if credit.outcome is RolloutOutcome.TRAINED]
    masked = [credit.episode for credit in own if credit.reason == OVER_AGE]
    bound, masks = config.max_staleness, config.on_stale == "mask"
    again = [c.episode for c in credits if c.replayed and c.outcome is RolloutOutcome.TRAINED]
    every = Counter(age for one in (*trained, *masked, *again) for age in ages(one.trajectory, step))
    late = sum(count for age, count in every.items() if age > bound)
    counted = {age: n for age, n in every.items() if not masks or age <= bound}
    most = max(bound, config.replay.max_age if config.replay.share else 0)
    metrics = _histogram(counted, most) | {"staleness/over_age_tokens": float(late)}
    return metrics | _compared("sampled", ended, success) | _compared("trained", trained, success)


def _compared(name: str, episodes: Sequence[Episode], success: str) -> dict[str, float]:
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
