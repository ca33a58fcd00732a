"""Whether RL can start: statistics of several attempts at each of some tasks, before training.

A group of attempts at one task is usable if it contains a success and a failure; otherwise all of its group-relative
advantages are 0. Lengths are in tokens, times in seconds. Functions on counts take `successes`, `[N]` integers out of
`attempts` per task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ludus.config.schema import Config
from ludus.evaluation.analysis.cost import num_turns
from ludus.evaluation.evaluate import Evaluation
from ludus.evaluation.stats import Interval, bootstrap_mean, constant_interval, pass_hat_k
from ludus.types import Failure, StopReason, ToolStatus, Trajectory

GROUP_SIZES: Final = (2, 4, 8, 16, 32)
MIN_USABLE: Final = 0.2
"""Share of usable groups below which RL should not start."""
GOOD_USABLE: Final = 0.5
"""Share of usable groups that a suggested group size reaches if possible."""
_RESAMPLES: Final = 2000
_CORRELATIONS: Final = np.linspace(0.0025, 0.9975, 200)
"""Candidate correlations between two attempts at a task."""
LIMITS: Final[Mapping[StopReason, str]] = {
    StopReason.TRUNCATED: "rollout.max_tokens_per_turn",
    StopReason.MAX_TOKENS: "rollout.max_seq_len",
    StopReason.PROMPT_TOO_LONG: "rollout.max_seq_len",
    StopReason.MAX_TURNS: "rollout.max_turns",
    StopReason.TOOL_ERRORS: "rollout.max_tool_errors",
    StopReason.TIMEOUT: "rollout.episode_timeout_s",
}
"""The setting of each limit."""
_BROKEN: Final = (ToolStatus.RAISED, ToolStatus.TIMED_OUT)
_UNPARSED: Final = (ToolStatus.MALFORMED, ToolStatus.BAD_ARGUMENTS)


@dataclass(frozen=True, slots=True)
class UsableShare:
    """Expected share of usable groups of `group_size` attempts, with a 95 % interval over tasks."""

    group_size: int
    share: float
    interval: Interval
    method: Literal["unbiased", "beta-binomial"]


def usable_share(n: int, c: int, k: int) -> float:
    """Return the probability that `k` of `n` attempts, `c` of them successful, include a success and a failure.

    `1 - (C(c, k) + C(n-c, k)) / C(n, k)`, unbiased for `1 - p^k - (1-p)^k`. ValueError for impossible counts.
    """
    same = pass_hat_k(n, c, k) + pass_hat_k(n, n - c, k)
    return 1 - same if k > 1 else 0.0


def beta_share(mean: float, correlation: float, k: int) -> float:
    """Return the probability that a group of `k` is usable if pass rates are beta distributed.

    `1 - B(a+k, b)/B(a, b) - B(a, b+k)/B(a, b)` with `a = mean s`, `b = (1-mean) s`, `s = 1/correlation - 1`.
    """
    if not 0 < mean < 1:
        return 0.0
    size = 1 / correlation - 1
    steps = np.arange(k)
    both = [math.exp(np.log((m * size + steps) / (size + steps)).sum()) for m in (mean, 1 - mean)]
    return max(0.0, 1 - sum(both))


def fit_correlation(histogram: NDArray[np.int64], mean: float) -> float:
    """Return the most likely beta-binomial correlation for `histogram` `[K+1]`, tasks with 0 to K successes."""
    from scipy.special import betaln

    num = len(histogram) - 1
    counts, sizes = np.arange(num + 1)[:, None], 1 / _CORRELATIONS - 1
    a, b = mean * sizes, (1 - mean) * sizes
    likelihood = histogram @ (betaln(counts + a, num - counts + b) - betaln(a, b))
    return float(_CORRELATIONS[int(likelihood.argmax())])


def usable_shares(successes: Sequence[int], attempts: int, seed: int = 0) -> list[UsableShare]:
    """Return the share of usable groups for each of `GROUP_SIZES`.

    Up to `attempts`, the mean of `usable_share` over tasks, which is unbiased. Above it, `beta_share` of a
    beta-binomial distribution with the observed mean and a fitted correlation: an extrapolation, which assumes that
    pass rates are beta distributed. Both intervals are percentile bootstraps over tasks. Raises ValueError for fewer
    than 2 tasks or attempts.
    """
    if len(successes) < 2 or attempts < 2:
        raise ValueError(f"need 2 tasks and 2 attempts or more, got {len(successes)} and {attempts}")
    found = []
    for size in (size for size in GROUP_SIZES if size <= attempts):
        estimate = bootstrap_mean([usable_share(attempts, c, size) for c in successes], seed=seed)
        found.append(UsableShare(size, estimate.mean, estimate.interval, "unbiased"))
    return found + _extrapolated(successes, attempts, seed)


def _extrapolated(successes: Sequence[int], attempts: int, seed: int) -> list[UsableShare]:
    sizes = [size for size in GROUP_SIZES if size > attempts]
    histogram = np.bincount(successes, minlength=attempts + 1)
    drawn = np.random.default_rng(seed).multinomial(len(successes), histogram / len(successes), _RESAMPLES)
    rows, counts = np.unique(np.vstack([histogram, drawn]), axis=0, return_inverse=True)
    fitted = []
    for row in rows:
        mean = float(row @ np.arange(attempts + 1)) / (attempts * int(row.sum()))
        correlation = fit_correlation(row, mean) if 0 < mean < 1 else 0.5
        fitted.append([beta_share(mean, correlation, size) for size in sizes])
    shares = np.array(fitted)[counts]
    found = []
    for values, size in zip(shares.T, sizes, strict=True):
        low, high = np.quantile(values[1:], (0.025, 0.975))
        interval = Interval(float(low), float(high))
        if np.count_nonzero(histogram) == 1:
            interval = constant_interval(np.full(len(successes), values[0]), Interval(0.0, 1.0)) or interval
        found.append(UsableShare(size, float(values[0]), interval, "beta-binomial"))
    return found


def suggested_group_size(shares: Sequence[UsableShare]) -> UsableShare:
    """Return the smallest size from 4 on with `GOOD_USABLE` usable groups, else the one with the largest share."""
    sizes = [one for one in shares if one.group_size >= 4]
    return next((one for one in sizes if one.share >= GOOD_USABLE), max(sizes, key=lambda one: one.share))


@dataclass(frozen=True, slots=True)
class SampledEpisodes:
    """Statistics of `num` episodes that took `seconds`.

    `lengths` has the median (`p50`), the 95th percentile and the maximum of each kind, and `sampled` and `tokens` the
    mean sampled and total tokens; None if the engine reports no tokens. `stopped` is the share cut by each limit, and
    `answered` that of episodes with an answer; episodes that failed in the infrastructure do not count for lengths and
    limits. `errors`, `unknown` and `unparsed` are shares of the tool calls. `dead` has the calls of each tool, 3 or
    more, of which none worked.
    """

    num: int
    seconds: float
    lengths: Mapping[str, Mapping[str, float] | None]
    sampled: float | None
    tokens: float | None
    stopped: Mapping[StopReason, float]
    answered: float
    calls_per_episode: float
    errors: float
    unknown: float
    unparsed: float
    dead: Mapping[str, int]

    def hours(self, episodes: float) -> float:
        """Return the proportional time, which is too long if these were too few for rollout.concurrency."""
        return episodes * self.seconds / self.num / 3600


def describe_episodes(trajectories: Sequence[Trajectory], seconds: float) -> SampledEpisodes:
    """Return the statistics of episodes that took `seconds`."""
    finished = [t for t in trajectories if t.failure is None]
    with_tokens = [t for t in finished if t.segments]
    sampled, total = [t.num_action_tokens for t in with_tokens], [len(t.token_ids) for t in with_tokens]
    prompts = [sum(len(s.tokens) for s in t.segments if s.kind == "prompt") for t in with_tokens]
    values = {"prompt": prompts, "response": sampled, "total": total, "turns": list(map(num_turns, finished))}
    stops = Counter(t.stop_reason for t in finished)
    calls = [outcome for t in trajectories for outcome in t.call_outcomes]
    status = Counter(outcome.status for outcome in calls)
    all_calls, broken = Counter(one.tool for one in calls), Counter(one.tool for one in calls if one.status in _BROKEN)
    num_calls = max(1, len(calls))
    return SampledEpisodes(
        num=len(trajectories),
        seconds=seconds,
        lengths={name: _spread(found) for name, found in values.items()},
        sampled=fmean(sampled) if sampled else None,
        tokens=fmean(total) if total else None,
        stopped={reason: stops[reason] / len(finished) for reason in LIMITS if stops[reason]},
        answered=sum(t.stop_reason is StopReason.ANSWERED for t in trajectories) / len(trajectories),
        calls_per_episode=len(calls) / len(trajectories),
        errors=(len(calls) - status[ToolStatus.OK]) / num_calls,
        unknown=status[ToolStatus.UNKNOWN_TOOL] / num_calls,
        unparsed=sum(status[one] for one in _UNPARSED) / num_calls,
        dead={name: num for name, num in sorted(all_calls.items()) if num > 2 and broken[name] == num},
    )


def _spread(values: Sequence[int]) -> dict[str, float] | None:
    quantiles = np.quantile(values, (0.5, 0.95, 1.0)).tolist() if values else ()
    return dict(zip(("p50", "p95", "maximum"), quantiles, strict=True)) if values else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """First action to take, and the reason."""

    answer: Literal["RL can start", "SFT first", "too easy", "fix the environment first"]
    reason: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """The statistics of a model in an environment."""

    evaluation: Evaluation
    shares: Sequence[UsableShare]
    episodes: SampledEpisodes
    verdict: Verdict

    @property
    def pass_rates(self) -> dict[str, int]:
        names = ("0 %", "1 to 49 %", "50 to 99 %", "100 %")
        num = self.evaluation.plan.samples
        bins = (0 if not c else 3 if c == num else 1 if 2 * c < num else 2 for c in self.evaluation.successes)
        count = Counter(bins)
        return {name: count[i] for i, name in enumerate(names)}


def readiness(evaluation: Evaluation, trajectories: Sequence[Trajectory], seconds: float) -> Readiness:
    """Return the statistics of an evaluation that took `seconds`, and the verdict."""
    shares = usable_shares(evaluation.successes, evaluation.plan.samples, evaluation.plan.seed)
    episodes = describe_episodes(trajectories, seconds)
    if fault := _environment_fault(episodes, [t.failure for t in trajectories if t.failure is not None]):
        verdict = Verdict("fix the environment first", fault)
    else:
        verdict = _verdict(evaluation.rate, suggested_group_size(shares), episodes)
    return Readiness(evaluation, shares, episodes, verdict)


def _verdict(rate: float, best: UsableShare, episodes: SampledEpisodes) -> Verdict:
    """Return the verdict on difficulty and format, in this order."""
    usable = f"{best.share:.0%} of the groups of {best.group_size} are usable"
    if best.share >= MIN_USABLE:
        return Verdict("RL can start", f"{usable}, and {MIN_USABLE:.0%} suffice.")
    if rate > 0.5:
        return Verdict("too easy", f"{rate:.0%} of the attempts succeed, and only {usable}.")
    reason = f"{rate:.1%} of the attempts succeed, and only {usable}."
    if (share := episodes.unparsed + episodes.unknown) > 0.5:
        reason = f"The model has not learned the format: {share:.0%} of its calls are invalid."
    elif episodes.answered < 0.5:
        cut = "".join(f", {v:.0%} stop at {LIMITS[k]}" for k, v in episodes.stopped.items() if v > 0.5)
        reason = f"The model has not learned the format: {episodes.answered:.0%} of the episodes are answered{cut}."
    return Verdict("SFT first", reason)


def _environment_fault(episodes: SampledEpisodes, failures: Sequence[Failure]) -> str:
    """Return the fault of environment or limits that prevents a measurement, or ""."""
    if len(failures) > 0.2 * episodes.num:
        parts = ", ".join(sorted({one.part for one in failures}))
        share = len(failures) / episodes.num
        return f"{share:.0%} of the episodes fail in the infrastructure ({parts}): {failures[0].error}"
    if episodes.dead:
        names = ", ".join(f"{name} ({calls} calls)" for name, calls in episodes.dead.items())
        return f"No call of these tools works: {names}."
    if (share := episodes.stopped.get(StopReason.PROMPT_TOO_LONG, 0.0)) > 0.2:
        return f"{share:.0%} of the prompts do not fit; raise {LIMITS[StopReason.PROMPT_TOO_LONG]}."
    return ""


def suggested_settings(found: Readiness, config: Config) -> dict[str, int]:
    """Return settings for RL: group size, prompts per step for the recipe's number of episodes, and limits.

    Token limits that cut more than 5 % of the episodes are doubled; limits of turns may be part of the task.
    """
    size = suggested_group_size(found.shares).group_size
    episodes = config.algorithm.group_size * config.training.prompts_per_step
    settings = {"algorithm.group_size": size, "training.prompts_per_step": max(1, round(episodes / size))}
    for name in (LIMITS[reason] for reason, share in found.episodes.stopped.items() if share > 0.05):
        if name in ("rollout.max_tokens_per_turn", "rollout.max_seq_len"):
            settings[name] = 2 * config.rollout.model_dump()[name.removeprefix("rollout.")]
    return settings


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way to improve the success: bounds of the gain in success, hours and cost; None is unknown."""

    name: str
    gain_low: float | None
    gain_high: float | None
    hours: float | None
    cost: float | None
    reason: str


@dataclass(frozen=True)
class PromptGains:
    """Intervals of the gain in success by other prompts, None if not measured; `episodes` of the prompt search."""

    few_shot: Interval | None = None
    optimised: Interval | None = None
    episodes: int = 0


def alternatives(
    found: Readiness, config: Config, learn_s: float | None, price: float | None, prompts: PromptGains
) -> list[Alternative]:
    """Return the ways to improve the success. `learn_s` is the learner's seconds of a step, `price` is per hour.

    The upper bound of RFT and RL is pass@K minus the success of single attempts: what the sampled attempts reach if the
    best one is chosen. Generalization between tasks can exceed it. Hours are of sampling at the measured speed, and of
    the learner. RFT trains on the successes of a round, each as long as an episode of a step of RL.
    """
    attempts, rft, rl, hours = found.evaluation.plan.samples, config.rft, config.training, found.episodes.hours
    reach = found.evaluation.pass_at(attempts) - found.evaluation.rate
    num = rl.prompts_per_step * config.algorithm.group_size
    kept = rft.tasks_per_round * min(rft.max_per_task or rft.samples, rft.samples * found.evaluation.rate)
    sampling = {"RFT": hours(rft.rounds * rft.tasks_per_round * rft.samples), "RL": hours(rl.steps * num)}
    examples = rft.epochs * kept if rft.steps is None else rft.steps * rft.batch_size
    trained = {"RFT": rft.rounds * examples, "RL": rl.steps * num}

    def way(name: str, low: float | None, high: float | None, needed_h: float | None, reason: str) -> Alternative:
        cost = None if needed_h is None or price is None else needed_h * price
        return Alternative(name, low, high, needed_h, cost, reason)

    ways = [way("prompt as is", 0.0, 0.0, 0.0, "the measured success")]
    for name, gain, needed_h, option in (
        ("few-shot prompt", prompts.few_shot, 0.0, "--few-shot"),
        ("optimised prompt", prompts.optimised, hours(prompts.episodes), "--optimise-prompt"),
    ):
        if gain is None:
            ways.append(way(name, None, None, None, f"not measured; add {option}"))
        else:
            ways.append(way(name, gain.low, gain.high, needed_h, "measured on held-out tasks, 95 % interval"))
    bound = f"at most pass@{attempts} of these tasks without generalization"
    learner = "learner unknown" if learn_s is None else "with the learner"
    for name, sampled_h in sampling.items():
        total_h = None if learn_s is None else sampled_h + trained[name] * learn_s / num / 3600
        ways.append(way(name, None, reach, total_h, f"{bound}; {sampled_h:.2g} h of sampling, {learner}"))
    return ways
