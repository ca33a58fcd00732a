"""Findings about a run, in the order in which an expert looks at it: `ludus doctor RUN`.

Each check is a function of `RunData` that yields findings of one topic. They read the configuration, the metrics of all
steps, the rollouts of the last steps and the evaluations; alarms of the metrics are among the findings.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean
from typing import Final, Literal

from ludus.config.schema import Config
from ludus.diagnostics.alarms import alarms_by_step
from ludus.errors import UserError
from ludus.evaluation.evaluate import Evaluation
from ludus.evaluation.stats import PairedDifference, paired_difference
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.types import StopReason, ToolStatus

Severity = Literal["fault", "warn", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("fault", "warn", "note")
_RECENT: Final = 20
"""Steps whose metrics are averaged."""
_CUT: Final = (StopReason.TRUNCATED, StopReason.MAX_TOKENS)
_FEW_TASKS: Final = 20
_LARGE: Final = 0.5
"""Correlation, or share, above which a check reports."""
_LOW_TEMPERATURE: Final = 0.3
_NO_SIGNAL: Final = {"groups", "failures", "reward", "verifier", "collapse"} | {
    f"alarm {name}"
    for name in ("equal_rewards", "zero_reward", "exploration_ended", "few_differences", "zero_gradient")
}
"""Topics of findings about groups with equal rewards."""
_DEGENERATE: Final = {
    "sampling",
    "held-out",
    "limits",
    "alarm truncation",
    "alarm repetition",
    "alarm uniform_failure",
} | {
    f"alarm {name}"
    for name in (
        *("success_drop", "held_out_drop", "kl_rate", "kl_jump", "entropy_explosion", "entropy_collapse"),
        *("gradient_spike", "length_explosion", "echo_trap", "echo_trap_early"),
    )
}
"""Topics of findings about a policy that produces no sensible text any more."""
CONSEQUENCES: Final[Mapping[str, set[str]]] = {
    "limits": _NO_SIGNAL | {"sampling", "alarm truncation", "alarm uniform_failure"},
    "tools": _NO_SIGNAL | {"alarm tool_errors", "alarm dead_tool", "alarm unused_results"},
    "temperature": _NO_SIGNAL | {"alarm entropy_collapse", "alarm few_strategies"},
    "verifier": _NO_SIGNAL,
    "advantages": _NO_SIGNAL | _DEGENERATE,
    "collapse": _NO_SIGNAL | _DEGENERATE,
}
"""Topics of the findings that a fault of a topic explains."""


@dataclass(frozen=True)
class RunData:
    """What the checks read. `records` are rollouts of the last steps, `rows` the metrics of all steps."""

    config: Config
    rows: Sequence[Mapping[str, float]]
    records: Sequence[RolloutRecord]
    evaluations: Sequence[Evaluation]

    @property
    def groups(self) -> list[list[RolloutRecord]]:
        """The finished rollouts by step and task."""
        found: dict[tuple[int, str], list[RolloutRecord]] = defaultdict(list)
        for record in self.records:
            if record.outcome is not RolloutOutcome.FAILED:
                found[record.step, record.group].append(record)
        return list(found.values())

    def recent(self, name: str) -> list[float]:
        """Return the last values of a metric, at most `_RECENT`."""
        return [row[name] for row in self.rows if name in row][-_RECENT:]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run: its topic, severity, evidence and remedy, and the topic of the fault that explains it."""

    topic: str
    severity: Severity
    text: str
    remedy: str
    follows_from: str = ""


def examine_run(run: RunData) -> list[Finding]:
    """Return all findings: those that a fault explains last, the most severe first, then in the order of the topics."""
    if not run.rows:
        raise UserError("The run has no finished step.", "Wait for its first step, or read its log.txt.")
    causes_first = (check_limits, check_tools, check_loss, check_sampling, check_collapse, check_verifier)
    others = (check_reward, check_groups, check_failures, check_held_out, check_alarms)
    found = [finding for check in (*causes_first, *others) for finding in check(run)]
    causes = list(dict.fromkeys(one.topic for one in found if one.severity == "fault" and one.topic in CONSEQUENCES))
    for place, one in enumerate(found):
        earlier = causes[: causes.index(one.topic)] if one.topic in causes else causes
        if cause := next((cause for cause in earlier if one.topic in CONSEQUENCES[cause]), ""):
            found[place] = replace(one, follows_from=cause)
    return sorted(found, key=lambda one: (bool(one.follows_from), SEVERITIES.index(one.severity)))


def check_limits(run: RunData) -> Iterator[Finding]:
    """Token limits that cut off episodes from the first step on."""
    limits = run.config.rollout
    for reason, name, value in (
        (StopReason.TRUNCATED, "max_tokens_per_turn", limits.max_tokens_per_turn),
        (StopReason.MAX_TOKENS, "max_seq_len", limits.max_seq_len),
    ):
        shares = run.recent(metric := f"episode/stop/{reason}")
        if shares and min(_mean(shares), run.rows[0].get(metric, 0.0)) > _LARGE:
            text = f"{_mean(shares):.0%} of the episodes are cut off at rollout.{name} = {value}, from step 1 on"
            yield Finding("limits", "fault", text, f"Raise rollout.{name}, or fine-tune on shorter turns (ludus sft).")


def check_tools(run: RunData) -> Iterator[Finding]:
    """Tools of which every call fails, with their most frequent error."""
    calls = defaultdict(list)
    for record in run.records:
        for outcome in record.trajectory.outcomes:
            if outcome.status is not ToolStatus.MALFORMED:
                calls[outcome.tool].append(outcome)
    for tool, outcomes in sorted(calls.items()):
        if len(outcomes) < 5 or any(outcome.status is ToolStatus.OK for outcome in outcomes):
            continue
        error = Counter(
            outcome.output.strip().partition("\n")[0][:120].rstrip(".") for outcome in outcomes
        ).most_common(1)[0][0]
        own = [outcome.status in (ToolStatus.RAISED, ToolStatus.TIMED_OUT) for outcome in outcomes]
        remedy = "Call the tool by hand: the error is its own, not the model's (ludus env check ENV)."
        if _mean(own) < _LARGE:
            remedy = "Fine-tune on demonstrations of correct calls (ludus sft)."
        yield Finding("tools", "fault", f"All {len(outcomes)} calls of {tool} fail, most often with: {error}", remedy)


def check_collapse(run: RunData) -> Iterator[Finding]:
    """Training success that fell to a quarter or less and stayed there."""
    rows = [row for row in run.rows if "success/mean" in row]
    success = [row["success/mean"] for row in rows]
    falls = [(_mean(success[max(0, at - 3) : at]), _mean(success[at:]), at) for at in range(1, len(rows) - 4)]
    before, after, at = max(falls, key=lambda fall: fall[0] - fall[1], default=(0.0, 0.0, 0))
    if before < 0.1 or after > before / 4:
        return
    text = f"Success fell from {before:.0%} to {after:.0%} after step {at}"
    for metric, name in (("policy/sampled_entropy", "entropy"), ("length/total_tokens/mean", "tokens per episode")):
        old, new = ([row[metric] for row in part if metric in row] for part in (rows[:at], rows[at:]))
        if old and new:
            text += f", {name} from {_mean(old):.3g} to {_mean(new):.3g}"
    reward = [_mean([row["reward/mean"] for row in part if "reward/mean" in row]) for part in (rows[:at], rows[at:])]
    remedy = (
        f"Lower training.learning_rate (it is {run.config.training.learning_rate:g}); resume an earlier checkpoint."
    )
    if reward[1] > 0.9 * reward[0] > 0:
        text += f", while the reward went from {reward[0]:.3g} to {reward[1]:.3g}"
        remedy = "The policy games a part of the reward: read rollouts, and lower its weight (rewards.weights)."
    yield Finding("collapse", "fault", text, remedy)


def check_verifier(run: RunData) -> Iterator[Finding]:
    """Tasks that are never solved, although episodes end with answers."""
    answered = _mean(run.recent("episode/stop/answered"))
    if answered < _LARGE or any(row.get("success/mean", 1.0) for row in run.rows):
        return
    text = f"Not one attempt is solved, although {answered:.0%} of the episodes end with an answer"
    first = next(iter(run.records[0].trajectory.rewards), "") if run.records else ""
    parts = {name for record in run.records for name in record.trajectory.rewards} - {first}
    means = {name: _mean([record.trajectory.rewards.get(name, 0.0) for record in run.records]) for name in parts}
    close = [f"{name} {mean:.2f}" for name, mean in sorted(means.items()) if mean > 0.1]
    text += f"; other parts of the reward are not 0: {', '.join(close)}" if close else ""
    remedy = "Score a correct answer by hand (ludus show RUN --step N), and run ludus env check ENV."
    yield Finding("verifier", "fault" if close else "warn", text, remedy)


def check_reward(run: RunData) -> Iterator[Finding]:
    """Shaping against outcome, rewarded truncation, preferred length, constant parts."""
    for part in sorted({name for record in run.records for name in record.trajectory.rewards}):
        values = {record.trajectory.rewards.get(part, 0.0) for record in run.records}
        if len(values) == 1 and len(run.records) > 1:
            remedy = "Check its rule, or remove it."
            yield Finding("reward", "note", f"The part {part} is {values.pop():g} in every rollout read", remedy)
    outcome, shaping = [], []
    for group in run.groups:
        outcome.append(_std([*map(_first_part, group)]))
        shaping.append(_std([r.trajectory.reward - _first_part(r) for r in group]))
    if shaping and _mean(shaping) > max(_mean(outcome), 1e-3):
        text = f"Shaping moves the reward by {_mean(shaping):.2g} in a group, the outcome by {_mean(outcome):.2g}"
        yield Finding("reward", "warn", text, "Lower the weights of the other parts (rewards.weights).")
    cut = [r.trajectory.reward for r in run.records if r.trajectory.stop_reason in _CUT]
    ended = [r.trajectory.reward for r in run.records if r.trajectory.stop_reason is StopReason.ANSWERED]
    if len(cut) > 0.05 * len(run.records) and _mean(cut) > 0.5 * max(_mean(ended), 0.1):
        text = f"Truncated episodes are rewarded: {_mean(cut):.2f} on average, answered ones {_mean(ended):.2f}"
        yield Finding("reward", "fault", text, "Give 0 to episodes whose stop_reason is truncated or max_tokens.")
    pairs = [pair for group in run.groups for pair in _centred(group, _length, _reward)]
    solved = [pair for group in run.groups for pair in _centred(group, _length, _first_part)]
    if (value := _correlation(pairs)) > max(_LARGE, (own := _correlation(solved)) + 0.3):
        text = f"The reward prefers long answers: correlation {value:.2f} in groups, that of the outcome {own:.2f}"
        yield Finding("reward", "warn", text, "Check judges for a preference for length; set rewards.length.kind.")


def check_loss(run: RunData) -> Iterator[Finding]:
    """Loss mask, sign of the advantages, learning rate, unchanged weights, gradient clipping."""
    if not run.config.training.mask_observations:
        text = "Observations are in the loss (training.mask_observations = false)"
        yield Finding("loss mask", "fault", text, "Set training.mask_observations to true.")
    pairs = [pair for group in run.groups for pair in _centred(group, _reward, lambda record: record.advantage or 0.0)]
    if (value := _correlation(pairs)) < -0.1:
        text = f"Advantages have the opposite sign of the rewards (correlation {value:.2f} in groups)"
        yield Finding("advantages", "fault", text, "Check the sign of a custom advantage or reward.")
    rates, norms = run.recent("optim/learning_rate"), run.recent("optim/grad_norm")
    if rates and not any(rates):
        yield Finding("learner", "fault", "The learning rate is 0", "Set training.learning_rate.")
    elif len(kls := run.recent("policy/kl_reference")) >= 5 and max(map(abs, kls)) < 1e-9 and any(norms):
        text = f"The policy equals the initial one after {len(run.rows)} steps (policy/kl_reference is 0)"
        yield Finding("learner", "fault", text, "Check that the trained weights reach the engine and are not frozen.")
    limit = run.config.training.max_grad_norm
    if norms and sum(norm > limit for norm in norms) > 0.9 * len(norms):
        text = f"The gradient is clipped in nearly every step (norm {_mean(norms):.3g}, limit {limit:g})"
        yield Finding("learner", "note", text, "Lower training.learning_rate or raise training.max_grad_norm.")


def check_sampling(run: RunData) -> Iterator[Finding]:
    """Weights of the engine, temperature, equal attempts."""
    tolerance = run.config.training.sync_tolerance or 1e-3
    gaps = run.recent("sync/probe_gap")
    if gaps and max(gaps) > tolerance:
        text = f"The engine sampled with other weights than the learner's (sync/probe_gap {max(gaps):.3g})"
        yield Finding("weight sync", "fault", text, "Check that the engine loads the weights that it receives.")
    both = [row for row in run.rows if {"policy/entropy", "policy/sampled_entropy"} <= row.keys()][-_RECENT:]
    entropy, sampled = ([row[name] for row in both] for name in ("policy/entropy", "policy/sampled_entropy"))
    on_policy = not any(run.recent("staleness/mean"))
    if entropy and sampled and on_policy and abs(_mean(sampled) - _mean(entropy)) > max(0.1, _LARGE * _mean(entropy)):
        nats = f"Sampled tokens have {_mean(sampled):.2f} nats, the policy's distribution {_mean(entropy):.2f}"
        text = f"{nats}: they were not sampled from it"
        remedy = "Check rollout.temperature, rollout.top_p and rollout.top_k against those of the engine."
        yield Finding("sampling", "fault", text, remedy)
    same = [len(set(map(_tokens, group))) == 1 for group in run.groups if len(group) > 1]
    if same and run.config.rollout.temperature > 0 and _mean(same) > _LARGE:
        text = f"All attempts are identical in {_mean(same):.0%} of the groups"
        if (temperature := run.config.rollout.temperature) < _LOW_TEMPERATURE:
            text += f": rollout.temperature is {temperature:g}"
            yield Finding("temperature", "fault", text, "Set rollout.temperature to 1.")
        else:
            remedy = "Check the seeds and the temperature of the engine; see the entropy."
            yield Finding("sampling", "warn", text, remedy)


def check_groups(run: RunData) -> Iterator[Finding]:
    """Members lost to filters, difficulty of the tasks, number of tasks."""
    trained = [sum(r.outcome is RolloutOutcome.TRAINED for r in group) for group in run.groups]
    alone = [count == 1 for group, count in zip(run.groups, trained, strict=True) if count and len(group) > 1]
    if alone and _mean(alone) > 0.2:
        text = f"A single attempt is trained in {_mean(alone):.0%} of the groups: a filter drops the others"
        yield Finding("groups", "warn", text, "See the reasons in the ledger (ludus show RUN).")
    for name, word, remedy in (
        ("groups/solve_none", "unsolved", "Use easier tasks, or run a cold start first (ludus sft)."),
        ("groups/solve_all", "solved in every attempt", "Use harder tasks."),
    ):
        if (values := run.recent(name)) and _mean(values) > 0.8:
            yield Finding("groups", "warn", f"{_mean(values):.0%} of the groups are {word}", remedy)
    tasks = {record.group for record in run.records}
    if 0 < len(tasks) < _FEW_TASKS < len(run.records):
        text = f"The last steps train on {len(tasks)} tasks"
        yield Finding("groups", "note", text, "Use more tasks, or expect overfitting.")


def check_failures(run: RunData) -> Iterator[Finding]:
    """Infrastructure failures, prompts that do not fit, steps without training."""
    started, failed = sum(run.recent("ledger/started")), sum(run.recent("ledger/failed"))
    if started and failed > 0.05 * started:
        reasons = Counter(r.reason for r in run.records if r.outcome is RolloutOutcome.FAILED)
        most = f", most often {reasons.most_common(1)[0][0]}" if reasons else ""
        text = f"{failed / started:.0%} of the attempts end in an infrastructure failure{most}"
        yield Finding("failures", "warn", text, "Read log.txt; raise rollout.tool_timeout_s for slow tools.")
    if (values := run.recent("episode/stop/prompt_too_long")) and _mean(values) > 0.05:
        text = f"{_mean(values):.0%} of the prompts do not fit"
        yield Finding("failures", "warn", text, "Raise rollout.max_seq_len.")
    idle = [row for row in run.rows if "ledger/started" in row and not row.get("ledger/trained", 0.0)]
    if len(idle) > 0.2 * len(run.rows):
        text = f"{len(idle)} of {len(run.rows)} steps trained on nothing"
        yield Finding("failures", "warn", text, "See the ledger for the reasons (ludus show RUN).")


def check_held_out(run: RunData) -> Iterator[Finding]:
    """Tasks of training and evaluation, overfitting, and whether there is a gain."""
    trained = {record.group for record in run.records}
    splits = {task.partition(":")[0] for task in trained} & set(run.config.evaluation.splits)
    if splits:
        text = f"The run trains on tasks of the split {', '.join(sorted(splits))}, which is held out"
        yield Finding("held-out", "fault", text, "Train on another split, or evaluate on another one.")
    elif shared := trained & {task for evaluation in run.evaluations for task in evaluation.task_ids}:
        text = f"{len(shared)} tasks are in training and in an evaluation, such as {min(shared)}"
        yield Finding("held-out", "fault", text, "Remove them from one of the two.")
    pairs = list(_before_and_after(run.evaluations))
    sampled = [after for _, after in pairs if after.plan.temperature == run.config.rollout.temperature]
    best = max((after.interval.high for after in sampled), default=1.0)
    if (gap := _mean(run.recent("success/mean")) - best) > 0.1:
        text = f"Training success is above held-out success, by {gap:.0%} or more on every split"
        yield Finding("held-out", "warn", text, "Use more tasks; lower training.learning_rate or training.steps.")
    for before, after in pairs:
        gain = _gain(before, after)
        if gain is not None and gain.interval.high < 0:
            text = f"{after.plan.split} at temperature {after.plan.temperature:g} became worse: {gain.difference:+.1%}"
            yield Finding("held-out", "warn", text, "Resume the best checkpoint; see the findings above for the cause.")


def check_alarms(run: RunData) -> Iterator[Finding]:
    """Each alarm of the run, with the steps at which it was raised."""
    for alarm, steps in alarms_by_step(enumerate(run.rows, start=1), run.config.run.alarms.actions):
        rule = alarm.rule
        text = f"{rule.cause}: {alarm.evidence} (at {len(steps)} of {len(run.rows)} steps, last at step {steps[-1]})"
        yield Finding(f"alarm {alarm.name}", "note" if rule.action == "note" else "warn", text, rule.remedy)


def _before_and_after(evaluations: Sequence[Evaluation]) -> Iterator[tuple[Evaluation, Evaluation]]:
    """Yield the first and the last evaluation of each split, temperature and number of samples."""
    found: dict[tuple[str, float, int], list[Evaluation]] = defaultdict(list)
    for one in sorted(evaluations, key=lambda one: one.plan.step):
        found[one.plan.split, one.plan.temperature, one.plan.samples].append(one)
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


def _centred(
    group: Sequence[RolloutRecord], a: Callable[[RolloutRecord], float], b: Callable[[RolloutRecord], float]
) -> list[tuple[float, float]]:
    """Return two values of each member, minus their means over the group."""
    first, second = list(map(a, group)), list(map(b, group))
    return [(x - _mean(first), y - _mean(second)) for x, y in zip(first, second, strict=True)]


def _correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the correlation of centred pairs; 0 if one side is constant."""
    size = math.sqrt(math.fsum(x * x for x, _ in pairs) * math.fsum(y * y for _, y in pairs))
    return math.fsum(x * y for x, y in pairs) / size if size > 0 else 0.0


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values]))
