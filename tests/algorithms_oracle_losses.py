"""Reference losses and corrections as slow loops over trajectories and tokens, written from the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from algorithms_oracle import Batch, clamp, lengths

ZERO = torch.zeros((), dtype=torch.float64)
Cell = Callable[[int, int], Tensor]


def actions(mask: Tensor, i: int) -> list[int]:
    return [t for t, m in enumerate(mask[i].tolist()) if m]


def log_gap(lp: Tensor, other: Tensor, mask: Tensor, i: int, mean: bool) -> Tensor:
    total = sum((lp[i, t] - other[i, t] for t in actions(mask, i)), ZERO)
    return total / max(len(actions(mask, i)), 1) if mean else total


def advantage(batch: Batch, i: int) -> float:
    chosen = actions(batch.mask, i)
    return sum(batch.advantages[i, t].item() for t in chosen) / max(len(chosen), 1)


def least(a: Tensor, b: Tensor) -> Tensor:
    return a if a.item() <= b.item() else b


def gspo(lp: Tensor, batch: Batch, low: float, high: float) -> Tensor:
    rows = []
    for i in range(len(batch.mask)):
        ratio = clamp(log_gap(lp, batch.old, batch.mask, i, mean=True), -20, 20).exp()
        a = advantage(batch, i)
        rows.append(-least(ratio * a, clamp(ratio, 1 - low, 1 + high) * a))
    return torch.stack(rows)


def gspo_token(lp: Tensor, batch: Batch, low: float, high: float) -> Cell:
    def cell(i: int, t: int) -> Tensor:
        fixed = log_gap(lp.detach(), batch.old, batch.mask, i, mean=True).clamp(-20, 20).exp()
        carried = fixed * lp[i, t].exp() / lp[i, t].detach().exp()
        a = batch.advantages[i, t]
        inside = 1 - low <= fixed.item() <= 1 + high
        clipped = carried if inside else ZERO + (1 - low if fixed.item() < 1 else 1 + high)
        return -least(carried * a, clipped * a)

    return cell


def gmpo(lp: Tensor, batch: Batch, low: float, high: float) -> Tensor:
    rows = []
    for i in range(len(batch.mask)):
        a = advantage(batch, i)
        total = ZERO
        for t in actions(batch.mask, i):
            d, own = lp[i, t] - batch.old[i, t], batch.advantages[i, t].item()
            if own > 0:
                total = total + least(d, clamp(d, -low, high))
            elif own < 0:
                clipped = clamp(d, -low, high)
                total = total + (d if d.item() >= clipped.item() else clipped)
        rows.append(-a * clamp(total / max(len(actions(batch.mask, i)), 1), -20, 20).exp())
    return torch.stack(rows)


def cispo(lp: Tensor, batch: Batch, low: float, high: float) -> Cell:
    def cell(i: int, t: int) -> Tensor:
        weight = math.exp(max(-20, min(20, (lp[i, t] - batch.old[i, t]).item())))
        weight = min(max(weight, 1 - low), 1 + high)
        return -weight * batch.advantages[i, t] * lp[i, t]

    return cell


def sapo(lp: Tensor, batch: Batch, pos: float, neg: float) -> Cell:
    def cell(i: int, t: int) -> Tensor:
        a = batch.advantages[i, t]
        tau = pos if a.item() > 0 else neg
        ratio = (lp[i, t] - batch.old[i, t]).exp()
        return -a * (4 / tau) / (1 + (-tau * (ratio - 1)).exp())

    return cell


def dppo(lp: Tensor, batch: Batch, bound: float, kind: str) -> Cell:
    def cell(i: int, t: int) -> Tensor:
        a, ratio = batch.advantages[i, t].item(), (lp[i, t] - batch.behavior[i, t]).exp()
        p, b = math.exp(lp[i, t].item()), math.exp(batch.behavior[i, t].item())
        if kind == "tv":
            far = abs(p - b)
        elif p >= 1:
            far = math.inf
        else:
            far = b * math.log(b / p) + (1 - b) * math.log((1 - b) / (1 - p))
        out = (a > 0 and p > b) or (a < 0 and p < b)
        return ZERO * 1 if out and far > bound else -ratio * a

    return cell


def mixed(lp: Tensor, batch: Batch, expert: list[bool], gamma: float) -> Cell:
    def cell(i: int, t: int) -> Tensor:
        a = batch.advantages[i, t]
        if expert[i]:
            p = lp[i, t].exp()
            return -p / (p + gamma) * a
        ratio = (lp[i, t] - batch.old[i, t]).exp()
        return -least(ratio * a, clamp(ratio, 0.8, 1.2) * a)

    return cell


def covariances(batch: Batch) -> dict[tuple[int, int], float]:
    places = [(i, t) for i in range(len(batch.mask)) for t in actions(batch.mask, i)]
    num = max(len(places), 1)
    mean_old = sum(batch.old[p].item() for p in places) / num
    mean_a = sum(batch.advantages[p].item() for p in places) / num
    return {p: (batch.old[p].item() - mean_old) * (batch.advantages[p].item() - mean_a) for p in places}


def value_token(value: Tensor, old: float, target: float, eps: float | None) -> Tensor:
    error = (value - target) ** 2
    if eps is not None:
        other = (clamp(value, old - eps, old + eps) - target) ** 2
        error = error if error.item() >= other.item() else other
    return error / 2


def conflicts(ids: list[list[int]], signs: list[int], group: list[int], contiguous: bool) -> list[list[float]]:
    """Return the weights of the action tokens; `ids[i]` are the token ids of trajectory i, in order."""
    weights = []
    for i, own in enumerate(ids):
        rivals = [other for j, other in enumerate(ids) if group[j] == group[i] and signs[j] * signs[i] < 0]
        left = [any(k < len(r) and r[k] == x for r in rivals) for k, x in enumerate(own)]
        right = [any(len(own) - k <= len(r) and r[k - len(own)] == x for r in rivals) for k, x in enumerate(own)]
        if contiguous:
            left = [all(left[: k + 1]) for k in range(len(own))]
            right = [all(right[k:]) for k in range(len(own))]
        hit = [a or b for a, b in zip(left, right, strict=True)]
        weights.append([1.0 if not h else (2.0 if signs[i] > 0 else 0.0) for h in hit])
    return weights


def ratio_of(batch: Batch, i: int, t: int, level: str) -> float:
    if level == "token":
        gap = (batch.old[i, t] - batch.behavior[i, t]).item()
    else:
        gap = log_gap(batch.old, batch.behavior, batch.mask, i, mean=level == "geometric").item()
    return math.exp(max(-20.0, min(20.0, gap)))


def largest_ratio(batch: Batch, i: int) -> float:
    return max(ratio_of(batch, i, t, "token") for t in actions(batch.mask, i))


def counts(mask: Tensor) -> tuple[int, int]:
    """Return M and N: the numbers of action tokens and of rows with any."""
    per_row = lengths(mask)
    return sum(per_row), sum(n > 0 for n in per_row)
