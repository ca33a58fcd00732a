"""What models beside the policy say of its rows: the reference and the teacher, token by token or whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ludus.algorithms.spec.algorithm import FULL_KL_NAMES, Algorithm
from ludus.training.batches.chunked_lm_head import CHUNK_LOGITS, Entropy
from ludus.training.batches.rows import Microbatch
from ludus.training.learner.full_kl import Divergence, DivergenceTarget, HiddenStates
from ludus.training.learner.logprobs import LogprobScorer, ScoredTokens

OTHERS = ("reference", "teacher")
"""Scorers that no update changes."""


class TokenScorer(Protocol):
    """Anything that gives log-probabilities `[B, L]` of given tokens: a reference, a teacher.

    `distributions` is what it says before the tokens that are asked for, for divergences of all of it.
    """

    def score(self, tokens: Tensor, asked: Tensor, entropy: Entropy = "none") -> ScoredTokens: ...

    def distributions(self, tokens: Tensor, asked: Tensor) -> HiddenStates: ...


@dataclass(frozen=True, slots=True)
class AuxLogprobs:
    """What models beside the policy say of one microbatch.

    Log-probabilities `[B, L]` of the reference and the teacher, or what the policy's whole distributions are
    compared with, by their names.
    """

    reference: Tensor | None = None
    teacher: Tensor | None = None
    against: Mapping[str, DivergenceTarget] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuxScorers:
    """The scorers of an algorithm beside its policy."""

    algorithm: Algorithm
    scorers: Mapping[str, TokenScorer]

    @property
    def compared_whole(self) -> dict[str, Divergence]:
        """Those whose whole distributions are read, and which divergence from them."""
        found: dict[str, Divergence] = {}
        if self.algorithm.loss == "distill_full" and "teacher" in self.scorers:
            found["teacher"] = "full_reverse"
        for which in FULL_KL_NAMES:
            if self.algorithm.kl == which and "reference" in self.scorers:
                found["reference"] = which
        return found

    @property
    def by_token(self) -> list[str]:
        """Those that are read token by token."""
        return [name for name in OTHERS if name in self.scorers and name not in self.compared_whole]

    def against(self, tokens: Tensor, asked: Tensor) -> dict[str, DivergenceTarget]:
        """What whole distributions are compared with at the tokens that are asked for."""
        return {
            name: DivergenceTarget(self.scorers[name].distributions(tokens, asked), which)
            for name, which in self.compared_whole.items()
        }

    def say(self, part: Microbatch, known: Mapping[str, Sequence[Tensor]], asked: Tensor) -> AuxLogprobs:
        """What they say of a microbatch; `known` has it for some of them, `[T]` a row."""
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
    """The full KL to the reference in the place of log-probabilities."""

    policy: LogprobScorer
    beside: AuxScorers

    def score(self, tokens: Tensor, asked: Tensor, entropy: Entropy = "none") -> ScoredTokens:
        """The divergence at each token that is asked for."""
        found, apart = self.policy.compare(tokens, asked, entropy, self.beside.against(tokens, asked))
        return ScoredTokens(apart["reference"], found.entropy)

    def distributions(self, tokens: Tensor, asked: Tensor) -> HiddenStates:
        """Those of the policy."""
        return self.policy.distributions(tokens, asked)


def table_of(values: Sequence[Tensor], part: Microbatch, like: Tensor) -> Tensor:
    """Values `[T]` of each row as `[B, L]` of a microbatch, as `like` is, without gradient."""
    padded = torch.zeros_like(like)
    for place, i in enumerate(part.index):
        padded[place, : len(values[i])] = values[i].to(padded)
    return padded.detach()


@dataclass(frozen=True, slots=True)
class SumPiSquared:
    """The sum of squared probabilities before each token in the place of log-probabilities."""

    policy: LogprobScorer

    @torch.no_grad()
    def score(self, tokens: Tensor, asked: Tensor, entropy: Entropy = "none") -> ScoredTokens:
        """The sum at each token that is asked for."""
        states = self.policy.distributions(tokens, asked)
        rows, columns = torch.nonzero(asked[:, 1:], as_tuple=True)
        size = max(1, CHUNK_LOGITS // states.head.weight.shape[0])
        parts = torch.split(states.hidden, size)
        sums = [torch.softmax(states.head.logits(part), -1).square().sum(-1) for part in parts]
        found = torch.zeros(tokens.shape, dtype=sums[0].dtype, device=tokens.device)
        found[rows, columns + 1] = torch.cat(sums)
        return ScoredTokens(found, None)

    def distributions(self, tokens: Tensor, asked: Tensor) -> HiddenStates:
        """Those of the policy."""
        return self.policy.distributions(tokens, asked)
