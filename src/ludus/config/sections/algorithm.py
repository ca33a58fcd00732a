"""Settings of the algorithm and its parts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ludus.config.sections.section import Section
from ludus.config.sections.training import SelfTeacherConfig


class PartOptionsConfig(Section):
    """Options of single parts of an algorithm; `ludus algorithms NAME` lists them."""

    advantage: dict[str, float | str] = Field({})
    """Options of the advantage, such as turn_grpo's outcome_weight."""
    loss: dict[str, float | str] = Field({})
    """Options of the loss, such as sapo's tau_neg."""
    correction: dict[str, float | str] = Field({})
    """Options of the correction, such as icepop's low and high."""
    kl: dict[str, float | str] = Field({})
    """Options of the KL term: granularity, importance."""
    terms: dict[str, float | str] = Field({})
    """Coefficients of auxiliary loss terms: echo, positive_nll."""


class AlgorithmParts(Section):
    """A preset by name, and overrides of its parts and bounds; an unset field has the preset's value."""

    preset: str = "grpo"
    """The algorithm that the other settings modify; `ludus algorithms` lists them."""
    group_size: int = Field(8, ge=1)
    """Trajectories per task (G); at least 2 if the algorithm compares the trajectories of a group."""
    advantage: str | None = None
    """Advantage estimator; if unset, the preset decides."""
    loss: str | None = None
    """Loss per token; if unset, the preset decides."""
    aggregation: str | None = None
    """How token losses are averaged; if unset, the preset decides."""
    clip_low: float | None = Field(None, ge=0)
    """The importance ratio is clipped below 1 - clip_low; if unset, the preset decides."""
    clip_high: float | None = Field(None, ge=0)
    """The importance ratio is clipped above 1 + clip_high; if unset, the preset decides."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound on the loss of a token with negative advantage, in multiples of it; if unset, the preset decides."""
    opsm_delta: float | None = Field(None, ge=0)
    """Off-policy sequence masking: a trajectory with a negative advantage has no policy loss if the mean of log(engine
    / policy) over its tokens exceeds this (1e-4 in slime). If unset, the preset decides; no built-in preset masks."""
    kl: str | None = None
    """KL estimator: k1, k2, k3, abs, k3_k2grad, full_reverse, full_forward; if unset, the preset decides."""
    kl_coef: float | None = Field(None, ge=0)
    """Coefficient of the KL term, 0 for no term; if unset, the preset decides."""
    kl_placement: Literal["loss", "reward", "advantage"] | None = None
    """Where the KL term is added: in the loss, or detached in the reward or advantage; if unset, the preset decides."""
    correction: str | None = Field(None, examples=["none", "tis"])
    """Off-policy correction between engine and learner: tis, icepop, decoupled, reject_sequence, m2po, or "none" for no
    correction. If unset, the preset decides."""
    tis_cap: float | None = Field(None, gt=0)
    """Largest importance weight between engine and learner (tis); if unset, the preset decides."""


class AlgorithmConfig(AlgorithmParts):
    """A preset by name, and overrides; an unset field has the preset's value."""

    filter_zero_variance: bool | None = None
    """Drop groups whose rewards are all equal; if unset, the preset decides."""
    max_resample_rounds: int | None = Field(None, ge=0)
    """Additional rounds of sampling to replace dropped groups; if unset, the preset decides."""
    variance_filter: Literal["share", "top_p"] | None = None
    """Reference of top_variance_fraction: the groups of a step (`share`), or the sum of their reward
    deviations (`top_p`). `top_p` drops groups of deviation 0, and skips a step without groups left; five such steps in
    a row stop the run. If unset, the preset decides."""
    top_variance_fraction: float | None = Field(None, gt=0, le=1)
    """Fraction of a step's groups that train, those with the largest reward deviation; 1 for all. If unset, the
    preset decides; the default of `top_p` is 0.9."""
    greso: bool | None = None
    """Skip tasks whose last groups had equal rewards, before they are sampled; if unset, the preset decides."""
    overlong_mask: bool | None = None
    """Exclude truncated trajectories from training; if unset, the preset decides."""
    std_ddof: Literal[0, 1] | None = None
    """Divisor n - std_ddof of the standard deviation of a group; if unset, the preset decides."""
    entropy_coef: float | None = Field(None, ge=0)
    """Coefficient of the entropy bonus, 0 for no bonus; if unset, the preset decides."""
    entropy_target: float | None = Field(None, gt=0)
    """Entropy at which the bonus ends, nats per token: a step with sampled entropy H has the coefficient entropy_coef
    times max(0, 1 - H / entropy_target); if unset, the coefficient is constant."""
    overlong_buffer: float | None = Field(None, ge=0, le=1)
    """Soft overlong punishment: the reward decreases by up to 1 over this last fraction of the longest episode, and by
    1 if a token limit truncated the episode; 0 for no punishment. If unset, the preset decides."""
    overlong_measure: Literal["sequence", "action_tokens"] | None = None
    """Episode length for the punishment: all tokens, relative to rollout.max_seq_len, or action tokens, relative to
    rollout.max_turns times max_tokens_per_turn if that is less. If unset, the preset decides."""
    overlong_length: int | None = Field(None, ge=1)
    """Longest episode for the punishment, in tokens of overlong_measure; if unset, the limit of an episode."""
    options: PartOptionsConfig = PartOptionsConfig()


class KLControlConfig(Section):
    """Schedule or controller of algorithm.kl_coef, and a guard that pauses the run at a high KL."""

    kind: Literal["constant", "linear", "cosine", "adaptive", "pid"] = "constant"
    """linear and cosine change algorithm.kl_coef to `end`; adaptive and pid keep the KL at `target`."""
    end: float | None = Field(None, ge=0)
    """linear and cosine: the final coefficient; if unset, 0."""
    steps: int | None = Field(None, ge=1)
    """linear and cosine: training steps until `end`; if unset, training.steps."""
    target: float | None = Field(None, gt=0)
    """adaptive and pid, required: the target KL, nats per token. Leave it unset for the other kinds."""
    horizon: float | None = Field(None, gt=0)
    """adaptive: trajectories in which the coefficient changes by at most a fifth; if unset, 10000."""
    kp: float | None = Field(None, ge=0)
    """pid: proportional gain; if unset, 0."""
    ki: float | None = Field(None, ge=0)
    """pid: integral gain; if unset, 0."""
    kd: float | None = Field(None, ge=0)
    """pid: derivative gain; if unset, 0."""
    max_coef: float | None = Field(None, gt=0)
    """pid: the largest coefficient; if unset, 1."""
    guard_factor: float = Field(0.0, ge=0)
    """Pause the run after a step whose KL exceeds the expected KL by this factor (typically 2); 0 disables it."""
    guard_expected: float | None = Field(None, gt=0)
    """Expected KL of the guard, nats per token; if unset, a running mean of the run's KL."""
    guard_decay: float | None = Field(None, ge=0, lt=1)
    """Decay of the running mean that tracks the expected KL; if unset, 0.9."""
    guard_warmup: int | None = Field(None, ge=0)
    """Steps before a tracked expected KL can pause the run; if unset, 20."""


class TeacherConfig(SelfTeacherConfig):
    """The teacher of on-policy distillation (preset distill), and the self-teacher of sdpo and sdft."""

    path: str | None = None
    """A model folder or name with the policy's tokenizer; if unset, no teacher is used."""


class DemonstrationsConfig(Section):
    """Expert trajectories that are added to the groups of their tasks (preset mixed_policy)."""

    path: str | None = None
    """A file of dialogues that name their task; if unset, the world's expert provides them."""
    per_group: int = Field(1, ge=1)
    """Maximum expert trajectories per task, in addition to algorithm.group_size."""


class PrimeConfig(Section):
    """The implicit process reward model of prime."""

    learning_rate: float = Field(3e-4, gt=0)
    """Learning rate of its AdamW."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of one step."""


class CriticConfig(Section):
    """The critic of algorithms with a value model (ppo and variants, starpo, coderl)."""

    model: Literal["separate", "head"] = "separate"
    """`separate`: a copy of the policy's body that is trained with a value head. `head`: a value head on the hidden
    states of the policy; it needs no second model, and its loss does not train the policy."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate of its AdamW; if unset, twice training.learning_rate."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of one step."""
    minibatches: int = Field(8, ge=1)
    """Gradient steps per pass: the rollouts of a step are split into this many minibatches."""
    clip: float = Field(0.2, ge=0)
    """Largest change of a value in one step; 0 is unbounded. Not for coderl, whose critic has no values."""
    warmup_steps: int | None = Field(None, ge=0)
    """Initial steps in which only the critic is trained; their rollouts count among training.steps. If unset, a tenth
    of training.steps, rounded down, and 0 for coderl."""
    prime: PrimeConfig = PrimeConfig()
    """The process reward model of the preset prime, which replaces the critic."""
