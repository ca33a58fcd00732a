"""Settings of the algorithm and its parts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ludus.config.sections.section import Section


class PartOptionsConfig(Section):
    """Numbers and words that one part of an algorithm has to itself; `ludus algorithms` lists them."""

    advantage: dict[str, float | str] = Field({})
    """Of the advantage, such as turn_grpo's outcome_weight."""
    loss: dict[str, float | str] = Field({})
    """Of the loss, such as sapo's tau_neg."""
    correction: dict[str, float | str] = Field({})
    """Of the correction, such as icepop's low and high."""
    kl: dict[str, float | str] = Field({})
    """Of the KL term: granularity, importance."""
    terms: dict[str, float | str] = Field({})
    """Coefficients of terms beside the policy loss: echo, positive_nll."""


class AlgorithmParts(Section):
    """A preset by name, and its parts with their bounds; None keeps the preset's value."""

    preset: str = "grpo"
    """The algorithm that the other settings start from; `ludus algorithms` lists them."""
    group_size: int = Field(8, ge=1)
    """Trajectories per task (G); at least 2 where the attempts of a group are compared."""
    advantage: str | None = None
    """How rewards become advantages; none keeps the preset's."""
    loss: str | None = None
    """The loss per token; none keeps the preset's."""
    aggregation: str | None = None
    """How the losses of tokens become one number; none keeps the preset's."""
    clip_low: float | None = Field(None, ge=0)
    """The ratio is clipped below 1 - clip_low; none keeps the preset's."""
    clip_high: float | None = Field(None, ge=0)
    """The ratio is clipped above 1 + clip_high; none keeps the preset's."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the loss of a token with a negative advantage, in multiples of it; none keeps the preset's."""
    opsm_delta: float | None = Field(None, ge=0)
    """Off-policy sequence masking: a trajectory with a negative advantage has no policy loss if the mean of
    log(engine / policy) over its tokens is above this (1e-4 in slime). None keeps the preset's, no mask."""
    kl: str | None = None
    """Estimator: k1, k2, k3, abs, k3_k2grad, full_reverse, full_forward; none keeps the preset's."""
    kl_coef: float | None = Field(None, ge=0)
    """Weight of the KL term, 0 for no term; none keeps the preset's."""
    kl_placement: Literal["loss", "reward", "advantage"] | None = None
    """Where the KL term goes: into the loss, or detached into the reward or the advantage; none keeps the
    preset's."""
    correction: str | None = Field(None, examples=["none", "tis"])
    """Off-policy correction between engine and learner: tis, icepop, decoupled, reject_sequence, m2po, or
    "none", which is no correction. Left out, it is the preset's."""
    tis_cap: float | None = Field(None, gt=0)
    """Largest importance weight between engine and learner (with tis); none keeps the preset's."""


class AlgorithmConfig(AlgorithmParts):
    """A preset by name and what to change in it; None keeps the preset's value."""

    filter_zero_variance: bool | None = None
    """Drop groups whose rewards are all equal; none keeps the preset's."""
    max_resample_rounds: int | None = Field(None, ge=0)
    """Further rounds of sampling to replace dropped groups; none keeps the preset's."""
    variance_filter: Literal["share", "top_p"] | None = None
    """What top_variance_fraction is a share of: the groups of a step, or the sum of their reward deviations.
    `top_p` drops groups of deviation 0, and skips a step in which none is left; five such in a row stop the
    run. None keeps the preset's."""
    top_variance_fraction: float | None = Field(None, gt=0, le=1)
    """Share of a step's groups that train, those whose rewards deviate most, 1 for all; none keeps the
    preset's, and is 0.9 for `top_p`."""
    greso: bool | None = None
    """Skip tasks whose last groups had equal rewards, before they are played; none keeps the preset's."""
    overlong_mask: bool | None = None
    """Truncated trajectories do not train; none keeps the preset's."""
    std_ddof: Literal[0, 1] | None = None
    """Divisor n - std_ddof of the standard deviation in a group; none keeps the preset's."""
    entropy_coef: float | None = Field(None, ge=0)
    """Weight of the entropy bonus, 0 for no bonus; none keeps the preset's."""
    overlong_buffer: float | None = Field(None, ge=0, le=1)
    """Soft overlong punishment: the reward falls by up to 1 over this last share of the longest episode, and
    by 1 where a token limit cut the episode; 0 for no punishment; none keeps the preset's."""
    overlong_measure: Literal["sequence", "action_tokens"] | None = None
    """Length of an episode for the punishment: all its tokens, against rollout.max_seq_len, or its action
    tokens, against rollout.max_turns times max_tokens_per_turn if that is less. None keeps the preset's."""
    overlong_length: int | None = Field(None, ge=1)
    """Longest episode, in tokens of overlong_measure, for the punishment; none is the limit at which an
    episode is cut."""
    options: PartOptionsConfig = PartOptionsConfig()


class KlControlConfig(Section):
    """How algorithm.kl_coef changes over a run, and when the KL pauses it; None is what each field says."""

    kind: Literal["constant", "linear", "cosine", "adaptive", "pid"] = "constant"
    """linear and cosine go from algorithm.kl_coef to `end`; adaptive and pid hold the KL at `target`."""
    end: float | None = Field(None, ge=0)
    """Of linear and cosine: the last coefficient; none is 0."""
    steps: int | None = Field(None, ge=1)
    """Of linear and cosine: training steps until `end`; none is training.steps."""
    target: float | None = Field(None, gt=0)
    """Of adaptive and pid, which need it: the KL to hold, nats per token; none is for the other kinds."""
    horizon: float | None = Field(None, gt=0)
    """Of adaptive: trajectories in which the coefficient changes by a fifth at most; none is 10000."""
    kp: float | None = Field(None, ge=0)
    """Of pid: gain on the error; none is 0."""
    ki: float | None = Field(None, ge=0)
    """Of pid: gain on the sum of errors; none is 0."""
    kd: float | None = Field(None, ge=0)
    """Of pid: gain on the change of the error; none is 0."""
    max_coef: float | None = Field(None, gt=0)
    """Of pid: the largest coefficient; none is 1."""
    guard_factor: float = Field(0.0, ge=0)
    """A step whose KL exceeds this many times the expected one pauses the run (2 is usual); 0 is no guard."""
    guard_expected: float | None = Field(None, gt=0)
    """The KL that the guard expects, nats per token; none follows the run."""
    guard_decay: float | None = Field(None, ge=0, lt=1)
    """How slowly the expected KL follows the run; none is 0.9."""
    guard_warmup: int | None = Field(None, ge=0)
    """Steps before an expected KL that follows the run can pause it; none is 20."""


class TeacherConfig(Section):
    """The teacher of on-policy distillation (the preset distill)."""

    path: str | None = None
    """A model folder or name with the policy's tokenizer; none is no teacher."""


class DemonstrationsConfig(Section):
    """Expert trajectories that join the groups of their tasks (the preset mixed_policy)."""

    path: str | None = None
    """A file of dialogues that name their task; none asks the world to show the task."""
    per_group: int = Field(1, ge=1)
    """Most experts of one task; they come on top of algorithm.group_size."""


class PrimeConfig(Section):
    """The process reward model of prime."""

    learning_rate: float = Field(3e-4, gt=0)
    """Of its own AdamW."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of one step."""


class CriticConfig(Section):
    """The critic of the algorithms that have one (ppo and its kin, starpo, coderl)."""

    model: Literal["separate", "head"] = "separate"
    """`separate`: a copy of the policy's body that learns with its head. `head`: a head alone, on the states
    of the policy itself; it needs no second model, and its loss does not move the policy."""
    learning_rate: float | None = Field(None, gt=0)
    """Of its own AdamW; none is twice training.learning_rate."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of one step."""
    minibatches: int = Field(8, ge=1)
    """Gradient steps per pass: the rollouts of a step are split into this many parts."""
    clip: float = Field(0.2, ge=0)
    """How far a value may move in one step; 0 is not bounded. Not of coderl, whose critic has no values."""
    warmup_steps: int | None = Field(None, ge=0)
    """First steps in which the critic alone learns, on rollouts that count among training.steps. None is a
    tenth of training.steps, rounded down, and 0 for coderl."""
    prime: PrimeConfig = PrimeConfig()
    """Of the algorithm prime, which has it in the place of a critic."""
