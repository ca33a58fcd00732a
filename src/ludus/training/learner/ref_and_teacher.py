"""Scores of the reference and the teacher, per token or over full distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ludus.algorithms.kl import FULL_KL_NAMES
from ludus.algorithms.parts import Need
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.training.batches.chunked_lm_head import CHUNK_LOGITS, Entropy
from ludus.training.batches.rows import Microbatch
from ludus.training.learner.full_kl import Divergence, DivergenceTarget, HiddenStates
from ludus.training.learner.logprobs import LogprobScorer, ScoredTokens

OTHERS = ("reference", "teacher")
"""Frozen scorers."""


class TokenScorer(Protocol):
    """Interface of models that score tokens `[B, L]`, such as a reference or a teacher.

    `distributions` returns full distributions at the scored tokens.
    """

    def score(self, tokens: Tensor, asked: Tensor, entropy: Entropy = "none") -> ScoredTokens: ...

    def distributions(self, tokens: Tensor, asked: Tensor) -> HiddenStates: ...


@dataclass(frozen=True, slots=True)
class AuxLogprobs:
    """Outputs of the auxiliary models on one microbatch.

    Log-probabilities `[B, L]` of reference and teacher, or targets of full divergences, by name.
    """

    reference: Tensor | None = None
    teacher: Tensor | None = None
    against: Mapping[str, DivergenceTarget] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuxScorers:
    """Scorers of an algorithm besides its policy."""

    algorithm: Algorithm
    scorers: Mapping[str, TokenScorer]

    @property
    def compared_whole(self) -> dict[str, Divergence]:
        """Return the scorers that are compared over full distributions, with their divergence."""
        found: dict[str, Divergence] = {}
        if self.algorithm.loss_spec.has(Need.TEACHER_DISTRIBUTION) and "teacher" in self.scorers:
            found["teacher"] = "full_reverse"
        for which in FULL_KL_NAMES:
            if self.algorithm.kl == which and "reference" in self.scorers:
                found["reference"] = which
        return found

    @property
    def by_token(self) -> list[str]:
        """Return the scorers that are read token by token."""
        return [name for name in OTHERS if name in self.scorers and name not in self.compared_whole]

    def against(self, tokens: Tensor, asked: Tensor) -> dict[str, DivergenceTarget]:
        """Return the divergence targets at the scored tokens."""
        return {
            name: DivergenceTarget(self.scorers[name].distributions(tokens, asked), which)
            for name, which in self.compared_whole.items()
        }

    def say(self, part: Microbatch, known: Mapping[str, Sequence[Tensor]], asked: Tensor) -> AuxLogprobs:
        """Return the scores of a microbatch; `known` holds cached ones, `[T]` a row."""
        found: dict[str, Tensor] = {}
        for name in self.by_token:
            if name in known:
                found[name] = table_of(known[name], part, part.advantages)
            else:
                with torch.no_grad():
                    found[name] = self.scorers[name].score(part.tokens, part.trains).logprobs
        return AuxLogprobs(found.get("reference"), found.get("teacher"), self.against(part.tokens, asked))


@dataclass(frozen=True, slots=True)
class FullKl:
    """Scorer that returns the full KL to the reference instead of log-probabilities."""

    policy: LogprobScorer
    beside: AuxScorers

    def score(self, tokens: Tensor, asked: Tensor, entropy: Entropy = "none") -> ScoredTokens:
        """Return the divergence at each scored token."""
        found, apart = self.policy.compare(tokens, asked, entropy, self.beside.against(tokens, asked))
        return ScoredTokens(apart["reference"], found.entropy)

    def distributions(self, tokens: Tensor, asked: Tensor) -> HiddenStates:
        """Return the policy's distributions."""
        return self.policy.distributions(tokens, asked)


def table_of(values: Sequence[Tensor], part: Microbatch, like: Tensor) -> Tensor:
    """Pad values `[T]` of each row to `[B, L]` of a microbatch, typed as `like`, without gradient."""
    padded = torch.zeros_like(like)
    for place, i in enumerate(part.index):
        padded[place, : len(values[i])] = values[i].to(padded)
    return padded.detach()


@dataclass(frozen=True, slots=True)
class SumPiSquared:
    """Scorer that returns the sum of squared probabilities instead of log-probabilities."""

    policy: LogprobScorer

    @torch.no_grad()
    def score(self, tokens: Tensor, asked: Tensor, entropy: Entropy = "none") -> ScoredTokens:
        """Return the sum at each scored token."""
        states = self.policy.distributions(tokens, asked)
        rows, columns = torch.nonzero(asked[:, 1:], as_tuple=True)
        size = max(1, CHUNK_LOGITS // states.head.weight.shape[0])
        parts = torch.split(states.hidden, size)
        sums = [torch.softmax(states.head.logits(part), -1).square().sum(-1) for part in parts]
        found = torch.zeros(tokens.shape, dtype=sums[0].dtype, device=tokens.device)
        found[rows, columns + 1] = torch.cat(sums)
        return ScoredTokens(found, None)

    def distributions(self, tokens: Tensor, asked: Tensor) -> HiddenStates:
        """Return the policy's distributions."""
        return self.policy.distributions(tokens, asked)
