"""The engine protocol: what a rollout needs of whatever samples tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ludus.types import Completion, SamplingParams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Request:
    """One action to sample.

    `token_ids` is the whole history; the engine finds by itself what it has already computed. `episode`
    names the episode, so that its cache can be kept and later released.
    """

    episode: str
    token_ids: tuple[int, ...]
    params: SamplingParams


class Engine(Protocol):
    """Samples from a language model.

    Raises `EngineError` where inference fails. `context_tokens` bounds prompt plus completion.
    """

    @property
    def context_tokens(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a request's tokens and log-probabilities are the same bits whatever else is computed."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Sample one action."""
        ...

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one action for each request, as one batch in the given order."""
        ...

    def release(self, episode: str) -> None:
        """Forget what was kept for an episode that has ended."""
        ...

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Take new weights; all later tokens carry `version`."""
        ...

    async def fingerprint(self) -> str | None:
        """`fingerprint_module` of the weights in use; None where the engine cannot tell."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token given those before it; 0 for the first."""
        ...

    async def close(self) -> None: ...
