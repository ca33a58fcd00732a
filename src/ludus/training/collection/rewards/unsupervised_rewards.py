"""Rewards without labels that are computed from the attempts at a task, their metrics, and their validation.

Those that need the policy's logits (`self_certainty`, `entropy`) are computed by the learner.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from statistics import fmean

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.chat.hints import full_text, split_at_action
from ludus.config.schema import Config
from ludus.config.sections.parts.terms import LEARNER_KINDS, UnsupervisedConfig
from ludus.envs.base import World
from ludus.errors import ConfigError
from ludus.rewards.exact_match import normalise
from ludus.rewards.extract import short_answers
from ludus.rollouts.scheduler import Episode
from ludus.training.credit.roles import is_expert
from ludus.types import Group, ToolStatus, Trajectory

NUM_STAGES = 4
"""Parts of equal length into which `confidence_stages` divides an attempt of one turn."""
_NUMBER = re.compile(r"-?\d{1,30}(?:[./]\d{1,30})?")
_TERM = re.compile(r"\d+|[^\W\d_]{4,}")
"""Numbers, and words of four letters or more."""


def answer_key(text: str) -> str:
    """Return the form in which answers are compared: extracted, normalized, and numbers as fractions.

    Empty for a text without an answer, or with several that differ.
    """
    keys = {_as_fraction(normalise(answer)) for answer in short_answers(text)}
    return keys.pop() if len(keys) == 1 else ""


def _as_fraction(text: str) -> str:
    try:
        return str(Fraction(text)) if _NUMBER.fullmatch(text) else text
    except ZeroDivisionError:
        return text


def majority_label(keys: Sequence[str]) -> str:
    """Return the most frequent key, the earliest one of several; empty keys do not vote (TTRL, arXiv:2504.16084)."""
    votes = Counter(key for key in keys if key)
    return votes.most_common(1)[0][0] if votes else ""


def majority(attempts: Sequence[Trajectory], votes: Sequence[bool]) -> list[float]:
    """Return for each attempt at one task 1 if its answer is the majority label, else 0.

    `votes` marks the attempts whose answers are counted. All values are 0 if no attempt has an answer.
    """
    keys = [answer_key(attempt.answer) for attempt in attempts]
    label = majority_label([key for key, counts in zip(keys, votes, strict=True) if counts])
    return [float(bool(label) and key == label) for key in keys]


def confidence_stages(attempt: Trajectory) -> list[float]:
    """Return the mean probability of the sampled tokens in each turn; for one turn, in each quarter of its tokens.

    The probabilities are those that the engine reported.
    """
    turns = [segment.logprobs for segment in attempt.segments if segment.kind == "action" and segment.logprobs]
    if len(turns) == 1:
        size = len(turns[0])
        bounds = [round(i * size / NUM_STAGES) for i in range(NUM_STAGES + 1)]
        turns = [turns[0][a:b] for a, b in pairwise(bounds) if a < b]
    return [math.fsum(map(math.exp, turn)) / len(turn) for turn in turns]


def confidence_gain(attempt: Trajectory) -> float:
    """Return the confidence of the last stage minus that of the first, in [-1, 1]; 0 for fewer than two stages.

    Progressive confidence shaping (arXiv:2605.24396) takes the trajectory of confidence as a process reward, since
    confidence before the work is done is a local optimum of training on outcomes alone. The formula of the paper was
    not available: this is the sum of the rises from stage to stage, built from that description.
    """
    stages = confidence_stages(attempt)
    return stages[-1] - stages[0] if stages else 0.0


def coverage(attempt: Trajectory) -> float:
    """Return the share of the terms of the question that the policy uses, 1 if the question has none.

    Terms are the numbers and the words of four letters or more in the user's messages before the first reply.
    """
    question, replies = split_at_action(attempt.messages)
    asked = _terms(one["content"] for one in question if one["role"] == "user")
    written = _terms(full_text(one) for one in replies if one["role"] == "assistant")
    return len(asked & written) / len(asked) if asked else 1.0


def _terms(texts: Iterable[str]) -> set[str]:
    return {term for text in texts for term in _TERM.findall(text.casefold())}


def regulation(attempt: Trajectory) -> float:
    """Return the share of failed calls that are not followed by the same call; 1 without a failed call."""
    statuses = {outcome.call_id: outcome.status for outcome in attempt.call_outcomes}
    calls = [call for message in attempt.messages for call in message.get("tool_calls") or ()]
    repeated = [
        before["function"] == after["function"]
        for before, after in pairwise(calls)
        if statuses.get(before["id"]) is not ToolStatus.OK
    ]
    return 1 - sum(repeated) / len(repeated) if repeated else 1.0


def metacognition(attempt: Trajectory, correctness: float) -> float:
    """Return the mean of `coverage`, `regulation` and `correctness`, in [0, 1].

    Metacognition as a reward (arXiv:2605.23384) has the components knowledge coverage, regulation and correctness. The
    formulas of the paper were not available: these are built from that list. `correctness` is a vote, not a label.
    """
    return (coverage(attempt) + regulation(attempt) + correctness) / 3


MAJORITY = "majority"
VOTE = "vote"
"""Drop reason of an episode that voted and does not train."""


def with_unsupervised_part(groups: Sequence[Sequence[Episode]], settings: UnsupervisedConfig) -> list[list[Episode]]:
    """Return the episodes of each group with the part of `rewards.unsupervised`, named as its kind.

    Failed and greedy episodes do not vote. The kinds of the learner have no part yet.
    """
    kind = settings.kind
    if kind == "none" or kind in LEARNER_KINDS:
        return [list(group) for group in groups]
    updated = []
    for group in groups:
        attempts = [episode.trajectory for episode in group]
        values = _values(kind, attempts, [not (one.greedy or one.trajectory.failure) for one in group])
        updated.append([_with_part(one, kind, value) for one, value in zip(group, values, strict=True)])
    return updated


def _values(kind: str, attempts: Sequence[Trajectory], votes: Sequence[bool]) -> list[float]:
    if kind == "confidence":
        return [confidence_gain(attempt) for attempt in attempts]
    agrees = majority(attempts, votes)
    if kind == MAJORITY:
        return agrees
    return [metacognition(attempt, value) for attempt, value in zip(attempts, agrees, strict=True)]


def _with_part(episode: Episode, kind: str, value: float) -> Episode:
    trajectory = episode.trajectory
    if trajectory.failure is not None:
        return episode
    return replace(episode, trajectory=replace(trajectory, rewards={**trajectory.rewards, kind: value}))


def split_votes(group: Sequence[Episode], num_trained: int) -> tuple[list[Episode], list[Episode]]:
    """Return the episodes of a group that train and those that only vote.

    The first `num_trained` attempts of the policy train, failed ones only if there are too few others. Greedy episodes
    and demonstrations are in the first list as well.
    """
    attempts = [i for i, one in enumerate(group) if not (one.greedy or is_expert(one))]
    ranked = sorted(attempts, key=lambda i: (group[i].trajectory.failure is not None, i))
    votes = {*ranked[num_trained:]}
    return [one for i, one in enumerate(group) if i not in votes], [group[i] for i in sorted(votes)]


def majority_metrics(groups: Sequence[Group], success: str) -> dict[str, float]:
    """Return the metrics of TTRL over groups with votes; empty without any.

    `majority/labelled`: share of the tasks with an answer to vote for. `majority/ratio`: share of the attempts at these
    tasks that agree with the label. `majority/label_accuracy`: share of all tasks whose label the verifier (the part
    `success`) accepts. `majority/reward_accuracy`: share of the attempts whose vote and verifier agree. The verifier is
    read here only.
    """
    rows = [
        [(one.rewards[MAJORITY], float(one.rewards.get(success, 0.0) >= 1)) for one in paths]
        for group in groups
        if (paths := [p for t in group.trajectories for p in t.attempts() if MAJORITY in p.rewards])
    ]
    if not rows:
        return {}
    ratios = [ratio for row in rows if (ratio := fmean(vote for vote, _ in row))]
    return {
        "majority/labelled": len(ratios) / len(rows),
        "majority/ratio": fmean(ratios) if ratios else 0.0,
        "majority/label_accuracy": fmean(next((right for vote, right in row if vote), 0.0) for row in rows),
        "majority/reward_accuracy": fmean(fmean(vote == right for vote, right in row) for row in rows),
    }


def check_unsupervised(config: Config, algorithm: Algorithm, world: World) -> None:
    """Raise ConfigError if `rewards.unsupervised` cannot be combined with the world or with other settings."""
    settings = config.rewards.unsupervised
    if settings.kind == "none":
        return
    if 0 < settings.votes < algorithm.group_size:
        text = f"rewards.unsupervised.votes ({settings.votes}) is below algorithm.group_size ({algorithm.group_size})."
        raise ConfigError(text, "Raise it: the first algorithm.group_size of the votes train.")
    of_learner = settings.kind in LEARNER_KINDS
    if of_learner and world.runs_agents:
        raise ConfigError(f"rewards.unsupervised.kind = {settings.kind} does not apply to agents.", "Use majority.")
    for what in (*_not_binary(settings, algorithm), *(_unsupported(config, algorithm) if of_learner else ())):
        raise ConfigError(
            f"rewards.unsupervised.kind = {settings.kind} does not work with {what}.", "Unset one of them."
        )
    if of_learner and not (settings.replaces_outcome or config.rewards.allow_outweigh):
        text = (
            f"rewards.unsupervised.kind = {settings.kind} is in nats, without a bound: it could outweigh the outcome."
        )
        raise ConfigError(text, "Set rewards.allow_outweigh, or keep rewards.unsupervised.replaces_outcome.")


def _not_binary(settings: UnsupervisedConfig, algorithm: Algorithm) -> Iterator[str]:
    is_binary = settings.kind == MAJORITY and settings.replaces_outcome and settings.weight == 1
    if algorithm.advantage_spec.has(Need.BINARY_REWARDS) and not is_binary:
        yield f"the advantage {algorithm.advantage}, which needs rewards of 0 and 1"


def _unsupported(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Yield the settings that need rewards before the learner has computed its part."""
    rewards, rollout = config.rewards, config.rollout
    conflicts = {
        f"rewards.aggregation = {rewards.aggregation}": rewards.aggregation != "weighted_sum",
        "rewards.normalise_by": rewards.normalise_by is not None,
        "rewards.constraint": rewards.constraint.part is not None,
        "rewards.length": rewards.length.kind == "sigmoid",
        "algorithm.max_resample_rounds": algorithm.max_resample_rounds > 0,
        "algorithm.greso": algorithm.greso,
        "algorithm.top_variance_fraction": algorithm.filters_groups,
        f"the advantage {algorithm.advantage}, which averages rewards by role": algorithm.advantage_spec.has(
            Need.ROLE_BASELINES
        ),
        "rollout.branch": rollout.branch.branches > 0,
        "rollout.subagents": rollout.subagents.max_depth > 0,
        "staleness.replay": config.staleness.replay.share > 0,
    }
    yield from (name for name, is_set in conflicts.items() if is_set)
