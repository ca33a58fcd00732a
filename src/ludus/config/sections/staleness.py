"""The section `staleness`: rollouts from older weights (training.mode = async)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section


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
    sources: list[str] = Field([])
    """Rollouts of other runs that are in the buffer from the start: run folders, checkpoints of runs (the rollouts up
    to their step), or files `step-*.jsonl.gz`. Rejected if their effective sample size under this policy is below
    staleness.min_ess; later a group below it is skipped and counted."""


class StalenessConfig(Section):
    """How far rollouts may lag behind the weights, and what happens at the limit.

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
    """Concurrent episodes, at most rollout.concurrency; 0 adapts them to the fewest that keep learner and engine busy.
    """
    min_ess: float = Field(0.3, ge=0, le=1)
    """Effective sample size of a step (fraction) below which a warning is printed, in every training.mode; 0 disables
    it."""
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
