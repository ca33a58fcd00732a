"""Log-probabilities, entropies and KL from hidden states, without the full table of logits.

The logits of `rows` states at a time are computed, used, dropped, and recomputed in the backward pass; the
gradient of the output layer is accumulated in place. Memory grows with the chunk times the vocabulary instead
of the batch. A small table is stored as a whole, which is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ludus.algorithms.kl import full_forward, full_reverse, jensen_shannon, likely_tokens
from ludus.engines.embedded.model_runner import apply, linear, outer_sum, product

MAX_UNCHUNKED_LOGITS = 16_777_216
"""Largest number of logits that are stored at once (64 MiB in float32)."""
CHUNK_LOGITS = 16_777_216
"""Logits of one chunk."""
_NEAR = 256
"""Rows processed together for a small vocabulary, so that their logits fit into CPU caches."""
_NEAR_LOGITS = 524_288
"""Logits per elementwise pass on a CPU, few enough for its caches (2 MiB in float32)."""
_WORDS = 16_384
"""Rows of the output layer per gradient accumulation."""


Entropy = Literal["none", "value", "gradient"]
"""Whether entropies are computed, and whether gradients flow through them."""


class TokenScores(NamedTuple):
    """Natural log-probability and entropy in nats (None unless requested).

    Both `[A]`, or `[B, L]`: 0 where not scored; column `t` belongs to token `t`.
    """

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
        return self.temper(linear(hidden, self.weight, self.bias))

    def temper(self, table: Tensor) -> Tensor:
        """Return tempered logits, in float32 or better, of the output layer's table."""
        wide = table if table.dtype == torch.float64 else table.float()
        return wide if self.temperature == 1 else wide / self.temperature

    @property
    def near_rows(self) -> int:
        """Rows per elementwise pass over a chunk: on a CPU few, elsewhere all."""
        return max(1, _NEAR_LOGITS // len(self.weight)) if self.weight.device.type == "cpu" else CHUNK_LOGITS

    def score(
        self, hidden: Tensor, targets: Tensor, entropy: Entropy = "none", *, rows: int | None = None
    ) -> TokenScores:
        """Return the scores of `targets` `[A]` after the states `hidden` `[A, H]`, with gradient.

        `rows` is the chunk size; None chooses it, and keeps the logits if the table is small.
        """
        vocabulary = self.weight.shape[0]
        function: type[_WholeTable] | type[_ChunkedTable] = _ChunkedTable
        if rows is None and len(hidden) * vocabulary <= MAX_UNCHUNKED_LOGITS:
            if entropy == "gradient":
                return logits_to_scores(self.logits(hidden), targets, entropy)
            function, rows = _WholeTable, len(hidden)
        how = _HeadArgs(self.temperature, rows or max(1, CHUNK_LOGITS // vocabulary), entropy)
        logprobs, spread = apply(function, hidden, self.weight, self.bias, targets, how)
        return TokenScores(logprobs, None if entropy == "none" else spread)


def logits_to_scores(logits: Tensor, targets: Tensor, entropy: Entropy = "none") -> TokenScores:
    """Return the scores of `targets` `[A]` from tempered logits `[A, V]`."""
    table = torch.log_softmax(logits, -1)
    picked = table.gather(1, targets[:, None])[:, 0]
    if entropy == "none":
        return TokenScores(picked, None)
    return TokenScores(picked, _entropy(table if entropy == "gradient" else table.detach()))


def _entropy(table: Tensor) -> Tensor:
    return -(table.exp() * table.masked_fill(table == -torch.inf, 0.0)).sum(-1)  # a masked token contributes 0


def _entropy_of(probabilities: Tensor, table: Tensor) -> Tensor:
    """Return the entropy `[A]` in one fused pass over `probabilities` and log-probabilities."""
    found = -torch.bmm(probabilities[:, None], table[:, :, None])[:, 0, 0]
    return _entropy(table) if found.isnan().any() else found


@dataclass(frozen=True, slots=True)
class _HeadArgs:
    temperature: float
    rows: int
    entropy: Entropy = "none"
    against: DivergenceTarget | None = None


class _HeadContext(FunctionCtx):
    how: _HeadArgs
    probabilities: Tensor
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


def _gradients(
    ctx: _HeadContext, probabilities: Tensor, upstream: Tensor
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


class _WholeTable(torch.autograd.Function):
    """Score all rows at once; no gradient flows through the entropies."""

    @staticmethod
    def forward(
        ctx: _HeadContext, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _HeadArgs
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
    def backward(ctx: _HeadContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, ctx.probabilities, grads[0]), None, None


class _ChunkedTable(torch.autograd.Function):
    """Score in chunks of rows.

    With `p` the distribution, `lp` its logarithm, `h` the entropy and upstream gradients `g` and `e` of the
    two results, the gradient of the logits is `(g (onehot - p) - e p (lp + h)) / temperature`.
    """

    @staticmethod
    def forward(
        ctx: _HeadContext, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _HeadArgs
    ) -> tuple[Tensor, Tensor]:
        head = LmHead(weight, bias, how.temperature)
        parts = []
        for h, t in zip(torch.split(hidden, how.rows), torch.split(targets, how.rows), strict=True):
            near = (torch.split(x, head.near_rows) for x in (linear(h, weight, bias), t))
            parts += [logits_to_scores(head.temper(a), b, how.entropy) for a, b in zip(*near, strict=True)]
        logprobs = torch.cat([part.logprobs for part in parts])
        entropy = [part.entropy for part in parts if part.entropy is not None]
        ctx.save_for_backward(hidden, weight, targets, *([] if bias is None else [bias]))
        ctx.how = how
        spread = torch.cat(entropy) if entropy else torch.zeros_like(logprobs)
        if how.entropy != "gradient":
            ctx.mark_non_differentiable(spread)
        return logprobs, spread

    @staticmethod
    def backward(ctx: _HeadContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        targets, how = ctx.saved_tensors[2], ctx.how

        def slope(logits: Tensor, at: slice) -> Tensor:
            of_entropy = grads[1][at] if how.entropy == "gradient" else None
            return _logits_slope(logits, targets[at], grads[0][at], of_entropy).div_(how.temperature)

        return *_chunked_gradients(ctx, slope, LmHead(ctx.saved_tensors[1]).near_rows), None, None


def _chunked_gradients(
    ctx: _HeadContext, slope: Callable[[Tensor, slice], Tensor], near_rows: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of states, weight and bias; `slope` returns that of the logits of up to `near_rows` rows."""
    hidden, weight, _, *rest = ctx.saved_tensors
    bias = rest[0] if rest else None
    head = LmHead(weight, bias, ctx.how.temperature)
    to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
    to_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
    for start in range(0, hidden.shape[0], ctx.how.rows):
        at = slice(start, start + ctx.how.rows)
        of_logits = linear(hidden[at], weight, bias)
        for first in range(0, len(of_logits), near_rows):
            near = of_logits[first : first + near_rows]
            near.copy_(slope(head.temper(near), slice(start + first, start + first + len(near))))
        if to_hidden is not None:
            to_hidden[at] = product(of_logits, weight)
        if to_weight is not None:
            for part, of_part in zip(torch.split(to_weight, _WORDS), torch.split(of_logits, _WORDS, 1), strict=True):
                part += outer_sum(of_part, hidden[at])
        if to_bias is not None:
            to_bias += of_logits.sum(0)
    return to_hidden, to_weight, to_bias


def _logits_slope(logits: Tensor, targets: Tensor, of_logprob: Tensor, of_entropy: Tensor | None) -> Tensor:
    table = torch.log_softmax(logits, -1)
    slope = table.exp()
    if of_entropy is None:
        slope *= -of_logprob[:, None]
    else:
        table.masked_fill_(table == -torch.inf, 0.0)
        spread = -(slope * table).sum(-1, keepdim=True)
        slope *= -of_entropy[:, None] * (table + spread) - of_logprob[:, None]
    return slope.scatter_add_(1, targets[:, None], of_logprob[:, None].to(slope.dtype))


Divergence = Literal["full_reverse", "full_forward", "jensen_shannon"]


class HiddenStates(NamedTuple):
    """Hidden states of a model at some positions: `hidden` `[A, H]`, input of its output layer `head`."""

    hidden: Tensor
    head: LmHead


class DivergenceTarget(NamedTuple):
    """Another model's states at the scored positions, and the divergence to compute.

    `top_k` as in `jensen_shannon`; the other divergences ignore it.
    """

    states: HiddenStates
    which: Divergence
    top_k: int = 0

    def of(self, own: Tensor, scored: Tensor) -> DivergenceTarget:
        """Return the target at the positions `own` among those `scored`, `[B, L]` each."""
        hidden = self.states.hidden[own[:, 1:][scored[:, 1:]]]
        return self._replace(states=self.states._replace(hidden=hidden))


def divergence(own: HiddenStates, against: DivergenceTarget, *, rows: int | None = None) -> Tensor:
    """Return `[A]` nats between tempered distributions, with gradient to `own`, in chunks of `rows` states."""
    head = own.head
    how = _HeadArgs(head.temperature, rows or max(1, CHUNK_LOGITS // head.weight.shape[0]), against=against)
    (found,) = apply(_Divergence, own.hidden, head.weight, head.bias, how)
    return found


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _HeadContext, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: _HeadArgs) -> Tensor:
        assert how.against is not None
        head, other = LmHead(weight, bias, how.temperature), how.against.states
        parts = [
            _chunk_divergence(how.against, head.logits(own), other.head.logits(theirs))
            for own, theirs in zip(torch.split(hidden, how.rows), torch.split(other.hidden, how.rows), strict=True)
        ]
        found = torch.cat(parts)
        ctx.save_for_backward(hidden, weight, found, *([] if bias is None else [bias]))
        ctx.how = how
        return found

    @staticmethod
    def backward(ctx: _HeadContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, how = ctx.saved_tensors[2], ctx.how
        assert how.against is not None
        against, other = how.against, how.against.states

        def slope(logits: Tensor, at: slice) -> Tensor:
            tables = (logits, other.head.logits(other.hidden[at]))
            return _divergence_slope(against, tables, found[at]).mul_((grads[0][at] / how.temperature)[:, None])

        return *_chunked_gradients(ctx, slope, how.rows), None


def _chunk_divergence(against: DivergenceTarget, logits: Tensor, ref_logits: Tensor) -> Tensor:
    if against.which == "jensen_shannon":
        return jensen_shannon(logits=logits, ref_logits=ref_logits, top_k=against.top_k)
    function = full_reverse if against.which == "full_reverse" else full_forward
    return function(logits=logits, ref_logits=ref_logits)


def _divergence_slope(against: DivergenceTarget, tables: tuple[Tensor, Tensor], found: Tensor) -> Tensor:
    """Return the gradient of the first tempered logits `[A, V]`; 0 for tokens that the policy masks."""
    own, theirs = (torch.log_softmax(table, -1) for table in tables)
    if against.which == "full_forward":
        return own.exp() - theirs.exp()
    if against.which == "jensen_shannon":
        return _jensen_shannon_slope(own, theirs, against.top_k)
    gap = torch.where(own == -torch.inf, 0.0, own - theirs)
    return own.exp() * (gap - found[:, None])


def _jensen_shannon_slope(own: Tensor, theirs: Tensor, top_k: int) -> Tensor:
    """Return `p (g - sum_b p_b g_b)` with `g = log(p_b / m_b) / 2` of a token's event `b`, `[A, V]`."""
    first, second, index = likely_tokens(own, theirs, top_k)
    middle = torch.logaddexp(first, second) - math.log(2)
    gap = torch.where(first == -torch.inf, 0.0, first - middle) / 2
    centred = gap - (first.exp() * gap).sum(-1, keepdim=True)
    if index is None:
        return own.exp() * centred
    return own.exp() * centred[:, -1:].expand(own.shape).scatter(-1, index, centred[:, :-1])
