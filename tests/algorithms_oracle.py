"""Reference implementations as slow loops over tokens, written from the definitions, and random batches.

The loops work on 0-dimensional tensors, so that autograd returns reference gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
REWARDS = [0.0, 1.0, 0.3, 0.1 + 0.2, 0.5, -2.5, 40.0]
GROUP_IDS = [7, -3, 100, 0]


@dataclass(frozen=True)
class Batch:
    """A ragged multi-turn batch. Masked positions hold NaN and infinities."""

    rewards: Tensor
    group: Tensor
    mask: Tensor
    logprobs: Tensor
    old: Tensor
    behavior: Tensor
    ref: Tensor
    advantages: Tensor
    entropy: Tensor

    def clean(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, values, 0.0)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw rows of runs of action and other tokens; a row may start or end with either, or be empty."""
    runs = st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=5)
    rows = draw(st.lists(runs, min_size=2, max_size=6))
    padding = draw(st.integers(1, 2))
    masks = [[kind for kind, length in row for _ in range(length)] for row in rows]
    width = max(len(row) for row in masks) + padding
    mask = torch.tensor([row + [False] * (width - len(row)) for row in masks])
    num = len(rows)
    ids = [GROUP_IDS[min(i // 2, num // 2 - 1)] for i in range(num)]
    group = torch.tensor(draw(st.permutations(ids)))
    rewards = draw(st.lists(st.sampled_from(REWARDS), min_size=num, max_size=num))
    return make_batch(mask, group, torch.tensor(rewards, dtype=torch.float64), draw(st.integers(0, 2**16)))


def make_batch(mask: Tensor, group: Tensor, rewards: Tensor, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    def poisoned(values: Tensor) -> Tensor:
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
        picks = torch.randint(3, mask.shape, generator=generator)
        return torch.where(mask, values, bad[picks])

    old = -noise(1.0).abs() - 0.01
    logprobs, behavior, ref = old + noise(0.4), old + noise(0.5), old + noise(0.3)
    return Batch(
        rewards=rewards,
        group=group,
        mask=mask,
        logprobs=poisoned(logprobs),
        old=poisoned(old),
        behavior=poisoned(behavior),
        ref=poisoned(ref),
        advantages=poisoned(noise(1.0)),
        entropy=poisoned(noise(1.0).abs()),
    )


def groups(batch: Batch) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for row, name in enumerate(batch.group.tolist()):
        members.setdefault(name, []).append(row)
    return members


def lengths(mask: Tensor) -> list[int]:
    return [sum(bool(m) for m in row) for row in mask.tolist()]


def per_token(scores: list[float], mask: Tensor) -> Tensor:
    rows = [[s if m else 0.0 for m in row] for s, row in zip(scores, mask.tolist(), strict=True)]
    return torch.tensor(rows, dtype=torch.float64).reshape(mask.shape)


def advantage_scores(name: str, batch: Batch, ddof: int = 1) -> list[float]:
    """Return one number per trajectory."""
    rewards, tokens = batch.rewards.tolist(), lengths(batch.mask)
    scores = [0.0] * len(rewards)
    for members in groups(batch).values():
        values = [rewards[i] for i in members]
        if name != "raw" and max(values) - min(values) < 1e-12:
            continue
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / (len(values) - ddof)) ** 0.5
        total = sum(tokens[i] for i in members)
        weighted = sum(tokens[i] * rewards[i] for i in members) / total if total else 0.0
        for i in members:
            others = [rewards[j] for j in members if j != i]
            scores[i] = {
                "grpo": (rewards[i] - mean) / (std + 1e-6),
                "dr_grpo": rewards[i] - mean,
                "rloo": rewards[i] - sum(others) / len(others),
                "opo": rewards[i] - weighted,
                "reinforce_pp_baseline": rewards[i] - mean,
                "raw": rewards[i],
            }[name]
    return scores


def whitened(values: Tensor, mask: Tensor, ddof: int) -> Tensor:
    kept = [
        v for row, ms in zip(values.tolist(), mask.tolist(), strict=True) for v, m in zip(row, ms, strict=True) if m
    ]
    mean = sum(kept) / max(len(kept), 1)
    var = sum((v - mean) ** 2 for v in kept) / max(len(kept) - ddof, 1)
    return torch.where(mask, (values - mean) / (var + 1e-8) ** 0.5, 0.0)


def advantages(name: str, batch: Batch, ddof: int = 1) -> Tensor:
    spread = per_token(advantage_scores(name, batch, ddof), batch.mask)
    return whitened(spread, batch.mask, ddof) if name == "reinforce_pp_baseline" else spread


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    value = x.item()
    return x if low <= value <= high else torch.tensor(low if value < low else high, dtype=x.dtype)


def ppo_token(lp: Tensor, old: Tensor, a: Tensor, eps: tuple[float, float], dual: float | None) -> Tensor:
    ratio = clamp(lp - old, -20, 20).exp()
    plain, clipped = ratio * a, clamp(ratio, 1 - eps[0], 1 + eps[1]) * a
    loss = -(plain if plain.item() <= clipped.item() else clipped)
    if dual is not None and a.item() < 0 and loss.item() > -dual * a.item():
        loss = -dual * a
    return loss


def tokens(batch_mask: Tensor, function) -> Tensor:
    """Return [N, L]: `function(i, t)` where the mask is set, else 0."""
    zero = torch.zeros((), dtype=torch.float64)
    cells = [function(i, t) if m else zero for i, row in enumerate(batch_mask.tolist()) for t, m in enumerate(row)]
    return torch.stack(cells).reshape(batch_mask.shape)


def kl_token(name: str, lp: Tensor, ref: Tensor) -> Tensor:
    d = lp - ref
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() + d - 1, "abs": d if d.item() > 0 else -d}[name]


def aggregate(loss: Tensor, mask: Tensor, how: str, constant: int) -> Tensor:
    counts = lengths(mask)
    num_tokens, num_rows = sum(counts), sum(n > 0 for n in counts)
    total = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(mask.tolist()):
        for t, m in enumerate(row):
            if m:
                divisor = {
                    "token_mean": num_tokens,
                    "seq_mean_token_mean": num_rows * counts[i],
                    "seq_mean_token_sum": num_rows,
                    "constant": num_rows * constant,
                }[how]
                total = total + loss[i, t] / divisor
    return total
