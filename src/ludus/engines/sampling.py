"""Draws tokens from logits, vectorised over a batch, with randomness that belongs to the request.

Token `t` of an action uses the uniform number counted by (the request's seed, t) and nothing else, so
what a row draws does not depend on its neighbours, on their number or on its place in the batch.

The recorded log-probability is that of the tempered distribution, before top-k and top-p cut it. A
greedy row (temperature 0) records the log-probability at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.types import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD = (1 << 64) - 1


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), elementwise."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def seed_words(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """Seeds of any size and sign as well-spread 64-bit words, `[B]`."""
    words = np.array([seed & _WORD for seed in seeds], dtype=np.uint64)
    return _mix(words + _GOLDEN)


def uniforms(words: NDArray[np.uint64], steps: int | NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, `[B]`, counted by (seed word, step): 53 bits of splitmix64."""
    counted = np.atleast_1d(np.asarray(steps, dtype=np.uint64)) + np.uint64(1)
    offset = _GOLDEN * counted
    draws: NDArray[np.float64] = (_mix(words + offset) >> np.uint64(11)).astype(np.float64)
    return draws * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """The sampling parameters of a batch as arrays.

    `words` `[B]` uint64; `temperature` `[B, 1]` (1 on greedy rows), `top_k` `[B, 1]` (the vocabulary where
    there is no limit) and `top_p` `[B, 1]` float64; `greedy` `[B]` bool.
    """

    words: NDArray[np.uint64]
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    greedy: Tensor
    all_greedy: bool
    any_greedy: bool
    any_cut: bool
    any_tempered: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRules:
        greedy = [p.temperature == 0 for p in params]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return cls(
            words=seed_words([p.seed for p in params]),
            temperature=column([p.temperature or 1.0 for p in params], torch.float32),
            top_k=column([p.top_k if p.top_k > 0 else vocab_size for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float64),
            greedy=torch.tensor(greedy, device=device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            any_cut=any(p.top_k > 0 or p.top_p < 1 for p in params if p.temperature > 0),
            any_tempered=any(p.temperature not in (0, 1) for p in params),
        )

    def select(self, rows: Sequence[int]) -> SamplingRules:
        """The rules of these rows, in this order."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.greedy.device)
        return SamplingRules(
            words=self.words[np.asarray(rows, dtype=np.int64)],
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            greedy=self.greedy[index],
            all_greedy=self.all_greedy,
            any_greedy=self.any_greedy,
            any_cut=self.any_cut,
            any_tempered=self.any_tempered,
        )


def sample(logits: Tensor, rules: SamplingRules, steps: int | NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """Draw token number `steps` (one for all, or `[B]`) of each action from `logits` `[B, V]`.

    Returns token ids `[B]` int64 and their log-probabilities `[B]` float32 (float64 for float64 logits). A
    greedy row takes the largest logit, the lowest id among equals.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = torch.log_softmax(logits / rules.temperature if rules.any_tempered else logits, dim=-1)
    if rules.all_greedy:
        tokens = logits.argmax(dim=-1)
    else:
        tokens = _draw(logprobs, rules, steps)
        if rules.any_greedy:
            tokens = torch.where(rules.greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _draw(logprobs: Tensor, rules: SamplingRules, steps: int | NDArray[np.uint64]) -> Tensor:
    """Inverse of the cumulative distribution (float64) at one uniform number per row."""
    probs = logprobs.exp()
    if rules.any_cut:
        probs = _cut(probs, rules)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    points = torch.from_numpy(uniforms(rules.words, steps)).to(logprobs.device)[:, None]
    drawn = torch.searchsorted(cumulative, points * total, right=True)
    # Rounding may put a point on the total itself; the last token of positive probability is meant then.
    last = torch.searchsorted(cumulative, total.contiguous(), right=False)
    # Logits that are not finite sort nowhere; their token is any, and its log-probability tells.
    return torch.minimum(drawn, last)[:, 0].clamp(max=logprobs.shape[1] - 1)


def _cut(probs: Tensor, rules: SamplingRules) -> Tensor:
    """Keep the `top_k` likeliest tokens, then the fewest of those whose share reaches `top_p`; `[B, V]`."""
    ranked, order = probs.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ranked = ranked.masked_fill(rank >= rules.top_k, 0.0)
    ranked = ranked / ranked.sum(dim=-1, keepdim=True)
    before = ranked.cumsum(dim=-1) - ranked
    ranked = ranked.masked_fill((before >= rules.top_p) & (rank > 0), 0.0)
    return torch.zeros_like(ranked).scatter_(1, order, ranked)
