"""The section about rollouts that are not in step with learning (training.mode = async)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section


class ReplayConfig(Section):
    """Groups that train once more."""

    share: float = Field(0.0, ge=0, lt=1)
    """Share of a step's groups that have trained before; 0 keeps none."""
    order: Literal["fifo", "priority"] = "fifo"
    """Which come first: those that trained longest ago, or those whose rewards deviate most."""
    size: int = Field(64, ge=1)
    """Groups kept at most; the oldest go first."""
    times: int = Field(1, ge=1)
    """How often one group is replayed at most."""
    max_age: int = Field(4, ge=1)
    """Versions; a group with an older token is dropped, and counted. Beyond staleness.max_staleness what is
    replayed trains under the correction alone."""
    sources: list[str] = Field([])
    """Rollouts of other runs that are in the buffer from the start: run folders, checkpoints of runs (the
    rollouts up to their step), or files `step-*.jsonl.gz`. Refused where their effective sample share under
    this policy is below staleness.min_ess; later a group below it is left out, and counted."""


class StalenessConfig(Section):
    """How far rollouts may be behind the weights, and what happens at the bound.

    For training.mode = async; `min_ess` and `ess_patience` are for every mode.
    """

    max_staleness: int = Field(2, ge=0)
    """Versions that a trained token may be behind the weights it trains; 0 is on-policy."""
    on_stale: Literal["wait", "mask", "replay"] = "wait"
    """An episode that outlives the bound holds the learner back (`wait`), its tokens over age do not train
    (`mask`), or its group goes into the replay buffer and trains from there, corrected (`replay`)."""
    in_flight_weight_updates: bool = True
    """New weights take effect in the middle of episodes; off, an engine takes them once its episodes have
    ended, and of several engines each for itself."""
    moves: bool = False
    """With several servers at engine.url and in_flight_weight_updates off: an episode whose server waits for
    it to end goes on, between two turns, at one with newer weights, where its history is computed again."""
    kv_cache_on_update: Literal["keep", "recompute"] = "keep"
    """With new weights an episode in flight goes on from its cache, or that is computed again."""
    oversample: int = Field(0, ge=0)
    """Episodes of a group beyond algorithm.group_size; the first of them that end train, the rest stop."""
    max_concurrent_rollouts: int = Field(0, ge=0)
    """Episodes in flight, at most rollout.concurrency; 0 finds by measurement the fewest that keep learner
    and engine busy."""
    min_ess: float = Field(0.3, ge=0, le=1)
    """Effective sample share of a step below which there is a warning, in every training.mode; 0 is no
    bound."""
    ess_patience: int = Field(5, ge=0)
    """Steps in a row below min_ess that stop the run; 0 never stops it."""
    replay: ReplayConfig = ReplayConfig()

    @model_validator(mode="after")
    def _has_room_for_what_is_late(self) -> Self:
        if self.on_stale == "replay" and not (self.replay.share and self.replay.max_age > self.max_staleness):
            raise ValueError(
                "staleness.on_stale = replay needs staleness.replay.share above 0 and a "
                f"staleness.replay.max_age ({self.replay.max_age}) above max_staleness ({self.max_staleness})"
            )
        return self

    @model_validator(mode="after")
    def _masks_what_it_replays(self) -> Self:
        if self.on_stale == "mask" and self.replay.share and self.replay.max_age > self.max_staleness:
            raise ValueError(
                f"staleness.replay.max_age ({self.replay.max_age}) lets groups in whose tokens "
                f"staleness.on_stale = mask takes out again (max_staleness {self.max_staleness})"
            )
        return self
