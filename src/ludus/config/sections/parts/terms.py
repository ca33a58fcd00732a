"""Sections of `rewards` about single parts: process, constraint, model_refresh and unsupervised."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section, changed, check_choice


class ProcessConfig(Section):
    """What `rewards.turn_verifier_weight` rewards, and subgoals from a process model."""

    source: Literal["milestones", "search_gain", "subgoals"] = "milestones"
    """`milestones` of the world's turn verifier. `search_gain` (StepSearch): new similarity of the retrieved documents
    to those that prove the answer, minus the share of documents seen before. `subgoals`: those of a file."""
    subgoals: str | None = None
    """subgoals: a file of JSON lines {"task": ID, "subgoals": [TEXT, ...]}; unset for the other sources."""
    thresholds: list[float] = Field([])
    """Values of a process model (`rewards.model`) that are subgoals: the turn whose value first exceeds one earns
    `rewards.model_weight` divided by their number, instead of its value."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.source == "subgoals") != (self.subgoals is not None):
            raise ValueError("rewards.process.subgoals is the file of the source subgoals: set both or neither")
        if self.thresholds != sorted(set(self.thresholds)) or any(not 0 < one < 1 for one in self.thresholds):
            raise ValueError("rewards.process.thresholds must increase, between 0 and 1")
        return self


class ConstraintConfig(Section):
    """A limit on the mean cost of episodes, by a Lagrange multiplier `lambda` (arXiv:2310.12773).

    The reward becomes `(reward - lambda cost) / (1 + lambda)`. After each step `log(lambda)` rises by `lambda_lr lambda
    (mean cost - limit)`.
    """

    part: str | None = None
    """Reward part whose absolute value is the cost, in [0, 1]; it does not count in the sum. If unset, there is no
    constraint."""
    limit: float = Field(0.0, ge=0, le=1)
    """Largest mean cost of an episode."""
    lambda_init: float = Field(1.0, gt=0)
    """Multiplier of the first step."""
    lambda_lr: float = Field(0.1, gt=0)
    """Learning rate of the multiplier."""
    lambda_max: float = Field(5.0, gt=0)
    """Largest multiplier."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.part is None and (given := [*changed(self)]):
            raise ValueError(f"rewards.constraint.{given[0]} needs rewards.constraint.part, which is unset")
        if self.lambda_init > self.lambda_max:
            above = f"is above rewards.constraint.lambda_max ({self.lambda_max:g})"
            raise ValueError(f"rewards.constraint.lambda_init ({self.lambda_init:g}) {above}")
        return self


class ModelRefreshConfig(Section):
    """Training of the models of `rewards.model` on the verified outcomes of the run's own rollouts."""

    every: int = Field(0, ge=0)
    """Training steps between refreshes; 0 keeps the models fixed."""
    steps: int = Field(4, ge=1)
    """Optimizer steps of a refresh."""
    learning_rate: float = Field(1e-4, gt=0)
    """Learning rate of AdamW, constant."""
    batch_size: int = Field(16, ge=1)
    """Attempts or pairs per optimizer step."""
    window: int | None = Field(None, ge=1)
    """Number of last training steps whose rollouts a refresh uses; if unset, those since the last one, `every`."""

    @model_validator(mode="after")
    def _takes_effect(self) -> Self:
        if not self.every and (unused := [*changed(self)]):
            raise ValueError(f"rewards.model_refresh.{unused[0]} needs rewards.model_refresh.every above 0")
        if self.window is not None and self.window < self.every:
            raise ValueError("rewards.model_refresh.window is below rewards.model_refresh.every")
        return self


LEARNER_KINDS: Final = ("self_certainty", "entropy")
"""Kinds that need the learner's logits; the others are computed from rollouts."""


class UnsupervisedConfig(Section):
    """A reward without labels (docs/use/unsupervised_rewards.md)."""

    kind: Literal["none", "majority", "self_certainty", "entropy", "confidence", "metacognition"] = "none"
    """`majority`: 1 for the most frequent answer of the group (TTRL). `self_certainty`: mean of `logsumexp(logits) -
    mean(logits)` over the tokens (INTUITOR). `entropy`: minus the mean entropy, in nats. `confidence`: rise of the
    token probability from the first to the last turn. `metacognition`: mean of coverage of the question, reaction to
    failed calls, and `majority`."""
    weight: float = Field(1.0, gt=0)
    """Weight of the part in the sum."""
    replaces_outcome: bool = True
    """Leave the outcomes of the world out of the reward. They are still recorded and measured."""
    votes: int = Field(0, ge=0)
    """majority: attempts per task that vote, of which the first `algorithm.group_size` train (64 and 32 in TTRL); 0:
    `algorithm.group_size`."""
    span: Literal["response", "last_turn"] = "response"
    """self_certainty, entropy: the tokens of the mean, all that the policy sampled or those of its last turn."""

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        every = ("majority", *LEARNER_KINDS, "confidence", "metacognition")
        needed = {"weight": every, "replaces_outcome": every, "votes": ("majority",), "span": LEARNER_KINDS}
        check_choice(self, "rewards.unsupervised", "kind", needed)
        return self
