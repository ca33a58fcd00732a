"""Settings of learning from shown solutions: hints on failed tasks, and a self-teacher."""

from __future__ import annotations

from pydantic import Field

from ludus.config.sections.section import Section


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
