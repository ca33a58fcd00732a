"""Where the embedded engine's cache keeps each episode, until the episode is over or the room is needed.

Takes sequences on their way into the core and out of it. Only the engine's worker calls it, between two
passes, so that no weights come between an episode's place in the cache and its first pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ludus.engines.embedded.radix_cache import AT
from ludus.engines.embedded.scheduler import BatchScheduler, Sequence


@dataclass
class SessionCache:
    """The places of episodes by name; with `outlive` their keys and values outlive the weights."""

    core: BatchScheduler
    outlive: bool
    _histories: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict, init=False)
    _shelves: dict[str, str] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        """Names that are known."""
        return len(self._histories.keys() | self._shelves.keys())

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, where its episode is kept."""
        episode, sequence.shelf = sequence.request.episode, sequence.adapter
        if self.outlive and episode:  # apart from those that began under other weights
            own = f"{sequence.adapter}{AT}{self.core.version_of(sequence.adapter)}"
            sequence.shelf = self._shelves.setdefault(episode, own)
        self.core.add(sequence)

    def ended(self, sequence: Sequence) -> None:
        """What was computed of a sequence stays for its episode; the last token never was."""
        if sequence.error is None and sequence.scores is None:
            self._histories[sequence.request.episode] = (sequence.shelf, tuple(sequence.tokens[:-1]))

    def forget_name(self, episode: str) -> tuple[str, tuple[int, ...]] | None:
        """The episode is over; gives its place and its tokens."""
        self._shelves.pop(episode, None)
        return self._histories.pop(episode, None)

    def release(self, episode: str) -> None:
        """The same, and what is kept for it and shared with nobody goes."""
        history = self.forget_name(episode)
        if history is not None:
            self.core.forget(history[1], history[0])
