"""Settings of the loss forks."""

from __future__ import annotations

from pydantic import Field

from ludus.config.sections.section import Section


class ForksConfig(Section):
    """The loss forks of preference training (ReasonMaxxer): only the tokens at which the model is undecided learn."""

    entropy: float = Field(1.4, gt=0)
    """Entropy of the model before the training, nats, above which a token is a decision."""
    kl_coef: float = Field(0.2, ge=0)
    """Coefficient of the KL from the model before the training at all other tokens."""
    advantage_clip: float = Field(2.5, gt=0)
    """Bound of the advantages `(r - mean) / std`."""
    groups: int = Field(50, ge=1)
    """Maximum groups that are trained on, those with the share of better attempts nearest to one half."""
