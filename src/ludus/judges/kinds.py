"""From the texts of a group to prompts, and from the replies to a value in [0, 1] for each text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ludus.config.sections.parts.judges import JudgeConfig
from ludus.rewards.judge_prompts import (
    JudgedText,
    JudgePrompt,
    LeafVerdict,
    correct_prompt,
    pair_prompt,
    rubric_prompt,
    score_prompt,
)

Value = float | tuple[LeafVerdict, ...]
"""What a reply says: a number, or the decisions on the leaves of a rubric."""
_ITERATIONS: Final = 200  # of the Bradley-Terry fit


@dataclass(frozen=True, slots=True)
class GroupQuestions:
    """The prompts of a group, and the numbers of the members that each is about."""

    prompts: Sequence[JudgePrompt[float] | JudgePrompt[tuple[LeafVerdict, ...]]]
    members: Sequence[tuple[int, ...]]


@dataclass
class GroupValues:
    """The value of each member, None if it was not judged, and counts: pairs, inconsistent ones, quotes."""

    values: list[float | None]
    pairs: int = 0
    flips: int = 0
    first_wins: float = 0.0
    quotes: int = 0
    unsupported: int = 0
    leaves: list[Mapping[str, bool]] = field(default_factory=list)
    """The decisions on the leaves of each member's rubric, empty if it was not judged."""


def questions(settings: JudgeConfig, group: Sequence[JudgedText]) -> GroupQuestions:
    """Return the prompts of a group; a pair has one for each order. A text whose leaves rules decide has none."""
    numbers, most = range(len(group)), settings.client.max_chars
    if settings.kind == "pairwise":
        pairs = [order for a, b in pairs_of(len(group), settings.opponents) for order in ((a, b), (b, a))]
        return GroupQuestions([pair_prompt(group[a], group[b], most) for a, b in pairs], pairs)
    if settings.kind == "rubric":
        asked = [n for n in numbers if group[n].open_leaves]
        return GroupQuestions([rubric_prompt(settings, group[n]) for n in asked], [(n,) for n in asked])
    scores = settings.kind == "score"
    prompts = [score_prompt(settings, one) if scores else correct_prompt(one, most) for one in group]
    return GroupQuestions(prompts, [(n,) for n in numbers])


def pairs_of(num: int, opponents: int) -> list[tuple[int, int]]:
    """Return pairs of `num` members in which each has about `opponents` different ones: its neighbours on a circle."""
    reach = range(1, max(1, (opponents + 1) // 2) + 1)
    found = {tuple(sorted((i, (i + gap) % num))) for i in range(num) for gap in reach}
    if opponents >= num - 1:
        found = {(i, j) for i in range(num) for j in range(i + 1, num)}
    return sorted((a, b) for a, b in found if a != b)


def group_values(
    settings: JudgeConfig, group: Sequence[JudgedText], asked: GroupQuestions, replies: Sequence[Value | None]
) -> GroupValues:
    """Return the values of the members from the replies, None if a reply is missing."""
    if settings.kind == "pairwise":
        return _pairwise(settings, len(group), asked, replies)
    by_member = {members[0]: reply for members, reply in zip(asked.members, replies, strict=True)}
    found = GroupValues([None] * len(group))
    for number, one in enumerate(group):
        reply = by_member.get(number, ())
        if isinstance(reply, float):
            found.values[number] = reply
        elif reply is not None and settings.kind == "rubric" and one.rubric is not None:
            found.quotes += sum(leaf.claimed for leaf in reply)
            found.unsupported += sum(leaf.claimed and not leaf.quoted for leaf in reply)
            holds = {**one.rules, **{leaf.name: leaf.holds for leaf in reply}}
            found.values[number] = one.rubric.score(holds)
            found.leaves.append(holds)
            continue
        found.leaves.append({})
    return found


def _pairwise(settings: JudgeConfig, num: int, asked: GroupQuestions, replies: Sequence[Value | None]) -> GroupValues:
    """Return the win rates or strengths; a pair counts only if both orders have a reply, and then their mean."""
    wins, found = np.full((num, num), np.nan), GroupValues([None] * num)
    for number in range(0, len(replies), 2):
        (a, b), one, other = asked.members[number], replies[number], replies[number + 1]
        if not isinstance(one, float) or not isinstance(other, float):
            continue
        wins[a, b] = (one + 1 - other) / 2
        wins[b, a] = 1 - wins[a, b]
        found.pairs += 1
        found.flips += one != 1 - other
        found.first_wins += (one + other) / 2
    values = win_rates(wins) if settings.pairwise == "win_rate" else bradley_terry(wins)
    known = ~np.isnan(wins).all(axis=1)
    found.values = [float(value) if judged else None for value, judged in zip(values, known, strict=True)]
    return found


def win_rates(wins: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean result of each member from `wins` `[G, G]`, the result of the row; NaN without a comparison."""
    counts = np.maximum(1, (~np.isnan(wins)).sum(axis=1))
    rates: NDArray[np.float64] = np.nansum(wins, axis=1) / counts
    return rates


def bradley_terry(wins: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability `p / (p + 1)` of winning against a member of strength 1 (Bradley and Terry 1952).

    Strengths `p` maximize the likelihood of `wins` `[G, G]` and of one draw of each member against strength 1, which
    keeps them finite; by the iteration of Hunter (2004, Ann. Stat. 32, 384).
    """
    played = ~np.isnan(wins)
    won = np.nansum(wins, axis=1) + 0.5
    strength = np.ones(len(wins))
    for _ in range(_ITERATIONS):
        shares = np.where(played, 1 / (strength[:, None] + strength[None, :]), 0.0).sum(axis=1)
        strength = won / (shares + 1 / (strength + 1))
    return strength / (strength + 1)


def combine(settings: JudgeConfig, values: Sequence[float]) -> tuple[float, float]:
    """Return the value of several replies on one text, and their standard deviation (ddof 0)."""
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    if settings.combine == "majority":
        return float(2 * sum(value >= 0.5 for value in values) > len(values)), std
    return max(0.0, mean - settings.std_coef * std), std


def fill_missing(settings: JudgeConfig, values: Sequence[float | None]) -> list[float]:
    """Return the values of a group with the default in place of None."""
    known = [value for value in values if value is not None]
    uses_mean = settings.client.default == "group_mean" and known
    default = statistics.fmean(known) if uses_mean else settings.client.neutral
    return [default if value is None else value for value in values]
