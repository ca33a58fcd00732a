"""The multi-turn workload of the rollout benchmark, with the same number of tokens for every system.

Needs only the standard library, so that the environments of other systems can import it. The number of tokens
of each turn is drawn beforehand, so that all systems generate equally many; the tokens themselves may differ.
"""

from __future__ import annotations

import hashlib
import math
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FIRST_ID = 16
"""Lower ids are reserved for special tokens."""


@dataclass(frozen=True)
class Work:
    """Sizes of the workload; lengths in tokens.

    A prompt is `system` common tokens and a question. Generated lengths are log-normal around `new` with sigma
    `spread`, clamped to 4 and `new_limit`; lengths of observations and questions are uniform within their bounds.
    """

    vocab: int
    prompts: int = 8
    members: int = 8
    turns: int = 3
    system: int = 64
    question: tuple[int, int] = (20, 100)
    observation: tuple[int, int] = (20, 200)
    new: int = 24
    spread: float = 0.7
    new_limit: int = 160
    seed: int = 0
    greedy: bool = False

    @property
    def longest(self) -> int:
        """The maximum length of an episode in tokens."""
        return max(episode.num_tokens for episode in episodes(self))


@dataclass(frozen=True)
class Episode:
    """An episode: prompt, numbers of tokens to generate in each turn, and observations after the turns."""

    prompt: tuple[int, ...]
    lengths: tuple[int, ...]
    observations: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(self.lengths) + sum(map(len, self.observations))


def episodes(work: Work) -> list[Episode]:
    """Return all episodes, grouped."""
    system = _tokens(random.Random(f"{work.seed}/system"), work, work.system)
    return [
        _episode(work, system + _question(work, prompt), f"{work.seed}/{prompt}/{member}")
        for prompt in range(work.prompts)
        for member in range(work.members)
    ]


def unshareable(plan: list[Episode], work: Work) -> list[Episode]:
    """Return the episodes with distinct first tokens, so that no two share a prefix."""
    return [
        Episode((FIRST_ID + i % (work.vocab - FIRST_ID), *e.prompt[1:]), e.lengths, e.observations)
        for i, e in enumerate(plan)
    ]


def num_generated(plan: list[Episode]) -> int:
    """Return the number of generated tokens."""
    return sum(sum(episode.lengths) for episode in plan)


def num_reusable(plan: list[Episode], work: Work) -> int:
    """Return the number of context tokens that an ideal cache has when they are needed again.

    The first member of a group finds the system prompt; the others find their prompt except its last token,
    whose logits are needed; a later turn finds everything except the token that was sampled last.
    """
    total = 0
    for i, episode in enumerate(plan):
        if i:
            total += len(episode.prompt) - 1 if i % work.members else work.system
        held = len(episode.prompt)
        for turn, observation in enumerate(episode.observations):
            total += held + episode.lengths[turn] - 1
            held += episode.lengths[turn] + len(observation)
    return total


def num_context(plan: list[Episode]) -> int:
    """Return the number of tokens whose keys and values decoding reads: all tokens before each generated one."""
    total = 0
    for episode in plan:
        held = len(episode.prompt)
        for length, observation in zip(episode.lengths, (*episode.observations, ()), strict=True):
            total += length * held + length * (length - 1) // 2
            held += length + len(observation)
    return total


def digest(generated: Sequence[Sequence[int]]) -> str:
    """Return a digest of the generated tokens, episode by episode."""
    text = ";".join(",".join(map(str, tokens)) for tokens in generated)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def peak_mb(device: str = "cpu") -> float:
    """Return the peak memory of this process in MB; on a GPU, the memory allocated by torch."""
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated() / 1e6
    return _memory("VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1e6 if sys.platform == "darwin" else 1e3
    )


def memory_mb(device: str = "cpu") -> float:
    """Return the memory of this process in MB, or 0 if unknown; on a GPU, the memory allocated by torch."""
    if device != "cpu":
        import torch

        return torch.cuda.memory_allocated() / 1e6
    return _memory("VmRSS:")


class Clock:
    """Wall-clock and processor seconds since its creation."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._wall

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._cpu


def _memory(field: str) -> float:
    """Return a field of /proc/self/status in MB. (The peak of `getrusage` includes that of the parent process.)"""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((float(line.split()[1]) * 1.024e-3 for line in lines if line.startswith(field)), 0.0)


def _question(work: Work, prompt: int) -> tuple[int, ...]:
    source = random.Random(f"{work.seed}/{prompt}")
    return _tokens(source, work, source.randint(*work.question))


def _episode(work: Work, prompt: tuple[int, ...], seed: str) -> Episode:
    source = random.Random(seed)
    lengths: list[int] = []
    observations: list[tuple[int, ...]] = []
    for turn in range(work.turns):
        drawn = source.lognormvariate(math.log(work.new), work.spread)
        lengths.append(min(work.new_limit, max(4, round(drawn))))
        if turn + 1 < work.turns:
            observations.append(_tokens(source, work, source.randint(*work.observation)))
    return Episode(prompt, tuple(lengths), tuple(observations))


def _tokens(source: random.Random, work: Work, count: int) -> tuple[int, ...]:
    return tuple(source.randrange(FIRST_ID, work.vocab) for _ in range(count))
