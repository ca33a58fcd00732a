"""Settings `env.mixture.NAME`: the worlds of a multi-task run."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field

from ludus.config.sections.section import Section

MIXTURE = "mixture"
"""Value of `env.name` for a mixture."""
CEILINGS = ("max_turns", "max_tokens_per_turn", "max_seq_len")
"""Limits of a world that must not exceed those of `rollout`, which determine memory use."""
BUDGETS = (*CEILINGS, "max_tool_errors", "max_tool_output", "tool_timeout_s")
"""Limits that a world may override; the defaults are the fields of `rollout` with the same names."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


class MemberConfig(Section):
    """Settings of one world of a mixture; a limit of None is that of `rollout`."""

    world: str | None = None
    """A registered world or the path of a .py file; none uses the name of the table."""
    weight: float = Field(1.0, gt=0)
    """Sampling weight: the fraction of the tasks of each step is this weight divided by the sum of all weights."""
    weight_end: float | None = Field(None, ge=0)
    """The weight after the last step, approached linearly; none keeps `weight`."""
    settings: dict[str, object] = Field({})
    """The world's own settings, validated by the world."""
    max_turns: int | None = Field(None, ge=1)
    """Assistant turns per episode; none uses rollout.max_turns."""
    max_tokens_per_turn: int | None = Field(None, ge=1)
    """Tokens per action; none uses rollout.max_tokens_per_turn."""
    max_seq_len: int | None = Field(None, ge=16)
    """Tokens of a trajectory, prompt and observations included; none uses rollout.max_seq_len."""
    max_tool_errors: int | None = Field(None, ge=1)
    """Consecutive tool errors or malformed calls that end an episode; none uses rollout.max_tool_errors."""
    max_tool_output: int | None = Field(None, ge=16)
    """Characters of a tool output that the model sees; none uses rollout.max_tool_output."""
    tool_timeout_s: float | None = Field(None, gt=0)
    """Timeout of a tool call, seconds; none uses rollout.tool_timeout_s."""


def mixture_fault(name: str, settings: Mapping[str, object], mixture: Mapping[str, MemberConfig]) -> str:
    """Return an error message if `env.name`, `env.settings` and `env.mixture` are inconsistent, otherwise ""."""
    if name == MIXTURE and not mixture:
        return (
            "env.name is mixture, but env.mixture has no worlds: add a table for each, "
            "such as env.mixture.math.weight = 1"
        )
    if not mixture:
        return ""
    if name != MIXTURE:
        return f'env.mixture has worlds ({", ".join(mixture)}), but env.name is "{name}": set it to "mixture"'
    if settings:
        return "env.settings applies to a single world: in a mixture use env.mixture.NAME.settings"
    if odd := [one for one in mixture if not _NAME.fullmatch(one)]:
        return f'env.mixture has a world "{odd[0]}": names may contain only letters, digits, - and _'
    if not any(one.weight if one.weight_end is None else one.weight_end for one in mixture.values()):
        return "every weight_end in env.mixture is 0: no worlds remain at the end"
    return ""


def budget_fault(rollout: Section, mixture: Mapping[str, MemberConfig]) -> str:
    """Return an error message for the first limit of a world that exceeds the run's, otherwise ""."""
    limits = rollout.model_dump()
    for name, member in mixture.items():
        set_limits = {key: value for key, value in member.model_dump().items() if value is not None}
        for key in CEILINGS:
            if set_limits.get(key, 0) > limits[key]:
                return (
                    f"env.mixture.{name}.{key} ({set_limits[key]}) is above rollout.{key} ({limits[key]}), "
                    "the limit of the run"
                )
        tokens, new = set_limits.get("max_seq_len", limits["max_seq_len"]), set_limits.get("max_tokens_per_turn")
        if (new or limits["max_tokens_per_turn"]) >= tokens:
            return (
                f"env.mixture.{name}: max_tokens_per_turn ({new or limits['max_tokens_per_turn']}) must be below "
                f"max_seq_len ({tokens})"
            )
    return ""
