"""The section about rewards without labels."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section, check_choice

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
