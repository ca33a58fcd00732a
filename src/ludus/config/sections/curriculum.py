"""The section of the order of training tasks: stages, samplers, new tasks, and the constants of GRESO."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section, check_choice

TaskOrderName = Literal["shuffled", "staged", "bandit", "target", "learnability", "perplexity"]
_BY_SUCCESS = ("target", "learnability")
_GATES = ("cumulative", "success", "groups", "steps")
_CHANGED: tuple[str, ...] = ("staged", "bandit", *_BY_SUCCESS, "perplexity")


class StageConfig(Section):
    """A stage of a curriculum: its tasks, its limits of an episode, its reward weights, and its end."""

    values: list[str] = Field([])
    """Values of `training.curriculum.by` of the tasks of this stage; empty for all tasks."""
    success: float | None = Field(None, ge=0, le=1)
    """The stage ends if the mean success exceeds this value; if unset, training.curriculum.success."""
    steps: int | None = Field(None, ge=1)
    """The stage ends after this many steps; if unset, training.curriculum.steps."""
    max_turns: int | None = Field(None, ge=1)
    """Maximum turns of a training episode, at most rollout.max_turns; if unset, that limit."""
    max_seq_len: int | None = Field(None, ge=1)
    """Maximum tokens of a training episode, at most rollout.max_seq_len; if unset, that limit."""
    weights: dict[str, float] = Field({})
    """Weights of reward parts in this stage, in place of rewards.weights."""

    @property
    def limits(self) -> dict[str, int]:
        """The limits of an episode that are set."""
        return self.model_dump(include={"max_turns", "max_seq_len"}, exclude_none=True)


class EvolveConfig(Section):
    """New tasks made from failed ones (WebRL, arXiv:2411.02337), by the world's `variants`."""

    every: int = Field(0, ge=0)
    """Steps of a phase, after which variants of its failed tasks are made; 0 is off."""
    tasks: int = Field(8, ge=1)
    """Maximum new tasks of a phase."""
    share: float = Field(0.25, gt=0, le=0.5)
    """Largest share of a step's tasks that are new ones."""
    low: float = Field(0.05, ge=0, le=1)
    """A new task whose success at its last visit is below this value is removed."""
    high: float = Field(0.75, ge=0, le=1)
    """A new task whose success at its last visit is above this value is removed."""
    max_tasks: int = Field(64, ge=1)
    """Maximum number of new tasks; the oldest are removed."""


class GresoConfig(Section):
    """Constants of GRESO (`algorithm.greso`); the defaults are those of its authors' code."""

    easy: float = Field(0.98, ge=0, le=1)
    """Mean success from which a group of equal rewards is easy."""
    hard: float = Field(0.11, ge=0, le=1)
    """Mean success up to which a group of equal rewards is hard."""
    target: float = Field(0.25, ge=0, le=1)
    """Target share of groups of equal rewards: a third of it easy ones, two thirds hard ones."""
    change: float = Field(0.01, gt=0, le=1)
    """Change of the base probabilities after a step."""
    min_p: float = Field(0.05, ge=0, le=1)
    """Smallest base probability."""
    max_p: float = Field(0.95, ge=0, le=1)
    """Largest base probability."""
    floor: float = Field(0.01, gt=0, le=1)
    """Smallest probability of visiting a task."""


class CurriculumConfig(Section):
    """Order of the training tasks (docs/use/curricula.md)."""

    order: TaskOrderName = "shuffled"
    """`shuffled`: epochs in random order. `staged`: the same within each stage. `bandit`: categories by the size of
    their advantages (SEC). `target`: tasks whose success is near `target`. `learnability`: tasks by p(1-p).
    `perplexity`: tasks sorted by the initial model's perplexity."""
    by: str = "level"
    """Category of a task: a tag, `horizon` (turns of the world's expert) or `length` (characters of the prompt)."""
    bins: int | None = Field(None, ge=2)
    """Number of categories of equal size, by number: "1" has the lowest. If unset, 3 for `horizon` and `length`, and
    the values of a tag."""
    stages: dict[str, StageConfig] = Field({})
    """Stages by name, in order. If empty, `staged` has one for each category, in ascending order."""
    cumulative: bool = False
    """A stage also has the tasks of the stages before it."""
    success: float = Field(0.7, ge=0, le=1)
    """A stage but the last ends if the mean success of its last `groups` groups exceeds this value; 1 never does."""
    groups: int = Field(32, ge=1)
    """Number of groups whose mean success ends a stage."""
    steps: int = Field(0, ge=0)
    """A stage but the last ends after this many steps; 0 disables the limit."""
    alpha: float = Field(0.5, gt=0, le=1)
    """Rate of the moving averages: `bandit`: of SEC's Q; `target` and `learnability`: of the success of a task."""
    tau: float = Field(1.0, gt=0)
    """bandit: temperature of the categories' probabilities."""
    target: float = Field(0.5, ge=0, le=1)
    """target: the success at which a task has the largest weight."""
    floor: float = Field(0.05, gt=0, le=1)
    """target and learnability: smallest weight of a task, relative to the largest possible one."""
    perplexity_of: Literal["demonstration", "prompt"] = "demonstration"
    """perplexity: the actions of the world's expert, or the prompt."""
    descending: bool = True
    """perplexity: the highest first."""
    evolve: EvolveConfig = EvolveConfig()
    greso: GresoConfig = GresoConfig()

    @model_validator(mode="after")
    def _fits_the_order(self) -> Self:
        needed: dict[str, tuple[str, ...]] = dict.fromkeys(("by", "bins", "stages", *_GATES), _CHANGED)
        needed |= {"alpha": ("bandit", *_BY_SUCCESS), "tau": ("bandit",), "target": ("target",), "floor": _BY_SUCCESS}
        needed |= dict.fromkeys(("perplexity_of", "descending"), ("perplexity",))
        check_choice(self, "training.curriculum", "order", needed)
        if not self.has_stages:
            check_choice(self, "training.curriculum", "order", dict.fromkeys(_GATES, ("staged",)))
        if not self.has_categories and (self.by, self.bins) != ("level", None):
            raise ValueError("training.curriculum.by and bins have no effect: no stage has values")
        if self.evolve.low > self.evolve.high:
            raise ValueError(f"training.curriculum.evolve.low ({self.evolve.low}) is above high ({self.evolve.high})")
        if self.greso.min_p > self.greso.max_p or self.greso.hard >= self.greso.easy:
            raise ValueError("training.curriculum.greso needs min_p at most max_p, and hard below easy")
        return self

    @property
    def is_active(self) -> bool:
        """Whether tasks are chosen by a state, not by their position alone."""
        return self.order != "shuffled" or self.evolve.every > 0

    @property
    def has_stages(self) -> bool:
        """Whether the run has stages."""
        return self.order == "staged" or bool(self.stages)

    @property
    def has_categories(self) -> bool:
        """Whether the order or its stages read the categories of tasks."""
        values = any(stage.values for stage in self.stages.values())
        return values or self.order in ("bandit", *_BY_SUCCESS) or (self.order == "staged" and not self.stages)
