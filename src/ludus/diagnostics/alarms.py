"""Alarms: problems that the metrics of a run show, each with cause, evidence, remedy and action.

An alarm is a function of the metrics of all steps so far, oldest first, that returns its evidence, or an empty text.
`alarms.toml` lists the alarms by the names of the functions in this module, with texts, limits and the default action.
An alarm that compares one metric with a limit names that `metric` there and needs no function. A metric that is absent
raises no alarm. `echo_trap` is the rule of RAGEN (arXiv:2504.20073); the other limits are ours.
"""

from __future__ import annotations

import json
import logging
import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib import resources
from statistics import fmean, median
from threading import Thread
from typing import Final, Literal
from urllib.request import Request, urlopen

from ludus.config.schema import AlarmAction
from ludus.diagnostics.history import COLLAPSE, SUCCESS, History, MetricsHistory, Row, first_mean, last_values
from ludus.types import StopReason, ToolStatus

Check = Callable[..., str]

log = logging.getLogger(__name__)
_WEBHOOK_S: Final = 10.0

ENTROPY: Final = "policy/entropy"
"""The learner's mean entropy of action tokens, in nats."""
GROUP_STD: Final = "groups/reward_std"
"""Mean over groups of the standard deviation of the rewards in a group."""
MEAN_AGE: Final = "staleness/mean"
LOGPROB_GAP: Final = "mismatch/logprob_diff"
"""The learner's mean of `|old - behavior|` over action tokens, in nats."""
GAP_BY_PROBABILITY: Final = "mismatch/by_probability/"
"""Prefix of that mean by the probability that the engine reported."""
JUDGE: Final = "judge/"
"""Prefix of the metrics of a judge part; the name of the part follows."""
JUDGE_VALUE: Final = "reward/judge"
"""Mean of the part of LLM judges."""
NOT_JUDGED: Final = "judge/defaulted"
"""Share of the episodes that LLM judges did not judge in time."""
UNTESTED: Final = "tools/untested"
"""Share of answered episodes without a call that ran tests."""
_LENGTH: Final = "response_length/mean"
_CALLS: Final = "tools/calls_per_episode"
_KL: Final = "policy/kl_reference"
EQUAL: Final = "groups/zero_variance"


@dataclass(frozen=True, slots=True)
class Rule:
    """Texts, limits and action of an alarm."""

    cause: str
    remedy: str
    action: AlarmAction
    limits: Mapping[str, float]
    metric: str = ""
    """The metric that is beyond `limit` for `steps`, of an alarm without a function."""
    side: Literal["above", "at least", "below", "at most"] = "above"
    on_policy: bool = False
    """Whether steps with older weights raise no alarm."""
    evidence: str = "{metric} is {last:.4g}, above {limit:g}{during}"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A raised alarm. `evidence` has the numbers of the newest step."""

    name: str
    evidence: str
    rule: Rule

    @property
    def text(self) -> str:
        """Cause, evidence and remedy as a paragraph."""
        return f"{self.rule.cause}: {self.evidence}. {self.rule.remedy}"

    def record(self, step: int) -> dict[str, str | int]:
        """Return the alarm as JSON values."""
        texts = {"action": self.rule.action, "cause": self.rule.cause, "evidence": self.evidence}
        return {"step": step, "alarm": self.name, **texts, "remedy": self.rule.remedy}


@cache
def rules() -> Mapping[str, Rule]:
    """Return the rules by the name of their alarm, in the order of `alarms.toml`."""
    found = tomllib.loads(resources.files(__package__).joinpath("alarms.toml").read_text("utf-8"))
    names = {field.name for field in fields(Rule)}
    return {name: Rule(limits=one, **{key: one.pop(key) for key in names & one.keys()}) for name, one in found.items()}


def find_alarms(history: History, actions: Mapping[str, AlarmAction] = {}) -> list[Alarm]:
    """Return the alarms that the newest step raises; `actions` replaces the actions of `alarms.toml` by name."""
    found = []
    for name, rule in rules().items() if history else ():
        action = actions.get(name, rule.action)
        check: Check = partial(_beyond, rule) if rule.metric else globals()[name]  # below, by its name
        if action != "off" and (evidence := check(history, **rule.limits)):
            found.append(Alarm(name, evidence, replace(rule, action=action)))
    return found


def alarms_by_step(
    rows: Iterable[tuple[int, Row]], actions: Mapping[str, AlarmAction] = {}
) -> list[tuple[Alarm, list[int]]]:
    """Return each alarm of a run's steps and metrics, as last raised, with the steps at which it was raised."""
    history = MetricsHistory()
    steps: dict[str, list[int]] = defaultdict(list)
    newest: dict[str, Alarm] = {}
    for step, row in rows:
        history.append(row)
        for raised in find_alarms(history.rows, actions):
            steps[raised.name].append(step)
            newest[raised.name] = raised
    return [(raised, steps[name]) for name, raised in newest.items()]


def send_alarm(url: str, run: str, step: int, raised: Alarm) -> Thread:
    """POST an alarm as JSON in the returned thread, which ends with the process. A failure is only logged."""
    body = json.dumps({"run": run} | raised.record(step)).encode()
    request = Request(url, body, {"Content-Type": "application/json"}, method="POST")

    def send() -> None:
        try:
            urlopen(request, timeout=_WEBHOOK_S).close()
        except (OSError, ValueError) as error:
            log.warning("the webhook of the alarm %s failed: %s", raised.name, error)

    thread = Thread(target=send, name="ludus-webhook", daemon=True)
    thread.start()
    return thread


# Values of a metric


def _evaluations(history: History) -> tuple[str, list[tuple[Row, float]]]:
    """Return the name of a held-out success of the newest step, and the rows that have it with its value."""
    ends = ("/sampled/success", "/greedy/success")
    names = [name for name in history[-1] if name.startswith("eval/") and name.endswith(ends)]
    return (names[0], [(row, row[names[0]]) for row in history if names[0] in row]) if names else ("", [])


# An alarm about too little, but for the critic's, is also raised if the metric is NaN.
_SIDES: Final[Mapping[str, Callable[[Sequence[float], float], bool]]] = {
    "above": lambda values, limit: min(values) > limit,
    "at least": lambda values, limit: not min(values) < limit,
    "below": lambda values, limit: not max(values) >= limit,
    "at most": lambda values, limit: max(values) <= limit,
}


def _beyond(rule: Rule, history: History, *, steps: int, limit: float) -> str:
    """Compare the metric of a rule with its limit; the evidence is that of the rule."""
    values = last_values(history, rule.metric, steps)
    is_excused = rule.on_policy and history[-1].get(MEAN_AGE, 0.0) > 0  # expected with older weights
    if is_excused or not values or not _SIDES[rule.side](values, limit):
        return ""
    names = {"metric": rule.metric, "last": values[-1], "limit": limit, "equal": history[-1].get(EQUAL, 0.0)}
    return rule.evidence.format_map(names | {"during": in_each_of(steps)})


def in_each_of(steps: int) -> str:
    """Return the words for several steps; empty for one."""
    return f" in each of the last {steps} steps" if steps > 1 else ""


# Rewards and groups


def non_finite(history: History) -> str:
    """NaN or infinite metrics."""
    return ", ".join(name for name, value in history[-1].items() if not math.isfinite(value))


def echo_trap(history: History, *, steps: int, first: int, fraction: float) -> str:
    """Reward deviation within groups stays below a fraction of its mean in the first steps with successes."""
    base = [row[GROUP_STD] for row in history if row.get(SUCCESS, 0.0) > 0 and GROUP_STD in row][:first]
    values = last_values(history, GROUP_STD, steps)
    if len(base) < first or len(history) < steps + first or not values or max(values) >= fraction * fmean(base):
        return ""
    return f"{GROUP_STD} is {values[-1]:.3g}, and was {fmean(base):.3g} in the first {first} steps with successes"


def echo_trap_early(history: History, *, steps: int, first: int, fraction: float) -> str:
    """Standard deviation in groups and entropy are both below a fraction of their means over the first steps."""
    falls = []
    for name in (GROUP_STD, ENTROPY):
        base, values = first_mean(history, name, first, steps), last_values(history, name, steps)
        if not base or not values or max(values) >= fraction * base:
            return ""
        falls.append(f"{name} fell from {base:.3g} to {values[-1]:.3g}")
    return " and ".join(falls)


def held_out_zero(history: History, *, evaluations: int, limit: float) -> str:
    """Held-out success was above the limit once and is below it in the last evaluations."""
    name, found = _evaluations(history)
    values = [value for _, value in found]
    last = values[-evaluations:]
    if len(values) <= evaluations or max(values) < limit or max(last) >= limit:
        return ""
    return f"{name} is below {limit:g} in the last {evaluations} evaluations, and was {max(values):.3g}"


def held_out_drop(history: History, *, evaluations: int, drop: float) -> str:
    """Held-out success is below its best evaluation in the last ones, by more than the error of both allows."""
    name, found = _evaluations(history)
    if len(found) <= evaluations:
        return ""
    best, solved = max(found[:-evaluations], key=lambda pair: pair[1])
    widths = [math.hypot(*(_half_width(one, name) for one in (best, row))) for row, _ in found[-evaluations:]]
    if any(solved - value < max(drop, w) for (_, value), w in zip(found[-evaluations:], widths, strict=True)):
        return ""
    return f"{name} fell from {solved:.2f} to {found[-1][1]:.2f}, below it in the last {evaluations} evaluations"


def _half_width(row: Row, name: str) -> float:
    bounds = name.removesuffix("/success")
    return (row.get(f"{bounds}/high", 0.0) - row.get(f"{bounds}/low", 0.0)) / 2


def zero_reward(history: History, *, steps: int) -> str:
    """All rewards are 0, of the run or of a world of a mixture."""
    of_worlds = [name for name in history[-1] if name.startswith("env/") and name.endswith("/reward_std")]
    for mean, std in [("reward/mean", "reward/std"), *((name.removesuffix("_std"), name) for name in of_worlds)]:
        values = last_values(history, mean, steps) + last_values(history, std, steps)
        if values and not any(values):
            place = "" if mean == "reward/mean" else f" in the world {mean.split('/')[1]}"
            why = "the model solves no task, or the reward function is wrong"
            if all(row.get(_CALLS) == 0 for row in history[-steps:]):
                why = "the model calls no tool"
            elif all(_cut_share(row) > 0.5 for row in history[-steps:]):
                why = "most episodes are cut off by a token limit before they answer"
            return f"every reward{place} in the last {steps} steps; {why}"
    return ""


def equal_rewards(history: History, *, steps: int, limit: float) -> str:
    """All groups have equal rewards, and rewards are the only source of the loss."""
    now, values = history[-1], last_values(history, EQUAL, steps)
    if not values or min(values) < limit or "distill/reverse_kl" in now or now.get("experts/trained", 0.0) > 0:
        return ""
    easy, hard = "too easy (all solved)", "too hard (none solved)"
    why = easy if now.get("groups/solve_all", 0.0) >= 1 else hard if now.get("groups/solve_none", 0.0) >= 1 else ""
    return f"the policy loss is exactly 0, and the tasks are {why or f'{easy} or {hard}'}"


def few_differences(history: History, *, steps: int, limit: float) -> str:
    """Most groups have equal rewards for long."""
    values = last_values(history, EQUAL, steps)
    return f"{fmean(values):.0%} of the groups of the last {steps} steps" if values and limit < min(values) < 1 else ""


def uniform_failure(history: History, *, steps: int, solved: float) -> str:
    """Success falls to exactly 0 from above `solved`."""
    values = last_values(history, SUCCESS, steps)
    before = max((row.get(SUCCESS, 0.0) for row in history[:-steps]), default=0.0)
    if not values or any(values) or before < solved:
        return ""
    return f"{SUCCESS} was up to {before:.2f}, and is exactly 0 in the last {steps} steps"


def success_drop(history: History, *, steps: int, fraction: float, solved: float) -> str:
    """Mean success over the last steps is at most a fraction of its best mean over as many earlier steps.

    The fall must exceed twice its standard error with the groups as independent units: tasks differ in difficulty.
    """
    last, before = last_values(history, SUCCESS, steps), [row.get(SUCCESS, 0.0) for row in history[:-steps]]
    best = max((fmean(before[i : i + steps]) for i in range(len(before) - steps + 1)), default=0.0)
    if not last or best < solved or fmean(last) > fraction * best:
        return ""
    variance = sum(rate * (1 - rate) for rate in (best, fmean(last)))
    if best - fmean(last) < 2 * math.sqrt(variance / max(1.0, sum(last_values(history, "groups/count", steps)))):
        return ""
    return f"{SUCCESS} fell from {best:.2f} to {fmean(last):.2f}, both means over {steps} steps"


def _without_gain(history: History, *, name: str, steps: int, first: int, factor: float, gain: float) -> str:
    """Return evidence if a metric rose by `factor` since the first steps and success by less than `gain`."""
    base, values = first_mean(history, name, first, steps), last_values(history, name, steps)
    solved, now = first_mean(history, SUCCESS, first, steps), last_values(history, SUCCESS, steps)
    if not base or not values or solved is None or not now:
        return ""
    if min(values) < factor * base or fmean(now) >= solved + gain:
        return ""
    return f"{name} rose from {base:.3g} to {values[-1]:.3g}; {SUCCESS} went from {solved:.2f} to {fmean(now):.2f}"


length_explosion = partial(_without_gain, name=_LENGTH)
tool_overuse = partial(_without_gain, name=_CALLS)


def truncation(history: History, *, steps: int, limit: float) -> str:
    """Episodes reach a token limit."""
    shares = [_cut_share(row) for row in history[-steps:]]
    return f"{shares[-1]:.0%} of the episodes" if len(shares) == steps and min(shares) > limit else ""


def _cut_share(row: Row) -> float:
    return sum(row.get(f"episode/stop/{reason}", 0.0) for reason in (StopReason.TRUNCATED, StopReason.MAX_TOKENS))


def long_episodes(history: History, *, steps: int, turns: float, solved: float) -> str:
    """Many turns, one reward, low success."""
    lengths, success = last_values(history, "turns/mean", steps), last_values(history, SUCCESS, steps)
    if not lengths or min(lengths) <= turns or not success or max(success) >= solved or "reward/turns" in history[-1]:
        return ""
    return f"turns/mean is {lengths[-1]:.1f}, {SUCCESS} {success[-1]:.2f}"


def tool_errors(history: History, *, steps: int, limit: float) -> str:
    """Failed calls."""
    now, name = history[-1], "tools/error_rate"
    if not (values := last_values(history, name, steps)) or min(values) <= limit:
        return ""
    kinds = {status: now.get(f"tools/status/{status}", 0.0) for status in ToolStatus if status is not ToolStatus.OK}
    worst = max(kinds, key=lambda status: kinds[status])
    return f"{values[-1]:.0%} of the calls, most often {worst} ({kinds[worst]:.0%} of all calls)"


def dead_tool(history: History, *, steps: int, calls: int) -> str:
    """A tool whose calls all fail."""
    tools = (name.split("/")[1] for name in history[-1] if name.startswith("tools/") and name.endswith("/calls"))
    for tool in tools:
        errors, counts = (last_values(history, f"tools/{tool}/{name}", steps) for name in ("error_rate", "calls"))
        if errors and min(errors) >= 1 and counts and sum(counts) >= calls:
            return f"all {sum(counts):.0f} calls of {tool} in the last {steps} steps failed"
    return ""


def tool_starvation(history: History, *, steps: int, first: int, fraction: float, calls: float) -> str:
    """Calls per episode fall to a fraction of those of the first steps."""
    base, values = first_mean(history, _CALLS, first, steps), last_values(history, _CALLS, steps)
    if base is None or base < calls or not values or max(values) > fraction * base:
        return ""
    return f"{_CALLS} fell from {base:.2f} to {values[-1]:.2f}"


def few_strategies(history: History, *, steps: int, first: int, fraction: float) -> str:
    """The number of distinct sequences of tools falls to a fraction of that of the first steps, or to 1."""
    name = "tools/sequences"
    base, values = first_mean(history, name, first, steps), last_values(history, name, steps)
    if not base or not values or base < 2 or max(values) > max(1.0, fraction * base):
        return ""
    return f"{values[-1]:.0f} distinct sequences of tools in a step, at first {base:.1f}"


# Rewards against success


def shaping_only(history: History, *, window: int, rise: float, gain: float, solved: float) -> str:
    """A reward part rises and success does not, over the whole run."""
    if len(history) < 2 * window:
        return ""
    before, now = (_means(rows) for rows in (history[:window], history[-window:]))
    success, at_first = now.get(SUCCESS, 1.0), before.get(SUCCESS, 1.0)
    if success >= solved or success - at_first > gain:
        return ""
    for name, value in now.items():
        is_part = name.startswith("reward/") and name not in ("reward/mean", "reward/std")
        if is_part and name in before and value - before[name] >= rise:
            rose = f"{name} rose from {before[name]:.2f} to {value:.2f}"
            return f"{rose}; {SUCCESS} went from {at_first:.2f} to {success:.2f}"
    return ""


def judge_drift(history: History, *, steps: int, first: int, drop: float, missing: float) -> str:
    """A judge agrees less with the verifier than in the first steps, rises without success, or is absent."""
    for name in history[-1]:
        base, values = first_mean(history, name, first, steps), last_values(history, name, steps)
        is_agreement = name.startswith(JUDGE) and name.endswith("/agreement")
        if is_agreement and base is not None and values and max(values) <= base - drop:
            part = name.split("/")[1]
            scores = [f"{one} is {history[-1].get(one, 0.0):.2f}" for one in (f"reward/{part}", SUCCESS)]
            return f"{name} fell from {base:.2f} to {values[-1]:.2f}; {', '.join(scores)}"
    absent = last_values(history, NOT_JUDGED, steps)
    if absent and min(absent) > missing:
        return f"{absent[-1]:.0%} of the episodes were not judged and took the default"
    base, before = (first_mean(history, name, first, steps) for name in (JUDGE_VALUE, SUCCESS))
    values, won = (last_values(history, name, steps) for name in (JUDGE_VALUE, SUCCESS))
    if base is None or before is None or not values or min(values) < base + drop or max(won) > before:
        return ""
    return f"{JUDGE_VALUE} rose from {base:.2f} to {values[-1]:.2f}; {SUCCESS} went from {before:.2f} to {won[-1]:.2f}"


def over_optimization(history: History, *, window: int, rise: float, drop: float) -> str:
    """The part of a judge or reward model rises while success falls, compared with the window of the best success.

    Both are means over windows of steps. The fall must also exceed twice its standard error, as for `success_drop`.
    """
    if len(history) < 2 * window:
        return ""
    now = _means(history[-window:])
    earlier = [_means(history[end - window : end]) for end in range(window, len(history) - window + 1)]
    best = max(earlier, key=lambda means: means.get(SUCCESS, 0.0))
    fall = best.get(SUCCESS, 0.0) - now.get(SUCCESS, 0.0)
    variance = sum(max(0.0, rate * (1 - rate)) for rate in (best.get(SUCCESS, 0.0), now.get(SUCCESS, 0.0)))
    num = sum(row.get("groups/count", 0.0) for row in history[-window:])
    if fall < max(drop, 2 * math.sqrt(variance / max(1.0, num))):
        return ""
    for part in (f"reward/{name.split('/')[1]}" for name in history[-1] if name.startswith(JUDGE)):
        if part in now and part in best and now[part] - best[part] >= rise:
            rose = f"{part} rose from {best[part]:.2f} to {now[part]:.2f}"
            return (
                f"{rose} and {SUCCESS} fell from {best[SUCCESS]:.2f} to {now[SUCCESS]:.2f}, means over {window} steps"
            )
    return ""


def majority_collapse(history: History, *, steps: int, first: int, limit: float, gain: float, solved: float) -> str:
    """The mean majority ratio is near 1 and the labels are not right more often than in the first steps."""
    ratios, name = last_values(history, "majority/ratio", steps), "majority/label_accuracy"
    base, right = first_mean(history, name, first, steps), last_values(history, name, steps)
    if base is None or not ratios or fmean(ratios) < limit or fmean(right) >= min(solved, base + gain):
        return ""
    return f"majority/ratio is {ratios[-1]:.2f}; {name} went from {base:.2f} to {fmean(right):.2f}"


def _means(rows: History) -> dict[str, float]:
    names = [name for name in rows[-1] if name.startswith(("reward/", SUCCESS))]
    return {name: fmean([row.get(name, 0.0) for row in rows]) for name in names}


def reward_hacking(history: History, *, evaluations: int, rise: float, drop: float) -> str:
    """Held-out success is below its best evaluation, with disjoint intervals, while the training reward is above."""
    name, found = _evaluations(history)
    if len(found) <= evaluations:
        return ""
    best, solved = max(found[:-evaluations], key=lambda pair: pair[1])
    bounds = name.removesuffix("/success")
    for row, value in found[-evaluations:]:
        is_worse = value <= solved - drop and row.get(f"{bounds}/high", value) < best.get(f"{bounds}/low", solved)
        if not is_worse or row["reward/mean"] < best["reward/mean"] + rise:
            return ""
    rose = f"reward/mean rose from {best['reward/mean']:.2f} to {history[-1]['reward/mean']:.2f}"
    return f"{name} fell from {solved:.2f} to {found[-1][1]:.2f}; {rose}"


def template_collapse(history: History, *, steps: int, first: int, fraction: float, chance: float) -> str:
    """Reasoning depends less on the prompt than in the first measurements; those with few prompts do not count."""
    name = COLLAPSE + "mutual_information"
    base, values = first_mean(history, name, first, steps), last_values(history, name, steps)
    if base is None or base <= 0 or not values or max(values) >= fraction * base:
        return ""
    if max(last_values(history, COLLAPSE + "chance", steps)) > chance:
        return ""
    return f"{name} fell from {base:.3g} to {values[-1]:.3g} nats per token"


def entropy_explosion(history: History, *, steps: int, first: int, factor: float, rise: float) -> str:
    """Entropy is far above that of the first steps."""
    base, values = first_mean(history, ENTROPY, first, steps), last_values(history, ENTROPY, steps)
    if base is None or not values or min(values) < max(factor * base, base + rise):
        return ""
    return f"{ENTROPY} rose from {base:.3g} to {values[-1]:.3g} nats per token"


def kl_jump(history: History, *, steps: int, window: int, factor: float, floor: float) -> str:
    """The KL is above a multiple of its maximum over the `window` steps before, raised by their slope."""
    before, values = last_values(history[:-steps], _KL, window), last_values(history, _KL, steps)
    if not before or not values or before[0] <= 0:
        return ""
    slope = max(0.0, (before[-1] - before[0]) / (window - 1))
    expected = [max(before) + slope * (step + 1) for step in range(steps)]
    if any(value < max(factor * line, floor) for value, line in zip(values, expected, strict=True)):
        return ""
    return f"{_KL} is {values[-1]:.3g} nats per token; the {window} steps before predict {expected[-1]:.3g}"


def kl_rate(history: History, *, steps: int, first: int, limit: float) -> str:
    """In the first steps of a run, the KL is above `limit` times the number of updates before."""
    values = [(num, row[_KL]) for num, row in enumerate(history) if _KL in row][-steps:]
    if len(history) > first or _KL not in history[-1] or len(values) < steps or values[0][0] == 0:
        return ""
    if any(value <= limit * num for num, value in values):
        return ""
    return f"{_KL} is {values[-1][1]:.3g} nats per token after {values[-1][0]} steps, more than {limit:g} per step"


def gradient_spike(history: History, *, steps: int, window: int, factor: float) -> str:
    """The gradient norm is a multiple of its median over the `window` steps before."""
    name = "optim/grad_norm"
    before, values = last_values(history[:-steps], name, window), last_values(history, name, steps)
    if not before or not values or min(values) < factor * median(before):
        return ""
    return f"{name} is {values[-1]:.3g}; its median over {window} steps was {median(before):.3g}"


def inert_clip(history: History, *, steps: int) -> str:
    """No token is clipped although the ratios differ from 1."""
    clipped, ratios = (last_values(history, f"policy/{name}", steps) for name in ("clip_fraction", "ratio_max"))
    if not clipped or any(clipped) or not ratios or min(ratios) <= 1 + 1e-6:
        return ""
    return f"policy/clip_fraction is 0{in_each_of(steps)}; ratios reach {max(ratios):.3f}"


def zero_gradient(history: History, *, steps: int) -> str:
    """Loss and gradient are 0 although groups have different rewards."""
    values = last_values(history, "loss/total", steps) + last_values(history, "optim/grad_norm", steps)
    equal = last_values(history, EQUAL, steps)
    if not values or any(values) or (equal and min(equal) >= 1):
        return ""
    return f"loss/total and optim/grad_norm are 0{in_each_of(steps)}"


def mismatch_by_length(history: History, *, steps: int, factor: float, floor: float) -> str:
    """The log-probability difference between learner and engine is larger at later positions."""
    buckets = [name for name in history[-1] if name.startswith(f"{LOGPROB_GAP}/")]
    if len(buckets) < 2 or history[-1].get(MEAN_AGE, 0.0) > 0:
        return ""
    early, late = (last_values(history, name, steps) for name in (buckets[0], buckets[-1]))
    if not early or not late or any(b < max(floor, factor * a) for a, b in zip(early, late, strict=True)):
        return ""
    first, last = (name.rpartition("/")[2] for name in (buckets[0], buckets[-1]))
    return f"{late[-1]:.3g} nats per token at positions {last}, {early[-1]:.3g} at {first}"


def mismatch_by_probability(history: History, *, steps: int, factor: float, floor: float) -> str:
    """The difference is large in one bin of the engine's probability, compared with all tokens, in on-policy steps."""
    overall = last_values(history, LOGPROB_GAP, steps)
    if not overall or history[-1].get(MEAN_AGE, 0.0) > 0:
        return ""
    bins = {name: last_values(history, name, steps) for name in history[-1] if name.startswith(GAP_BY_PROBABILITY)}
    for name, values in bins.items():
        if values and all(one > max(floor, factor * mean) for one, mean in zip(values, overall, strict=True)):
            label = name.removeprefix(GAP_BY_PROBABILITY)
            return f"{values[-1]:.3g} nats per token of probability {label}, {overall[-1]:.3g} over all tokens"
    return ""
