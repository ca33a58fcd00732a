"""Versions of the default adapter in one engine: an episode keeps the version that it started with."""

from __future__ import annotations

from dataclasses import dataclass, field

from ludus.engines.base import DEFAULT


@dataclass
class AdapterVersions:
    """Map each episode to its adapter's name in the engine. Unless `keeps` is set, all use `current`."""

    current: str
    keeps: bool = False
    _episodes: dict[str, str] = field(default_factory=dict, init=False)

    def of(self, episode: str) -> str:
        """Return the adapter that an episode samples with."""
        if not self.keeps or not episode:
            return self.current
        return self._episodes.setdefault(episode, self.current)

    def name(self, version: int) -> str:
        """Return the engine's name for a version."""
        return f"{DEFAULT}#{version}"

    def renew(self, name: str) -> str | None:
        """Use `name` for new episodes. Return the previous adapter if no episode needs it, else None."""
        old, self.current = self.current, name
        return self._unless_needed(old)

    def release(self, episode: str) -> str | None:
        """End an episode. Return its adapter if that is outdated and unused, else None."""
        had = self._episodes.pop(episode, None)
        return None if had is None else self._unless_needed(had)

    def _unless_needed(self, name: str) -> str | None:
        """Return `name` if it can be unloaded. The model's own adapter stays: it holds the LoRA scale."""
        needed = name in (self.current, DEFAULT) or name in self._episodes.values()
        return None if needed else name
