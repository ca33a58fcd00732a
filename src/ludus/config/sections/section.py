"""Base classes of the sections of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A frozen part of the configuration that rejects unknown keys, infinities and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def changed(section: Section) -> dict[str, object]:
    """Return the settings that differ from their defaults, by name."""
    plain = type(section).model_construct().model_dump()  # runs no validator, which may call this function
    return {name: value for name, value in section.model_dump().items() if value != plain[name]}


def check_choice(section: Section, path: str, choice: str, allowed: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError for a changed setting that has no effect with the current value of the setting `choice`.

    `allowed` are the values of `choice` that a setting needs, `path` the dotted name of the section.
    """
    values, fields = section.model_dump(), type(section).model_fields
    for name, needed in allowed.items():
        if values[name] != fields[name].default and values[choice] not in needed:
            raise ValueError(f"{path}.{name} is for the {choice} {' or '.join(needed)}, not for {values[choice]}")


def as_names(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names in a setting that is one name, a list of them, or unset."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


class OptimizerSection(Section):
    """The settings of every section that trains a model with AdamW. Sections may set other defaults."""

    learning_rate: float = Field(3e-4, gt=0)
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW: decay of the mean of squared gradients."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is clipped to this norm."""


class SupervisedSection(OptimizerSection):
    """The settings of SFT, preference and reward-model training."""

    batch_size: int = Field(16, ge=1)
    """Dialogues, pairs or attempts per optimizer step."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass, at least one example; the gradient does not depend on it."""
    checkpoint_every: int = Field(50, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(1, ge=1)
    """Number of checkpoints to keep."""


class EpochsSection(SupervisedSection):
    """The settings of training for a number of epochs or steps."""

    learning_rate: float = Field(1e-4, gt=0)
    """Learning rate of AdamW after the warm-up."""
    epochs: int = Field(1, ge=1)
    """Passes over all examples, unless `steps` is set."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps; if unset, determined by `epochs`."""
