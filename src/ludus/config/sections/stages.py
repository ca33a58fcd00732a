"""Settings of the stages besides RL: SFT, preference optimisation, rejection sampling."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from ludus.config.sections.section import OptimizerSection, Section
from ludus.types import DataClass


class SftSource(Section):
    """Dialogues that fine-tuning draws from: a file's or a world's. With neither `data` nor `world` they
    are those of the run's own world."""

    data: str | None = None
    """A file of dialogues; none takes a world."""
    world: str | None = None
    """A registered world or the path of a .py file, whose demonstrations are taken; none is the run's own,
    unless `data` is set."""
    settings: dict[str, object] = Field({})
    """The settings of `world`; it checks them against its own schema."""
    weight: float = Field(1.0, gt=0)
    """The share of dialogues from this source is its weight by the sum of all."""
    data_class: DataClass | None = None
    """The class of its dialogues, unless they name one; none takes what their messages show."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.data is not None and self.world is not None:
            raise ValueError(f'data ("{self.data}") and world ("{self.world}") exclude each other')
        if self.settings and self.world is None:
            raise ValueError("settings are those of a world, and world is not set")
        return self


class SftConfig(OptimizerSection):
    """Supervised fine-tuning on demonstrations."""

    steps: int = Field(2000, ge=1)
    """Optimiser steps of the fine-tuning or cold start."""
    batch_size: int = Field(48, ge=1)
    """Dialogues per optimiser step."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Padded tokens per forward pass; the gradient does not depend on it."""
    learning_rate: float = Field(2e-3, gt=0)
    """Of AdamW, after the warm-up."""
    warmup_steps: int = Field(50, ge=0)
    """Optimiser steps in which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate goes on after the warm-up."""
    weight_decay: float = Field(0.01, ge=0)
    """Of AdamW."""
    beta2: float = Field(0.98, ge=0, lt=1)
    """Of AdamW: decay of the mean of squared gradients."""
    checkpoint_every: int = Field(250, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(1, ge=1)
    """The newest ones that are kept."""
    data: str | None = None
    """A JSON-lines file of dialogues (`{"messages": [...]}`); None uses the world's own demonstrations."""
    sources: dict[str, SftSource] = Field({})
    """Several files and worlds that each step draws from, by a name of your choice."""
    classes: dict[DataClass, Annotated[float, Field(ge=0)]] = Field({})
    """How often dialogues of a class are taken, relative to how often they occur: 1 for a class that is not
    named, 0 leaves a class out."""

    @model_validator(mode="after")
    def _has_dialogues(self) -> Self:
        if self.data is not None and self.sources:
            raise ValueError(f'sft.data ("{self.data}") and sft.sources exclude each other')
        if len(self.classes) == len(get_args(DataClass)) and not any(self.classes.values()):
            raise ValueError("every weight in sft.classes is 0: no dialogue is left")
        return self


PreferenceLoss = Literal[
    "dpo",
    "robust",
    "simpo",
    "ipo",
    "kto",
    "hinge",
    "exo",
    "nca",
    "sppo",
    "discopop",
    "apo_zero",
    "apo_down",
    "bco",
    "bco_pair",
]
UNPAIRED_LOSSES: tuple[PreferenceLoss, ...] = ("kto", "bco")
"""Losses that judge trajectories alone, and so take labelled dialogues."""
SMOOTHED: tuple[PreferenceLoss, ...] = ("dpo", "robust", "simpo", "exo")
"""Losses that read label_smoothing."""


class PreferenceConfig(OptimizerSection):
    """Training on pairs of a better and a worse trajectory."""

    loss: PreferenceLoss = "dpo"
    """Loss of a pair; `simpo` needs no reference model."""
    beta: float | None = Field(None, gt=0)
    """How strongly the policy is held to the reference; for simpo the scale of the margin. None is 0.1, for
    simpo 2."""
    gamma: float | None = Field(None, ge=0)
    """The margin that simpo asks for; none is 1."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be the wrong way round (dpo, robust, simpo, exo). robust needs a share
    above 0; for exo 0 is 0.001."""
    tau: float | None = Field(None, gt=0)
    """Of discopop: the margin over which its two terms change places; none is 0.05."""
    undesirable_weight: float = Field(1.0, gt=0)
    """What the rejected of a pair, or a dialogue labelled false, counts in kto; the others count 1."""
    learning_rate: float = Field(1e-4, gt=0)
    """Of AdamW, after the warm-up."""
    epochs: int = Field(1, ge=1)
    """Passes over all pairs, where `steps` is none."""
    steps: int | None = Field(None, ge=1)
    """Optimiser steps; none takes as many as `epochs` need."""
    batch_size: int = Field(16, ge=1)
    """Pairs of one optimiser step."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass (or one pair); the gradient does not depend on it."""
    min_reward_gap: float = Field(0.0, ge=0)
    """A group whose best and worst reward differ by less gives no pair; nor do equal rewards, ever."""
    run: str | None = None
    """A run folder: its rollouts give the pairs. None takes them from `data`, or from the model itself."""
    pairs: Literal["groups", "steps"] = "groups"
    """Of a run: the best attempt of each group against the worst, or at each step of a group's tree the best
    action against the worst, by the mean reward of what came of it."""
    data: str | None = None
    """A file of pairs, for kto and bco also of labelled dialogues (docs/use/data.md); none takes no file."""
    tasks: int = Field(64, ge=1)
    """Without `run` and `data` the model plays this many training tasks itself, or all if there are fewer."""
    samples: int = Field(8, ge=2)
    """Attempts at each of them, at rollout.temperature."""
    checkpoint_every: int = Field(50, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(1, ge=1)
    """The newest ones that are kept."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.run is not None and self.data is not None:
            raise ValueError(f'preference.run ("{self.run}") and preference.data exclude each other')
        if (self.pairs != "groups" or self.min_reward_gap) and self.data is not None:
            key = "pairs" if self.pairs != "groups" else "min_reward_gap"
            raise ValueError(f"preference.{key} is for rollouts, and preference.data is set")
        if (self.tasks, self.samples) != (64, 8) and (self.run or self.data) is not None:
            raise ValueError("preference.tasks and samples are for attempts of the model, and it plays none")
        return self

    @model_validator(mode="after")
    def _has_what_the_loss_reads(self) -> Self:
        if self.gamma is not None and self.loss != "simpo":
            raise ValueError(f'preference.gamma belongs to the loss simpo, not to "{self.loss}"')
        if self.tau is not None and self.loss != "discopop":
            raise ValueError(f'preference.tau belongs to the loss discopop, not to "{self.loss}"')
        if self.loss == "robust" and self.label_smoothing == 0:
            raise ValueError(
                "preference.loss robust corrects for the share of wrong pairs: set preference.label_smoothing"
                ' above 0, or take the loss "dpo"'
            )
        if self.label_smoothing > 0 and self.loss not in SMOOTHED:
            raise ValueError(f'preference.label_smoothing has no meaning with the loss "{self.loss}"')
        if self.undesirable_weight != 1 and self.loss != "kto":
            raise ValueError(f'preference.undesirable_weight belongs to the loss kto, not to "{self.loss}"')
        return self


class RftConfig(OptimizerSection):
    """Rejection-sampling fine-tuning: rounds of sampling, keeping what succeeded, and training on it."""

    rounds: int = Field(3, ge=1)
    """Rounds of the whole run."""
    tasks_per_round: int = Field(64, ge=1)
    """Tasks that a round samples."""
    samples: int = Field(8, ge=1)
    """Attempts at each of them, at rollout.temperature."""
    max_per_task: int | None = Field(None, ge=1)
    """Most attempts at one task that a round trains on, the first ones; none is no limit."""
    epochs: int = Field(1, ge=1)
    """Passes over what a round kept."""
    batch_size: int = Field(16, ge=1)
    """Trajectories of one optimiser step."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Padded tokens per forward pass; the gradient does not depend on it."""
    learning_rate: float = Field(3e-4, gt=0)
    """Of AdamW, after the warm-up. Each round begins with a fresh optimiser."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps of each round in which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up, to the end of the round."""
    keep_checkpoints: int = Field(2, ge=1)
    """The newest ones that are kept; each round ends with one."""
