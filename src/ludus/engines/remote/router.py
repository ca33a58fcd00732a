"""Which replica an episode's requests go to. Replicas may come and go while requests run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.engines.remote.http_client import Replica
from ludus.engines.remote.rolling_update import EpisodePin
from ludus.errors import EngineError


@dataclass
class Router:
    """The replicas of one client (a list that changes in place), those that left, and where episodes are."""

    replicas: list[Replica]
    left: list[Replica] = field(default_factory=list)
    _by_episode: dict[str, Replica] = field(default_factory=dict)
    _pins: dict[str, EpisodePin] = field(default_factory=dict)

    def pin(self, episode: str, pin: EpisodePin) -> None:
        """Have an episode stay at one replica and one version, to its end or until it is pinned anew."""
        self._pins[episode] = pin
        self._by_episode.pop(episode, None)

    def pin_of(self, episode: str) -> EpisodePin | None:
        """Where the episode stays, if it does."""
        return self._pins.get(episode)

    def of(self, episode: str) -> Replica:
        """The episode's replica: the one that it had, else the least busy of those in reach.

        Raises EngineError where there is none, or that at which it stays has left.
        """
        pin = self._pins.get(episode)
        if pin is not None:
            return self._at(pin)
        known = self._by_episode.get(episode)
        if known is not None and not known.is_down:
            return known
        if not self.replicas:
            raise EngineError("There is no inference server: all have left.")
        return min(self.replicas, key=lambda replica: (replica.is_down, replica.load))

    def is_new(self, episode: str) -> bool:
        """Whether the episode has no replica yet."""
        return episode not in self._by_episode

    def keep(self, episode: str, replica: Replica) -> None:
        """Send the episode's next request to the same replica, unless that has left."""
        if not replica.gone:
            self._by_episode[episode] = replica

    def release(self, episode: str) -> None:
        """Forget where an episode is."""
        self._by_episode.pop(episode, None)
        self._pins.pop(episode, None)

    def leave(self, url: str) -> None:
        """Send nothing more to a replica; what waits for it to come back fails, episodes move on."""
        for replica in [one for one in self.replicas if one.url == url]:
            replica.part()
            self.replicas.remove(replica)
            self.left.append(replica)
            self._by_episode = {e: r for e, r in self._by_episode.items() if r is not replica}

    def _at(self, pin: EpisodePin) -> Replica:
        for replica in self.replicas:
            if replica.url == pin.url:
                return replica
        raise EngineError(f"{pin.url} has left, and with it the weights {pin.version} of its episodes.")

    def urls(self) -> Sequence[str]:
        """The addresses of the replicas."""
        return [replica.url for replica in self.replicas]
