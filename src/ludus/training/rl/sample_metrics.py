"""Metrics of a step that need the training samples: tasks that are sampled and never trained, and conflict tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from ludus.rollouts.ledger import RolloutOutcome
from ludus.training.batches.rows import new_actions
from ludus.training.credit.advantages import TrainingSample

STARVED = 3
"""Consecutive groups of a task without a trained token after which it is starved."""


def count_untrained(before: Mapping[str, int], samples: Sequence[TrainingSample]) -> dict[str, int]:
    """Return for each task the number of its newest groups in a row without a trained token.

    A group trains if the outcome of a member is TRAINED and its advantage is not 0 on some token. `before` are the
    counts of the steps before; tasks with a count of 0 are left out.
    """
    trains: dict[int, bool] = {}
    tasks = {sample.group: sample.episode.task.id for sample in samples}
    for sample in samples:
        trained = sample.outcome is RolloutOutcome.TRAINED and any(sample.advantages or ())
        trains[sample.group] = trains.get(sample.group, False) or trained
    counts = dict(before)
    for group, trained in trains.items():
        counts[tasks[group]] = 0 if trained else counts.get(tasks[group], 0) + 1
    return {task: count for task, count in counts.items() if count}


def starved_metrics(counts: Mapping[str, int], samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return the share of the step's tasks that are starved, and the number of starved tasks of the run."""
    starved = {task for task, count in counts.items() if count >= STARVED}
    sampled = {sample.episode.task.id for sample in samples}
    return {"tasks/starved": len(starved & sampled) / max(1, len(sampled)), "tasks/starved_in_run": float(len(starved))}


def conflict_share(samples: Sequence[TrainingSample]) -> float:
    """Return the share of conflict tokens (GTPO, arXiv:2508.03772) among the action tokens.

    A token is in conflict if it belongs to a prefix or a suffix of its attempt in which, at each index, attempts of its
    group with a positive and with a negative mean advantage have the same token.
    Only trained samples with an advantage count.
    """
    groups: dict[int, list[tuple[list[int], bool]]] = {}
    for sample in samples:
        if sample.outcome is RolloutOutcome.TRAINED and not sample.expert:
            tokens = list(chain.from_iterable(s.tokens for s in new_actions(sample.episode.trajectory)))
            if sample.advantage:
                groups.setdefault(sample.group, []).append((tokens, sample.advantage > 0))
    conflicts = sum(_conflicts(group) for group in groups.values())
    return conflicts / max(1, sum(len(tokens) for group in groups.values() for tokens, _ in group))


def _conflicts(group: Sequence[tuple[list[int], bool]]) -> int:
    """Return the conflict tokens of a group: the prefixes and suffixes of its attempts without their overlap."""
    reversed_group = [(tokens[::-1], positive) for tokens, positive in group]
    pairs = zip(group, _prefixes(group), _prefixes(reversed_group), strict=True)
    return sum(min(len(tokens), left + right) for (tokens, _), left, right in pairs)


def _prefixes(group: Sequence[tuple[list[int], bool]]) -> list[int]:
    """Return the length of the conflict prefix of each attempt."""
    lengths = [0] * len(group)
    unbroken, index = [*range(len(group))], 0
    while unbroken:
        seen: tuple[set[int], set[int]] = (set(), set())
        for tokens, positive in group:
            if index < len(tokens):
                seen[positive].add(tokens[index])
        both = seen[0] & seen[1]
        unbroken = [i for i in unbroken if index < len(group[i][0]) and group[i][0][index] in both]
        index += 1
        for i in unbroken:
            lengths[i] = index
    return lengths
