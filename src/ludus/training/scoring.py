"""Log-probabilities of given tokens under a Hugging Face causal language model, with gradient.

Only the positions that are asked for pass through the output layer: a dialogue is mostly prompt and
observation, and a row of logits is as wide as the vocabulary. That shortcut is used for a model only if it
reproduces the model's own logits on a probe; otherwise the full logits are computed and selected from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ludus.algorithms.entropy import entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Scores(NamedTuple):
    """`logprobs` and `entropy`, `[B, L]`, 0 where nothing was asked; column `t` speaks of token `t`."""

    logprobs: Tensor
    entropy: Tensor | None


@dataclass
class Scorer:
    """Scores tokens under `model` at `temperature`: what a learner, a reference or a teacher is made of."""

    model: PreTrainedModel
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self._shortcut = _shortcut_holds(self.model)

    def score(self, tokens: Tensor, asked: Tensor, *, with_entropy: bool = False) -> Scores:
        """Log-probability (natural log, float32 or better) of the tokens `[B, L]` marked in `asked`.

        A token is scored from the position before it; the first of a row cannot be and scores 0. Rows are
        padded on the right, which a causal model does not see. `with_entropy` adds the entropy of the whole
        distribution, in nats, without gradient.
        """
        rows, columns = torch.nonzero(asked[:, 1:], as_tuple=True)
        if rows.numel() == 0:
            nothing = torch.zeros(tokens.shape, dtype=self._dtype, device=tokens.device)
            return Scores(nothing, nothing if with_entropy else None)
        used = int(columns.max()) + 1
        logits = self._logits(tokens[:, :used], rows, columns)
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        picked = logits.gather(1, tokens[rows, columns + 1, None])[:, 0] - logits.logsumexp(-1)
        spread = entropy(logits=logits.detach()) if with_entropy else None
        at = (rows, columns + 1)
        return Scores(_placed(picked, at, tokens), None if spread is None else _placed(spread, at, tokens))

    @property
    def _dtype(self) -> torch.dtype:
        own = next(self.model.parameters()).dtype
        return own if own == torch.float64 else torch.float32

    def _logits(self, tokens: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Logits `[A, V]` at the given positions."""
        if not self._shortcut:
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
            return logits[rows, columns]
        hidden: Tensor = _body(self.model)(input_ids=tokens, use_cache=False).last_hidden_state
        picked: Tensor = self.model.get_output_embeddings()(hidden[rows, columns])
        return picked


def _placed(values: Tensor, at: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    empty = torch.zeros(like.shape, dtype=values.dtype, device=values.device)
    return empty.index_put(at, values)


def _body(model: PreTrainedModel) -> torch.nn.Module:
    """The model below its output layer."""
    body: torch.nn.Module = model.base_model
    return body


@torch.no_grad()
def _shortcut_holds(model: PreTrainedModel) -> bool:
    """Whether body and output layer alone give the model's logits, bit for bit or nearly so."""
    head = model.get_output_embeddings()
    if head is None or _body(model) is model:
        return False
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = (torch.arange(8, device=next(model.parameters()).device) * 7 % vocabulary)[None]
    try:
        hidden = _body(model)(input_ids=tokens, use_cache=False).last_hidden_state
        short = head(hidden)
    except (AttributeError, TypeError, RuntimeError):
        return False
    full = model(input_ids=tokens, use_cache=False).logits
    return short.shape == full.shape and bool(torch.allclose(short, full, rtol=1e-5, atol=1e-5))
