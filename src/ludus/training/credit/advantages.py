"""Credit assignment: decide which episodes train and compute their advantages.

In self-play the task tag `role` is the policy's role (default "policy"); the tag `proposal` is the proposed
task that it attempts (default: its own id). In an episode of several agents, each agent is an attempt: its role is its
name up to a slash ("solver" of "solver/1/2"), its proposal is the episode and the name up to the last slash
("solver/1"), and it is compared with the same role.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from ludus.algorithms.algorithm import GRANULARITIES, Algorithm, Need
from ludus.algorithms.filters import mean_entropy, overlong_mask, zero_variance
from ludus.algorithms.kl import penalised_advantages, penalised_rewards
from ludus.algorithms.losses.gtpo import conflict_weights
from ludus.algorithms.shaping import soft_overlong
from ludus.algorithms.tensors import Outcomes
from ludus.errors import LearnerError
from ludus.rewards.base import Reward
from ludus.rollouts.ledger import Ledger, RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.rollouts.scheduler import Episode
from ludus.training.batches.rows import (
    Row,
    apply_mask,
    check_estimates,
    check_trajectories,
    new_actions,
    on_marked_path,
    pad_table,
    row_of_trajectory,
    transitions_of,
    turn_nodes,
    with_teacher_prompt,
)
from ludus.training.credit.roles import PROPOSAL, ROLE, alone, is_expert, role_tables, with_agent_rewards
from ludus.types import Path, StopReason, Trajectory


class Estimates(NamedTuple):
    """Model estimates of the compared samples (`ESTIMATE_NAMES`), in order, per action token `[n_i]`.

    `bootstrap` [one per row] is 0 for episodes that terminated. None if the algorithm does not use it.
    """

    kl: Sequence[Tensor] | None = None
    values: Sequence[Tensor] | None = None
    outcome_probs: Sequence[Tensor] | None = None
    prm_logprobs: Sequence[Tensor] | None = None
    ref_logprobs: Sequence[Tensor] | None = None
    old_logprobs: Sequence[Tensor] | None = None
    entropies: Sequence[Tensor] | None = None
    sum_pi_squared: Sequence[Tensor] | None = None
    bootstrap: Sequence[Tensor] | None = None

    def along(self, split: Sequence[Sequence[Path]]) -> Estimates:
        """Return the estimates for each path of each trajectory."""

        def spread(rows: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
            if rows is None:
                return None
            return [row[list(path.places)] for row, paths in zip(rows, split, strict=True) for path in paths]

        *per_token, bootstrap = self
        of_paths = None
        if bootstrap is not None:
            of_paths = [row[[path.row]] for row, paths in zip(bootstrap, split, strict=True) for path in paths]
        return Estimates._make([*map(spread, per_token), of_paths])

    def repeated(self, rows: Sequence[int]) -> Estimates:
        """Return the estimates followed by copies of some rows."""
        return Estimates._make(None if of is None else [*of, *(of[i] for i in rows)] for of in self)


ESTIMATE_NAMES = (
    "KL to the reference",
    "value of the critic",
    "probability of the outcome",
    "log-probability under the process reward model",
    "log-probability under the reference",
    "log-probability at the start of the step",
    "entropy at the start of the step",
    "sum of squared probabilities",
    "value of the critic at the end",
)
"""Descriptions of the estimates, in the order of `Estimates`."""
UNKNOWN = Estimates()
"""No estimates."""


CUT_OFF = frozenset({StopReason.TRUNCATED, StopReason.MAX_TOKENS})
"""Stop reasons caused by a token limit, as used by the overlong filter."""
NO_TOKEN_WEIGHTS = "reinforce"
"""A loss that does not weigh the advantages of tokens."""
BASELINE = "baseline"
"""Drop reason of a greedy baseline episode."""


@dataclass(frozen=True)
class TrainingSample:
    """Outcome of one episode and its training targets.

    `advantages` has one value per action token; None if the episode was not compared with its group. `trains`
    masks action tokens (None: all train). `values` and `targets` are the critic's, per action token;
    `reference` holds reference log-probabilities for a process reward model. `group` numbers the groups of a
    step. `baselines` replace the group as the baseline of the reward: one, or one per agent. `replayed`: already
    trained in an earlier step. `teacher_prompt` replaces the prompt for a self-teacher (empty: none).
    """

    episode: Episode
    outcome: RolloutOutcome
    reason: str
    group: int = 0
    advantages: tuple[float, ...] | None = None
    trains: tuple[bool, ...] | None = None
    values: tuple[float, ...] | None = None
    targets: tuple[float, ...] | None = None
    reference: tuple[float, ...] | None = None
    baselines: tuple[float, ...] = ()
    replayed: bool = False
    teacher_prompt: tuple[int, ...] = ()

    @property
    def expert(self) -> bool:
        """Whether this is an expert's or a guided episode, excluded from ledger and episode metrics."""
        return is_expert(self.episode)

    def masked(self, keep: Sequence[bool]) -> TrainingSample:
        """Return the sample with the action tokens masked where `keep` is false."""
        before = self.trains or (True,) * len(keep)
        return replace(self, trains=tuple(a and b for a, b in zip(before, keep, strict=True)))

    @property
    def advantage(self) -> float | None:
        """The mean advantage over action tokens."""
        if self.advantages is None:
            return None
        first = self.advantages[0] if self.advantages else 0.0
        if all(value == first for value in self.advantages):
            return first
        return math.fsum(self.advantages) / len(self.advantages)

    @property
    def record(self) -> RolloutRecord:
        """The record written to the run's rollouts."""
        key = self.episode.key
        return RolloutRecord(
            step=key.step,
            group=self.episode.task.id,
            outcome=self.outcome,
            reason=self.reason,
            trajectory=self.episode.trajectory,
            advantage=self.advantage,
            attempt=key.attempt,
        )


def assign_credit(
    groups: Sequence[Sequence[Episode]], algorithm: Algorithm, max_length: int = 0, first_group: int = 0
) -> list[TrainingSample]:
    """Return one training sample per episode, in order; groups are numbered from `first_group`.

    A group with a failed member is dropped as a whole. A greedy episode is its group's baseline and never
    trained. Group statistics cover all members, batch statistics only trained ones; filtered samples retain
    their advantage. `max_length` is the longest episode for soft overlong punishment (0: off), in
    tokens of `algorithm.overlong_measure`. Raises LearnerError if a reward or log-probability is not finite,
    or the advantage does not support a reward.
    """
    samples: list[TrainingSample] = []
    compared: list[TrainingSample] = []
    for number, group in enumerate(with_agent_rewards(groups), start=first_group):
        if any(episode.trajectory.failure for episode in group):
            samples += [TrainingSample(one, *failed_status(one, "partial_group"), number) for one in group]
        else:
            check_trajectories([episode.trajectory for episode in group])
            if algorithm.advantage_spec.has(Need.BINARY_REWARDS):
                _check_binary([episode.trajectory for episode in group], algorithm)
            samples += [TrainingSample(one, RolloutOutcome.MASKED, BASELINE, number) for one in group if one.greedy]
            compared += _members(group, algorithm, max_length, number)
    return samples + _compare(compared, algorithm, max_length)


def recompute_samples(samples: Sequence[TrainingSample], algorithm: Algorithm, max_length: int) -> list[TrainingSample]:
    """Recompute samples after their rewards changed.

    Recomputes baselines, filters and advantages; group numbers do not change.
    """
    greedy = {c.group: c.episode.trajectory for c in samples if c.reason == BASELINE}
    compared = [
        replace(c, baselines=_greedy_rewards(greedy[c.group], c.episode, algorithm, max_length))
        if c.group in greedy
        else c
        for c in samples
        if c.advantages is not None
    ]
    recomputed = iter(_compare(compared, algorithm, max_length))
    return [sample if sample.advantages is None else next(recomputed) for sample in samples]


def _members(group: Sequence[Episode], algorithm: Algorithm, max_length: int, number: int) -> list[TrainingSample]:
    greedy = next((episode.trajectory for episode in group if episode.greedy), None)
    members = [
        TrainingSample(episode, RolloutOutcome.TRAINED, "trained", number) for episode in group if not episode.greedy
    ]
    if algorithm.advantage_spec.has(Need.ROLE_BASELINES):
        return [replace(one, baselines=(0.0,)) for one in members]  # until the averages are computed over the step
    if greedy is None:
        return members
    return [replace(m, baselines=_greedy_rewards(greedy, m.episode, algorithm, max_length)) for m in members]


def _greedy_rewards(greedy: Trajectory, episode: Episode, algorithm: Algorithm, max_length: int) -> tuple[float, ...]:
    """Return the greedy episode's reward with length punishment, or that of its role for each agent of an episode."""
    if not (greedy.agent_rewards and episode.trajectory.agent_rewards):
        return (greedy.reward + _punishment(greedy, algorithm, max_length),)
    by_role: dict[str, list[float]] = {}
    for path in greedy.paths():
        value = path.trajectory.reward + _punishment(path.trajectory, algorithm, max_length)
        by_role.setdefault(path.role, []).append(value)
    return tuple(fmean(by_role.get(path.role, [greedy.reward])) for path in episode.trajectory.paths())


def varies(group: Sequence[Episode], algorithm: Algorithm) -> bool:
    """Return whether the advantage distinguishes the members of a complete group, as in `varied_groups`."""
    unpunished = replace(algorithm, overlong_buffer=0.0)
    return any(varied_groups(_members(group, unpunished, 0, 0), unpunished).values())


def _check_binary(trajectories: Sequence[Trajectory], algorithm: Algorithm) -> None:
    for one in trajectories:
        rewards = tuple(one.agent_rewards.values()) or one.row_rewards
        if invalid := [reward for reward in rewards if reward not in (0.0, 1.0)]:
            raise LearnerError(
                f"The reward of {one.name} is {invalid[0]:g}, but the advantage {algorithm.advantage} needs 0 or 1.",
                "Use another advantage or a binary outcome.",
            )


def with_estimates(
    samples: Sequence[TrainingSample], algorithm: Algorithm, max_length: int, estimates: Estimates = UNKNOWN
) -> list[TrainingSample]:
    """Return the samples with advantages that include the KL, as placed by `algorithm`, and the critic.

    If there are values, sets `values` and `targets`; if there are reference log-probabilities, sets
    `reference`. Raises LearnerError if an estimate is not finite.
    """
    compared = [sample for sample in samples if sample.advantages is not None]
    if not compared:
        return list(samples)
    check_estimates(
        dict(zip(ESTIMATE_NAMES, estimates, strict=True)), [sample.episode.trajectory.name for sample in compared]
    )
    columns = {"advantages": _advantages(compared, algorithm, max_length, estimates)}
    if estimates.ref_logprobs is not None:
        columns["reference"] = [tuple(row.tolist()) for row in estimates.ref_logprobs]
    if estimates.values is not None:
        raw = _advantages(compared, _critic_algorithm(algorithm), max_length, estimates)
        values = [v.double().cpu() for v in estimates.values]
        columns["values"] = [tuple(v.tolist()) for v in values]
        targets = [torch.tensor(a, dtype=v.dtype) + v for a, v in zip(raw, values, strict=True)]
        columns["targets"] = [tuple(t.tolist()) for t in targets]
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return [sample if sample.advantages is None else replace(sample, **next(rows)) for sample in samples]


def _critic_algorithm(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm whose advantages plus values are the critic's targets: unwhitened, own lambda.

    A KL in the reward is part of the targets; a KL in the advantage and GTPO's conflict weights are not.
    """
    options = algorithm.options.advantage | {"whiten": 0.0}
    spec = algorithm.advantage_spec
    if "lam_critic" in spec.options:
        options |= {"lam": algorithm.number("advantage", "lam_critic")}
    if spec.critic_targets:
        algorithm = replace(algorithm, advantage=spec.critic_targets)
    if algorithm.kl_placement == "advantage":
        algorithm = replace(algorithm, kl_coef=0.0)
    return replace(algorithm, loss=NO_TOKEN_WEIGHTS, options=replace(algorithm.options, advantage=options))


def failed_status(episode: Episode, otherwise: str) -> tuple[RolloutOutcome, str]:
    """Return the outcome of an episode that is not trained; `otherwise` is the reason if it did not fail."""
    failure = episode.trajectory.failure
    return (RolloutOutcome.DROPPED, otherwise) if failure is None else (RolloutOutcome.FAILED, failure.part)


def _compare(samples: Sequence[TrainingSample], algorithm: Algorithm, max_length: int) -> list[TrainingSample]:
    if not samples:
        return []
    varied = varied_groups(samples, algorithm)
    updated = []
    for sample in samples:
        ends = [end.stop_reason in CUT_OFF for end in sample.episode.trajectory.attempts()]
        complete = overlong_mask(truncated=ends)
        outcome, reason = _training_status(sample.episode, varied[sample.group], bool(complete.any()), algorithm)
        updated.append(replace(sample, outcome=outcome, reason=reason))
        if algorithm.overlong_mask and complete.any() and not complete.all():
            trains = on_marked_path(sample.episode.trajectory.paths(), complete.tolist())
            updated[-1] = replace(updated[-1], trains=trains)
    advantages = _advantages(updated, algorithm, max_length)
    return [replace(sample, advantages=a) for sample, a in zip(updated, advantages, strict=True)]


def compared_rewards(samples: Sequence[TrainingSample], algorithm: Algorithm) -> tuple[Tensor, list[int]]:
    """Return rewards [P, C] of each path of each trajectory, and the number of the paths that it is compared with.

    Column 0 is the reward; other columns are turn rewards, if the advantage uses them. Length punishment is
    excluded, since DAPO's dynamic sampling is based on correctness.
    """
    split = [sample.episode.trajectory.paths() for sample in samples]
    paths = [(one.episode.trajectory, one.group) for one in _path_samples(samples, split)]
    reads_turns = algorithm.advantage_spec.has(Need.OPTIONAL_TURN_REWARDS)
    turns = [list(t.turn_rewards[: t.num_turns]) if reads_turns else [] for t, _ in paths]
    width = max(map(len, turns), default=0)
    rows = [[t.reward, *values, *[0.0] * (width - len(values))] for (t, _), values in zip(paths, turns, strict=True)]
    return torch.tensor(rows, dtype=torch.float64), [group for _, group in paths]


def varied_groups(samples: Sequence[TrainingSample], algorithm: Algorithm) -> dict[int, bool]:
    """Return whether the advantage distinguishes each group's members, by group number.

    Compares the rewards that the advantage uses; for advantages with other inputs, a nonzero
    advantage also counts.
    """
    table, index = compared_rewards(samples, algorithm)
    by_advantage = algorithm.advantage_spec.has(Need.ADVANTAGE_OF_EQUAL_REWARDS)
    varied = zero_variance(rewards=table[:, 0] if by_advantage else table, group=index).tolist()
    by_group = any_of_group(samples, varied)
    if by_advantage:
        unpenalised = replace(algorithm, loss=NO_TOKEN_WEIGHTS, kl_coef=0.0, overlong_buffer=0.0)
        rows = _advantages(samples, unpenalised, 0)
        for sample, row in zip(samples, rows, strict=True):
            by_group[sample.group] |= any(row)
    return by_group


def any_of_group(samples: Sequence[TrainingSample], marks: Sequence[bool]) -> dict[int, bool]:
    """Return whether any path of each group is marked, by group number. `marks` has one entry per path."""
    groups = [sample.group for sample in samples for _ in sample.episode.trajectory.paths()]
    found = dict.fromkeys(groups, False)
    for group, mark in zip(groups, marks, strict=True):
        found[group] |= mark
    return found


def equal_groups(samples: Sequence[TrainingSample], algorithm: Algorithm) -> dict[int, bool]:
    """Return whether each compared group has zero variance, as the filter `zero_variance`; by number."""
    compared = [sample for sample in samples if sample.advantages is not None]
    varied = varied_groups(compared, algorithm) if compared else {}
    return {number: not varies for number, varies in varied.items()}


def _training_status(episode: Episode, varied: bool, whole: bool, algorithm: Algorithm) -> tuple[RolloutOutcome, str]:
    if algorithm.filter_zero_variance and not varied:
        return RolloutOutcome.DROPPED, "zero_variance"
    if algorithm.overlong_mask and not whole:
        return RolloutOutcome.MASKED, "overlong"
    if episode.trajectory.num_action_tokens == 0:
        return RolloutOutcome.MASKED, "no_action_tokens"
    return RolloutOutcome.TRAINED, "trained"


def _advantages(
    samples: Sequence[TrainingSample], algorithm: Algorithm, max_length: int, estimates: Estimates = UNKNOWN
) -> list[tuple[float, ...]]:
    """Return one value per action token of each trajectory.

    Paths of a tree, and agents, are compared as separate attempts; a token's value is the mean over its paths.
    """
    split = [sample.episode.trajectory.paths() for sample in samples]
    if not any(len(one.rows) > 1 or one.agent_rewards for one in (sample.episode.trajectory for sample in samples)):
        return _chain_advantages(samples, algorithm, max_length, estimates, split)
    attempts = _path_samples(samples, split)
    spec, twins = algorithm.advantage_spec, list[int]()
    if spec.has(Need.GROUP) and any(one.episode.trajectory.agent_rewards for one in attempts):
        # an attempt without another one is compared with a copy, so that its advantage is 0
        tasks = [one.episode.task for one in attempts]
        twins = alone([one.group for one in attempts], tasks, by_proposal=spec.has(Need.PROPOSALS))
    inputs = [*attempts, *(attempts[i] for i in twins)]
    flat = [path for paths in split for path in paths]
    grouped = [*split, *([flat[i]] for i in twins)]
    values = iter(_chain_advantages(inputs, algorithm, max_length, estimates.along(split).repeated(twins), grouped))
    return [_mean_of_paths(paths, [next(values) for _ in paths]) for paths in split]


def _path_samples(samples: Sequence[TrainingSample], split: Sequence[Sequence[Path]]) -> list[TrainingSample]:
    """Return a sample per path. Paths of one group have equal group numbers if they have one role."""
    numbers: dict[tuple[int, str], int] = {}
    found = []
    for sample, paths in zip(samples, split, strict=True):
        for place, path in enumerate(paths):
            task, role = sample.episode.task, ""
            if path.trajectory.agent_rewards:
                role = path.role
                proposal = f"{task.id}/{sample.episode.key.sample}/{path.agent.rpartition('/')[0]}"
                task = replace(task, tags={**task.tags, ROLE: role, PROPOSAL: proposal})
            one = replace(
                sample,
                episode=replace(sample.episode, trajectory=path.trajectory, task=task),
                group=numbers.setdefault((sample.group, role), len(numbers)),
            )
            if sample.trains is not None:
                one = replace(one, trains=tuple(sample.trains[position] for position in path.places))
            found.append(replace(one, baselines=sample.baselines[place : place + 1] or sample.baselines[:1]))
    return found


def _mean_of_paths(paths: Sequence[Path], values: Sequence[Sequence[float]]) -> tuple[float, ...]:
    by_position: dict[int, list[float]] = {}
    for path, row in zip(paths, values, strict=True):
        for position, value in zip(path.places, row, strict=True):
            by_position.setdefault(position, []).append(value)
    return tuple(math.fsum(by_position[position]) / len(by_position[position]) for position in sorted(by_position))


def _chain_advantages(
    samples: Sequence[TrainingSample],
    algorithm: Algorithm,
    max_length: int,
    estimates: Estimates,
    split: Sequence[Sequence[Path]],
) -> list[tuple[float, ...]]:
    outcomes = _make_outcomes(samples, estimates)
    if algorithm.advantage_spec.has(Need.BRANCHES):
        outcomes = replace(outcomes, nodes=turn_nodes(split))
    punished = [_punishment(sample.episode.trajectory, algorithm, max_length) for sample in samples]
    rewards = outcomes.rewards + torch.tensor(punished, dtype=torch.float64)
    penalty = outcomes.kl
    in_reward = algorithm.kl_placement == "reward"
    if penalty is not None and in_reward and not algorithm.advantage_spec.has(Need.TOKEN_KL):
        rewards = penalised_rewards(rewards=rewards, kl=penalty, mask=outcomes.mask, coef=algorithm.kl_coef)
    inputs = replace(outcomes, rewards=rewards, kl=penalty if in_reward else None)
    advantages = algorithm.compute("advantage", inputs)
    if penalty is not None and algorithm.kl_placement == "advantage":
        advantages = penalised_advantages(
            advantages=advantages,
            kl=penalty,
            mask=outcomes.mask,
            coef=algorithm.kl_coef,
            granularity=algorithm.choice("kl", "granularity", GRANULARITIES),
            trains=outcomes.trains,
        )
    if algorithm.loss_spec.has(Need.CONFLICT_WEIGHTS):
        weights = _conflict_token_weights(samples, outcomes, advantages, algorithm)
        advantages = weights * (advantages - _entropy_penalty(estimates, outcomes.mask, algorithm))
    rows = advantages.tolist()
    return [tuple(row[:n]) for row, n in zip(rows, outcomes.mask.sum(1).tolist(), strict=True)]


def _punishment(one: Trajectory, algorithm: Algorithm, max_length: int) -> float:
    """Return the soft overlong punishment; -1 if a token limit truncated the trajectory."""
    if algorithm.overlong_buffer == 0 or max_length == 0:
        return 0.0
    if one.stop_reason in CUT_OFF:
        return -1.0
    num_tokens = sum(len(segment.tokens) for segment in one.segments)
    length = num_tokens if algorithm.overlong_measure == "sequence" else one.num_action_tokens
    cache = max(1, round(algorithm.overlong_buffer * max_length))
    return float(soft_overlong(lengths=torch.tensor(length), max_length=max_length, cache=cache))


def _make_outcomes(samples: Sequence[TrainingSample], estimates: Estimates) -> Outcomes:
    """Return the batch of action tokens: column `j` is a trajectory's j-th action token."""
    trajectories = [sample.episode.trajectory for sample in samples]
    lengths = torch.tensor([t.num_action_tokens for t in trajectories])
    width = max(1, int(lengths.max()))
    turns = [turns_of_actions(t) for t in trajectories]
    num_turns = max((max(row, default=0) + 1 for row in turns), default=1)
    proposer, proposals = role_tables([sample.episode.task for sample in samples])
    mask = torch.arange(width)[None, :] < lengths[:, None]
    per_token = {name: rows for name, rows in estimates._asdict().items() if name not in ("entropies", "bootstrap")}
    return Outcomes(
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float64),
        group=torch.tensor([sample.group for sample in samples]),
        mask=mask,
        trains=_training_tokens(samples, mask),
        turn=pad_table(turns, torch.int64, width),
        turn_rewards=pad_table([t.turn_rewards[:num_turns] for t in trajectories], torch.float64, num_turns),
        bootstrap_values=None if estimates.bootstrap is None else torch.cat(list(estimates.bootstrap)),
        behavior_logprobs=_behavior(samples, estimates.old_logprobs, width),
        baselines=_baselines(samples),
        anchors=_anchors(trajectories, num_turns),
        proposer=proposer,
        proposals=proposals,
        **{name: _table(rows, width) for name, rows in per_token.items()},
    )


def _training_tokens(samples: Sequence[TrainingSample], mask: Tensor) -> Tensor | None:
    """Return the mask of trained action tokens in `mask` [N, L], or None if it is empty."""
    tokens = mask.clone()
    for i, sample in enumerate(samples):
        if sample.outcome is not RolloutOutcome.TRAINED:
            tokens[i] = False
        elif sample.trains is not None:
            tokens[i, : len(sample.trains)] &= torch.tensor(sample.trains, dtype=torch.bool)
    return tokens if tokens.any() else None


def _behavior(samples: Sequence[TrainingSample], old: Sequence[Tensor] | None, width: int) -> Tensor | None:
    """Return the engine's log-probabilities, `[N, width]`; for experts the policy's."""
    if old is None:
        return None
    actions = [new_actions(sample.episode.trajectory) for sample in samples]
    recorded = [torch.tensor([lp for seg in row for lp in seg.logprobs], dtype=torch.float64) for row in actions]
    rows = [engine if len(engine) else own for own, engine in zip(old, recorded, strict=True)]
    return _table(rows, width)


def _anchors(trajectories: Sequence[Trajectory], width: int) -> Tensor:
    """Return state ids before turns, `[N, width]`; unknown states get unique ids."""
    table = -1 - torch.arange(len(trajectories) * width).view(len(trajectories), width)
    numbers: dict[str, int] = {}
    for i, trajectory in enumerate(trajectories):
        actions = [segment for segment in trajectory.segments if segment.kind == "action"]
        if len(trajectory.anchors) == len(actions):
            pairs = zip(trajectory.anchors, actions, strict=True)
            states = [numbers.setdefault(anchor, len(numbers)) for anchor, s in pairs if s.tokens]
            table[i, : len(states)] = torch.tensor(states, dtype=torch.int64)
    return table


def _baselines(samples: Sequence[TrainingSample]) -> Tensor | None:
    baselines = [sample.baselines[0] for sample in samples if sample.baselines]
    return torch.tensor(baselines, dtype=torch.float64) if len(baselines) == len(samples) else None


def _table(values: Sequence[Tensor] | None, width: int) -> Tensor | None:
    return None if values is None else pad_table(values, torch.float64, width)


def turns_of_actions(trajectory: Trajectory) -> list[int]:
    """Return the turn index of each action token; turns are numbered consecutively from 0."""
    of_actions = list(compress(trajectory.turn_index, trajectory.action_mask))
    numbers = {turn: number for number, turn in enumerate(dict.fromkeys(of_actions))}
    return [numbers[turn] for turn in of_actions]


def _conflict_token_weights(
    samples: Sequence[TrainingSample], outcomes: Outcomes, advantages: Tensor, algorithm: Algorithm
) -> Tensor:
    trajectories = [sample.episode.trajectory for sample in samples]
    ids = [list(compress(trajectory.token_ids, trajectory.action_mask)) for trajectory in trajectories]
    token_ids = pad_table(ids, torch.int64, outcomes.mask.shape[1])
    given = {"token_ids": token_ids, "group": outcomes.group, "advantages": advantages, "mask": outcomes.mask}
    return algorithm.call(conflict_weights, "loss", given)


def _entropy_penalty(estimates: Estimates, mask: Tensor, algorithm: Algorithm) -> Tensor:
    """Return GTPO's entropy penalty [N, 1]: a multiple of each trajectory's mean entropy.

    0 before the entropies are computed.
    """
    entropy = _table(estimates.entropies, mask.shape[1])
    if entropy is None:
        return torch.zeros(len(mask), 1, dtype=torch.float64)
    coef = algorithm.number("loss", "entropy_penalty")
    return coef * mean_entropy(entropy=entropy, mask=mask)[:, None]


def record_outcomes(ledger: Ledger, samples: Sequence[TrainingSample]) -> None:
    """Record outcomes in the ledger, except failed and replayed samples (already recorded) and experts."""
    for sample in samples:
        if sample.outcome is not RolloutOutcome.FAILED and not (sample.expert or sample.replayed):
            ledger.finish(sample.episode.key, sample.outcome, sample.reason)


def training_rows(
    samples: Sequence[TrainingSample],
    *,
    mask_observations: bool,
    rewards: Sequence[Reward] = (),
    transitions: bool = False,
) -> list[Row]:
    """Return the rows of trained samples. A row is positive if an outcome among `rewards` is above 0.

    Without `rewards` the weighted sum is used. With `transitions` each turn is a row.
    """
    rows = []
    for sample in samples:
        if sample.outcome is RolloutOutcome.TRAINED:
            trajectory = sample.episode.trajectory
            row = row_of_trajectory(trajectory, sample.advantages or (), mask_observations=mask_observations)
            row = apply_mask(with_teacher_prompt(row, trajectory, sample.teacher_prompt), sample.trains)
            parts = [trajectory.rewards.get(reward.name, 0.0) for reward in rewards if reward.outcome]
            sampled = (False,) * len(row.tokens) if sample.expert and not any(row.behavior) else row.sampled
            positive = max(parts, default=trajectory.reward) > 0
            row = replace(row, sampled=sampled, positive=positive, expert=sample.expert)
            rows += transitions_of(row, trajectory) if transitions else [row]
    return rows
