"""The section `rewards.model_refresh`: training of the reward model during a run."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section


class ModelRefreshConfig(Section):
    """Training of the models of `rewards.model` on the verified outcomes of the run's own rollouts."""

    every: int = Field(0, ge=0)
    """Training steps between refreshes; 0 keeps the models fixed."""
    steps: int = Field(4, ge=1)
    """Optimizer steps of a refresh."""
    learning_rate: float = Field(1e-4, gt=0)
    """Learning rate of AdamW, constant."""
    batch_size: int = Field(16, ge=1)
    """Attempts or pairs per optimizer step."""
    window: int | None = Field(None, ge=1)
    """Number of last training steps whose rollouts a refresh uses; if unset, those since the last one, `every`."""

    @model_validator(mode="after")
    def _takes_effect(self) -> Self:
        fields = type(self).model_fields
        unused = [name for name, value in self.model_dump().items() if value != fields[name].default]
        if not self.every and unused:
            raise ValueError(f"rewards.model_refresh.{unused[0]} needs rewards.model_refresh.every above 0")
        if self.window is not None and self.window < self.every:
            raise ValueError("rewards.model_refresh.window is below rewards.model_refresh.every")
        return self
