"""The sections about tree search: collection of pairs, and search at evaluation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.rollout import RolloutConfig
from ludus.config.sections.section import Section, changed


class TreeSearchConfig(Section):
    """Monte Carlo tree search over turns (AgentQ, arXiv:2408.07199)."""

    proposals: int = Field(4, ge=2)
    """Actions sampled at each expanded node; equal ones count once."""
    exploration: float = Field(1.0, ge=0)
    """Coefficient c of UCB1: the bonus of an action is `c * sqrt(ln(visits of the node) / (1 + visits))`."""
    alpha: float = Field(0.5, ge=0, le=1)
    """Value of an action: `alpha * mean of its episodes + (1 - alpha) * rank by the model`; 1 disables the ranking."""
    critic_tokens: int = Field(32, ge=1)
    """Maximum tokens of a ranking, of which there are two per node, in opposite orders."""
    max_nodes: int = Field(64, ge=1)
    """Maximum expanded nodes of a tree."""


class StepSearchConfig(TreeSearchConfig):
    """Pairs of actions from trees of the model itself, in place of independent attempts."""

    simulations: int = Field(0, ge=0)
    """Episodes of a tree; 0 disables the search."""
    threshold: float = Field(0.2, ge=0)
    """Two actions of a node make a pair if the difference between their values is above this."""
    max_tokens: int = Field(0, ge=0)
    """Sampled tokens of a tree, rankings included, after which no simulation begins; 0 is unlimited."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if not self.simulations and changed(self):
            names = ", ".join(changed(self))
            raise ValueError(f"preference.search.{names} has no effect while simulations is 0")
        return self


SearchMethod = Literal["none", "best_of_n", "mcts"]
SelectorName = Literal["majority", "likelihood", "critique", "outcome"]


class DecodingSearchConfig(TreeSearchConfig):
    """Search as a decoding strategy of `ludus eval`, at temperatures above 0, compared at equal sampled tokens."""

    method: SearchMethod = "none"
    """`best_of_n` selects one of the `evaluation.samples` attempts at a task; `mcts` also searches a tree with as many
    sampled tokens as those attempts have, and selects one of its episodes."""
    selector: SelectorName = "majority"
    """Score of an episode: share of episodes with its answer, mean likelihood of its tokens, its rank by the model
    (only best_of_n), or `outcome`, the verified success, which is an upper bound and not known in use."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        used = {"none": (), "best_of_n": ("method", "selector", "critic_tokens"), "mcts": type(self).model_fields}
        if unused := [name for name in changed(self) if name not in used[self.method]]:
            raise ValueError(f"evaluation.search.{unused[0]} has no effect with the method {self.method}")
        if self.method == "mcts" and self.selector == "critique":
            raise ValueError("evaluation.search.selector critique ranks finished episodes: use the method best_of_n")
        return self


def check_search(setting: str, rollout: RolloutConfig) -> None:
    """Raise ValueError, naming `setting`, if episodes cannot be continued from a recorded action."""
    reasons = {
        "with rollout.agent the agent's program runs the episodes": rollout.agent.is_set,
        "rollout.subagents have dialogues within a turn": rollout.subagents.max_depth > 0,
        "rollout.context rewrites the dialogue": rollout.context.max_tokens > 0,
        "rollout.guided_tools changes the distribution of actions": rollout.guided_tools,
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise ValueError(f"{setting} is not possible: {found[0]}")
