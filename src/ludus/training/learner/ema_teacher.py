"""Self-teacher: the exponential moving average of the policy's weights, as a scorer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ludus.training.batches.chunked_lm_head import Entropy, HiddenStates, TokenScores
from ludus.training.learner.logprobs import LogprobScorer, TokenScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


EMA_TEACHER = "ema_teacher"
"""Name of the average in a checkpoint."""


@dataclass
class EmaTeacher:
    """Frozen copy of the policy that follows it: after each optimizer step `w <- w + rate (policy - w)`.

    The average of weights with fewer than 32 bits is kept in float32. At a `rate` of 1 the teacher is the policy
    itself, without a copy.
    """

    policy: PreTrainedModel
    temperature: float
    rate: float
    scorer: LogprobScorer = field(init=False)
    _average: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        model = self.policy
        if self.rate < 1:
            trained = [name for name, weight in self.policy.named_parameters() if weight.requires_grad]
            model = copy.deepcopy(self.policy).requires_grad_(False).eval()
            weights = dict(model.named_parameters())
            self._average = {
                name: weights[name].data.to(torch.promote_types(weights[name].dtype, torch.float32)) for name in trained
            }
        self.scorer = LogprobScorer(model, self.temperature)

    def score(self, tokens: Tensor, scored: Tensor, entropy: Entropy = "none") -> TokenScores:
        return self.scorer.score(tokens, scored, entropy)

    def distributions(self, tokens: Tensor, scored: Tensor) -> HiddenStates:
        return self.scorer.distributions(tokens, scored)

    @torch.no_grad()
    def update(self, policy: torch.nn.Module) -> None:
        """Move the average towards the weights of `policy`."""
        weights, own = dict(policy.named_parameters()), dict(self.scorer.model.named_parameters())
        for name, average in self._average.items():
            average.lerp_(weights[name].to(average), self.rate)
            own[name].copy_(average)

    def state(self) -> dict[str, Tensor]:
        """Return the average by name; empty at a rate of 1."""
        return dict(self._average)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state`."""
        own = dict(self.scorer.model.named_parameters())
        for name, average in self._average.items():
            average.copy_(state[name])
            own[name].copy_(average)


def update_ema(scorers: Mapping[str, TokenScorer], policy: torch.nn.Module) -> None:
    """Update the self-teacher among the scorers, if there is one, after an optimizer step."""
    if isinstance(teacher := scorers.get("teacher"), EmaTeacher):
        teacher.update(policy)


def ema_state(scorers: Mapping[str, TokenScorer]) -> dict[str, dict[str, Tensor]]:
    """Return the part of a checkpoint with the self-teacher's average; empty without one."""
    teacher = scorers.get("teacher")
    state = teacher.state() if isinstance(teacher, EmaTeacher) else {}
    return {EMA_TEACHER: state} if state else {}
