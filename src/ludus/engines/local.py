"""The embedded engine: samples from a Hugging Face causal language model in this process.

Takes requests from any number of tasks on an event loop; gives completions. All compute and all access to
the caches happens on one worker thread, in the order in which it was asked for, so that a batch never sees
half-loaded weights. It waits for nothing but that thread and never retries.

With the same weights, the same sequence of `generate_batch` calls gives the same tokens and
log-probabilities, bit for bit, on one machine. `generate` forms its batches from what happens to wait, so
rounding may differ there from run to run.
"""

from __future__ import annotations

import asyncio
import copy as copying
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from ludus.engines.base import Request
from ludus.engines.batch import BatchSampler, EngineStats
from ludus.engines.fingerprint import fingerprint_module
from ludus.engines.forward import CausalForward
from ludus.engines.kv import KvStore
from ludus.errors import EngineError, SyncError
from ludus.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of the embedded engine, in tokens but for `max_batch` (requests) and `threads`."""

    context_tokens: int = 1024
    """Prompt plus completion."""
    max_batch: int = 128
    """Requests computed together; a larger `generate_batch` is split in order."""
    cache_tokens: int = 131_072
    """Keys and values kept between turns; beyond that the least recently used episode is recomputed."""
    prefill_tokens: int = 1024
    """Padded tokens of one prefill pass; a GPU likes more."""
    threads: int = 0
    """Compute threads on a CPU, apart from those of the learner; 0 leaves torch its own number."""


class LocalEngine:
    """An `Engine` around any causal language model with standard attention.

    Works on its own copy of `model` unless `copy` is False; then the model is the engine's from here on.
    `tokenizer` is needed for stop strings only. Raises `UserError` for a model it cannot run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        settings: EngineSettings = EngineSettings(),
        *,
        version: int = 0,
        copy: bool = True,
    ) -> None:
        self._model = copying.deepcopy(model) if copy else model
        self._model.requires_grad_(False).eval()
        self._has_tokenizer = tokenizer is not None
        self._settings = settings
        self._version = version
        self._forward = CausalForward(self._model)
        self._store = KvStore(self._forward.layout, settings.cache_tokens)
        self._sampler = BatchSampler(
            self._forward, self._store, tokenizer, settings.context_tokens, settings.prefill_tokens
        )
        self._worker = ThreadPoolExecutor(1, "ludus-engine", partial(_take_threads, settings.threads))
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._drain: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def context_tokens(self) -> int:
        return self._settings.context_tokens

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Completion:
        """Sample one action, together with whatever else waits when the engine is free."""
        self._check(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._drain is None or self._drain.done():
            self._drain = asyncio.create_task(self._serve_waiting())
        return await future

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one action for each request, in order, as batches of at most `max_batch`."""
        for request in requests:
            self._check(request)
        size = self._settings.max_batch
        parts = [requests[first : first + size] for first in range(0, len(requests), size)]
        done = await asyncio.gather(*(self._compute(partial(self._sample, part)) for part in parts))
        return [completion for part in done for completion in part]

    def release(self, episode: str) -> None:
        """Forget an episode's cache, once the compute under way is done."""
        if not self._closed:
            self._worker.submit(self._store.drop, episode)

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Copy `state` (all parameters or some, by name) into the engine's model and drop every cache.

        Raises `SyncError`, with nothing changed, for an unknown name or another shape.
        """
        await self._compute(partial(self._load, version, state))

    async def fingerprint(self) -> str:
        """`fingerprint_module` of the weights in use."""
        return await self._compute(partial(fingerprint_module, self._model))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token at temperature 1, by one plain forward pass; 0 for the first.

        Raises `EngineError` if there are none, or more than `context_tokens`.
        """
        if not 0 < len(token_ids) <= self.context_tokens:
            raise EngineError(
                f"A sequence of {len(token_ids)} tokens cannot be scored: "
                f"the engine takes 1 to {self.context_tokens}."
            )
        return await self._compute(partial(self._score, tuple(token_ids)))

    async def close(self) -> None:
        """Finish the compute under way and refuse any more."""
        self._closed = True
        await asyncio.to_thread(self._worker.shutdown)
        self._store.clear()

    def stats(self, *, reset: bool = False) -> EngineStats:
        """Counts since the start or the last reset."""
        stats = self._sampler.stats
        if reset:
            self._sampler.stats = EngineStats()
        return stats

    def _check(self, request: Request) -> None:
        length, limit = len(request.token_ids), self.context_tokens
        if not 0 < length < limit:
            raise EngineError(
                f"Episode {request.episode} has a prompt of {length} tokens, "
                f"but the engine takes 1 to {limit - 1} (context_tokens is {limit}).",
                "Shorten the history or give the engine a larger context.",
            )
        if request.params.max_new_tokens < 1:
            raise EngineError(f"Episode {request.episode} asks for max_new_tokens below 1.")
        if request.params.stop and not self._has_tokenizer:
            raise EngineError("Stop strings need a tokenizer.", "Give the engine one, or use stop_token_ids.")
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self._forward.vocab_size:
            raise EngineError(
                f"Episode {request.episode} has token ids outside the model's vocabulary "
                f"of {self._forward.vocab_size}.",
                "Use the tokenizer that belongs to the model.",
            )

    async def _serve_waiting(self) -> None:
        """Batch what waits until nothing does."""
        await asyncio.sleep(0)
        while batch := self._next_batch():
            await self._serve(batch)

    def _next_batch(self) -> list[tuple[Request, asyncio.Future[Completion]]]:
        live = [place for place in self._waiting if not place[1].done()]
        self._waiting = live[self._settings.max_batch :]
        return live[: self._settings.max_batch]

    async def _serve(self, batch: Sequence[tuple[Request, asyncio.Future[Completion]]]) -> None:
        """End each future with its completion, or with whatever error ended the batch."""
        work = self._compute(partial(self._sample, [request for request, _ in batch]))
        (outcome,) = await asyncio.gather(work, return_exceptions=True)
        for place, (_, future) in enumerate(batch):
            if future.done():
                continue
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome[place])

    async def _compute(self, work: Callable[[], Result]) -> Result:
        if self._closed:
            raise EngineError("The engine is closed.")
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _sample(self, requests: Sequence[Request]) -> list[Completion]:
        """The boundary to torch: what fails in there (memory, a device) becomes an `EngineError`."""
        try:
            return self._sampler.run(requests, self._version)
        except EngineError:
            self._sampler.forget()
            raise
        except (RuntimeError, MemoryError) as error:
            self._sampler.forget()
            raise EngineError(f"Inference failed on a batch of {len(requests)}: {error}") from error

    @torch.no_grad()
    def _load(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        own = self._model.state_dict(keep_vars=True)
        unknown = sorted(set(state) - set(own))
        if unknown or not state:
            shown = ", ".join(unknown[:3]) or "no tensors at all"
            raise SyncError(f"The weights of version {version} do not belong to the engine's model: {shown}.")
        for name, tensor in state.items():
            if own[name].shape != tensor.shape:
                raise SyncError(
                    f"Weight {name} of version {version} has shape {tuple(tensor.shape)}, "
                    f"the engine's has {tuple(own[name].shape)}."
                )
        for name, tensor in state.items():
            own[name].copy_(tensor)
        self._sampler.forget()
        self._version = version

    @torch.inference_mode()
    def _score(self, token_ids: tuple[int, ...]) -> list[float]:
        ids = torch.tensor([token_ids], device=self._forward.device)
        logits = self._forward.plain_logits(ids)[0, :-1]
        logprobs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
        scores: list[float] = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return [0.0, *scores]


def _take_threads(threads: int) -> None:
    """Give the calling thread its own number of compute threads: OpenMP counts them thread by thread."""
    if threads:
        torch.zeros(1).sum()  # torch takes over its global number on first use, so that comes before
        torch.set_num_threads(threads)
