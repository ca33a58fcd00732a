"""The sections about rewards: aggregation of parts, and training of reward models."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.parts.judges import JudgeConfig
from ludus.config.sections.parts.terms import ConstraintConfig, ModelRefreshConfig, ProcessConfig, UnsupervisedConfig
from ludus.config.sections.section import EpochsSection, Section, as_names, check_choice

PROGRESS = "progress"
"""The turn event of a new milestone of the world's turn verifier (`rewards.turns`)."""


class LengthConfig(Section):
    """Length penalty of an episode, measured in action tokens."""

    kind: Literal["none", "linear", "sigmoid"] = "none"
    """`linear` subtracts `lam` per token above `target`, at most `cap`. `sigmoid` multiplies a positive reward by
    `floor + (1 - floor) sigmoid((target - tokens) / tau)`."""
    target: int = Field(512, ge=1)
    """Action tokens above which `linear` applies, and at which `sigmoid` is half-way down."""
    lam: float = Field(0.001, gt=0)
    """linear: penalty per token."""
    cap: float = Field(0.5, gt=0)
    """linear: largest penalty."""
    applies_to: Literal["all", "failures", "successes"] = "all"
    """linear: which episodes are penalized; a success has a reward above 0 before the penalty."""
    tau: float = Field(64.0, gt=0)
    """sigmoid: width of the decay, in tokens."""
    floor: float = Field(0.8, ge=0, lt=1)
    """sigmoid: smallest factor, so that a long success earns more than a well-formed failure."""

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        linear, sigmoid = ("linear",), ("sigmoid",)
        needed = {"target": linear + sigmoid, "lam": linear, "cap": linear, "applies_to": linear}
        needed |= {"tau": sigmoid, "floor": sigmoid}
        check_choice(self, "rewards.length", "kind", needed)
        return self


class PartConfig(Section):
    """A shaping reward, enabled by its name. Each part validates which options it needs."""

    source: str | None = None
    """A custom part, `path/to/file.py:name` (docs/extend/plugins.md); if unset, the built-in part of that name, or an
    installed entry point."""
    weight: float = 0.05
    """Weight in the sum; penalties are negative themselves and need a positive weight."""
    free: int | None = None
    """extra_calls, extra_turns, long_answer, required: calls, turns or words without penalty. Unset for other parts."""
    limit: int | None = None
    """The same parts, required: number from which the penalty is 1. Unset for other parts."""
    cap: int | None = None
    """repeated_calls and invalid_calls: number of such calls at which the penalty is 1; if unset, 4. tool_diversity:
    number of tools at which the bonus is 1; if unset, 3."""
    script: str | None = None
    """language_consistency: LATIN, CYRILLIC, CJK, ...; if unset, LATIN."""
    tool: str | None = None
    """same_state: the tool (or environment) whose last output is the state; if unset, the answer is the state."""
    necessity: str | None = None
    """used_results: a file of `ludus necessity`; the part is multiplied by the tool necessity of the task, at least 0.
    If unset, or for a task that is not in the file, it is not multiplied."""

    options: dict[str, bool | int | float | str] = Field({})
    """The options of a custom part."""

    @property
    def given(self) -> dict[str, bool | int | float | str]:
        return self.model_dump(exclude={"weight", "source", "options"}, exclude_none=True) | self.options


class RewardModelParts(Section):
    """The reward models of a run, whose value is the part reward_model."""

    model: str | list[str] | None = None
    """A run folder of `ludus reward-model`, or one of its checkpoints: `sigmoid(score)` becomes the part reward_model.
    A list is an ensemble of models of one kind; the part is their mean minus `model_std_coef` times their standard
    deviation. If unset, the part is not added."""
    model_std_coef: float = Field(0.0, ge=0)
    """Ensembles: penalty on the disagreement of the models."""
    model_weight: float = Field(0.2, ge=0)
    """Weight of the part reward_model."""
    model_threshold: float | None = Field(None, gt=0, le=1)
    """The part reward_model is 1 from this probability on and otherwise 0 (WebRL's outcome model: 0.5); if unset, it is
    the probability."""
    model_refresh: ModelRefreshConfig = ModelRefreshConfig()

    @property
    def models(self) -> tuple[str, ...]:
        """The reward models of the ensemble; empty if there are none."""
        return as_names(self.model)


class RewardsConfig(RewardModelParts):
    """Aggregation of reward parts into one training reward. Evaluations ignore this section."""

    preset: Literal["toolrl", "search_r1", "retool", "r1", "composite"] | None = None
    """Parts and weights of a published system (`r1`, `composite`: the world's outcome); if unset, the world's."""
    extra: dict[str, PartConfig] = Field({})
    """Additional shaping rewards by name: a built-in one (docs/use/rewards.md), or any name with a `source`."""
    aggregation: Literal["weighted_sum", "gated", "pareto", "gdpo"] = "weighted_sum"
    """`weighted_sum` of all parts. `gated`: parts other than the outcome count only if `gate` is 1. `pareto`: rank in
    the group by Pareto dominance, without weights. `gdpo`: the parts are normalized in the group, summed by
    weight, and normalized over the batch (arXiv:2601.05242)."""
    gate: str = "outcome"
    """gated: the name of a part, or `outcome`."""
    weights: dict[str, float] = Field({})
    """Weights of parts by name, instead of the world's."""
    weights_end: dict[str, float] = Field({})
    """Weights of parts at the end of the schedule; other parts keep their weight."""
    schedule: Literal["linear", "cosine"] = "linear"
    """Interpolation from `weights` to `weights_end`."""
    schedule_steps: int | None = Field(None, ge=1)
    """Training steps of the schedule; if unset, the whole run."""
    caps: dict[str, float] = Field({})
    """Bounds of the absolute value of parts before weighting, at most and by default 1. Outcomes are not bounded."""
    allow_outweigh: bool = False
    """Allow the other parts together to change a reward by as much as the outcome or more."""
    normalise_by: str | None = None
    """A task tag: rewards are normalised per value of this tag by mean and variance before groups are compared; if
    unset, they are not. In a mixture, `world` is such a tag."""
    normalise_over: Literal["run", "batch"] = "run"
    """normalise_by: statistics of all rewards so far, or of the whole batch of a step including resampling rounds."""
    length: LengthConfig = LengthConfig()
    turns: dict[str, float] = Field({})
    """Rewards of turns by event: the called tools (`a+b` for two), the status of a failed call (`raised`, `malformed`,
    ...), `progress` (a new milestone of the turn verifier), or `answer`. `ludus rewards calibrate RUN` derives them."""
    turn_verifier_weight: float = Field(0.0, ge=0)
    """Weight of the world's turn verifier: the turn that first reaches a milestone earns the weight divided by the
    number of milestones. 0 disables it."""
    judge: JudgeConfig = JudgeConfig()
    process: ProcessConfig = ProcessConfig()
    """What `turn_verifier_weight` rewards, and subgoals from a process model."""
    constraint: ConstraintConfig = ConstraintConfig()
    unsupervised: UnsupervisedConfig = UnsupervisedConfig()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.normalise_over != "run" and self.normalise_by is None:
            raise ValueError("rewards.normalise_over needs rewards.normalise_by, which is unset")
        if self.aggregation == "gdpo" and self.normalise_by is not None:
            raise ValueError("rewards.aggregation = gdpo normalizes rewards itself; unset rewards.normalise_by")
        if self.aggregation in ("pareto", "gdpo") and self.constraint.part is not None:
            raise ValueError(
                f"rewards.constraint needs a sum of parts, which rewards.aggregation = {self.aggregation} is not"
            )
        if self.model is not None and not self.models:
            raise ValueError("rewards.model is an empty list; name at least one reward model, or unset it")
        if self.model_threshold is not None and not self.models:
            raise ValueError("rewards.model_threshold needs rewards.model, which is unset")
        if len(set(self.models)) < len(self.models):
            raise ValueError("rewards.model names a reward model twice; members of an ensemble must differ")
        if self.process.source != "milestones" and not self.turn_verifier_weight:
            raise ValueError("rewards.process.source has no effect: rewards.turn_verifier_weight is 0")
        if self.process.thresholds and self.model is None:
            raise ValueError("rewards.process.thresholds needs rewards.model, a process reward model")
        if self.model_std_coef and len(self.models) < 2:
            raise ValueError("rewards.model_std_coef needs an ensemble: a list of two or more in rewards.model")
        if self.model_refresh.every and self.model is None:
            raise ValueError("rewards.model_refresh.every needs rewards.model, which is unset")
        return self

    @property
    def verifies_turns(self) -> bool:
        """Whether the world's turn verifier runs, for its own reward or for the event `progress`."""
        return self.turn_verifier_weight > 0 or PROGRESS in self.turns

    @property
    def rewards_turns(self) -> bool:
        return bool(self.turns) or self.turn_verifier_weight > 0

    @property
    def is_default(self) -> bool:
        return self == RewardsConfig()


class RewardModelConfig(EpochsSection):
    """Training of a reward model: the policy's body with a scalar head."""

    kind: Literal["pairwise", "pointwise", "process"] = "pairwise"
    """`pairwise`: the better of two attempts scores higher. `pointwise`: probability of success. `process`: a value for
    every turn."""
    run: str | None = None
    """A run folder whose rollouts are the training data; if unset, `data` is used."""
    data: str | None = None
    """A data file (docs/use/data.md): pairs for `pairwise`, otherwise rollouts; if unset, `run` is used."""
    min_reward_gap: float = Field(0.0, ge=0)
    """pairwise: smallest reward difference of a group's best and worst that makes a pair; equal rewards never do."""
    labels: Literal["return", "agent_prm", "counterfactual", "inverse"] = "return"
    """process: targets of the turns (docs/use/process_rewards.md). `return`: discounted success. `agent_prm`: the same
    of 2 * success - 1, mapped to [0, 1]. `counterfactual`: change of the success rate by the turn, mapped to [0, 1].
    `inverse`: turns of demonstrations against turns of the attempts."""
    discount: float = Field(1.0, gt=0, le=1)
    """process: discount of the outcome per turn, for `inverse` of the next turn's value. AgentPRM uses 0.95."""
    rollouts: int = Field(0, ge=0)
    """process: Monte Carlo rollouts from each turn but the last, to estimate its value; 0 uses the given ones."""
    held_out: float = Field(0.1, ge=0, lt=1)
    """Fraction of tasks held out for evaluation; 0 disables it."""
    evaluate_every: int = Field(10, ge=1)
    """Steps between evaluations on held-out tasks; the last step always has one."""

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        if self.run is not None and self.data is not None:
            raise ValueError(f'reward_model.run ("{self.run}") and reward_model.data are mutually exclusive')
        process = ("process",)
        needed = {"labels": process, "discount": process, "rollouts": process, "min_reward_gap": ("pairwise",)}
        check_choice(self, "reward_model", "kind", needed)
        labels = {"discount": ("return", "agent_prm", "inverse"), "rollouts": ("return", "agent_prm", "counterfactual")}
        check_choice(self, "reward_model", "labels", labels)
        if self.labels == "counterfactual" and self.rollouts < 2:
            raise ValueError("reward_model.labels counterfactual needs reward_model.rollouts of at least 2")
        if self.min_reward_gap > 0 and self.data is not None:
            raise ValueError("reward_model.min_reward_gap applies to rollouts, but reward_model.data is set")
        return self
