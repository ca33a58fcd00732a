"""Per-token model estimates that advantages use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ludus.rollout.trees import Path


@dataclass(frozen=True, slots=True)
class Estimates:
    """Model estimates of the compared samples, in order, per action token `[n_i]`.

    `kl` to the reference, `values` of the critic, `outcome_probs` of an outcome critic, `prm_logprobs` of the
    process reward model with `ref_logprobs` of its reference; `old_logprobs`, `entropies` and
    `sum_pi_squared` (sum of squared probabilities) of the policy at the start of the step; `bootstrap` [one
    per path], the critic's value after the last action token, 0 for episodes that terminated. None if the
    algorithm does not use it.
    """

    kl: Sequence[Tensor] | None = None
    values: Sequence[Tensor] | None = None
    outcome_probs: Sequence[Tensor] | None = None
    prm_logprobs: Sequence[Tensor] | None = None
    ref_logprobs: Sequence[Tensor] | None = None
    old_logprobs: Sequence[Tensor] | None = None
    entropies: Sequence[Tensor] | None = None
    sum_pi_squared: Sequence[Tensor] | None = None
    bootstrap: Sequence[Tensor] | None = None

    def along(self, split: Sequence[Sequence[Path]]) -> Estimates:
        """Return the estimates for each path of each trajectory."""

        def spread(rows: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
            if rows is None:
                return None
            return [row[list(path.places)] for row, own in zip(rows, split, strict=True) for path in own]

        return Estimates(
            kl=spread(self.kl),
            values=spread(self.values),
            outcome_probs=spread(self.outcome_probs),
            prm_logprobs=spread(self.prm_logprobs),
            ref_logprobs=spread(self.ref_logprobs),
            old_logprobs=spread(self.old_logprobs),
            entropies=spread(self.entropies),
            sum_pi_squared=spread(self.sum_pi_squared),
            bootstrap=None if self.bootstrap is None else [v[None] for own in self.bootstrap for v in own],
        )

    @property
    def named(self) -> dict[str, Sequence[Tensor] | None]:
        """Return the estimates by their names in messages."""
        return {
            "KL to the reference": self.kl,
            "value of the critic": self.values,
            "probability of the outcome": self.outcome_probs,
            "log-probability under the process reward model": self.prm_logprobs,
            "log-probability under the reference": self.ref_logprobs,
            "log-probability at the start of the step": self.old_logprobs,
            "entropy at the start of the step": self.entropies,
            "sum of squared probabilities": self.sum_pi_squared,
            "value of the critic at the end": self.bootstrap,
        }


UNKNOWN = Estimates()
"""No estimates."""
