"""Whether RL can start: statistics of several attempts at each of some tasks, before training.

A group of attempts at one task is usable if it contains a success and a failure; otherwise all of its group-relative
advantages are 0. Lengths are in tokens, times in seconds. Functions on counts take `successes`, `[N]` integers out of
`attempts` per task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ludus.config.schema import Config
from ludus.evaluation.evaluate import Evaluation
from ludus.evaluation.stats import Interval, bootstrap_mean, constant_interval, pass_hat_k
from ludus.types import StopReason, ToolStatus, Trajectory

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
"""The setting that lifts each limit."""
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
class Spread:
    """Median, 95th percentile and maximum."""

    p50: float
    p95: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread | None:
        return cls(*(float(q) for q in np.quantile(values, (0.5, 0.95, 1.0)))) if values else None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of episodes; tokens are None if the engine reports none. `stopped` is the share cut by each limit."""

    prompt: Spread | None
    response: Spread | None
    total: Spread | None
    turns: Spread | None
    stopped: Mapping[StopReason, float]


def lengths(trajectories: Sequence[Trajectory]) -> Lengths:
    """Return the lengths of episodes without those that failed in the infrastructure."""
    finished = [t for t in trajectories if t.failure is None]
    with_tokens = [t for t in finished if t.segments]
    prompts = [sum(len(s.tokens) for s in t.segments if s.kind == "prompt") for t in with_tokens]
    count = Counter(t.stop_reason for t in finished)
    return Lengths(
        Spread.of(prompts),
        Spread.of([t.num_action_tokens for t in with_tokens]),
        Spread.of([sum(len(s.tokens) for s in t.segments) for t in with_tokens]),
        Spread.of([num_turns(t) for t in finished]),
        {reason: count[reason] / len(finished) for reason in LIMITS if count[reason]},
    )


def num_turns(trajectory: Trajectory) -> int:
    """Return the number of sampled turns, also of a trajectory without tokens, where prompts contain none."""
    return trajectory.num_turns or sum(message["role"] == "assistant" for message in trajectory.messages)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tool calls per episode, shares of all calls, and the calls of each tool that failed in all of them (`dead`)."""

    calls_per_episode: float
    errors: float
    unknown: float
    unparsed: float
    dead: Mapping[str, int]


def tool_use(trajectories: Sequence[Trajectory]) -> ToolUse:
    """Return the statistics of the model's calls. A tool is dead after 3 calls without one that worked."""
    calls = [outcome for t in trajectories for outcome in t.call_outcomes]
    status = Counter(outcome.status for outcome in calls)
    total = max(1, len(calls))
    by_tool: dict[str, list[bool]] = {}
    for outcome in calls:
        by_tool.setdefault(outcome.tool, []).append(outcome.status in _BROKEN)
    return ToolUse(
        len(calls) / max(1, len(trajectories)),
        1 - status[ToolStatus.OK] / total if calls else 0.0,
        status[ToolStatus.UNKNOWN_TOOL] / total,
        sum(status[one] for one in _UNPARSED) / total,
        {name: len(broken) for name, broken in sorted(by_tool.items()) if len(broken) > 2 and all(broken)},
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured sampling: episodes, seconds, and sampled and total tokens per episode (None if unknown).

    Estimates are proportional, which overestimates the time if the episodes were too few for rollout.concurrency.
    """

    episodes: int
    seconds: float
    sampled: float | None
    tokens: float | None

    def hours(self, episodes: float) -> float:
        return episodes * self.seconds / self.episodes / 3600


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do first, and the reason."""

    answer: Literal["RL can start", "SFT first", "too easy", "fix the environment first"]
    reason: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """The statistics of a model in an environment."""

    evaluation: Evaluation
    shares: Sequence[UsableShare]
    lengths: Lengths
    tools: ToolUse
    speed: Speed
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
    length, tools = lengths(trajectories), tool_use(trajectories)
    tokens = [t for t in trajectories if t.segments]
    sampled, total = sum(t.num_action_tokens for t in tokens), sum(len(t.token_ids) for t in tokens)
    means = (sampled / len(tokens), total / len(tokens)) if tokens else (None, None)
    speed = Speed(len(trajectories), seconds, *means)
    found = Readiness(evaluation, shares, length, tools, speed, Verdict("RL can start", ""))
    return replace(found, verdict=judge(found, trajectories))


def judge(found: Readiness, trajectories: Sequence[Trajectory]) -> Verdict:
    """Return the verdict: environment, difficulty and format, in this order."""
    if fault := _environment_fault(found, trajectories):
        return Verdict("fix the environment first", fault)
    rate, best = found.evaluation.rate, suggested_group_size(found.shares)
    usable = f"{best.share:.0%} of the groups of {best.group_size} are usable"
    if best.share >= MIN_USABLE:
        return Verdict("RL can start", f"{usable}, and {MIN_USABLE:.0%} suffice.")
    if rate > 0.5:
        return Verdict("too easy", f"{rate:.0%} of the attempts succeed, and only {usable}.")
    answered = sum(t.stop_reason is StopReason.ANSWERED for t in trajectories) / len(trajectories)
    if (share := found.tools.unparsed + found.tools.unknown) > 0.5:
        return Verdict("SFT first", f"The model does not know the format: {share:.0%} of its calls are invalid.")
    if answered < 0.5:
        cut = "".join(f", {v:.0%} stop at {LIMITS[k]}" for k, v in found.lengths.stopped.items() if v > 0.5)
        answers = f"{answered:.0%} of the episodes are answered{cut}"
        return Verdict("SFT first", f"The model does not know the format: {answers}.")
    return Verdict("SFT first", f"{rate:.1%} of the attempts succeed, and only {usable}.")


def _environment_fault(found: Readiness, trajectories: Sequence[Trajectory]) -> str:
    """Return the fault of environment or limits that prevents a measurement, or ""."""
    failures = [t.failure for t in trajectories if t.failure is not None]
    if len(failures) > 0.2 * len(trajectories):
        parts = ", ".join(sorted({one.part for one in failures}))
        share = len(failures) / len(trajectories)
        return f"{share:.0%} of the episodes fail in the infrastructure ({parts}): {failures[0].error}"
    if found.tools.dead:
        names = ", ".join(f"{name} ({calls} calls)" for name, calls in found.tools.dead.items())
        return f"No call of these tools works: {names}."
    cut = found.lengths.stopped
    if (share := cut.get(StopReason.PROMPT_TOO_LONG, 0.0)) > 0.2:
        return f"{share:.0%} of the prompts do not fit; raise {LIMITS[StopReason.PROMPT_TOO_LONG]}."
    return ""


def suggested_settings(found: Readiness, config: Config) -> dict[str, int]:
    """Return settings for RL: group size, prompts per step for the recipe's number of episodes, and limits.

    Token limits that cut more than 5 % of the episodes are doubled; limits of turns may be part of the task.
    """
    size = suggested_group_size(found.shares).group_size
    episodes = config.algorithm.group_size * config.training.prompts_per_step
    settings = {"algorithm.group_size": size, "training.prompts_per_step": max(1, round(episodes / size))}
    rollout = config.rollout
    limits = {"max_tokens_per_turn": rollout.max_tokens_per_turn, "max_seq_len": rollout.max_seq_len}
    for name in (LIMITS[reason] for reason, share in found.lengths.stopped.items() if share > 0.05):
        if limit := limits.get(name.removeprefix("rollout.")):
            settings[name] = 2 * limit
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
    attempts = found.evaluation.plan.samples
    reach, rft, rl = found.evaluation.pass_at(attempts) - found.evaluation.rate, config.rft, config.training
    rft_h = found.speed.hours(rft.rounds * rft.tasks_per_round * rft.samples)
    rl_h = found.speed.hours(rl.steps * rl.prompts_per_step * config.algorithm.group_size)
    total_h = rft_all_h = None
    if learn_s is not None:
        total_h = rl_h + rl.steps * learn_s / 3600
        kept = rft.tasks_per_round * min(rft.max_per_task or rft.samples, rft.samples * found.evaluation.rate)
        episode_s = learn_s / (rl.prompts_per_step * config.algorithm.group_size)
        rft_all_h = rft_h + rft.rounds * rft.epochs * kept * episode_s / 3600
    bound = f"at most pass@{attempts} of these tasks without generalization"
    learner = "learner unknown" if learn_s is None else "with the learner"

    def priced(hours: float | None) -> float | None:
        return None if hours is None or price is None else hours * price

    def of_prompt(name: str, gain: Interval | None, hours: float | None, option: str) -> Alternative:
        if gain is None:
            return Alternative(name, None, None, None, None, f"not measured; add {option}")
        reason = "measured on held-out tasks, 95 % interval"
        return Alternative(name, gain.low, gain.high, hours, priced(hours), reason)

    return [
        Alternative("prompt as is", 0.0, 0.0, 0.0, priced(0.0), "the measured success"),
        of_prompt("few-shot prompt", prompts.few_shot, 0.0, "--few-shot"),
        of_prompt("optimised prompt", prompts.optimised, found.speed.hours(prompts.episodes), "--optimise-prompt"),
        Alternative("RFT", None, reach, rft_all_h, priced(rft_all_h), f"{bound}; {rft_h:.2g} h of sampling, {learner}"),
        Alternative("RL", None, reach, total_h, priced(total_h), f"{bound}; {rl_h:.2g} h of sampling, {learner}"),
    ]
