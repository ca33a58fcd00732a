"""Registry of rewards: shaping parts for any world (`rewards.extra`), and presets of parts (`rewards.preset`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ludus.config.sections.rewards import PartConfig, RewardsConfig
from ludus.errors import ConfigError, did_you_mean
from ludus.plugins import check_signature, find_plugin
from ludus.rewards import shaping
from ludus.rewards.base import Reward, RewardFunction
from ludus.rewards.code.patches import Patch, patch_similarity
from ludus.rewards.exact_match import ExpectedAnswers, token_f1, well_formed
from ludus.rewards.extract import final_answer, last_output
from ludus.rewards.json_match import MatchState, Schema, Value, json_schema, json_value, same_state
from ludus.rewards.multiple_choice import Choice, multiple_choice
from ludus.rewards.paper_rewards import ExpectedCalls, format_kept, retool, search_r1, toolrl
from ludus.rewards.tool_results import used_results
from ludus.types import Task

MODEL_PART = "reward_model"
"""Name of the part scored by a reward model."""
JUDGE_PART = "judge"
"""Name of the part of LLM judges."""
JUDGE_DEFAULT = f"{JUDGE_PART}_default"
"""Reward part: 1 if the part of the judges is the default because the episode was not judged."""


@dataclass(frozen=True, slots=True)
class RegisteredReward:
    """A reward part that settings can name: `make` builds its function from its options.

    The parameters of `make` are the names of the options. `calls`: the function reads tool calls, so tasks must have
    tools. `truth`: the type of truth that it reads.
    """

    make: Callable[..., RewardFunction]
    calls: bool = False
    truth: type | None = None


def _make_same_state(tool: str = "") -> RewardFunction:
    """Create `same_state` of the answer, or of the last output of a tool or of the environment."""
    return same_state(last_output(tool) if tool else final_answer)


NAMED: Mapping[str, RegisteredReward] = {
    "citation_support": RegisteredReward(lambda: shaping.citation_support, calls=True),
    "extra_calls": RegisteredReward(shaping.extra_calls, calls=True),
    "extra_turns": RegisteredReward(shaping.extra_turns),
    "format_kept": RegisteredReward(lambda: format_kept),
    "format_score": RegisteredReward(lambda: shaping.format_score),
    "invalid_calls": RegisteredReward(shaping.invalid_calls, calls=True),
    "json_schema": RegisteredReward(lambda: json_schema, truth=Schema),
    "json_value": RegisteredReward(lambda: json_value, truth=Value),
    "language_consistency": RegisteredReward(shaping.language_consistency),
    "long_answer": RegisteredReward(shaping.long_answer),
    "multiple_choice": RegisteredReward(lambda: multiple_choice, truth=Choice),
    "patch_similarity": RegisteredReward(lambda: patch_similarity(), truth=Patch),
    "repeated_calls": RegisteredReward(shaping.repeated_calls, calls=True),
    "same_state": RegisteredReward(_make_same_state, truth=MatchState),
    "think_format": RegisteredReward(lambda: shaping.think_format),
    "token_f1": RegisteredReward(lambda: token_f1, truth=ExpectedAnswers),
    "tool_diversity": RegisteredReward(shaping.tool_diversity, calls=True),
    "tool_use": RegisteredReward(lambda: shaping.tool_use, calls=True),
    "used_results": RegisteredReward(used_results, calls=True),
    "well_formed": RegisteredReward(lambda: well_formed),
}


TURN_COST = 0.05
"""Penalty in `composite` per turn above the target."""
TARGET_TURNS, MAX_TURNS = 4, 7


@dataclass(frozen=True, slots=True)
class RewardPreset:
    """A preset: its parts, and the type of truth that their functions read.

    With `keeps_outcome`, `parts` has no outcome: the world's outcomes are added, scaled so that their smallest weight
    is 1, and a part of `rewards.extra` replaces the preset's part of the same name.
    """

    parts: Callable[[], tuple[Reward, ...]]
    truth: type = object
    keeps_outcome: bool = False


def r1() -> tuple[Reward, ...]:
    """Return DeepSeek-R1's format part (arXiv:2501.12948), for an accuracy of 0 or 1; the weight is Ludus's."""
    return (Reward("think_format", shaping.think_format, weight=0.2),)


def composite() -> tuple[Reward, ...]:
    """Return the parts of `outcome + 0.2 format + 0.1 tools - 0.05 turns above the target` (at most three)."""
    turns = shaping.extra_turns(TARGET_TURNS, MAX_TURNS)
    return (
        Reward("format_score", shaping.format_score, weight=0.2),
        Reward("tool_use", shaping.tool_use, weight=0.1),
        Reward("extra_turns", turns, weight=TURN_COST * (MAX_TURNS - TARGET_TURNS)),
    )


PUBLISHED: Mapping[str, RewardPreset] = {
    "composite": RewardPreset(composite, keeps_outcome=True),
    "r1": RewardPreset(r1, keeps_outcome=True),
    "retool": RewardPreset(retool, ExpectedAnswers),
    "search_r1": RewardPreset(search_r1, ExpectedAnswers),
    "toolrl": RewardPreset(toolrl, ExpectedCalls),
}


def preset_parts(preset: str | None, own: Sequence[Reward]) -> Sequence[Reward]:
    """Return the parts of the preset, or the world's `own` if `preset` is None."""
    if preset is None:
        return own
    published = PUBLISHED[preset]
    outcomes = [part for part in own if part.outcome and published.keeps_outcome]
    least = min((part.weight for part in outcomes if part.weight > 0), default=1.0)
    return (*(replace(part, weight=part.weight / least) for part in outcomes), *published.parts())


def find_reward(name: str, source: str | None) -> RegisteredReward:
    """Return the built-in part of that name, or the plug-in `source`. Raises ConfigError if there is none."""
    if source is None and name in NAMED:
        return NAMED[name]
    found = find_plugin("rewards", source or name, f"rewards.extra.{name}.source", NAMED)
    return found if isinstance(found, RegisteredReward) else RegisteredReward(lambda: cast(RewardFunction, found))


def named_part(name: str, config: PartConfig) -> Reward:
    """Return the part of this name with its options.

    Raises ConfigError for an unknown name, an unknown, missing or invalid option, and a function whose parameters are
    not task and trajectory.
    """
    options, part = config.given, find_reward(name, config.source)
    known = inspect.signature(part.make).parameters
    if unknown := [option for option in options if option not in known]:
        hint = f"It takes {', '.join(known)}." if known else "It takes none."
        raise ConfigError(f"rewards.extra.{name} has no option {unknown[0]!r}.", hint)
    missing = [o for o, p in known.items() if p.default is inspect.Parameter.empty and o not in options]
    if missing:
        raise ConfigError(f"rewards.extra.{name} needs {' and '.join(missing)}.", "See docs/use/rewards.md.")
    try:
        function = part.make(**options)
    except ValueError as error:
        raise ConfigError(f"rewards.extra.{name}: {error}.", "See docs/use/rewards.md.") from error
    check_signature(f"rewards.extra.{name}.source = {config.source or name}", function, ("task", "trajectory"))
    return Reward(name, function, config.weight)


def added_parts(settings: RewardsConfig) -> tuple[Reward, ...]:
    """Return the parts that the section `rewards` adds to those of a world: a preset, and parts by name."""
    published = PUBLISHED[settings.preset].parts() if settings.preset is not None else ()
    return (*_drop_replaced(settings, published), *(named_part(*extra) for extra in settings.extra.items()))


def _drop_replaced(settings: RewardsConfig, parts: Sequence[Reward]) -> Sequence[Reward]:
    """Return the parts of a preset; if it keeps the outcome, without those that `rewards.extra` sets."""
    if settings.preset is None or not PUBLISHED[settings.preset].keeps_outcome:
        return parts
    return [part for part in parts if part.outcome or part.name not in settings.extra]


def has_extra_rewards(settings: RewardsConfig) -> bool:
    """Return whether the section `rewards` scores anything beyond the rewards of the world."""
    return bool(added_parts(settings)) or settings.verifies_turns


def training_parts(settings: RewardsConfig, own: Sequence[Reward]) -> Sequence[Reward]:
    """Return the parts to train on: those of the preset (without one, the world's `own`) and of `rewards.extra`.

    Raises ConfigError for an unknown or duplicate part.
    """
    base = _drop_replaced(settings, preset_parts(settings.preset, own))
    added = [named_part(*extra) for extra in settings.extra.items()]
    if duplicates := {part.name for part in base} & {part.name for part in added}:
        message = f"rewards.extra.{min(duplicates)}: the rewards already have a part of that name."
        raise ConfigError(message, f"Set rewards.weights.{min(duplicates)}.")
    return (*base, *added)


def check_names(settings: RewardsConfig, parts: Sequence[Reward]) -> None:
    """Raise ConfigError if weights, caps or the gate name an unknown part; the error names the nearest one."""
    names = [part.name for part in parts] + ([MODEL_PART] if settings.model is not None else [])
    names += [JUDGE_PART] if settings.judge.is_on and settings.judge.rule is None else []
    gate = [] if settings.gate == "outcome" else [settings.gate]
    given = {"weights": settings.weights, "weights_end": settings.weights_end, "caps": settings.caps, "gate": gate}
    for key, name in ((key, name) for key, used in given.items() for name in used if name not in names):
        message = f"rewards.{key} names {name!r}, which is not a part of the reward."
        raise ConfigError(message, f"{did_you_mean(name, names)}Parts: {', '.join(names)}.")


def check_task_fits(settings: Mapping[str, PartConfig], task: Task, num_tools: int) -> None:
    """Raise ConfigError if a part cannot score `task`, in an environment with `num_tools` tools."""
    for name, config in settings.items():
        part, part_name = find_reward(name, config.source), f"rewards.extra.{name}"
        if part.calls and not num_tools:
            message = f"{part_name} scores tool calls, but task {task.id} has no tools."
            raise ConfigError(message, "Remove the reward, or use a world with tools.")
        if part.truth is not None and not isinstance(task.truth, part.truth):
            own = f"that of task {task.id} is {type(task.truth).__name__}"
            message = f"{part_name} reads a truth of the type {part.truth.__name__}, but {own}."
            raise ConfigError(message, "Remove the reward, or use a world with such tasks.")
