"""Alarms about the learner: entropy, KL, gradient, and its agreement with the engine."""

from __future__ import annotations

from statistics import median

from ludus.diagnostics.alarms import (
    COLLAPSE,
    ENTROPY,
    EQUAL,
    GAP_BY_PROBABILITY,
    LOGPROB_GAP,
    MEAN_AGE,
    History,
    alarm,
    first_mean,
    in_each_of,
    last_values,
)

_KL = "policy/kl_reference"


@alarm
def entropy_collapse(history: History, *, steps: int, limit: float) -> str:
    """Entropy stays near 0. Steps without training have no entropy and raise no alarm."""
    values = last_values(history, ENTROPY, steps)
    if not values or max(values) >= limit:
        return ""
    return f"{ENTROPY} is {values[-1]:.4g} nats per token, below {limit:g}{in_each_of(steps)}"


@alarm
def template_collapse(history: History, *, steps: int, first: int, fraction: float, chance: float) -> str:
    """Reasoning does not depend on the prompt, in measurements with enough prompts."""
    found, expected = (last_values(history, COLLAPSE + name, steps) for name in ("retrieval_1", "chance"))
    if not found or not expected or max(expected) > chance:
        return ""
    name = COLLAPSE + "mutual_information"
    base, values = first_mean(history, name, first, steps), last_values(history, name, steps)
    if all(share <= 2 * one for share, one in zip(found, expected, strict=True)):
        return f"{found[-1]:.0%} of the first turns are likeliest under their own prompt (chance: {expected[-1]:.0%})"
    if base is None or base <= 0 or max(values) >= fraction * base:
        return ""
    return f"{name} fell from {base:.3g} to {values[-1]:.3g} nats per token"


@alarm
def exploration_ended(history: History, *, steps: int, limit: float) -> str:
    """Most groups have a low sampled entropy: dropped groups do not count in the trained entropy."""
    values = last_values(history, "groups/low_entropy", steps)
    if not values or min(values) < limit:
        return ""
    return f"in {values[-1]:.0%} of the groups; {history[-1].get(EQUAL, 0.0):.0%} have equal rewards"


@alarm
def entropy_explosion(history: History, *, steps: int, first: int, factor: float, rise: float) -> str:
    """Entropy is far above that of the first steps."""
    base, values = first_mean(history, ENTROPY, first, steps), last_values(history, ENTROPY, steps)
    if base is None or not values or min(values) < max(factor * base, base + rise):
        return ""
    return f"{ENTROPY} rose from {base:.3g} to {values[-1]:.3g} nats per token"


@alarm
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


@alarm
def kl_rate(history: History, *, steps: int, first: int, limit: float) -> str:
    """In the first steps of a run, the KL is above `limit` times the number of updates before."""
    values = [row[_KL] for row in history if _KL in row]
    if len(values) != len(history) or not steps < len(values) <= first:
        return ""
    last = [(num, value) for num, value in enumerate(values)][-steps:]
    if any(value <= limit * num for num, value in last):
        return ""
    return f"{_KL} is {values[-1]:.3g} nats per token after {len(values) - 1} steps, more than {limit:g} per step"


@alarm
def gradient_spike(history: History, *, steps: int, window: int, factor: float) -> str:
    """The gradient norm is a multiple of its median over the `window` steps before."""
    name = "optim/grad_norm"
    before, values = last_values(history[:-steps], name, window), last_values(history, name, steps)
    if not before or not values or min(values) < factor * median(before):
        return ""
    return f"{name} is {values[-1]:.3g}; its median over {window} steps was {median(before):.3g}"


@alarm
def inert_clip(history: History, *, steps: int) -> str:
    """No token is clipped although the ratios differ from 1."""
    clipped, ratios = (last_values(history, f"policy/{name}", steps) for name in ("clip_fraction", "ratio_max"))
    if not clipped or any(clipped) or not ratios or min(ratios) <= 1 + 1e-6:
        return ""
    return f"policy/clip_fraction is 0{in_each_of(steps)}; ratios reach {max(ratios):.3f}"


@alarm
def zero_gradient(history: History, *, steps: int) -> str:
    """Loss and gradient are 0 although groups have different rewards."""
    values = last_values(history, "loss/total", steps) + last_values(history, "optim/grad_norm", steps)
    equal = last_values(history, EQUAL, steps)
    if not values or any(values) or (equal and min(equal) >= 1):
        return ""
    return f"loss/total and optim/grad_norm are 0{in_each_of(steps)}"


@alarm
def critic(history: History, *, steps: int, limit: float) -> str:
    """The explained variance of the critic stays at or below the limit."""
    name = "critic/explained_variance"
    values = last_values(history, name, steps)
    return f"{name} is {values[-1]:.3g}{in_each_of(steps)}" if values and max(values) <= limit else ""


# Learner and engine


@alarm
def mismatch(history: History, *, steps: int, limit: float) -> str:
    """Log-probabilities of learner and engine differ in on-policy steps."""
    if history[-1].get(MEAN_AGE, 0.0) > 0:  # expected with older weights
        return ""
    values = last_values(history, LOGPROB_GAP, steps)
    return f"{values[-1]:.4g} nats per token, above {limit:g}" if values and min(values) > limit else ""


@alarm
def mismatch_by_length(history: History, *, steps: int, factor: float, floor: float) -> str:
    """The difference is larger in later positions."""
    buckets = [name for name in history[-1] if name.startswith(f"{LOGPROB_GAP}/")]
    if len(buckets) < 2 or history[-1].get(MEAN_AGE, 0.0) > 0:
        return ""
    early, late = (last_values(history, name, steps) for name in (buckets[0], buckets[-1]))
    if not early or not late or any(b < max(floor, factor * a) for a, b in zip(early, late, strict=True)):
        return ""
    first, last = (name.rpartition("/")[2] for name in (buckets[0], buckets[-1]))
    return f"{late[-1]:.3g} nats per token at positions {last}, {early[-1]:.3g} at {first}"


@alarm
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
