"""Memory check: run a microbatch of maximum length before the first step.

Out-of-memory errors then occur at the start of a run instead of at its first long batch. The gradient is
dropped; weights, moments and random state are unchanged. The check is collective.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ludus.config.schema import Config
from ludus.engines.models.loading import num_positions
from ludus.sandbox.guest.procfs import peak_memory
from ludus.training.batches.rows import Row
from ludus.training.distributed.collectives import Collectives, local_shard, raise_on_all_ranks
from ludus.training.learner.learner import REMEDY, CachedLogprobs, Learner

log = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory in bytes for the longest microbatch of `tokens` tokens, and the `available` memory.

    `others` is memory allocated before, without the policy's weights: engine, reference, libraries. `activations`
    excludes gradients. The first optimizer step allocates `moments`. On the CPU the numbers use the process's
    high-water mark, so an earlier peak can hide `activations`.
    """

    tokens: int
    weights: int
    others: int
    gradients: int
    activations: int
    moments: int
    available: int

    @property
    def total(self) -> int:
        return self.weights + self.others + self.gradients + self.activations + self.moments

    def __str__(self) -> str:
        return (
            f"the longest microbatch ({self.tokens} tokens) peaks at about {_gib(self.total)} GiB of "
            f"{_gib(self.available)} GiB: weights {_gib(self.weights)}, gradients {_gib(self.gradients)}, "
            f"moments {_gib(self.moments)}, activations {_gib(self.activations)}, other {_gib(self.others)}"
        )


def check_memory(config: Config, learner: Learner) -> MemoryEstimate | None:
    """Run the memory check if configured; `auto`: on a GPU only, since on the CPU it may take as long as a step."""
    wanted = config.training.learner.dry_run
    device = next(learner.scorer.model.parameters()).device
    if wanted == "never" or (wanted == "auto" and device.type != "cuda"):
        return None
    most = config.rollout.max_seq_len
    longest = min(most, num_positions(learner.scorer.model) or most)
    with learner.ranks.call_on_ranks("dry_run", longest):
        return dry_run(learner, longest)


def dry_run(learner: Learner, longest: int) -> MemoryEstimate:
    """Run forward and backward over as many rows of `longest` tokens as fit the budget (or one).

    All tokens except the first are trained; no prefix is shared; ranks have equal row counts. Raises
    LearnerError on all ranks if the pass or the following step runs out of memory.
    """
    parameters, model, ranks = list(learner.optimizer.parameters), learner.scorer.model, learner.ranks
    device = parameters[0].device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    num = max(1, learner.budget.tokens // longest)
    rows = longest_rows(num * (ranks.world_size if ranks.receives_all_rows else 1), longest, vocabulary)
    weights = _size(model.parameters())
    before = _in_use(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            learner.gradient(rows, CachedLogprobs(chosen=[torch.zeros(longest, dtype=torch.bool)] * len(rows)))
            gradients = _size(p.grad for p in parameters if p.grad is not None)
            peak = _peak(device)
        finally:
            learner.optimizer.zero_grad()
    estimate = MemoryEstimate(
        tokens=min(num * longest, max(learner.budget.tokens, longest)),
        weights=weights,
        others=max(0, before - weights),
        gradients=gradients,
        activations=max(0, peak - before - gradients),
        moments=learner.optimizer.unallocated_bytes,
        available=_available(device),
    )
    log.info("dry run: %s", estimate)
    _check_fits(estimate, ranks, device)
    return estimate


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_shard(tensor).nbytes for tensor in tensors)


def _check_fits(estimate: MemoryEstimate, ranks: Collectives, device: torch.device) -> None:
    """Raise LearnerError if the estimate exceeds memory. CPU memory is shared by a machine's ranks."""
    own_host = socket.gethostname() if device.type == "cpu" else str(ranks.rank)
    here = [total for host, total in ranks.gather((own_host, estimate.total)) if host == own_host]
    fault = ""
    if sum(here) > estimate.available:
        detail = f"; all {len(here)} ranks here need {_gib(sum(here))} GiB" if len(here) > 1 else ""
        fault = f"Not enough memory: {estimate}{detail}."
    raise_on_all_ranks(fault, f"Lower training.microbatch_tokens. {REMEDY}", ranks)


def longest_rows(num: int, length: int, vocabulary: int) -> list[Row]:
    """Return `num` rows of `length` tokens without shared prefixes, all trained."""
    trains = (False, *[True] * (length - 1))
    zeros, ones = (0.0,) * length, (0.0, *[1.0] * (length - 1))
    return [
        Row(tuple((i * (2 * k + 3) + k) % vocabulary for i in range(length)), trains, trains, zeros, ones)
        for k in range(num)
    ]


def _in_use(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return _peak(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if own_peak := peak_memory("self"):  # getrusage may report the peak of the parent process
        return own_peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no file, or "max"
        return min(installed, int(_CGROUP.read_text("ascii")))
    return installed


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
