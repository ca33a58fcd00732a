"""The section `rewards.process`: sources of turn rewards other than the milestones of a world."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section


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
