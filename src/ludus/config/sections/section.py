"""What every section of the configuration is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True, slots=True)
class Why:
    """The reason for a field's bounds, as the end of a sentence; the message of a refused value gives it."""

    reason: str


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys, infinities and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def changed(section: Section) -> dict[str, object]:
    """The settings that are not their defaults, by name."""
    plain = type(section)().model_dump()
    return {name: value for name, value in section.model_dump().items() if value != plain[name]}


class OptimizerSection(Section):
    """What every section that trains a model with AdamW has. A section may set other defaults."""

    learning_rate: float = Field(3e-4, gt=0)
    """Of AdamW, after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps in which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Of AdamW."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Of AdamW: decay of the mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Of AdamW: decay of the mean of squared gradients."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this norm."""
