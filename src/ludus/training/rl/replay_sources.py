"""Load rollouts of other runs into the replay buffer and check that they are close to the policy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ludus.config.schema import Config
from ludus.errors import ConfigError
from ludus.rollout.ledger import RolloutKey
from ludus.rollout.rollout_files import RolloutRecord, read_rollouts
from ludus.rollout.scheduler import Episode
from ludus.training.collection.replay_buffer import ReplayBuffer
from ludus.training.learner.learner import Learner
from ludus.training.rl.advantage_inputs import effective_share
from ludus.types import Task

_CHECKED = 16
"""Groups per source that are checked before the first step, evenly spaced."""
_CHECKPOINT = re.compile(r"step-(\d{6,})")


def load_sources(
    replay: ReplayBuffer, tasks: Mapping[str, Task], learner: Learner, vocab_size: int, min_share: float
) -> None:
    """Add the groups of `staleness.replay.sources` to the buffer.

    Raises ConfigError if a source has no usable rollouts or its effective sample share under the learner's
    policy is below `min_share`; UserError if a file cannot be read.
    """
    for source in replay.config.sources:
        groups = _groups(source, tasks, vocab_size)
        if not groups:
            raise ConfigError(
                f"{source} has no usable rollouts. Needed: groups of two or more, of tasks in "
                "this world's train split, with log-probabilities, in this model's vocabulary.",
                "Remove it from staleness.replay.sources.",
            )
        chosen = groups[:: -(-len(groups) // _CHECKED)]
        share = effective_share([one.trajectory for group in chosen for one in group], learner)
        if share < min_share:
            raise ConfigError(
                f"The rollouts of {source} are too far from this policy to train on: their effective sample "
                f"share is {share:.2g}, below staleness.min_ess = {min_share:g}.",
                "Remove it from staleness.replay.sources, or start from weights that are closer to it.",
            )
        replay.add_source(source, groups)


def check_sources(config: Config) -> None:
    """Raise ConfigError for a source of `staleness.replay` without rollouts."""
    if config.training.streams and config.staleness.replay.share:
        for source in config.staleness.replay.sources:
            _files(source)


def refuse_far(replay: ReplayBuffer, groups: Sequence[list[Episode]], learner: Learner, least: float) -> int:
    """Exclude the groups whose effective sample share is below `least`; return their number."""
    far = [group for group in groups if effective_share([e.trajectory for e in group], learner) < least]
    for group in far:
        replay.refuse(group)
    return len(far)


def _files(source: str) -> list[Path]:
    """Return the rollout files of a run, of a run up to a checkpoint, or a single file."""
    path = Path(source)
    if path.is_file():
        return [path]
    match = _CHECKPOINT.fullmatch(path.name)
    run, last = (path.parent.parent, int(match[1])) if match and path.is_dir() else (path, None)
    found = sorted((run / "rollouts").glob("step-*.jsonl.gz"))
    found = [one for one in found if last is None or int(one.name.split("-")[1].split(".")[0]) <= last]
    if not found:
        raise ConfigError(
            f"{source} has no rollouts to replay.",
            "staleness.replay.sources takes run folders, checkpoints of runs and files step-*.jsonl.gz.",
        )
    return found


def _groups(source: str, tasks: Mapping[str, Task], vocab_size: int) -> list[list[Episode]]:
    found: dict[tuple[Path, int, str], list[Episode]] = {}
    for path in _files(source):
        for record in read_rollouts(path):
            if record.group in tasks and _can_train(record, vocab_size):
                key = RolloutKey(record.step, record.group, record.trajectory.sample, record.attempt)
                group = found.setdefault((path, record.step, record.group), [])
                group.append(Episode(key, tasks[record.group], record.trajectory))
    return [group for group in found.values() if len(group) > 1]


def _can_train(record: RolloutRecord, vocab_size: int) -> bool:
    """Return whether a rollout has the fields that corrections need, and tokens of this model."""
    segments = record.trajectory.segments
    actions = [segment for segment in segments if segment.kind == "action"]
    whole = all(len(s.logprobs) == len(s.versions) == len(s.tokens) for s in actions)
    known = all(0 <= token < vocab_size for segment in segments for token in segment.tokens)
    return record.trajectory.failure is None and bool(actions) and whole and known
