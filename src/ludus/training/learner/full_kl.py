"""KL between full distributions in chunks, without the full table of logits.

Inputs are the hidden states `[A, H]` of both models. The logits of `rows` states at a time are computed,
used, dropped, and recomputed in the backward pass; no gradient flows to the second model. With `p` the first
distribution, `q` the second and `D` the divergence, the gradient of the first logits is `p (log p - log q -
D)` for `full_reverse`, `p - q` for `full_forward` (`algorithms.kl`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ludus.algorithms.kl import full_forward, full_reverse
from ludus.engines.embedded.onednn_linear import apply, outer_sum, product
from ludus.training.batches.chunked_lm_head import CHUNK_LOGITS, LmHead

Divergence = Literal["full_reverse", "full_forward"]


class HiddenStates(NamedTuple):
    """Hidden states of a model at some positions: `hidden` `[A, H]`, input of its output layer `head`."""

    hidden: Tensor
    head: LmHead


class DivergenceTarget(NamedTuple):
    """Another model's states at the scored positions, and the divergence to compute."""

    states: HiddenStates
    which: Divergence


@dataclass(frozen=True, slots=True)
class _How:
    temperature: float
    rows: int
    against: DivergenceTarget


class _Context(FunctionCtx):
    how: _How
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


def divergence(own: HiddenStates, against: DivergenceTarget, *, rows: int | None = None) -> Tensor:
    """Return `[A]` nats between tempered distributions, in float32 or better, with gradient to `own`.

    `rows` is the chunk size; None uses that of the output layer.
    """
    head = own.head
    if rows is None:
        rows = max(1, CHUNK_LOGITS // head.weight.shape[0])
    how = _How(head.temperature, rows, DivergenceTarget(_plain(against.states), against.which))
    (found,) = apply(_Divergence, own.hidden, head.weight, head.bias, how)
    return found


def _plain(states: HiddenStates) -> HiddenStates:
    """Detach the states."""
    head = states.head
    bias = None if head.bias is None else head.bias.detach()
    return HiddenStates(states.hidden.detach(), LmHead(head.weight.detach(), bias, head.temperature))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        head, other = LmHead(weight, bias, how.temperature), how.against.states
        function = full_reverse if how.against.which == "full_reverse" else full_forward
        parts = [
            function(logits=head.logits(own), ref_logits=other.head.logits(theirs))
            for own, theirs in zip(torch.split(hidden, how.rows), torch.split(other.hidden, how.rows), strict=True)
        ]
        found = torch.cat(parts)
        ctx.save_for_backward(hidden, weight, found, *([] if bias is None else [bias]))
        ctx.how = how
        return found

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, found, *rest = ctx.saved_tensors
        bias, how, other = rest[0] if rest else None, ctx.how, ctx.how.against.states
        head = LmHead(weight, bias, how.temperature)
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, hidden.shape[0], how.rows):
            at = slice(start, start + how.rows)
            tables = (head.logits(hidden[at]), other.head.logits(other.hidden[at]))
            slope = _slope(how.against.which, tables, found[at])
            slope = slope.mul_((grads[0][at] / how.temperature)[:, None]).to(hidden.dtype)
            if to_hidden is not None:
                to_hidden[at] = product(slope, weight)
            if to_weight is not None:
                to_weight += outer_sum(slope, hidden[at])
            if to_bias is not None:
                to_bias += slope.sum(0)
        return to_hidden, to_weight, to_bias, None


def _slope(which: Divergence, tables: tuple[Tensor, Tensor], found: Tensor) -> Tensor:
    """Return the gradient of the first tempered logits `[A, V]`; 0 for tokens that the policy masks."""
    own, theirs = (torch.log_softmax(table, -1) for table in tables)
    if which == "full_forward":
        return own.exp() - theirs.exp()
    gap = torch.where(own == -torch.inf, 0.0, own - theirs)
    return own.exp() * (gap - found[:, None])
