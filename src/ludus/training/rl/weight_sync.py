"""Send the learner's weights to the engine and verify them.

After each transfer the engine's digest must equal the learner's, if the engine reports one, and the
log-probabilities of a probe must agree within a tolerance. SyncError is raised on a mismatch, on timeout, and
if the engine rejects the transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ludus.config.schema import Config
from ludus.engines.base import Engine, RollingUpdate, WeightCheck
from ludus.engines.models.fingerprint import fingerprint_gathered
from ludus.errors import EngineError, SyncError
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives, full_state_dict, is_sharded
from ludus.training.learner.logprobs import LogprobScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ludus.training.rl.train_step import ComputeDispatch


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected digest and probe `logprobs` `[T]` (CPU) of an engine with a version; `tolerance` in nats."""

    version: int
    fingerprint: str
    logprobs: Tensor
    tolerance: float

    def compare(self, theirs: str | None, scores: Sequence[float]) -> float:
        """Return the largest difference on the probe, in nats. Raises SyncError if it, or the digest, differs."""
        if theirs is not None and self.fingerprint != theirs:
            raise SyncError(
                f"The engine's weights are not those of version {self.version}: its digest is {theirs[:12]}, "
                f"the learner's {self.fingerprint[:12]}.",
                "No checkpoint was trained on rollouts of these weights. "
                "If another run has trained this server, restart it.",
            )
        diff = float((self.logprobs - torch.tensor(scores, dtype=self.logprobs.dtype))[1:].abs().max())
        if not diff <= self.tolerance:
            text = f"Engine and learner disagree on the probe by {diff:.3g} nats (tolerance {self.tolerance:g})."
            raise SyncError(text, "See training.sync_tolerance.")
        return diff


@dataclass(frozen=True)
class WeightSync:
    """Publish a model's trainable weights to an engine. `probe` is a fixed sequence of token ids."""

    model: PreTrainedModel
    engine: Engine
    probe: tuple[int, ...]
    tolerance: float = 1e-3
    deadline_s: float = 300.0
    ranks: Collectives = ONE_PROCESS
    others: tuple[WeightSync, ...] = ()
    """Those of separate models of roles, which `publish` includes."""

    @classmethod
    def of(
        cls,
        config: Config,
        model: PreTrainedModel,
        engine: Engine,
        probe: tuple[int, ...],
        ranks: Collectives = ONE_PROCESS,
    ) -> WeightSync:
        training = config.training
        tolerance = training.probe_tolerance(config.model.dtype)
        return cls(model, engine, probe, tolerance, training.sync_timeout_s, ranks)

    async def publish(self, version: int) -> float:
        """Send the weights as `version` and check them; they must not change meanwhile. Return the gap on the probe."""
        weights = self._gathered()
        result = await self._transfer(version, self._trainable(weights))
        gap = self._expected(version, weights).compare(*result)
        return max([gap, *[await one.publish(version) for one in self.others]])

    async def copy_weights(self, version: int, dispatch: ComputeDispatch) -> tuple[Expected, Mapping[str, Tensor]]:
        """Return the expected check and a copy of the weights as `version`, for `send_copy`; computed with `dispatch`.

        The weights may change once this returns. The copy is in CPU memory: the learner's device has no free memory
        during the next step, and reads from it would wait for its queue.
        """
        weights = self._gathered()

        def copy() -> tuple[Expected, Mapping[str, Tensor]]:
            trainable = self._trainable(weights)
            state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in trainable.items()}
            return self._expected(version, weights), state

        return await dispatch(copy)

    async def send_copy(self, expected: Expected, state: Mapping[str, Tensor]) -> float:
        return expected.compare(*await self._transfer(expected.version, state))

    async def send_in_flight(self, version: int, dispatch: ComputeDispatch) -> Expected:
        """Send the weights as `version`, which may change once this returns; `dispatch` computes the check."""
        weights = self._gathered()
        async with self._within_timeout(version):
            loading = self.engine.load_weights(version, self._trainable(weights))
            expected, _ = await asyncio.gather(dispatch(lambda: self._expected(version, weights)), loading)
        return expected

    async def check(self, expected: Expected) -> float:
        async with self._within_timeout(expected.version):
            return expected.compare(*await self._read_engine())

    async def _transfer(self, version: int, state: Mapping[str, Tensor]) -> tuple[str | None, Sequence[float]]:
        async with self._within_timeout(version):
            await self.engine.load_weights(version, state)
            return await self._read_engine()

    async def _read_engine(self) -> tuple[str | None, Sequence[float]]:
        return await self.engine.fingerprint(), await self.engine.score(self.probe)

    @asynccontextmanager
    async def _within_timeout(self, version: int) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.deadline_s):
                yield
        except TimeoutError as error:
            hint = "Check the engine and the network, or raise training.sync_timeout_s."
            raise SyncError(f"Sending weights {version} took longer than {self.deadline_s:g} s.", hint) from error
        except EngineError as error:
            raise SyncError(f"The engine rejected weights {version}: {error}") from error

    async def push_weights(
        self, version: int, engines: RollingUpdate, dispatch: ComputeDispatch, on_gap: Callable[[float], None]
    ) -> None:
        """Publish the weights as `version`, as `send_in_flight`, to rolling engines; `on_gap` receives each gap."""
        weights = self._gathered()
        expected = await dispatch(lambda: self._expected(version, weights))

        def check(theirs: str | None, scores: Sequence[float]) -> None:
            on_gap(expected.compare(theirs, scores))

        try:
            async with asyncio.timeout(self.deadline_s):
                weight_check = WeightCheck(version, self.probe, check, self.deadline_s)
                await engines.push_weights(weight_check, self._trainable(weights))
        except TimeoutError as error:
            raise SyncError(f"Storing weights {version} took longer than {self.deadline_s:g} s.") from error

    def _trainable(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: weights[name] for name, p in self.model.named_parameters() if p.requires_grad}

    def _gathered(self) -> dict[str, Tensor]:
        """Return all weights unsharded. Unsharded weights are not copied; frozen ones are the parameters themselves,
        whose digests are cached."""
        if not is_sharded(self.model):
            return {name: p.detach() if p.requires_grad else p for name, p in self.model.named_parameters()}
        with self.ranks.call_on_ranks("gather_weights"):
            return full_state_dict(self.model)

    @torch.no_grad()
    def _expected(self, version: int, weights: Mapping[str, Tensor]) -> Expected:
        ours = fingerprint_gathered(self.model, weights)
        if is_sharded(self.model):
            with self.ranks.call_on_ranks("probe", self.probe):
                own = probe_logprobs(LogprobScorer(self.model), self.probe)
        else:
            own = probe_logprobs(self._scorer, self.probe)
        return Expected(version, ours, own.cpu(), self.tolerance)

    @cached_property
    def _scorer(self) -> LogprobScorer:
        return LogprobScorer(self.model)


@torch.no_grad()
def probe_logprobs(scorer: LogprobScorer, probe: Sequence[int]) -> Tensor:
    """Return the log-probability of each token `[T]`; 0 for the first."""
    tokens = torch.tensor([probe], device=next(scorer.model.parameters()).device)
    return scorer.score(tokens, torch.ones_like(tokens, dtype=torch.bool)).logprobs[0]
