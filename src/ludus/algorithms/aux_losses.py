"""Terms beside the policy loss that are means over tokens of their own: observations, positive trajectories.

Each has a coefficient in `algorithm.options.terms`, 0 where it is not named, and divides by the number of
its own tokens in the whole batch, so that microbatches add up.
"""

from __future__ import annotations

from torch import Tensor

from ludus.algorithms.aggregate import Normalizer
from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.losses import echo, positive_nll
from ludus.algorithms.spec.algorithm import TERM_NAMES, Algorithm


def coefficient(algorithm: Algorithm, name: str) -> float:
    """The coefficient of a term; 0 is no term."""
    return algorithm.number("terms", name)


def added_terms(batch: TokenBatch, algorithm: Algorithm, normaliser: Normalizer) -> dict[str, Tensor]:
    """The terms [] of one microbatch by name, times their coefficients, to be added to its loss.

    Raises ValueError where the batch does not say which tokens a term is about.
    """
    return {
        name: _term(name, coef, batch, normaliser) for name in TERM_NAMES if (coef := coefficient(algorithm, name)) > 0
    }


def _term(name: str, coef: float, batch: TokenBatch, normaliser: Normalizer) -> Tensor:
    if name == "echo":
        if batch.observed is None:
            raise ValueError("echo is above 0 and the batch does not say which tokens are observations")
        return echo(logprobs=batch.logprobs, observations=batch.observed, coef=coef, num_tokens=normaliser.observed)
    if batch.positive is None:
        raise ValueError("positive_nll is above 0 and the batch does not say which trajectories are positive")
    return positive_nll(
        logprobs=batch.logprobs, positive=batch.positive, mask=batch.mask, coef=coef, num_tokens=normaliser.positive
    )
