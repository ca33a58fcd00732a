"""Findings about a run (`ludus doctor RUN`).

Each check is a function of `RunData` that yields findings of one topic. Alarms of the metrics are findings too.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from operator import attrgetter
from typing import Final, Literal

from ludus.config.schema import Config
from ludus.diagnostics.alarms import alarms_by_step
from ludus.diagnostics.metrics import mean, std
from ludus.errors import UserError
from ludus.evaluation.evaluate import Evaluation
from ludus.evaluation.stats import PairedDifference, paired_difference
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.types import StopReason, ToolStatus, grouped

Severity = Literal["fault", "warn", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("fault", "warn", "note")
_RECENT: Final = 20
"""Steps whose metrics are averaged."""
_CUT: Final = (StopReason.TRUNCATED, StopReason.MAX_TOKENS)
_FEW_TASKS: Final = 20
_LOW_TEMPERATURE: Final = 0.3
_LARGE: Final = 0.5
"""Correlation, or share, above which a check reports."""


@dataclass(frozen=True)
class RunData:
    """Input of the checks. `records` are rollouts of the last steps, `rows` the metrics of all steps."""

    config: Config
    rows: Sequence[Mapping[str, float]]
    records: Sequence[RolloutRecord]
    evaluations: Sequence[Evaluation]

    @property
    def groups(self) -> list[list[RolloutRecord]]:
        """The finished rollouts by step and task."""
        finished = (record for record in self.records if record.outcome is not RolloutOutcome.FAILED)
        return list(grouped(finished, lambda record: (record.step, record.group)).values())

    def recent(self, name: str) -> list[float]:
        """Return the last values of a metric, at most `_RECENT`."""
        return [row[name] for row in self.rows if name in row][-_RECENT:]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run: its topic, severity, evidence and remedy.

    `explains` are topics of findings that this fault may cause, `follows_from` the topic of a fault that may cause it.
    """

    topic: str
    severity: Severity
    text: str
    remedy: str
    explains: Sequence[str] = ()
    follows_from: str = ""


def examine_run(run: RunData) -> list[Finding]:
    """Return all findings, the most severe first; findings that another fault may cause are last."""
    if not run.rows:
        raise UserError("The run has no finished step.", "Wait for its first step, or read its log.txt.")
    causes_first = (check_limits, check_agents, check_tools, check_loss, check_sampling, check_collapse, check_verifier)
    others = (check_reward, check_groups, check_failures, check_held_out, check_alarms)
    found: list[Finding] = []
    for one in (finding for check in (*causes_first, *others) for finding in check(run)):
        causes = (cause.topic for cause in found if one.topic in cause.explains)
        found.append(replace(one, follows_from=next(causes, "")))
    return sorted(found, key=lambda one: (bool(one.follows_from), SEVERITIES.index(one.severity)))


@cache
def _templates() -> Mapping[str, Finding]:
    found = tomllib.loads(resources.files(__package__).joinpath("findings.toml").read_text("utf-8"))
    return {name: Finding(**one) for name, one in found.items()}


def _finding(name: str, **values: object) -> Finding:
    """Return a finding of `findings.toml` with the values in its text."""
    template = _templates()[name]
    text, remedy = (part.format_map(values) for part in (template.text, template.remedy))
    return replace(template, text=text, remedy=remedy)


def check_limits(run: RunData) -> Iterator[Finding]:
    """Find token limits that truncate episodes from the first step on."""
    limits = run.config.rollout
    for reason, setting, limit in (
        (StopReason.TRUNCATED, "rollout.max_tokens_per_turn", limits.max_tokens_per_turn),
        (StopReason.MAX_TOKENS, "rollout.max_seq_len", limits.max_seq_len),
    ):
        share = mean(run.recent(f"episode/stop/{reason}"))
        if min(share, run.rows[0].get(f"episode/stop/{reason}", 0.0)) > _LARGE:
            yield _finding("short_limit", share=share, setting=setting, limit=limit)


def check_agents(run: RunData) -> Iterator[Finding]:
    """Find an agent function or program that fails in most rollouts."""
    if (share := mean(run.recent(f"episode/stop/{StopReason.AGENT_FAILED}"))) > _LARGE:
        yield _finding("failing_agent", share=share)


def check_tools(run: RunData) -> Iterator[Finding]:
    """Find tools whose calls all fail, with their most frequent error."""
    calls = (outcome for record in run.records for outcome in record.trajectory.outcomes)
    known = (outcome for outcome in calls if outcome.status is not ToolStatus.MALFORMED)
    for tool, outcomes in sorted(grouped(known, lambda outcome: outcome.tool).items()):
        if len(outcomes) >= 5 and all(outcome.status is not ToolStatus.OK for outcome in outcomes):
            errors = Counter(outcome.output.strip().partition("\n")[0][:120].rstrip(".") for outcome in outcomes)
            own = mean([outcome.status in (ToolStatus.RAISED, ToolStatus.TIMED_OUT) for outcome in outcomes]) > _LARGE
            name, error = "broken_tool" if own else "wrong_calls", errors.most_common(1)[0][0]
            yield _finding(name, tool=tool, num=len(outcomes), error=error, env=run.config.env.name)


def check_collapse(run: RunData) -> Iterator[Finding]:
    """Find a fall of the training success to a quarter or less without recovery."""
    rows = [row for row in run.rows if "success/mean" in row]
    success = [row["success/mean"] for row in rows]
    falls = [(mean(success[max(0, at - 3) : at]), mean(success[at:]), at) for at in range(1, len(rows) - 4)]
    before, after, at = max(falls, key=lambda fall: fall[0] - fall[1], default=(0.0, 0.0, 0))
    if before < 0.1 or after > before / 4:
        return

    def change(metric: str) -> tuple[float, float]:
        old, new = (mean([row[metric] for row in part if metric in row]) for part in (rows[:at], rows[at:]))
        return old, new

    entropy, tokens, reward = map(change, ("policy/sampled_entropy", "length/total_tokens/mean", "reward/mean"))
    numbers = {"before": before, "after": after, "step": at, "entropy": entropy, "tokens": tokens, "reward": reward}
    if reward[1] <= 0.9 * reward[0] or reward[0] <= 0:
        yield _finding("destroyed_policy", **numbers, rate=run.config.training.learning_rate)
        return
    parts = {name: change(f"reward/{name}") for record in run.records for name in record.trajectory.rewards}
    rises = {name: new - old for name, (old, new) in parts.items()}
    most = max(rises, key=lambda name: rises[name], default="")
    risen = "; its part {} rose from {:.3g} to {:.3g}".format(most, *parts[most]) if rises.get(most, 0.0) > 0 else ""
    yield _finding("gamed_reward", **numbers, risen=risen)


def check_verifier(run: RunData) -> Iterator[Finding]:
    """Check whether no task is solved although episodes end with answers."""
    answered = mean(run.recent("episode/stop/answered"))
    if answered < _LARGE or any(row.get("success/mean", 1.0) for row in run.rows):
        return
    parts: dict[str, list[float]] = defaultdict(list)
    for record in run.records:
        for name, value in [*record.trajectory.rewards.items()][1:]:
            parts[name].append(value)
    close = ", ".join(f"{name} {mean(values):.2f}" for name, values in sorted(parts.items()) if mean(values) > 0.1)
    best = max(run.records, key=lambda record: sum(record.trajectory.rewards.values()), default=None)
    answer = best.trajectory.answer[:80] if best else ""
    name = "close_answers" if close else "unsolved"
    yield _finding(name, answered=answered, parts=close, answer=answer, env=run.config.env.name)


def check_reward(run: RunData) -> Iterator[Finding]:
    """Check shaping against the outcome, rewards of truncated and of long episodes, and constant parts."""
    for part in sorted({name for record in run.records for name in record.trajectory.rewards}):
        values = {record.trajectory.rewards.get(part, 0.0) for record in run.records}
        if len(values) == 1 and len(run.records) > 1:
            yield _finding("constant_part", part=part, value=values.pop())
    outcome = mean([std([*map(_first_part, group)]) for group in run.groups])
    shaping = mean([std([r.trajectory.reward - _first_part(r) for r in group]) for group in run.groups])
    if run.groups and shaping > max(outcome, 1e-3):
        yield _finding("large_shaping", shaping=shaping, outcome=outcome)
    cut = [r.trajectory.reward for r in run.records if r.trajectory.stop_reason in _CUT]
    ended = mean([r.trajectory.reward for r in run.records if r.trajectory.stop_reason is StopReason.ANSWERED])
    if len(cut) > 0.05 * len(run.records) and mean(cut) > 0.5 * max(ended, 0.1):
        yield _finding("rewarded_truncation", cut=mean(cut), ended=ended)
    value, own = (_correlation(run.groups, _length, other) for other in (_reward, _first_part))
    if value > max(_LARGE, own + 0.3):
        yield _finding("preferred_length", value=value, own=own)


def check_loss(run: RunData) -> Iterator[Finding]:
    """Check loss mask, sign of the advantages, learning rate, unchanged weights and gradient clipping."""
    if not run.config.training.mask_observations:
        yield _finding("trained_observations")
    if (value := _correlation(run.groups, _reward, lambda record: record.advantage or 0.0)) < -0.1:
        yield _finding(
            "opposite_advantages", value=value, advantage=run.config.algorithm.advantage or run.config.algorithm.preset
        )
    rates, norms = run.recent("optim/learning_rate"), run.recent("optim/grad_norm")
    if rates and not any(rates):
        yield _finding("no_learning_rate")
    elif len(kls := run.recent("policy/kl_reference")) >= 5 and max(map(abs, kls)) < 1e-9 and any(norms):
        yield _finding("unchanged_policy", steps=len(run.rows))
    limit = run.config.training.max_grad_norm
    if norms and sum(norm > limit for norm in norms) > 0.9 * len(norms):
        yield _finding("clipped_gradient", norm=mean(norms), limit=limit)


def check_sampling(run: RunData) -> Iterator[Finding]:
    """Check the weights of the engine, the temperature and identical attempts."""
    gap = max(run.recent("sync/probe_gap"), default=0.0)
    if gap > run.config.training.probe_tolerance(run.config.model.dtype):
        yield _finding("stale_engine", gap=gap)
    names = ("policy/entropy", "policy/sampled_entropy")
    both = [row for row in run.rows if all(name in row for name in names)][-_RECENT:]
    entropy, sampled = (mean([row[name] for row in both]) for name in names)
    on_policy = not any(run.recent("staleness/mean"))
    if both and on_policy and abs(sampled - entropy) > max(0.1, _LARGE * entropy):
        yield _finding("other_distribution", sampled=sampled, entropy=entropy)
    share = mean([len(set(map(_tokens, group))) == 1 for group in run.groups if len(group) > 1])
    if (temperature := run.config.rollout.temperature) > 0 and share > _LARGE:
        name = "low_temperature" if temperature < _LOW_TEMPERATURE else "identical_attempts"
        yield _finding(name, share=share, temperature=temperature)


def check_groups(run: RunData) -> Iterator[Finding]:
    """Check the members lost to filters, and the difficulty and number of tasks."""
    trained = [sum(r.outcome is RolloutOutcome.TRAINED for r in group) for group in run.groups]
    alone = mean([count == 1 for group, count in zip(run.groups, trained, strict=True) if count and len(group) > 1])
    if alone > 0.2:
        yield _finding("single_attempts", share=alone)
    for name in ("solve_none", "solve_all"):
        if (share := mean(run.recent(f"groups/{name}"))) > 0.8:
            yield _finding(name, share=share)
    tasks = {record.group for record in run.records}
    if 0 < len(tasks) < _FEW_TASKS < len(run.records):
        yield _finding("few_tasks", num=len(tasks))


def check_failures(run: RunData) -> Iterator[Finding]:
    """Check infrastructure failures, prompts that are too long, and steps without training."""
    started, failed = sum(run.recent("ledger/started")), sum(run.recent("ledger/failed"))
    if started and failed > 0.05 * started:
        reasons = Counter(r.reason for r in run.records if r.outcome is RolloutOutcome.FAILED)
        most = f", most often {reasons.most_common(1)[0][0]}" if reasons else ""
        yield _finding("infrastructure", share=failed / started, most=most)
    if (share := mean(run.recent("episode/stop/prompt_too_long"))) > 0.05:
        yield _finding("long_prompts", share=share)
    idle = [row for row in run.rows if "ledger/started" in row and not row.get("ledger/trained", 0.0)]
    if len(idle) > 0.2 * len(run.rows):
        yield _finding("idle_steps", num=len(idle), steps=len(run.rows))


def check_held_out(run: RunData) -> Iterator[Finding]:
    """Check for tasks in both training and evaluation, for overfitting and for a fall of held-out success."""
    trained = {record.group for record in run.records}
    splits = {task.partition(":")[0] for task in trained} & set(run.config.evaluation.splits)
    if splits:
        yield _finding("trained_split", splits=", ".join(sorted(splits)))
    elif shared := trained & {task for evaluation in run.evaluations for task in evaluation.task_ids}:
        yield _finding("shared_tasks", num=len(shared), task=min(shared))
    pairs = list(_before_and_after(run.evaluations))
    sampled = [after for _, after in pairs if after.plan.temperature == run.config.rollout.temperature]
    best = max((after.interval.high for after in sampled), default=1.0)
    if (gap := mean(run.recent("success/mean")) - best) > 0.1:
        yield _finding("overfitting", gap=gap)
    for before, after in pairs:
        plan, gain = after.plan, _gain(before, after)
        if gain is not None and gain.interval.high < 0:
            yield _finding("worse", split=plan.split, temperature=plan.temperature, difference=gain.difference)


def check_alarms(run: RunData) -> Iterator[Finding]:
    """Yield each alarm of the run, with the steps at which it was raised."""
    for alarm, steps in alarms_by_step(enumerate(run.rows, start=1), run.config.run.alarms.actions):
        rule = alarm.rule
        seen = f"at {len(steps)} of {len(run.rows)} steps, first at step {steps[0]}, last at step {steps[-1]}"
        text = f"{rule.cause}: {alarm.evidence} ({seen})"
        yield Finding(f"alarm {alarm.name}", "note" if rule.action == "note" else "warn", text, rule.remedy)


def _before_and_after(evaluations: Sequence[Evaluation]) -> Iterator[tuple[Evaluation, Evaluation]]:
    """Yield the first and the last evaluation of each split, temperature and number of samples."""
    ordered = sorted(evaluations, key=lambda one: one.plan.step)
    found = grouped(ordered, lambda one: (one.plan.split, one.plan.temperature, one.plan.samples))
    return ((own[0], own[-1]) for own in found.values() if len(own) > 1)


def _gain(before: Evaluation, after: Evaluation) -> PairedDifference | None:
    """Return the difference on common tasks, or None if there are fewer than two."""
    common = before.scores.keys() & after.scores.keys()
    a, b = ({task: one.scores[task] for task in common} for one in (after, before))
    return paired_difference(a, b) if len(common) > 1 else None


_reward, _length = attrgetter("trajectory.reward"), attrgetter("trajectory.num_action_tokens")


def _first_part(record: RolloutRecord) -> float:
    return next(iter(record.trajectory.rewards.values()), 0.0)


def _tokens(record: RolloutRecord) -> tuple[int, ...]:
    return tuple(token for segment in record.trajectory.segments for token in segment.tokens)


def _correlation(
    groups: Sequence[Sequence[RolloutRecord]], a: Callable[[RolloutRecord], float], b: Callable[[RolloutRecord], float]
) -> float:
    """Return the correlation of two values within groups; 0 if one of them is constant."""
    sides = [[[value(r) for r in group] for group in groups] for value in (a, b)]
    x, y = ([value - mean(own) for own in side for value in own] for side in sides)
    size = math.sqrt(math.fsum(v * v for v in x) * math.fsum(v * v for v in y))
    return math.fsum(v * w for v, w in zip(x, y, strict=True)) / size if size > 0 else 0.0
