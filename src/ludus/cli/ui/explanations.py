"""A run in plain words: what became of its rollouts, what looks wrong, what a loss of 0 means."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ludus.diagnostics.metrics import AlarmLimits, alarms
from ludus.diagnostics.timings import episode_shares
from ludus.diagnostics.trackers import MetricsRow

NEAR_ZERO = 1e-6
"""A loss nearer to 0 than this is 0 up to rounding."""
PHASES = ("rollout", "train", "sync", "evaluate")
"""The phases of a step."""
_OUTCOMES = ("trained", "masked", "dropped", "failed")


def ledger_words(rows: Sequence[MetricsRow]) -> str:
    """What became of all rollouts, with the reasons; empty for a run without rollouts."""
    total: Counter[str] = Counter()
    for row in rows:
        counts = {n.removeprefix("ledger/"): v for n, v in row.metrics.items() if n.startswith("ledger/")}
        total.update({name: int(value) for name, value in counts.items()})
    if not total["started"]:
        return ""
    parts = []
    for outcome in _OUTCOMES:
        named = {n.partition("/")[2]: v for n, v in total.items() if n.startswith(f"{outcome}/") and v}
        shown = ", ".join(f"{count} {reason}" for reason, count in sorted(named.items()) if reason != outcome)
        parts.append(f"{total[outcome]} {outcome}" + (f" ({shown})" if shown else ""))
    text = f"{total['started']} rollouts started: {', '.join(parts)}."
    if total["clock_limited"]:
        text += (
            f" A wall-clock limit fired in {total['clock_limited']} of {len(rows)} steps: "
            "a repetition need not give the same numbers."
        )
    return text


def alarm_words(rows: Sequence[MetricsRow]) -> list[str]:
    """Each alarm of the run once, in the words of its last time, and at how many steps it rang."""
    history = [row.metrics for row in rows]
    reach = AlarmLimits().reach
    rang: dict[str, list[int]] = defaultdict(list)
    words: dict[str, str] = {}
    for number, row in enumerate(rows, start=1):
        for text in alarms(history[max(0, number - reach) : number]):
            kind = re.sub(r"\d[\d.,e%+-]*", "", text)
            rang[kind].append(row.step)
            words[kind] = text
    return [
        f"{words[kind]} (at {len(steps)} of {len(rows)} steps, last at step {steps[-1]})"
        for kind, steps in rang.items()
    ]


def loss_words(rows: Sequence[MetricsRow]) -> str:
    """What a loss of 0 means at the last step, or a step without a loss; empty where it is neither."""
    if not rows:
        return ""
    step, last = rows[-1].step, rows[-1].metrics
    if "ledger/started" in last and "loss/total" not in last:
        return (
            f"Step {step} has no loss: none of its rollouts trained (see the ledger for the reasons), so the "
            "weights stayed as they were."
        )
    loss = last.get("loss/policy", last.get("loss/total", 1.0))
    if abs(loss) > NEAR_ZERO:
        return ""
    if last.get("groups/zero_variance", 0.0) >= 1:
        return (
            f"The loss of step {step} is 0 because all rewards within each group were equal: no attempt is "
            "better than another, every advantage is 0, and nothing is learned from them."
        )
    if last.get("optim/grad_norm", 0.0) > 0:
        return (
            f"The loss of step {step} is 0 up to rounding, and that is normal: on the first update of a "
            "batch every ratio is 1 and the advantages of a group add up to 0, so the value is 0 while the "
            f"gradient is not (its norm is {last['optim/grad_norm']:.3g}). Watch reward and held-out success."
        )
    return f"Loss and gradient of step {step} are both 0: the step changed nothing."


def mean_timings(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """The mean of each timing over the steps that have it; of the slowest scoring the slowest."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.metrics.items():
            found[name].append(value)
    return {
        name: max(values) if name == "scoring/slowest_s" else sum(values) / len(values)
        for name, values in found.items()
    }


def time_words(timings: Mapping[str, float]) -> str:
    """What a step and an episode spend their time on, from `mean_timings`; empty where no step was timed."""
    total_s = timings.get("time/step_s", 0.0)
    if not total_s:
        return ""
    phases = {name: timings.get(f"time/{name}_s", 0.0) for name in PHASES}
    named = ", ".join(f"{name} {seconds / total_s:.0%}" for name, seconds in phases.items() if seconds)
    text = f"Of the {total_s:.3g} s of a step: {named}."
    shares = episode_shares(timings)
    if shares:
        model, tools, scoring = shares["model"], shares["tools"], shares["scoring"]
        text += f" Of an episode: model {model:.0%}, tools {tools:.0%}, waiting for rewards {scoring:.0%}."
    return text
