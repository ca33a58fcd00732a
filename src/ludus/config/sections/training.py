"""The sections of the learner and the training loop."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.curriculum import CurriculumConfig
from ludus.config.sections.section import OptimizerSection, Section


class GuidanceConfig(Section):
    """Further attempts with a hint at tasks that a whole group failed; the solved ones are trained without the hint."""

    samples: int = Field(0, ge=0)
    """Attempts with a hint per failed group; 0 for no guidance."""
    actions: int = Field(1, ge=0)
    """Actions of the expert in the hint, without its answer; 0 for feedback on the failed attempt alone."""


class SelfTeacherConfig(Section):
    """The self-teacher of the presets sdpo and sdft."""

    ema_rate: float = Field(0.05, gt=0, le=1)
    """Rate at which its weights follow the policy's at each optimizer step; at 1 it has the policy's weights, and needs
    no second copy of them."""
    feedback: bool = True
    """sdpo: show the feedback on a failed attempt (`World.hint` with 0 actions), besides a success of its group."""


class LearnerConfig(Section):
    """Processing of a batch by the learner."""

    old_logprobs: Literal["recomputed", "engine"] = "recomputed"
    """Log-probabilities in the denominator of ratios: recomputed by the learner, or those of the engine if both agree
    to 1e-3 nats, which saves a forward pass in steps with several updates."""
    replay_routing: bool = False
    """Mixtures of experts: use the routing of a step's first pass in all passes of its several updates."""
    dry_run: Literal["auto", "always", "never"] = "auto"
    """Run the longest microbatch before step 1 and report its memory; `auto` does so on a GPU."""
    halve_on_oom: bool = True
    """If memory runs out, repeat the update with half of training.microbatch_tokens, and keep that value."""
    ranks: int = Field(1, ge=1)
    """Learner processes on this machine, one GPU each; torchrun's number takes precedence."""
    shard: bool = False
    """Shard weights, gradients and optimizer states across the processes (FSDP2); otherwise they are replicated."""
    rank_timeout_s: float = Field(600.0, gt=0)
    """Timeout for collectives between the processes, including rendezvous and loading; then the run stops and names a
    rank that is missing or stopped."""

    @model_validator(mode="after")
    def _for_one_process(self) -> Self:
        if self.ranks > 1 and self.replay_routing:
            ranks = f"training.learner.ranks is {self.ranks}"
            raise ValueError(f"training.learner.replay_routing needs one process, and {ranks}")
        return self


class TrainingConfig(OptimizerSection):
    """The training loop."""

    guidance: GuidanceConfig = GuidanceConfig()
    mode: Literal["sync", "one_step", "async"] = "sync"
    """`sync`: sample, then train, reproducible bit for bit. `one_step`: sample the next batch while training on this
    one. `async`: episodes stream, and the learner trains whenever a batch is ready."""
    steps: int = Field(40, ge=1)
    """Steps of the run: each samples, trains and updates the engine."""
    prompts_per_step: int = Field(12, ge=1)
    """Tasks per step; each is sampled algorithm.group_size times."""
    epochs: int = Field(1, ge=1)
    """Passes over one batch of rollouts."""
    minibatches: int | None = Field(None, ge=1)
    """Optimizer steps per pass; if unset, the preset's, which `ludus algorithms NAME` shows."""
    microbatch_tokens: int = Field(4096, ge=1)
    """Padded tokens per forward pass; the gradient does not depend on it."""
    mask_observations: bool = True
    """False trains on tool outputs as if the model had written them: for comparison only, with a warning."""
    transitions: bool = False
    """Make each turn a training sample: its context and its action. Sequence means, sequence ratios and minibatches are
    then over turns (arXiv:2604.02869)."""
    report_kl: bool = True
    """Compute log-probabilities under the initial policy to report the KL even without a KL term."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of checkpoints to keep."""
    sync_tolerance: float | None = Field(None, gt=0)
    """Largest difference of probe log-probabilities between learner and engine after a weight update, in nats. If
    unset, 0.001, and 1 with bfloat16 weights, whose rounding alone differs by up to 0.6."""
    sync_timeout_s: float = Field(300.0, gt=0)
    """Timeout of a weight update including the probe, seconds; then the run stops."""
    learner: LearnerConfig = LearnerConfig()
    curriculum: CurriculumConfig = CurriculumConfig()

    @property
    def streams(self) -> bool:
        """Whether rollouts run concurrently with training, without fixed steps (`async`)."""
        return self.mode == "async"

    @property
    def off_policy(self) -> bool:
        """Whether rollouts come from older weights than those they train."""
        return self.mode != "sync"

    def probe_tolerance(self, dtype: str) -> float:
        """Return `sync_tolerance`, or its default for weights of this data type."""
        return self.sync_tolerance or (1.0 if dtype == "bfloat16" else 1e-3)


class ReplayConfig(Section):
    """Replay buffer of groups that train again."""

    share: float = Field(0.0, ge=0, lt=1)
    """Fraction of the groups of a step that come from the buffer; 0 disables it."""
    order: Literal["fifo", "priority"] = "fifo"
    """Which groups are replayed first: the least recently trained, or those with the largest reward deviation."""
    size: int = Field(64, ge=1)
    """Maximum groups in the buffer; the oldest are evicted."""
    times: int = Field(1, ge=1)
    """Maximum replays of a group."""
    max_age: int = Field(4, ge=1)
    """Maximum age in versions; a group with an older token is dropped and counted. Groups older than
    staleness.max_staleness train only under the off-policy correction."""
    confidence: list[float] | None = Field(None, min_length=2, max_length=2)
    """Keep only groups with a success whose mean action token probability when sampled (exp of the mean
    log-probability) is above the first number and at most the second (WebRL: [0.5, 0.95]); if unset, all groups."""
    sources: list[str] = Field([])
    """Rollouts of other runs that are in the buffer from the start: run folders, checkpoints of runs (the rollouts up
    to their step), or files `step-*.jsonl.gz`. Rejected if their effective sample size under this policy is below
    staleness.min_ess; later a group below it is skipped and counted."""


class StalenessConfig(Section):
    """Limit of the lag of rollouts behind the weights, and handling of older rollouts.

    For training.mode = async; `min_ess` and `ess_patience` apply to every mode.
    """

    max_staleness: int = Field(2, ge=0)
    """Maximum age of a trained token, in weight versions; 0 is on-policy."""
    on_stale: Literal["wait", "mask", "replay"] = "wait"
    """If an episode exceeds the limit, the learner waits for it (`wait`), its stale tokens are masked (`mask`), or its
    group moves to the replay buffer and trains from there with a correction (`replay`)."""
    in_flight_weight_updates: bool = True
    """Update weights in the middle of episodes; otherwise each engine updates once its episodes have ended."""
    moves: bool = False
    """With several servers at engine.url and without in_flight_weight_updates: an episode whose server waits to update
    continues, between two turns, on a server with newer weights, which prefills its history again."""
    kv_cache_on_update: Literal["keep", "recompute"] = "keep"
    """After a weight update, keep the KV cache of running episodes or recompute it."""
    oversample: int = Field(0, ge=0)
    """Episodes per group in addition to algorithm.group_size; the first to end train, the others are cancelled."""
    max_concurrent_rollouts: int = Field(0, ge=0)
    """Concurrent episodes, at most rollout.concurrency; 0 adapts to the fewest that keep learner and engine busy."""
    min_ess: float = Field(0.3, ge=0, le=1)
    """Effective sample size of a step (fraction) below which every training.mode warns; 0 disables it."""
    ess_patience: int = Field(5, ge=0)
    """Consecutive steps below min_ess that stop the run; 0 never stops it."""
    replay: ReplayConfig = ReplayConfig()

    @model_validator(mode="after")
    def _fits_replay(self) -> Self:
        if self.on_stale == "replay" and not (self.replay.share and self.replay.max_age > self.max_staleness):
            raise ValueError(
                "staleness.on_stale = replay needs staleness.replay.share above 0 and a "
                f"staleness.replay.max_age ({self.replay.max_age}) above max_staleness ({self.max_staleness})"
            )
        if self.on_stale == "mask" and self.replay.share and self.replay.max_age > self.max_staleness:
            raise ValueError(
                f"staleness.replay.max_age ({self.replay.max_age}) admits groups whose tokens "
                f"staleness.on_stale = mask removes (max_staleness {self.max_staleness})"
            )
        return self
