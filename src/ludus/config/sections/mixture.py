"""The tables `env.mixture.NAME`: worlds that one run trains on together."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field

from ludus.config.sections.section import Section

MIXTURE = "mixture"
"""The `env.name` of several worlds."""
CEILINGS = ("max_turns", "max_tokens_per_turn", "max_seq_len")
"""Budgets of a world that stay within the run's own, by which memory is laid out."""
BUDGETS = (*CEILINGS, "max_tool_errors", "max_tool_output", "tool_timeout_s")
"""Fields that a world may have to itself; those of `rollout` with the same names hold otherwise."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


class MemberConfig(Section):
    """A world of a mixture, by the name that it has there; None keeps what `rollout` says."""

    world: str | None = None
    """A registered world or the path of a .py file; none is the name that the table has."""
    weight: float = Field(1.0, gt=0)
    """Its share of the tasks of each step is this by the sum of all weights."""
    weight_end: float | None = Field(None, ge=0)
    """The weight after the last step, approached evenly; none keeps `weight`."""
    settings: dict[str, object] = Field({})
    """The world's own settings; it checks them against its own schema."""
    max_turns: int | None = Field(None, ge=1)
    """Assistant turns of one episode; none takes rollout.max_turns."""
    max_tokens_per_turn: int | None = Field(None, ge=1)
    """Tokens of one action; none takes rollout.max_tokens_per_turn."""
    max_seq_len: int | None = Field(None, ge=16)
    """Tokens of a whole trajectory, prompt and observations included; none takes rollout.max_seq_len."""
    max_tool_errors: int | None = Field(None, ge=1)
    """Tool errors or malformed calls in a row that end an episode; none takes rollout.max_tool_errors."""
    max_tool_output: int | None = Field(None, ge=16)
    """Characters of one tool's output that the model sees; none takes rollout.max_tool_output."""
    tool_timeout_s: float | None = Field(None, gt=0)
    """Seconds that one tool call may take; none takes rollout.tool_timeout_s."""


def mixture_fault(name: str, settings: Mapping[str, object], mixture: Mapping[str, MemberConfig]) -> str:
    """What is wrong with `env.name`, `env.settings` and `env.mixture` together; empty where nothing is."""
    if name == MIXTURE and not mixture:
        return (
            "env.name is mixture, and env.mixture has no world: write a table for each, "
            "such as env.mixture.math.weight = 1"
        )
    if not mixture:
        return ""
    if name != MIXTURE:
        return f'env.mixture has worlds ({", ".join(mixture)}), and env.name is "{name}": set it to "mixture"'
    if settings:
        return "env.settings are those of one world: in a mixture write env.mixture.NAME.settings"
    if odd := [one for one in mixture if not _NAME.fullmatch(one)]:
        return f'env.mixture has a world "{odd[0]}": a name has letters, digits, - and _ only'
    if not any(one.weight if one.weight_end is None else one.weight_end for one in mixture.values()):
        return "every weight_end in env.mixture is 0: no world is left at the end"
    return ""


def budget_fault(rollout: Section, mixture: Mapping[str, MemberConfig]) -> str:
    """The first budget of a world that is not within the run's own, in a sentence; empty without one."""
    limits = rollout.model_dump()
    for name, member in mixture.items():
        own = {key: value for key, value in member.model_dump().items() if value is not None}
        for key in CEILINGS:
            if own.get(key, 0) > limits[key]:
                return (
                    f"env.mixture.{name}.{key} ({own[key]}) is above rollout.{key} ({limits[key]}), "
                    "which bounds every world of the run"
                )
        tokens, new = own.get("max_seq_len", limits["max_seq_len"]), own.get("max_tokens_per_turn")
        if (new or limits["max_tokens_per_turn"]) >= tokens:
            return (
                f"env.mixture.{name}: max_tokens_per_turn ({new or limits['max_tokens_per_turn']}) must be "
                "below "
                f"max_seq_len ({tokens})"
            )
    return ""
