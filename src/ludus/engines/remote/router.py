"""Route each episode's requests to a replica. Replicas may join and leave while requests run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.engines.remote.http_client import Replica
from ludus.engines.remote.rolling_update import EpisodePin
from ludus.errors import EngineError


@dataclass
class Router:
    """The replicas of one client (modified in place), removed ones, and the replica of each episode."""

    replicas: list[Replica]
    left: list[Replica] = field(default_factory=list)
    _by_episode: dict[str, Replica] = field(default_factory=dict)
    _pins: dict[str, EpisodePin] = field(default_factory=dict)

    def pin(self, episode: str, pin: EpisodePin) -> None:
        """Pin an episode to a replica and version until released or pinned again."""
        self._pins[episode] = pin
        self._by_episode.pop(episode, None)

    def pin_of(self, episode: str) -> EpisodePin | None:
        """Return the episode's pin, or None."""
        return self._pins.get(episode)

    def of(self, episode: str) -> Replica:
        """Return the episode's replica: its previous one, otherwise the least loaded reachable one.

        Raises EngineError if there is none, or if the replica it is pinned to was removed.
        """
        pin = self._pins.get(episode)
        if pin is not None:
            return self._at(pin)
        known = self._by_episode.get(episode)
        if known is not None and not known.is_down:
            return known
        if not self.replicas:
            raise EngineError("No inference server is left: all were removed.")
        return min(self.replicas, key=lambda replica: (replica.is_down, replica.load))

    def is_new(self, episode: str) -> bool:
        """Return whether the episode has no replica yet."""
        return episode not in self._by_episode

    def keep(self, episode: str, replica: Replica) -> None:
        """Route the episode's next request to the same replica, unless it was removed."""
        if not replica.gone:
            self._by_episode[episode] = replica

    def release(self, episode: str) -> None:
        """Forget an episode."""
        self._by_episode.pop(episode, None)
        self._pins.pop(episode, None)

    def leave(self, url: str) -> None:
        """Remove a replica: requests waiting for it to come back fail, and episodes move to others."""
        for replica in [one for one in self.replicas if one.url == url]:
            replica.part()
            self.replicas.remove(replica)
            self.left.append(replica)
            self._by_episode = {e: r for e, r in self._by_episode.items() if r is not replica}

    def _at(self, pin: EpisodePin) -> Replica:
        for replica in self.replicas:
            if replica.url == pin.url:
                return replica
        raise EngineError(f"{pin.url} was removed, which served version {pin.version} of its episodes.")

    def urls(self) -> Sequence[str]:
        """Return the addresses of the replicas."""
        return [replica.url for replica in self.replicas]
