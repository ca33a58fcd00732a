"""The sections of training stages other than RL: SFT, preference optimisation, rejection sampling."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from ludus.config.sections.section import (
    EpochsSection,
    OptimizerSection,
    Section,
    SupervisedSection,
    as_names,
    changed,
    check_choice,
)
from ludus.config.sections.tree_search import StepSearchConfig
from ludus.types import DataClass


class ForksConfig(Section):
    """The loss forks of preference training (ReasonMaxxer): only the tokens at which the model is undecided learn."""

    entropy: float = Field(1.4, gt=0)
    """Entropy of the model before the training, nats, above which a token is a decision."""
    kl_coef: float = Field(0.2, ge=0)
    """Coefficient of the KL from the model before the training at all other tokens."""
    advantage_clip: float = Field(2.5, gt=0)
    """Bound of the advantages `(r - mean) / std`."""
    groups: int = Field(50, ge=1)
    """Maximum groups that are trained on, those with the share of better attempts nearest to one half."""


class SftSource(Section):
    """A source of dialogues for fine-tuning: a file or a world. With neither, the run's own world."""

    data: str | None = None
    """A file, folder or Hugging Face dataset of dialogues or texts; if unset, those of a world."""
    world: str | None = None
    """A registered world or .py file, whose demonstrations are used; if unset, the run's own, unless `data` is set."""
    settings: dict[str, object] = Field({})
    """The settings of `world`, validated by the world."""
    weight: float = Field(1.0, gt=0)
    """The fraction of dialogues from this source is its weight divided by the sum of all weights."""
    data_class: DataClass | None = None
    """The class of its dialogues, unless they name one; if unset, it is derived from their messages."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.data is not None and self.world is not None:
            raise ValueError(f'data ("{self.data}") and world ("{self.world}") are mutually exclusive')
        if self.settings and self.world is None:
            raise ValueError("settings apply to a world, but world is not set")
        return self


class SftConfig(SupervisedSection):
    """Supervised fine-tuning on demonstrations."""

    steps: int = Field(2000, ge=1)
    """Optimizer steps of the fine-tuning or cold start."""
    batch_size: int = Field(48, ge=1)
    """Dialogues, pairs or attempts per optimizer step."""
    learning_rate: float = Field(2e-3, gt=0)
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: int = Field(50, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate schedule after the warm-up."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of AdamW."""
    beta2: float = Field(0.98, ge=0, lt=1)
    """AdamW: decay of the mean of squared gradients."""
    checkpoint_every: int = Field(250, ge=1)
    """Steps between checkpoints."""
    data: str | None = None
    """A file, folder or Hugging Face dataset of dialogues or texts; if unset, the world's demonstrations."""
    sources: dict[str, SftSource] = Field({})
    """Several files and worlds that each step draws from, by a name of your choice."""
    classes: dict[DataClass, Annotated[float, Field(ge=0)]] = Field({})
    """Sampling weights of dialogue classes, relative to their frequency: 1 for a class not listed; 0 excludes it."""

    @model_validator(mode="after")
    def _has_dialogues(self) -> Self:
        if self.data is not None and self.sources:
            raise ValueError(f'sft.data ("{self.data}") and sft.sources are mutually exclusive')
        if len(self.classes) == len(get_args(DataClass)) and not any(self.classes.values()):
            raise ValueError("every weight in sft.classes is 0: no dialogues remain")
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
"""Losses on single trajectories, which accept labelled dialogues."""
SMOOTHED: tuple[PreferenceLoss, ...] = ("dpo", "robust", "simpo", "exo")
"""Losses that use label_smoothing."""


class PreferenceConfig(EpochsSection):
    """Training on pairs of a better and a worse trajectory."""

    loss: PreferenceLoss | Literal["forks"] = "dpo"
    """Loss of a pair; `simpo` needs no reference model. `forks` trains on single rollouts, by their advantage."""
    forks: ForksConfig = ForksConfig()
    beta: float | None = Field(None, gt=0)
    """Strength of regularisation to the reference; for simpo the scale of the margin. If unset, 0.1, for simpo 2."""
    gamma: float | None = Field(None, ge=0)
    """simpo: the target margin; if unset, 1."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo, robust (above 0), simpo, exo (0 means 0.001): assumed fraction of mislabelled pairs."""
    tau: float | None = Field(None, gt=0)
    """discopop: the margin at which its two terms are blended; if unset, 0.05."""
    undesirable_weight: float = Field(1.0, gt=0)
    """kto: weight of rejected trajectories and dialogues labelled false, relative to 1 for the others."""
    min_reward_gap: float = Field(0.0, ge=0)
    """Smallest difference between the best and worst reward of a group, or value of a step, that makes a pair; equal
    ones never do."""
    run: str | None = None
    """A run folder, or one of recorded sessions, whose rollouts are learned from. If unset, `data` is used, or attempts
    of the model itself."""
    pairs: Literal["groups", "steps", "none"] | None = None
    """Pairs of a run: the best against the worst attempt of each group, or at each step of a group's tree the best
    against the worst action, by the mean reward of its continuations. `none`, for kto and bco: each rollout by itself,
    desirable from `threshold` on. If unset, `none` if `threshold` is set, and for recorded sessions with these losses;
    otherwise `groups`."""
    threshold: float | None = None
    """Without pairs: the reward from which on a rollout is desirable; if unset, the mean of all."""
    data: str | None = None
    """A file of pairs, for kto and bco also of labelled dialogues (docs/use/data.md); unset with `run`."""
    model: str | list[str] | None = None
    """steps: a process reward model (run folder of `ludus reward-model` or checkpoint, or an ensemble) that ranks the
    actions of a step by their values; if unset, by the mean reward of their continuations."""
    actions: int = Field(0, ge=0)
    """model: further actions that the model samples at each step of the attempts, to be ranked with the one taken."""
    tasks: int = Field(64, ge=1)
    """Without `run` and `data`: training tasks that the model attempts, or all if there are fewer."""
    samples: int = Field(8, ge=2)
    """Attempts per task, at rollout.temperature."""
    search: StepSearchConfig = StepSearchConfig()

    @model_validator(mode="after")
    def _searches_alone(self) -> Self:
        others = ("run", "data", "pairs", "samples", "min_reward_gap")
        if self.search.simulations and (set_ones := [name for name in others if name in changed(self)]):
            raise ValueError(f"preference.search samples its own pairs: unset preference.{set_ones[0]}")
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The reward models that rank actions; empty if there are none."""
        return as_names(self.model)

    @property
    def weighs_rollouts(self) -> bool:
        """Whether the loss is of single rollouts, weighted by their advantages."""
        return self.loss == "forks"

    @model_validator(mode="after")
    def _fits_forks(self) -> Self:
        if self.loss == "forks" and (self.data or self.pairs or self.threshold or self.beta) is not None:
            raise ValueError(
                "preference.loss forks has groups of rollouts: unset preference.data, pairs, threshold and beta"
            )
        if self.loss != "forks" and (of_forks := changed(self.forks)):
            raise ValueError(f"preference.forks.{next(iter(of_forks))} is for the loss forks, not for {self.loss}")
        return self

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.run is not None and self.data is not None:
            raise ValueError(f'preference.run ("{self.run}") and preference.data are mutually exclusive')
        if self.model is not None and self.pairs != "steps":
            raise ValueError('preference.model ranks the actions of a step: set preference.pairs = "steps"')
        if self.actions and self.model is None:
            raise ValueError("preference.actions has no effect without preference.model, which ranks them")
        for key in ("pairs", "threshold", "min_reward_gap"):
            if self.data is not None and self.model_dump()[key] != type(self).model_fields[key].default:
                raise ValueError(f"preference.{key} applies to rollouts, but preference.data is set")
        if self.pairs == "none" and (self.run is None or self.loss not in UNPAIRED_LOSSES):
            raise ValueError("preference.pairs none needs preference.run, and the loss kto or bco")
        if self.threshold is not None and (self.run is None or self.pairs in ("groups", "steps")):
            raise ValueError("preference.threshold needs preference.run, without pairs")
        if (self.tasks, self.samples) != (64, 8) and (self.run or self.data) is not None:
            raise ValueError("preference.tasks and samples need attempts of the model, but run or data is set")
        needed = {"gamma": ("simpo",), "tau": ("discopop",), "undesirable_weight": ("kto",)}
        shared = {"threshold": UNPAIRED_LOSSES, "label_smoothing": SMOOTHED}
        check_choice(self, "preference", "loss", {**needed, **shared})
        if self.loss == "robust" and self.label_smoothing == 0:
            raise ValueError(
                "preference.loss robust corrects for mislabelled pairs: set preference.label_smoothing above 0, "
                'or use the loss "dpo"'
            )
        return self


class RftConfig(OptimizerSection):
    """Rejection-sampling fine-tuning: rounds of sampling, keeping successes, and training on them."""

    rounds: int = Field(3, ge=1)
    """Rounds of the whole run."""
    tasks_per_round: int = Field(64, ge=1)
    """Tasks sampled per round."""
    samples: int = Field(8, ge=1)
    """Attempts per task, at rollout.temperature."""
    max_per_task: int | None = Field(None, ge=1)
    """Maximum attempts at a task that a round trains on, the first ones; if unset, all."""
    hindsight: float = Field(0.0, ge=0, le=1)
    """Weight in the loss of failed attempts that are relabelled as successes at what they achieved, for worlds that
    define it (docs/use/process_rewards.md); 0 leaves them out."""
    epochs: int = Field(1, ge=1)
    """Passes over the successes of a round."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps of a round, in as many passes as they take; if unset, those of `epochs` passes."""
    batch_size: int = Field(16, ge=1)
    """Dialogues, pairs or attempts per optimizer step."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Padded tokens per forward pass; the gradient does not depend on it."""
    learning_rate: float = Field(3e-4, gt=0)
    """Learning rate of AdamW after the warm-up. Each round starts with a new optimizer."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up in each round."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up, to the end of the round."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of checkpoints to keep."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.steps is not None and self.epochs != 1:
            raise ValueError("rft.steps and rft.epochs are mutually exclusive: a round has one length")
        return self
