"""The sections about rewards: how their parts become one number, and how a reward model is trained."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import OptimizerSection, Section
from ludus.errors import nearest_names

PARTS = (
    "citation_support",
    "extra_calls",
    "extra_turns",
    "format_kept",
    "format_score",
    "invalid_calls",
    "json_schema",
    "json_value",
    "language_consistency",
    "long_answer",
    "multiple_choice",
    "patch_similarity",
    "repeated_calls",
    "same_state",
    "think_format",
    "token_f1",
    "tool_use",
    "well_formed",
)
"""The names of `rewards.extra` (`ludus.rewards.registry.NAMED`)."""


PROGRESS = "progress"
"""The event of a turn that reached a milestone of the world's turn verifier (`rewards.turns`)."""


class LengthConfig(Section):
    """What the length of an episode, in action tokens, does to its reward."""

    kind: Literal["none", "linear", "sigmoid"] = "none"
    """`linear` takes `lam` for each token beyond `target`, at most `cap`. `sigmoid` multiplies a
    reward above 0 by `floor + (1 - floor) sigmoid((target - tokens) / tau)`."""
    target: int = Field(512, ge=1)
    """Action tokens from which on `linear` counts, and at which `sigmoid` is half-way down."""
    lam: float = Field(0.001, gt=0)
    """Of `linear`: what a token costs."""
    cap: float = Field(0.5, gt=0)
    """Of `linear`: the most that it costs."""
    tau: float = Field(64.0, gt=0)
    """Of `sigmoid`: tokens in which the reward fades."""
    floor: float = Field(0.8, ge=0, lt=1)
    """Of `sigmoid`: the least factor, so that a long success earns more than a failure in good form."""

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        kinds = {"target": "linear or sigmoid", "lam": "linear", "cap": "linear", "tau": "sigmoid", "floor": "sigmoid"}
        for name, given in self.model_dump().items():
            own = type(self).model_fields[name].default
            if name in kinds and self.kind not in kinds[name] and given != own:
                raise ValueError(f"rewards.length.{name} is of the kind {kinds[name]}, not of {self.kind}")
        return self


class PartConfig(Section):
    """A shaping part that is switched on by its name. Which options a part has, and needs, it says itself."""

    source: str | None = None
    """A part of your own, `path/to/file.py:name` (docs/extend/plugins.md); none takes the built-in one of
    that name.
    """
    weight: float = 0.05
    """Of the part in the sum; penalties are negative by themselves and take a weight above 0."""
    free: int | None = None
    """Of `extra_calls`, `extra_turns` and `long_answer`, which need it: calls, turns or words that cost
    nothing; none is for others."""
    limit: int | None = None
    """Of the same, which need it: from here on they cost 1; none is for others."""
    cap: int | None = None
    """Of `repeated_calls` and `invalid_calls`: as many such calls cost 1; none is 4."""
    script: str | None = None
    """Of `language_consistency`: LATIN, CYRILLIC, CJK, ...; none is LATIN."""
    tool: str | None = None
    """Of `same_state`: whose last output is the state, a tool's or the environment's; none is the answer."""

    @property
    def options(self) -> dict[str, int | str]:
        """Those that are given."""
        return self.model_dump(exclude={"weight", "source"}, exclude_none=True)


class RewardsConfig(Section):
    """How the parts of a training episode's reward become one number. Evaluations do not read it."""

    preset: Literal["toolrl", "search_r1", "retool", "r1", "composite"] | None = None
    """The parts and weights of a published system in the place of the world's (`r1` and `composite` keep its
    outcome); none keeps the world's."""
    extra: dict[str, PartConfig] = Field({})
    """Shaping parts by name that count beside the world's: citation_support, extra_calls, extra_turns,
    format_kept, format_score, invalid_calls, json_schema, json_value, language_consistency, long_answer,
    multiple_choice, patch_similarity, repeated_calls, same_state, think_format, token_f1, tool_use,
    well_formed."""
    aggregation: Literal["weighted_sum", "gated", "pareto"] = "weighted_sum"
    """`weighted_sum` of all parts. `gated`: parts other than the outcome count only where `gate` is full.
    `pareto`: the rank in the group by domination, without weights."""
    gate: str = "outcome"
    """Of `gated`: a part by name, or `outcome`; full is 1."""
    weights: dict[str, float] = Field({})
    """Weights of parts by name, instead of the world's own."""
    weights_end: dict[str, float] = Field({})
    """Weights of parts at the end of the schedule; a part that is not here keeps its weight."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How weights go from `weights` to `weights_end`."""
    schedule_steps: int | None = Field(None, ge=1)
    """Training steps of the schedule; none takes all of the run."""
    caps: dict[str, float] = Field({})
    """The value of a part, before its weight, is held within plus and minus this, at most and by default 1.
    Outcomes have none."""
    allow_outweigh: bool = False
    """Let all other parts together move a reward by as much as the outcome or more."""
    normalise_by: str | None = None
    """A tag of the tasks: rewards are brought to one scale for each of its values by their running mean and
    variance, before groups are compared. None leaves them as they are. In a mixture `world` is such a tag."""
    normalise_over: Literal["run", "batch"] = "run"
    """Of `normalise_by`: mean and variance of all rewards so far, or of those of a step's whole batch, all
    rounds of resampling together."""
    length: LengthConfig = LengthConfig()
    turns: dict[str, float] = Field({})
    """Rewards of turns by what happened in them: the tools that were called (`a+b` for two), how a call
    failed (`raised`, `malformed`, ...), `progress` (the turn verifier found a new milestone), or `answer`.
    `ludus rewards calibrate RUN` finds them."""
    turn_verifier_weight: float = Field(0.0, ge=0)
    """Weight of the world's turn verifier: the turn that first reaches a milestone of the task earns the
    weight divided by the number of milestones. 0 switches it off."""
    model: str | list[str] | None = None
    """A run folder of `ludus reward-model`, or a checkpoint of it: `sigmoid(score)` becomes the part
    reward_model; none adds no part. A list is an ensemble of models of one kind, and the part is the mean of
    their values minus `model_std_coef` times their standard deviation."""
    model_std_coef: float = Field(0.0, ge=0)
    """Of an ensemble: how much a disagreement of its members lowers the part."""
    model_weight: float = Field(0.2, ge=0)
    """Weight of the part reward_model."""

    @model_validator(mode="after")
    def _has_parts(self) -> Self:
        if odd := [name for name, part in self.extra.items() if name not in PARTS and part.source is None]:
            near = " or ".join(f"rewards.extra.{name}" for name in nearest_names(odd[0], PARTS))
            told = f"the nearest is {near}" if near else f"there are {', '.join(PARTS)}"
            raise ValueError(f"rewards.extra.{odd[0]} is no part of rewards; {told}")
        return self

    @model_validator(mode="after")
    def _normalises(self) -> Self:
        if self.normalise_over != "run" and self.normalise_by is None:
            raise ValueError("rewards.normalise_over belongs to rewards.normalise_by, which is none")
        return self

    @model_validator(mode="after")
    def _has_ensemble(self) -> Self:
        if self.model is not None and not self.models:
            raise ValueError("rewards.model is an empty list; name at least one reward model, or leave it out")
        if len(set(self.models)) < len(self.models):
            raise ValueError("rewards.model names a reward model twice; members of an ensemble must differ")
        if self.model_std_coef and len(self.models) < 2:
            raise ValueError("rewards.model_std_coef needs an ensemble: a list of two or more in rewards.model")
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The members of the ensemble of reward models; empty without one."""
        if self.model is None:
            return ()
        return (self.model,) if isinstance(self.model, str) else tuple(self.model)

    @property
    def verifies_turns(self) -> bool:
        """Whether the world's turn verifier is asked: for its own reward, or for the event `progress`."""
        return self.turn_verifier_weight > 0 or PROGRESS in self.turns

    @property
    def rewards_turns(self) -> bool:
        """Whether these settings add rewards of turns."""
        return bool(self.turns) or self.turn_verifier_weight > 0

    @property
    def is_default(self) -> bool:
        """Whether rewards stay as the world makes them."""
        return self == RewardsConfig()


class RewardModelConfig(OptimizerSection):
    """Training of a reward model: the policy's body with one number in place of the output layer."""

    kind: Literal["pairwise", "pointwise", "process"] = "pairwise"
    """`pairwise`: the better of two attempts scores higher. `pointwise`: whether an attempt succeeded.
    `process`: a value for every turn."""
    run: str | None = None
    """A run folder: its rollouts are what is learned from; none takes those of `data`."""
    data: str | None = None
    """A file instead (docs/use/data.md): of pairs for `pairwise`, else of rollouts; none takes no file."""
    min_reward_gap: float = Field(0.0, ge=0)
    """Of `pairwise`: a group whose best and worst reward differ by less gives no pair; nor do equal ones."""
    discount: float = Field(1.0, gt=0, le=1)
    """Of `process`: an outcome counts this much less for each turn that it is away."""
    rollouts: int = Field(0, ge=0)
    """Of `process`: rollouts that the model plays on from after each turn but the last, to estimate what the
    turn is worth; 0 takes the rollouts that there are."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Share of the tasks that is kept aside to measure on; 0 measures nothing."""
    learning_rate: float = Field(1e-4, gt=0)
    """Of AdamW, after the warm-up."""
    epochs: int = Field(1, ge=1)
    """Passes over all examples, where `steps` is none."""
    steps: int | None = Field(None, ge=1)
    """Optimiser steps; none takes as many as `epochs` need."""
    batch_size: int = Field(16, ge=1)
    """Examples (pairs or attempts) of one optimiser step."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass (or one example); the gradient does not depend on it."""
    evaluate_every: int = Field(10, ge=1)
    """Steps between measurements on what is held out; the last step always has one."""
    checkpoint_every: int = Field(50, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(1, ge=1)
    """The newest ones that are kept."""

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        if self.run is not None and self.data is not None:
            raise ValueError(f'reward_model.run ("{self.run}") and reward_model.data exclude each other')
        if self.discount != 1 and self.kind != "process":
            raise ValueError(f'reward_model.discount belongs to the kind process, not to "{self.kind}"')
        if self.rollouts and self.kind != "process":
            raise ValueError(f'reward_model.rollouts belongs to the kind process, not to "{self.kind}"')
        if self.min_reward_gap > 0 and self.kind != "pairwise":
            raise ValueError(f'reward_model.min_reward_gap belongs to pairwise, not to "{self.kind}"')
        if self.min_reward_gap > 0 and self.data is not None:
            raise ValueError("reward_model.min_reward_gap is for rollouts, and reward_model.data is set")
        return self
