"""Bounded replay buffer of trained groups, for asynchronous runs.

Groups are drawn first-in-first-out or by variance. Groups are evicted, and counted, if they are too old, were
replayed often enough, or exceed the size. Replayed episodes are excluded from the ledger and from sampling
metrics. The buffer is part of the checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.config.schema import Config
from ludus.config.sections.training import ReplayConfig
from ludus.errors import ConfigError
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import SESSION_PREFIX, RolloutRecord, read_rollouts
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.prompt_stream import episode_line, read_episode, reading
from ludus.training.credit.advantages import TrainingSample, assign_credit
from ludus.training.credit.roles import ROLE, SESSION
from ludus.types import Task, grouped

TO_REPLAY: Final = "to_replay"
"""Drop reason of an episode past the staleness bound that moved to the buffer."""
REPLAY_FILE: Final = "replay.jsonl"
"""File name of the buffer in a checkpoint's trainer folder."""


@dataclass(eq=False)
class _StoredGroup:
    """Group in the buffer. One of another run has a `source` and no age here."""

    episodes: list[Episode]
    replayed: int = 0
    source: str = ""

    @cached_property
    def version(self) -> int:
        return _oldest_version(self.episodes)

    @property
    def spread(self) -> float:
        members = [episode.trajectory for episode in self.episodes if not episode.greedy]
        return statistics.pstdev(reward for one in members for reward in one.row_rewards)


@dataclass
class ReplayBuffer:
    """Replay buffer of a run; `groups_per_step` is the number of fresh groups."""

    config: ReplayConfig
    groups_per_step: int
    success: str = ""
    """Outcome part of `config.confidence`."""
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """Groups since the start or resume, by name in the metrics.

    `expired`: evicted because of age, size, or a missing baseline. `late`: entered the buffer past the bound,
    without training first. `refused`: of other runs, with too low an effective sample size. `used`: evicted
    after `times` replays.
    """
    _stored: list[_StoredGroup] = field(default_factory=list, init=False)

    def num_at(self, step: int) -> int:
        """Return the number of groups that a step replays; over all steps it sums to the share, rounded down."""
        share = self.config.share
        rate = self.groups_per_step * share / (1 - share) + 1e-9
        return int(step * rate) - int((step - 1) * rate)

    def add(self, samples: Sequence[TrainingSample]) -> None:
        """Add the groups of a step with at least one trained sample."""
        if not self.config.share:
            return
        trained = {c.group for c in samples if c.outcome is RolloutOutcome.TRAINED and not c.replayed}
        if self.config.confidence is not None:
            trained &= {c.group for c in samples if self._is_confident(c.episode)}
        self._add_groups(c for c in samples if c.group in trained and not c.replayed and not c.expert)

    def _is_confident(self, episode: Episode) -> bool:
        """Return whether an episode succeeded with a confidence in the band."""
        low, high = self.config.confidence or (0.0, 1.0)
        logprobs = [value for s in episode.trajectory.segments for value in s.logprobs]
        confidence = math.exp(statistics.fmean(logprobs)) if logprobs else 0.0
        return episode.trajectory.rewards.get(self.success, 0.0) >= 1 and low < confidence <= high

    def _add_groups(self, samples: Iterable[TrainingSample]) -> int:
        """Add the groups of the samples and return their number."""
        groups = grouped(samples, lambda one: one.group)
        self._store([_StoredGroup([one.episode for one in own]) for own in groups.values()])
        return len(groups)

    def take_stale(self, samples: Sequence[TrainingSample], step: int, bound: int) -> list[TrainingSample]:
        """Move groups with a token older than `bound` to the buffer; return the samples, with moved ones as dropped."""
        stale = {c.group for c in samples if step - 1 - _oldest_version([c.episode], step) > bound and not c.expert}
        late = {c.group for c in samples if c.group in stale and c.outcome is RolloutOutcome.TRAINED}

        def goes(sample: TrainingSample) -> bool:
            return sample.group in late and sample.outcome is not RolloutOutcome.FAILED and not sample.expert

        self.counts["late"] += self._add_groups(filter(goes, samples))
        return [
            replace(sample, outcome=RolloutOutcome.DROPPED, reason=TO_REPLAY) if goes(sample) else sample
            for sample in samples
        ]

    def add_source(self, source: str, groups: Sequence[list[Episode]]) -> None:
        self._store([_StoredGroup(episodes, source=source) for episodes in groups])

    def load_sources(
        self,
        tasks: Mapping[str, Task],
        vocab_size: int,
        share: Callable[[Sequence[Episode]], float],
        least: float,
        min_group: int = 2,
    ) -> None:
        """Add the groups of the `sources` with `min_group` rollouts or more; with 1, also sessions without a task.

        Raises ConfigError for a source without usable rollouts or with a low `share`.
        """
        for source in self.config.sources:
            groups = _read_groups(source, tasks, vocab_size, min_group)
            if not groups:
                size = "" if min_group == 1 else "groups of two or more, "
                sessions = " or sessions without a task" if min_group == 1 else ""
                raise ConfigError(
                    f"{source} has no usable rollouts. Needed: {size}of tasks in this world's train split{sessions}, "
                    "with log-probabilities, in this model's vocabulary.",
                    "Remove it from staleness.replay.sources.",
                )
            ess = share([one for group in groups[:: -(-len(groups) // _CHECKED)] for one in group])
            if ess < least:
                raise ConfigError(
                    f"The rollouts of {source} are too far off-policy: their effective sample "
                    f"size is {ess:.2g}, below staleness.min_ess = {least:g}.",
                    "Remove it from staleness.replay.sources, or start from weights closer to it.",
                )
            self.add_source(source, groups)

    def session_rewards(self) -> list[float]:
        """Return the rewards of the sessions without a task."""
        episodes = [stored.episodes[0] for stored in self._stored]
        return [one.trajectory.reward for one in episodes if one.task.tags.get(ROLE) == SESSION]

    def evict_low_ess(
        self, step: int, algorithm: Algorithm, share: Callable[[Sequence[Episode]], float], least: float
    ) -> None:
        """Evict the groups of other runs that `step` would replay and whose effective sample size is below `least`."""
        while refused := [s for s in self._chosen(step, algorithm) if s.source and share(s.episodes) < least]:
            self._evict("refused", [stored for stored in self._stored if stored not in refused])

    def draw(self, step: int, algorithm: Algorithm, max_length: int, first_group: int) -> list[TrainingSample]:
        """Return the samples of the groups that `step` replays, numbered from `first_group`."""
        chosen = self._chosen(step, algorithm)
        self._evict("expired", [stored for stored in self._stored if self._fits(stored, step, algorithm)])
        for stored in chosen:
            stored.replayed += 1
        self._drop_used()
        oldest = step - 1 - self.config.max_age  # of groups of other runs, which have no age here
        groups = [
            [_relabel_versions(one, oldest) for one in stored.episodes] if stored.source else stored.episodes
            for stored in chosen
        ]
        samples = assign_credit(groups, algorithm, max_length, first_group)
        return [replace(sample, replayed=True) for sample in samples]

    def metrics(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        if not self.config.share:
            return {}
        replayed = [sample for sample in samples if sample.replayed]
        return {
            "replay/groups": float(len({sample.group for sample in replayed})),
            "replay/trained": float(sum(sample.outcome is RolloutOutcome.TRAINED for sample in replayed)),
            "replay/kept": float(len(self._stored)),
        } | {f"replay/{name}": float(self.counts[name]) for name in ("expired", "late", "refused", "used")}

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
        groups = []
        with reading("replay buffer"):
            lines = iter([json.loads(line) for line in text.splitlines()])
            for head in lines:
                task = tasks.get(head["task"]) or _session_task(head["task"])
                episodes = [read_episode(next(lines), task, greedy) for greedy in head["greedy"]]
                groups.append(_StoredGroup(episodes, int(head["replayed"]), str(head["source"])))
        self._stored = groups
        self._drop_used()
        self._store([])

    def _fits(self, stored: _StoredGroup, step: int, algorithm: Algorithm) -> bool:
        """Return whether a group is within the age bound and has the baseline that the algorithm needs."""
        eligible = not algorithm.advantage_spec.has(Need.GREEDY_ROLLOUT) or any(one.greedy for one in stored.episodes)
        return eligible and (bool(stored.source) or step - 1 - stored.version <= self.config.max_age)

    def _chosen(self, step: int, algorithm: Algorithm) -> list[_StoredGroup]:
        fit = [stored for stored in self._stored if self._fits(stored, step, algorithm)]
        by_spread = sorted(fit, key=lambda stored: -stored.spread)  # stable sort: first in, first out among equals
        return (by_spread if self.config.order == "priority" else fit)[: self.num_at(step)]

    def _store(self, groups: Sequence[_StoredGroup]) -> None:
        self._stored = [*self._stored, *groups]
        self._evict("expired", self._stored[max(0, len(self._stored) - self.config.size) :])

    def _drop_used(self) -> None:
        self._evict("used", [stored for stored in self._stored if stored.replayed < self.config.times])

    def _evict(self, reason: str, remaining: list[_StoredGroup]) -> None:
        """Evict all but the `remaining` groups and count the evicted ones."""
        self.counts[reason] += len(self._stored) - len(remaining)
        self._stored = remaining


def _relabel_versions(episode: Episode, version: int) -> Episode:
    trajectory = episode.trajectory
    segments = tuple(replace(s, versions=(version,) * len(s.versions)) for s in trajectory.segments)
    return replace(episode, trajectory=replace(trajectory, segments=segments))


def _oldest_version(episodes: Sequence[Episode], default: int = 0) -> int:
    versions = (v for e in episodes for s in e.trajectory.segments for v in s.versions)
    return min(versions, default=default)


_CHECKED = 16
"""Groups per source that are checked before the first step, evenly spaced."""
_CHECKPOINT = re.compile(r"step-(\d{6,})")


def check_sources(config: Config) -> None:
    """Raise ConfigError for a source of `staleness.replay` without rollouts."""
    if config.training.streams and config.staleness.replay.share:
        for source in config.staleness.replay.sources:
            _rollout_files(source)


def _rollout_files(source: str) -> list[Path]:
    """Return the rollout files of a run, of a run up to a checkpoint, or a single file."""
    path = Path(source)
    if path.is_file():
        return [path]
    match = _CHECKPOINT.fullmatch(path.name)
    run, last = (path.parent.parent, int(match[1])) if match and path.is_dir() else (path, None)
    files = sorted((run / "rollouts").glob("step-*.jsonl.gz"))
    files = [file for file in files if last is None or int(file.name.split("-")[1].split(".")[0]) <= last]
    if not files:
        raise ConfigError(
            f"{source} has no rollouts to replay.",
            "staleness.replay.sources takes run folders, checkpoints of runs and files step-*.jsonl.gz.",
        )
    return files


def _read_groups(source: str, tasks: Mapping[str, Task], vocab_size: int, min_group: int) -> list[list[Episode]]:
    groups: dict[tuple[Path, int, str], list[Episode]] = {}
    for path in _rollout_files(source):
        for record in read_rollouts(path):
            is_session = min_group == 1 and record.group.startswith(SESSION_PREFIX)
            if (record.group in tasks or is_session) and _is_trainable(record, vocab_size):
                task = tasks.get(record.group) or _session_task(record.group)
                group = groups.setdefault((path, record.step, record.group), [])
                group.append(Episode(record.key, task, record.trajectory))
    return [group for group in groups.values() if len(group) >= min_group]


def _session_task(name: str) -> Task:
    """Return the task of a recorded session that names none. Raises KeyError if it is not one."""
    if not name.startswith(SESSION_PREFIX):
        raise KeyError(name)
    return Task(name, (), None, tags={ROLE: SESSION})


def _is_trainable(record: RolloutRecord, vocab_size: int) -> bool:
    """Return whether a rollout has the fields that corrections need, and tokens of this model."""
    segments = record.trajectory.segments
    actions = [segment for segment in segments if segment.kind == "action"]
    complete = all(len(s.logprobs) == len(s.versions) == len(s.tokens) for s in actions)
    in_vocabulary = all(0 <= token < vocab_size for segment in segments for token in segment.tokens)
    return record.is_scored and bool(actions) and complete and in_vocabulary
