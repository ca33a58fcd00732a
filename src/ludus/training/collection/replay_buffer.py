"""Bounded replay buffer of trained groups, for asynchronous runs.

Groups are drawn first-in-first-out or by variance. Groups are evicted, and counted, if they are too old, were
replayed often enough, or exceed the size. Replayed episodes are excluded from the ledger and from sampling
metrics. The buffer is part of the checkpoint.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.config.sections.staleness import ReplayConfig
from ludus.errors import StorageError
from ludus.rollout.ledger import RolloutOutcome
from ludus.rollout.scheduler import Episode
from ludus.training.collection.prompt_stream import episode_line, read_episode
from ludus.training.credit.advantages import TrainingSample, assign_credit
from ludus.types import Task

TO_REPLAY: Final = "to_replay"
"""Drop reason of an episode past the staleness bound that moved to the buffer."""
REPLAY_FILE: Final = "replay.jsonl"
"""File name of the buffer in a checkpoint's trainer folder."""


@dataclass
class _StoredGroup:
    """Group in the buffer; `version` is that of its oldest token.

    A group of another run has a `source` and no age here; it counts as oldest.
    """

    episodes: list[Episode]
    version: int
    replayed: int = 0
    source: str = ""

    @property
    def spread(self) -> float:
        members = [episode.trajectory for episode in self.episodes if not episode.greedy]
        return statistics.pstdev(reward for one in members for reward in one.row_rewards)


@dataclass
class ReplayBuffer:
    """Replay buffer of a run; `groups_per_step` is the number of fresh groups."""

    config: ReplayConfig
    groups_per_step: int
    expired: int = field(default=0, init=False)
    """Groups evicted since the start or resume because of age, size, or a missing baseline."""
    late: int = field(default=0, init=False)
    """Groups since then that entered the buffer past the bound, without training first."""
    refused: int = field(default=0, init=False)
    """Groups of other runs since then whose effective sample share was too low."""
    used: int = field(default=0, init=False)
    """Groups since then that were evicted after `times` replays."""
    _stored: list[_StoredGroup] = field(default_factory=list, init=False)

    def num_at(self, step: int) -> int:
        """Return how many groups a step replays; summed over steps it is the share, rounded down."""
        share = self.config.share
        rate = self.groups_per_step * share / (1 - share) + 1e-9
        return int(step * rate) - int((step - 1) * rate)

    def add(self, samples: Sequence[TrainingSample]) -> None:
        """Add the groups of a step that were trained at least in part."""
        if not self.config.share:
            return
        groups: dict[int, list[Episode]] = {}
        trained = {c.group for c in samples if c.outcome is RolloutOutcome.TRAINED and not c.replayed}
        for sample in samples:
            if sample.group in trained and not sample.replayed and not sample.expert:
                groups.setdefault(sample.group, []).append(sample.episode)
        self._stored += [_StoredGroup(episodes, _oldest_version(episodes)) for episodes in groups.values()]
        self._drop_beyond()

    def take_late(self, samples: Sequence[TrainingSample], step: int, bound: int) -> list[TrainingSample]:
        """Move groups with a token older than `bound` to the buffer and return the samples.

        The moved ones are marked as dropped; they train from the buffer and leave the ledger.
        """
        old = {c.group for c in samples if step - 1 - _oldest_version([c.episode], step) > bound and not c.expert}
        late = {c.group for c in samples if c.group in old and c.outcome is RolloutOutcome.TRAINED}

        def goes(sample: TrainingSample) -> bool:
            return sample.group in late and sample.outcome is not RolloutOutcome.FAILED and not sample.expert

        groups: dict[int, list[Episode]] = {}
        for sample in filter(goes, samples):
            groups.setdefault(sample.group, []).append(sample.episode)
        self.late += len(groups)
        self._stored += [_StoredGroup(episodes, _oldest_version(episodes)) for episodes in groups.values()]
        self._drop_beyond()
        return [
            replace(sample, outcome=RolloutOutcome.DROPPED, reason=TO_REPLAY) if goes(sample) else sample
            for sample in samples
        ]

    def add_source(self, source: str, groups: Sequence[list[Episode]]) -> None:
        """Add groups of another run."""
        self._stored += [_StoredGroup(episodes, 0, source=source) for episodes in groups]
        self._drop_beyond()

    def foreign(self, step: int, algorithm: Algorithm) -> list[list[Episode]]:
        """Return the groups of other runs that `step` would replay."""
        return [stored.episodes for stored in self._chosen(step, algorithm) if stored.source]

    def refuse(self, episodes: list[Episode]) -> None:
        """Remove a group whose effective sample share is too low."""
        left = [stored for stored in self._stored if stored.episodes is not episodes]
        self.refused, self._stored = self.refused + len(self._stored) - len(left), left

    def draw(self, step: int, algorithm: Algorithm, max_length: int, first_group: int) -> list[TrainingSample]:
        """Return the samples of the groups that `step` replays, numbered from `first_group`.

        `RolloutCollector.replay_samples` makes a batch of them.
        """
        chosen = self._chosen(step, algorithm)
        fit = [stored for stored in self._stored if self._fits(stored, step, algorithm)]
        self.expired += len(self._stored) - len(fit)
        for stored in chosen:
            stored.replayed += 1
        self._stored = fit
        self._drop_used()
        oldest = step - 1 - self.config.max_age
        groups = [
            [_relabel_versions(one, oldest) for one in stored.episodes] if stored.source else stored.episodes
            for stored in chosen
        ]
        samples = assign_credit(groups, algorithm, max_length, first_group)
        return [replace(sample, replayed=True) for sample in samples]

    def metrics(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Return the replay metrics of a step; empty if replay is unused."""
        if not self.config.share:
            return {}
        again = [sample for sample in samples if sample.replayed]
        return {
            "replay/groups": float(len({sample.group for sample in again})),
            "replay/trained": float(sum(sample.outcome is RolloutOutcome.TRAINED for sample in again)),
            "replay/kept": float(len(self._stored)),
            "replay/expired": float(self.expired),
            "replay/late": float(self.late),
            "replay/refused": float(self.refused),
            "replay/used": float(self.used),
        }

    def to_text(self) -> str:
        """Serialize to JSON lines: each group before its episodes, oldest first."""
        lines = []
        for stored in self._stored:
            greedy = [episode.greedy for episode in stored.episodes]
            task = stored.episodes[0].task.id
            head = {"task": task, "replayed": stored.replayed, "greedy": greedy, "source": stored.source}
            lines.append(json.dumps(head))
            lines += [episode_line(episode) for episode in stored.episodes]
        return "".join(f"{line}\n" for line in lines)

    def restore(self, text: str, tasks: Mapping[str, Task]) -> None:
        """Restore from `to_text`. Raises StorageError if the text is invalid or a task is unknown."""
        found = []
        try:
            lines = iter([json.loads(line) for line in text.splitlines()])
            for head in lines:
                task = tasks[head["task"]]
                episodes = [read_episode(next(lines), task, greedy) for greedy in head["greedy"]]
                source = str(head.get("source", ""))
                found.append(_StoredGroup(episodes, _oldest_version(episodes), int(head["replayed"]), source))
        except (ValueError, TypeError, KeyError, StopIteration) as error:
            raise StorageError(
                f"The checkpoint's replay buffer cannot be read: {error!r}.",
                "Remove this checkpoint and resume from the one before.",
            ) from error
        self._stored = found
        self._drop_used()
        self._drop_beyond()

    def _fits(self, stored: _StoredGroup, step: int, algorithm: Algorithm) -> bool:
        """Return whether a group is young enough and has the baseline that the algorithm needs.

        Groups from before a resume with another algorithm may lack it.
        """
        whole = not algorithm.advantage_spec.has(Need.GREEDY_ROLLOUT) or any(one.greedy for one in stored.episodes)
        return whole and (bool(stored.source) or step - 1 - stored.version <= self.config.max_age)

    def _chosen(self, step: int, algorithm: Algorithm) -> list[_StoredGroup]:
        """Return the groups that a step would replay."""
        fit = [stored for stored in self._stored if self._fits(stored, step, algorithm)]
        by_spread = sorted(fit, key=lambda stored: -stored.spread)  # stable sort: first in, first out among equals
        return (by_spread if self.config.order == "priority" else fit)[: self.num_at(step)]

    def _drop_beyond(self) -> None:
        beyond = max(0, len(self._stored) - self.config.size)
        self._stored, self.expired = self._stored[beyond:], self.expired + beyond

    def _drop_used(self) -> None:
        left = [stored for stored in self._stored if stored.replayed < self.config.times]
        self.used, self._stored = self.used + len(self._stored) - len(left), left


def _relabel_versions(episode: Episode, version: int) -> Episode:
    """Return the episode with all tokens labelled with one version."""
    trajectory = episode.trajectory
    segments = tuple(replace(s, versions=(version,) * len(s.versions)) for s in trajectory.segments)
    return replace(episode, trajectory=replace(trajectory, segments=segments))


def _oldest_version(episodes: Sequence[Episode], default: int = 0) -> int:
    versions = (v for e in episodes for s in e.trajectory.segments for v in s.versions)
    return min(versions, default=default)
