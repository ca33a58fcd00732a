"""A learner for each of several models, whose tokens are in the same rows (`model.roles`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ludus.training.batches.chunked_lm_head import Entropy, TokenScores
from ludus.training.batches.rows import Row
from ludus.training.learner.learner import Learner
from ludus.training.learner.logprobs import score_dtype


def rows_of_policy(rows: Sequence[Row], policy: str) -> tuple[list[int], list[Row]]:
    """Return the indices of the rows with tokens of a policy in the loss, and these rows with only those tokens in it.

    `policy` is a `Segment.policy`. Tokens of others are context.
    """
    found: dict[int, Row] = {}
    for i, row in enumerate(rows):
        own = [name == policy for name in row.policies or ("",) * len(row.tokens)]
        trains = tuple(marked and mine for marked, mine in zip(row.trains, own, strict=True))
        observed = tuple(seen and mine for seen, mine in zip(row.observed, own, strict=False))
        if any(trains):
            found[i] = replace(row, trains=trains, observed=observed, policies=())
    return [*found], [*found.values()]


_COUNT = "num_steps"


def read_counted(part: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """Return the state of an optimizer in `checkpoint_parts`, and its number of steps."""
    return {name: tensor for name, tensor in part.items() if name != _COUNT}, int(part[_COUNT])


@dataclass
class RoleLearners(Learner):
    """The learner of the shared model, with the learners of the separate ones by `Segment.policy`.

    Each takes optimizer steps on its own tokens alone: normalization of the loss, clipping of the gradient, moments
    and the number of steps are separate. All have one algorithm and learning rate.
    """

    by_policy: Mapping[str, Learner] = field(default_factory=dict)
    frozen: Collection[str] = ()
    """Policies that are not trained."""

    def separate(self) -> Iterator[tuple[str, Learner]]:
        """Yield the separate learners, with the algorithm, temperature and learning rate factor of this one."""
        for policy, learner in self.by_policy.items():
            learner.algorithm = self.algorithm
            learner.optimizer.learning_rate_factor = self.optimizer.learning_rate_factor
            for scorer in (learner.scorer, *learner.scorers.values()):
                scorer.temperature = self.scorer.temperature
            yield policy, learner

    def score_with(
        self, name: str, rows: Sequence[Row], entropy: Entropy = "none", keep: bool = False
    ) -> list[TokenScores]:
        """Return the scores `[T]` of rows, those of each token by the learner of its policy; 0 at other tokens."""
        model = self.scorer.model
        dtype, device = score_dtype(model), next(model.parameters()).device
        zeros = [torch.zeros(len(row.tokens), dtype=dtype, device=device) for row in rows]
        total = [TokenScores(zero, None if entropy == "none" else zero) for zero in zeros]
        shared = partial(super().score_with, name)
        for policy, score in [("", shared), *((p, partial(one.score_with, name)) for p, one in self.separate())]:
            indices, own = rows_of_policy(rows, policy)
            for i, found in zip(indices, score(own, entropy, keep) if own else [], strict=True):
                total[i] = _sum(total[i], found, device)
        return total

    def checkpoint_parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the states of the optimizers of the separate models, for `read_counted`."""
        optimizers = {policy: learner.optimizer for policy, learner in self.by_policy.items()}
        return {name: one.state_dict() | {_COUNT: torch.tensor(one.num_steps)} for name, one in optimizers.items()}

    def train(self, rows: Sequence[Row], seed: int) -> dict[str, float]:
        """Train each model on its tokens; the metrics of the separate ones begin with their policy, `role_x/`."""
        metrics = super().train(rows_of_policy(rows, "")[1], seed)
        for policy, learner in self.separate():
            if policy not in self.frozen:
                own = learner.train(rows_of_policy(rows, policy)[1], seed)
                metrics |= {f"{policy}/{name}": value for name, value in own.items()}
        return metrics


def _sum(left: TokenScores, right: TokenScores, device: torch.device) -> TokenScores:
    entropy = None if left.entropy is None or right.entropy is None else left.entropy + right.entropy.to(device)
    return TokenScores(left.logprobs + right.logprobs.to(device), entropy)
