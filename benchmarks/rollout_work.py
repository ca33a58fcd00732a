"""The multi-turn workload of the rollout benchmark: what is asked of every system, token for token in number.

Needs the standard library only, so that it can be imported in the environments of other systems. How many
tokens each turn generates is drawn beforehand, so every system generates exactly as many; what it generates
is its own.
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
"""Lower ids are left to a tokenizer's special tokens."""


@dataclass(frozen=True)
class Work:
    """Sizes of the workload; lengths in tokens.

    Prompts are `system` tokens in common and a question. Generated lengths are log-normal around `new`, with
    sigma `spread`, cut to 4 and `new_limit`; observations and questions are uniform within their bounds.
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
        """Tokens of the longest episode."""
        return max(episode.num_tokens for episode in episodes(self))


@dataclass(frozen=True)
class Episode:
    """One member's episode: its prompt, the tokens to generate in each turn, and what follows each turn."""

    prompt: tuple[int, ...]
    lengths: tuple[int, ...]
    observations: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(self.lengths) + sum(map(len, self.observations))


def episodes(work: Work) -> list[Episode]:
    """All episodes, those of a group together."""
    system = _tokens(random.Random(f"{work.seed}/system"), work, work.system)
    return [
        _episode(work, system + _question(work, prompt), f"{work.seed}/{prompt}/{member}")
        for prompt in range(work.prompts)
        for member in range(work.members)
    ]


def unshareable(plan: list[Episode], work: Work) -> list[Episode]:
    """The same episodes, each with a first token of its own: no two have a prefix in common."""
    return [
        Episode((FIRST_ID + i % (work.vocab - FIRST_ID), *e.prompt[1:]), e.lengths, e.observations)
        for i, e in enumerate(plan)
    ]


def num_generated(plan: list[Episode]) -> int:
    """Tokens that the workload generates."""
    return sum(sum(episode.lengths) for episode in plan)


def num_reusable(plan: list[Episode], work: Work) -> int:
    """Context tokens that were computed before they are asked for again.

    The first member of a group finds the system prompt, the others their whole prompt but its last token,
    whose logits are needed; a later turn finds all but the token that was sampled last.
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
    """Tokens whose keys and values decoding reads: for each generated token, all that stand before it."""
    total = 0
    for episode in plan:
        held = len(episode.prompt)
        for length, observation in zip(episode.lengths, (*episode.observations, ()), strict=True):
            total += length * held + length * (length - 1) // 2
            held += length + len(observation)
    return total


def digest(generated: Sequence[Sequence[int]]) -> str:
    """Of every generated token, episode by episode."""
    text = ";".join(",".join(map(str, tokens)) for tokens in generated)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def peak_mb(device: str = "cpu") -> float:
    """The largest memory this process has had, in MB; on a GPU, that which torch has taken there."""
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated() / 1e6
    return _memory("VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1e6 if sys.platform == "darwin" else 1e3
    )


def memory_mb(device: str = "cpu") -> float:
    """The memory this process has now, in MB; 0 where the system does not tell."""
    if device != "cpu":
        import torch

        return torch.cuda.memory_allocated() / 1e6
    return _memory("VmRSS:")


class Clock:
    """Wall-clock and processor seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._wall

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._cpu


def _memory(field: str) -> float:
    """Of this program alone: the peak of `getrusage` begins with that of the process that started it."""
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
