"""Presets of rewards: `PUBLISHED` by name, which `rewards.preset` puts in the place of a world's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ludus.rewards.base import Reward
from ludus.rewards.composite import extra_turns, format_score, think_format, tool_use
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.rewards.paper_rewards import ExpectedCalls, retool, search_r1, toolrl

TURN_COST = 0.05
"""What a turn above the target costs in `composite`."""
TARGET_TURNS, MAX_TURNS = 4, 7


@dataclass(frozen=True, slots=True)
class Published:
    """A preset: its parts, and the truth that its functions read.

    `keeps_outcome`: the world's outcomes train as well, scaled so that the smallest weight is 1, and `parts`
    has none. A part of `rewards.extra` then replaces the preset's of that name.
    """

    parts: Callable[[], tuple[Reward, ...]]
    truth: type = object
    keeps_outcome: bool = False


def r1() -> tuple[Reward, ...]:
    """Return DeepSeek-R1's format part (arXiv:2501.12948), for an accuracy of 0 or 1; the weight is ours."""
    return (Reward("think_format", think_format, weight=0.2),)


def composite() -> tuple[Reward, ...]:
    """Return the parts of `outcome + 0.2 format + 0.1 tools - 0.05 turns above the target` (at most three turns
    count).
    """
    turns = extra_turns(TARGET_TURNS, MAX_TURNS)
    return (
        Reward("format_score", format_score, weight=0.2),
        Reward("tool_use", tool_use, weight=0.1),
        Reward("extra_turns", turns, weight=TURN_COST * (MAX_TURNS - TARGET_TURNS)),
    )


PUBLISHED: Mapping[str, Published] = {
    "composite": Published(composite, keeps_outcome=True),
    "r1": Published(r1, keeps_outcome=True),
    "retool": Published(retool, ExpectedAnswers),
    "search_r1": Published(search_r1, ExpectedAnswers),
    "toolrl": Published(toolrl, ExpectedCalls),
}


def training_parts(preset: str | None, own: Sequence[Reward]) -> Sequence[Reward]:
    """Return the parts to train on: those of the preset, or else the world's `own`."""
    if preset is None:
        return own
    published = PUBLISHED[preset]
    return (*_outcomes(own), *published.parts()) if published.keeps_outcome else published.parts()


def _outcomes(own: Sequence[Reward]) -> Sequence[Reward]:
    """Return a world's outcomes, their weights scaled so that the smallest positive one is 1."""
    found = [part for part in own if part.outcome]
    least = min((part.weight for part in found if part.weight > 0), default=1.0)
    return [replace(part, weight=part.weight / least) for part in found]
