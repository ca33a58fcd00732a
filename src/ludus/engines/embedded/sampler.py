"""Draws tokens from logits, vectorised over a batch, with randomness that belongs to the request.

Token `t` of an action uses the uniform number counted by (the request's seed, t) and nothing else, so
what a row draws does not depend on its neighbours, on their number or on its place in the batch.

Two log-probabilities are recorded: of the tempered distribution over the whole vocabulary, and of what is
left of it after guide, top-k, top-p and min-p, from which is sampled. A greedy row (temperature 0) records
both at temperature 1, with nothing but the guide cut. Rows that ask get the likeliest tokens of the first
distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.types import SamplingParams, TopLogprobs

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD = (1 << 64) - 1
_BLOCK = 64
"""Tokens of one block in the search of a draw."""


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
    there is no limit), `top_p` and `min_p` `[B, 1]` float64; `greedy` and `cut`
    (by any of the three) `[B]` bool; `num_top` how many of the likeliest tokens each row asks for.
    """

    words: NDArray[np.uint64]
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: Tensor
    cut: Tensor
    all_greedy: bool
    any_greedy: bool
    any_cut: bool
    any_tempered: bool
    num_top: tuple[int, ...]
    any_top: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRules:
        greedy = [p.temperature == 0 for p in params]
        cut = [p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return cls(
            words=seed_words([p.seed for p in params]),
            temperature=column([p.temperature or 1.0 for p in params], torch.float64),
            top_k=column(
                [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params], torch.int64
            ),
            top_p=column([p.top_p for p in params], torch.float64),
            min_p=column([p.min_p for p in params], torch.float64),
            greedy=torch.tensor(greedy, device=device),
            cut=torch.tensor(cut, device=device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            any_cut=any(cut),
            any_tempered=any(p.temperature not in (0, 1) for p in params),
            num_top=tuple(p.top_logprobs for p in params),
            any_top=any(p.top_logprobs for p in params),
        )

    def select(self, rows: Sequence[int]) -> SamplingRules:
        """The rules of these rows, in this order."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.greedy.device)
        return SamplingRules(
            words=self.words[np.asarray(rows, dtype=np.int64)],
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            greedy=self.greedy[index],
            cut=self.cut[index],
            all_greedy=self.all_greedy,
            any_greedy=self.any_greedy,
            any_cut=self.any_cut,
            any_tempered=self.any_tempered,
            num_top=tuple(self.num_top[row] for row in rows),
            any_top=any(self.num_top[row] for row in rows),
        )


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """Token ids `[B]` int64, and their log-probabilities `[B]` in the plain and in the cut distribution.

    `top` has what `likeliest` gives of the plain distribution; it is empty where no row asks.
    """

    tokens: Tensor
    logprobs: Tensor
    cut_logprobs: Tensor
    top: Sequence[TopLogprobs] = ()


def sample(
    logits: Tensor, rules: SamplingRules, steps: int | NDArray[np.uint64], allowed: Tensor | None = None
) -> TokenDraw:
    """Draw token number `steps` (one for all, or `[B]`) of each action from `logits` `[B, V]`.

    `allowed` `[B, V]` bool are the tokens that a guide leaves. Log-probabilities are float32 (float64 for
    float64 logits). A greedy row takes the largest logit, the lowest id among equals.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    tempered = logits / rules.temperature.to(logits.dtype) if rules.any_tempered else logits
    logprobs = torch.log_softmax(tempered, dim=-1)
    top = likeliest(logprobs, rules.num_top) if rules.any_top else ()
    best = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    if rules.all_greedy and allowed is None:
        tokens = best.argmax(dim=-1)
        plain = _at(logprobs, tokens)
        return TokenDraw(tokens, plain, plain, top)
    probs = logprobs.exp()
    if allowed is not None:
        probs = probs.masked_fill(~allowed, 0.0)
    if rules.any_cut:
        probs = torch.where(rules.cut[:, None], _cut(probs, rules), probs.double())
    tokens, total = _draw(probs, rules, steps)
    if rules.any_greedy:
        tokens = torch.where(rules.greedy, best.argmax(dim=-1), tokens)
    plain = _at(logprobs, tokens)
    if allowed is None and not rules.any_cut:
        return TokenDraw(tokens, plain, plain, top)
    share = _at(probs, tokens).double() / total
    changed = rules.cut if allowed is None else rules.cut | ~allowed.all(dim=-1)
    return TokenDraw(tokens, plain, torch.where(changed, share.log().to(plain.dtype), plain), top)


def likeliest(logprobs: Tensor, nums: Sequence[int]) -> list[TopLogprobs]:
    """The `nums[b]` likeliest tokens of each row of `logprobs` `[B, V]`; one at least asks for some.

    Tokens without probability are left out. What a row gets depends on nothing but the row.
    """
    asking = [row for row, num in enumerate(nums) if num > 0]
    rows = logprobs if len(asking) == len(nums) else logprobs[asking]
    most = min(max(nums), rows.shape[1])
    values, tokens = rows.topk(most, dim=-1)
    # Of equals at the end `topk` takes any: take all of them, and then the lowest ids.
    num_tied = int((rows >= values[:, -1:]).sum(-1).max())
    if num_tied > most:
        values, tokens = rows.topk(num_tied, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values, by_value = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(1, by_value)[:, :most]
    found: list[TopLogprobs] = [()] * len(nums)
    for row, ids, given in zip(asking, tokens.tolist(), values[:, :most].tolist(), strict=True):
        pairs = zip(ids[: nums[row]], given[: nums[row]], strict=True)
        found[row] = tuple((token, logprob) for token, logprob in pairs if logprob > -math.inf)
    return found


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(1, tokens[:, None])[:, 0]


def _draw(probs: Tensor, rules: SamplingRules, steps: int | NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """Inverse of the cumulative distribution of `probs` `[B, V]` at one uniform number per row.

    Gives tokens `[B]` and the sums of the rows `[B]`, float64. The sums of blocks of tokens are searched
    first, then one block a row: a cumulative sum over the vocabulary is the dearest part of sampling.
    """
    rows, vocabulary = probs.shape
    blocks = torch.nn.functional.pad(probs, (0, -vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    points = torch.from_numpy(uniforms(rules.words, steps)).to(probs.device)[:, None] * sums[:, -1:]
    chosen = _search(sums, points)
    before = torch.where(chosen > 0, sums.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    index = chosen[:, :, None].expand(-1, -1, _BLOCK)
    inside = blocks.gather(1, index)[:, 0].double().cumsum(-1)
    token = chosen * _BLOCK + _search(inside, (points - before).clamp(min=0.0))
    return token[:, 0].clamp(max=vocabulary - 1), sums[:, -1]


def _search(cumulative: Tensor, points: Tensor) -> Tensor:
    """The first place `[B, 1]` whose cumulative sum exceeds the point; one of positive probability."""
    found = torch.searchsorted(cumulative, points, right=True)
    # Rounding may put a point on the total itself; the last place of positive probability is meant then.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)
    # Logits that are not finite sort nowhere; their token is any, and its log-probability tells.
    return torch.minimum(found, last).clamp(max=cumulative.shape[1] - 1)


def _cut(probs: Tensor, rules: SamplingRules) -> Tensor:
    """Keep the `top_k` likeliest tokens, of those the fewest whose share reaches `top_p`, and of those the
    ones with at least `min_p` times the probability of the likeliest; `[B, V]` float64."""
    ranked, order = probs.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ranked = ranked.masked_fill(rank >= rules.top_k, 0.0)
    ranked = ranked / ranked.sum(dim=-1, keepdim=True)
    before = ranked.cumsum(dim=-1) - ranked
    too_unlikely = (before >= rules.top_p) | (ranked < rules.min_p * ranked[:, :1])
    ranked = ranked.masked_fill(too_unlikely & (rank > 0), 0.0)
    return torch.zeros_like(ranked).scatter_(1, order, ranked)
