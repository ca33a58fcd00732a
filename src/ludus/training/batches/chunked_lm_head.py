"""Log-probabilities and entropies from hidden states, without the full table of logits.

The logits of `rows` states at a time are computed, used, dropped, and recomputed in the backward pass; the
gradient of the output layer is accumulated in place. Memory grows with the chunk times the vocabulary instead
of the batch. A small table is kept as a whole, which is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ludus.engines.embedded.onednn_linear import apply, linear, outer_sum, product

KEPT_LOGITS = 16_777_216
"""Largest number of logits that is kept as a whole (64 MiB in float32)."""
CHUNK_LOGITS = 16_777_216
"""Logits of one chunk."""
_NEAR = 256
"""Rows processed together for a small vocabulary, so that their logits fit into CPU caches."""
_WORDS = 16_384
"""Rows of the output layer per gradient accumulation."""


Entropy = Literal["none", "value", "gradient"]
"""Whether entropies are computed, and whether gradients flow through them."""


class TokenScores(NamedTuple):
    """Natural log-probability and entropy in nats (None unless requested), both `[A]`."""

    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class LmHead:
    """Output layer: `weight` `[V, H]`, optional `bias` `[V]`, and the temperature of its logits."""

    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """Return tempered logits `[A, V]` of `hidden` `[A, H]`, in float32 or better."""
        made = linear(hidden, self.weight, self.bias)
        wide = made if made.dtype == torch.float64 else made.float()
        return wide if self.temperature == 1 else wide / self.temperature

    def score(
        self, hidden: Tensor, targets: Tensor, entropy: Entropy = "none", *, rows: int | None = None
    ) -> TokenScores:
        """Return the scores of `targets` `[A]` after the states `hidden` `[A, H]`, with gradient.

        `rows` is the chunk size; None chooses it, and keeps the logits if the table is small.
        """
        if rows is None:
            if hidden.shape[0] * self.weight.shape[0] <= KEPT_LOGITS:
                return self._score_kept(hidden, targets, entropy)
            rows = max(1, CHUNK_LOGITS // self.weight.shape[0])
        how = _How(self.temperature, rows, entropy)
        return self._apply(_Chunked, hidden, targets, how)

    def _score_kept(self, hidden: Tensor, targets: Tensor, entropy: Entropy) -> TokenScores:
        """Score without chunks; the probabilities are kept for the backward pass."""
        if entropy == "gradient":
            return logits_to_scores(self.logits(hidden), targets, entropy)
        how = _How(self.temperature, len(hidden), entropy)
        return self._apply(_Kept, hidden, targets, how)

    def _apply(self, function: type[_Kept] | type[_Chunked], hidden: Tensor, targets: Tensor, how: _How) -> TokenScores:
        logprobs, spread = apply(function, hidden, self.weight, self.bias, targets, how)
        return TokenScores(logprobs, None if how.entropy == "none" else spread)


def logits_to_scores(logits: Tensor, targets: Tensor, entropy: Entropy = "none") -> TokenScores:
    """Return the scores of `targets` `[A]` from tempered logits `[A, V]`."""
    table = torch.log_softmax(logits, -1)
    picked = table.gather(1, targets[:, None])[:, 0]
    if entropy == "none":
        return TokenScores(picked, None)
    return TokenScores(picked, _entropy(table if entropy == "gradient" else table.detach()))


def _entropy(table: Tensor) -> Tensor:
    """Return the entropy `[A]` of log-probabilities `[A, V]`; a masked token (-inf) contributes 0."""
    return -(table.exp() * table.masked_fill(table == -torch.inf, 0.0)).sum(-1)


def _entropy_of(probabilities: Tensor, table: Tensor) -> Tensor:
    """Return the entropy `[A]` in one fused pass over `probabilities` and log-probabilities."""
    found = -torch.bmm(probabilities[:, None], table[:, :, None])[:, 0, 0]
    return _entropy(table) if found.isnan().any() else found


@dataclass(frozen=True, slots=True)
class _How:
    temperature: float
    rows: int
    entropy: Entropy


class _Context(FunctionCtx):
    how: _How
    probabilities: Tensor
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


def _gradients(
    ctx: _Context, probabilities: Tensor, upstream: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of states, weight and bias for logit gradients `g (onehot - p) / temperature`.

    Row factors are applied to the states, so that no other table `[A, V]` is allocated.
    """
    rows, weight, chosen, *rest = ctx.saved_tensors
    factors = (upstream / ctx.how.temperature).to(rows.dtype)
    shares = probabilities.to(rows.dtype)
    scaled = rows * factors[:, None]
    to_hidden = to_weight = to_bias = None
    if ctx.needs_input_grad[0]:
        to_hidden = (weight[chosen] - product(shares, weight)).mul_(factors[:, None])
    if ctx.needs_input_grad[1]:
        to_weight = outer_sum(shares, scaled).neg_().index_add_(0, chosen, scaled)
    if rest and ctx.needs_input_grad[2]:
        to_bias = (shares.t() @ factors).neg_().index_add_(0, chosen, factors)
    return to_hidden, to_weight, to_bias


class _Kept(torch.autograd.Function):
    """Score all rows at once; no gradient flows through the entropies."""

    @staticmethod
    def forward(
        ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
    ) -> tuple[Tensor, Tensor]:
        head = LmHead(weight, bias, how.temperature)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        probabilities = hidden.new_empty(len(hidden), len(weight), dtype=wide)
        logprobs, spread = (hidden.new_zeros(len(hidden), dtype=wide) for _ in range(2))
        for start in range(0, len(hidden), _NEAR):
            at = slice(start, start + _NEAR)
            table = torch.log_softmax(head.logits(hidden[at]), -1)
            logprobs[at] = table.gather(1, targets[at, None])[:, 0]
            torch.exp(table, out=probabilities[at])
            if how.entropy != "none":
                spread[at] = _entropy_of(probabilities[at], table)
        ctx.save_for_backward(hidden, weight, targets, *([] if bias is None else [bias]))
        ctx.probabilities, ctx.how = probabilities, how
        ctx.mark_non_differentiable(spread)
        return logprobs, spread

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, ctx.probabilities, grads[0]), None, None


class _Chunked(torch.autograd.Function):
    """Score in chunks of rows.

    With `p` the distribution, `lp` its logarithm, `h` the entropy and upstream gradients `g` and `e` of the
    two results, the gradient of the logits is `(g (onehot - p) - e p (lp + h)) / temperature`.
    """

    @staticmethod
    def forward(
        ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
    ) -> tuple[Tensor, Tensor]:
        head = LmHead(weight, bias, how.temperature)
        parts = [
            logits_to_scores(head.logits(h), t, how.entropy)
            for h, t in zip(torch.split(hidden, how.rows), torch.split(targets, how.rows), strict=True)
        ]
        logprobs = torch.cat([part.logprobs for part in parts])
        entropy = [part.entropy for part in parts if part.entropy is not None]
        ctx.save_for_backward(hidden, weight, targets, *([] if bias is None else [bias]))
        ctx.how = how
        spread = torch.cat(entropy) if entropy else torch.zeros_like(logprobs)
        if how.entropy != "gradient":
            ctx.mark_non_differentiable(spread)
        return logprobs, spread

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, *rest = ctx.saved_tensors
        bias, how = rest[0] if rest else None, ctx.how
        head = LmHead(weight, bias, how.temperature)
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, hidden.shape[0], how.rows):
            at = slice(start, start + how.rows)
            of_entropy = grads[1][at] if how.entropy == "gradient" else None
            slope = _slope(head.logits(hidden[at]), targets[at], grads[0][at], of_entropy)
            slope = slope.div_(how.temperature).to(hidden.dtype)
            if to_hidden is not None:
                to_hidden[at] = product(slope, weight)
            if to_weight is not None:
                parts = zip(torch.split(to_weight, _WORDS), torch.split(slope, _WORDS, 1), strict=True)
                for part, of_part in parts:
                    part += outer_sum(of_part, hidden[at])
            if to_bias is not None:
                to_bias += slope.sum(0)
        return to_hidden, to_weight, to_bias, None, None


def _slope(logits: Tensor, targets: Tensor, of_logprob: Tensor, of_entropy: Tensor | None) -> Tensor:
    """Return the gradient of tempered logits."""
    table = torch.log_softmax(logits, -1)
    slope = table.exp()
    if of_entropy is None:
        slope *= -of_logprob[:, None]
    else:
        table.masked_fill_(table == -torch.inf, 0.0)
        spread = -(slope * table).sum(-1, keepdim=True)
        slope *= -of_entropy[:, None] * (table + spread) - of_logprob[:, None]
    return slope.scatter_add_(1, targets[:, None], of_logprob[:, None].to(slope.dtype))
