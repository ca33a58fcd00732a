"""Several versions of the default adapter in one engine: an episode stays with the one that it began with."""

from __future__ import annotations

from dataclasses import dataclass, field

from ludus.engines.base import DEFAULT


@dataclass
class AdapterVersions:
    """The adapter of each episode by its name in the engine. Without `keeps` all have the `current` one."""

    current: str
    keeps: bool = False
    _episodes: dict[str, str] = field(default_factory=dict, init=False)

    def of(self, episode: str) -> str:
        """The adapter that an episode samples with."""
        if not self.keeps or not episode:
            return self.current
        return self._episodes.setdefault(episode, self.current)

    def name(self, version: int) -> str:
        """What a version is called beside others."""
        return f"{DEFAULT}#{version}"

    def renew(self, name: str) -> str | None:
        """Episodes begin with this one from now on; gives the one before, if no episode needs it."""
        old, self.current = self.current, name
        return self._unless_needed(old)

    def release(self, episode: str) -> str | None:
        """An episode is over; gives the version that it had, if it is older and no other episode needs it."""
        had = self._episodes.pop(episode, None)
        return None if had is None else self._unless_needed(had)

    def _unless_needed(self, name: str) -> str | None:
        """The adapter that came with the model stays: the scale of the others is its own."""
        needed = name in (self.current, DEFAULT) or name in self._episodes.values()
        return None if needed else name
