"""Cache entries of each episode in the embedded engine, until release or eviction.

Only the engine's worker calls this, between two passes, so that no weight update falls between an episode's
cache lookup and its first pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ludus.engines.embedded.radix_cache import AT
from ludus.engines.embedded.scheduler import BatchScheduler, Sequence


@dataclass
class SessionCache:
    """Cache entries of episodes by name; with `outlive` they stay valid across weight updates."""

    core: BatchScheduler
    outlive: bool
    _histories: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict, init=False)
    _shelves: dict[str, str] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        """Number of known episodes."""
        return len(self._histories.keys() | self._shelves.keys())

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence on its episode's cache branch."""
        episode, sequence.shelf = sequence.request.episode, sequence.adapter
        if self.outlive and episode:  # separate from episodes that started under other weights
            own = f"{sequence.adapter}{AT}{self.core.version_of(sequence.adapter)}"
            sequence.shelf = self._shelves.setdefault(episode, own)
        self.core.add(sequence)

    def ended(self, sequence: Sequence) -> None:
        """Record the computed history of the sequence; its last token was never computed."""
        if sequence.error is None and sequence.scores is None:
            self._histories[sequence.request.episode] = (sequence.shelf, tuple(sequence.tokens[:-1]))

    def forget_name(self, episode: str) -> tuple[str, tuple[int, ...]] | None:
        """Forget the episode; return its cache branch and tokens."""
        self._shelves.pop(episode, None)
        return self._histories.pop(episode, None)

    def release(self, episode: str) -> None:
        """Forget the episode and free the cache entries that it shares with no other."""
        history = self.forget_name(episode)
        if history is not None:
            self.core.forget(history[1], history[0])
