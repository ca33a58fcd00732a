"""The section about a constraint on the cost of episodes."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section


class ConstraintConfig(Section):
    """A limit on the mean cost of episodes, by a Lagrange multiplier `lambda` (arXiv:2310.12773).

    The reward becomes `(reward - lambda cost) / (1 + lambda)`. After each step `log(lambda)` rises by `lambda_lr lambda
    (mean cost - limit)`.
    """

    part: str | None = None
    """Reward part whose absolute value is the cost, in [0, 1]; it does not count in the sum. If unset, there is no
    constraint."""
    limit: float = Field(0.0, ge=0, le=1)
    """Largest mean cost of an episode."""
    lambda_init: float = Field(1.0, gt=0)
    """Multiplier of the first step."""
    lambda_lr: float = Field(0.1, gt=0)
    """Learning rate of the multiplier."""
    lambda_max: float = Field(5.0, gt=0)
    """Largest multiplier."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        plain = {name: one.default for name, one in type(self).model_fields.items()}
        given = [name for name, value in self.model_dump().items() if value != plain[name]]
        if self.part is None and given:
            raise ValueError(f"rewards.constraint.{given[0]} needs rewards.constraint.part, which is unset")
        if self.lambda_init > self.lambda_max:
            above = f"is above rewards.constraint.lambda_max ({self.lambda_max:g})"
            raise ValueError(f"rewards.constraint.lambda_init ({self.lambda_init:g}) {above}")
        return self
