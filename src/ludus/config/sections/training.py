"""Settings of the learner and of the loop around it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import OptimizerSection, Section


class LearnerConfig(Section):
    """How the learner works through a batch: what it computes again, and what that takes."""

    old_logprobs: Literal["recomputed", "engine"] = "recomputed"
    """The log-probabilities that ratios divide by: computed by the learner, or as the engine recorded them,
    where both agree to 1e-3 nats; that saves a pass in steps of several updates."""
    replay_routing: bool = False
    """Mixtures of experts: record which experts each token takes at the start of a step of several updates,
    and keep to them in all of its passes."""
    dry_run: Literal["auto", "always", "never"] = "auto"
    """Try the longest microbatch before step 1 and report the memory it takes; `auto` does so on a GPU."""
    halve_on_oom: bool = True
    """Where memory runs out, do the update again with half of training.microbatch_tokens, and go on so."""
    ranks: int = Field(1, ge=1)
    """Processes of the learner on this machine, a GPU each; under torchrun its number counts instead."""
    shard: bool = False
    """Split weights, gradients and moments between the processes (FSDP2); otherwise each holds all."""
    rank_timeout_s: float = Field(600.0, gt=0)
    """Several processes: the longest that one waits for another, while they meet, load or work together; then
    the run stops, and names one that is stopped or gone."""

    @model_validator(mode="after")
    def _for_one_process(self) -> Self:
        if self.ranks > 1 and self.replay_routing:
            raise ValueError(
                f"training.learner.replay_routing needs one process, and training.learner.ranks is {self.ranks}"
            )
        return self


class TrainingConfig(OptimizerSection):
    """Training and its loop."""

    mode: Literal["sync", "one_step", "async"] = "sync"
    """`sync`: sample, then learn, bit for bit repeatable. `one_step`: sample the next batch while learning on
    this one. `async`: episodes stream, and the learner takes a batch when one is ready."""
    steps: int = Field(40, ge=1)
    """Steps of the whole run: each samples, learns and sends the weights."""
    prompts_per_step: int = Field(12, ge=1)
    """Tasks of one step; each is played algorithm.group_size times."""
    epochs: int = Field(1, ge=1)
    """Passes over one batch of rollouts."""
    minibatches: int | None = Field(None, ge=1)
    """Optimiser steps in one pass; none takes the preset's, which `ludus algorithms NAME` shows."""
    microbatch_tokens: int = Field(4096, ge=1)
    """Padded tokens per forward pass; the gradient does not depend on it."""
    mask_observations: bool = True
    """False trains on tool output as if the model had written it: for comparison only; it warns."""
    transitions: bool = False
    """Make each turn a training sample: its context and its action. Means over sequences, ratios of sequences
    and minibatches are then those of turns (arXiv:2604.02869)."""
    report_kl: bool = True
    """Score each batch under the initial policy to report the KL, also where no KL term is used."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """The newest ones that are kept."""
    sync_tolerance: float = Field(1e-3, gt=0)
    """Largest difference of probe log-probabilities between learner and engine after an update."""
    sync_timeout_s: float = Field(300.0, gt=0)
    """Seconds that new weights may take to the engine, with its answer to the probe; then the run stops."""
    learner: LearnerConfig = LearnerConfig()

    @property
    def streams(self) -> bool:
        """Whether rollouts run beside the learner without an order of steps (`async`)."""
        return self.mode == "async"

    @property
    def one_step_behind(self) -> bool:
        """Whether each step trains on rollouts of the weights before (`one_step`)."""
        return self.mode == "one_step"

    @property
    def off_policy(self) -> bool:
        """Whether rollouts come from older weights than those that they train."""
        return self.mode != "sync"
