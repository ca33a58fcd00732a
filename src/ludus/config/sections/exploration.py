"""Settings of exploration: sampling that differs over steps or within a group, bonuses, and what a group explores."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section, changed
from ludus.types import Bound


class ScheduleConfig(Section):
    """A value that changes from the run's setting to `end`."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """`constant` keeps the run's setting."""
    end: float | None = Field(None, ge=0)
    """linear and cosine, required: the final value. Leave it unset for `constant`."""
    steps: int | None = Field(None, ge=1)
    """linear and cosine: training steps until `end`; if unset, training.steps."""


class DiverseConfig(Section):
    """Members of a group whose first turns begin differently: a turn that begins like a sibling's is sampled again."""

    tokens: int = Field(0, ge=0)
    """Number of tokens at the beginning of the first turn that are compared; 0 is off."""
    tries: int = Field(4, ge=1)
    """Maximum number of additional samples per member."""


class CountBonusConfig(Section):
    """Count-based bonus: the mean of 1 / sqrt(n) over the turns, n the visits of the run so far."""

    weight: float = Field(0.0, ge=0)
    """Weight of the bonus in the reward, below the weight of the outcome; 0 is off."""
    of: Literal["state", "call"] = "state"
    """What is counted: states of the environment before a turn, per task, or tool calls with their arguments."""


class InterleaveConfig(Section):
    """Exploration rollouts between task rollouts: groups whose reward is the coverage of checkpoints."""

    task: int = Field(5, ge=1)
    """Number of groups with the reward of the task, in each cycle."""
    exploration: int = Field(0, ge=0)
    """Number of groups with the reward of exploration, after those of the task; 0 is off. The published ratio is 5 to
    1; task = 1 and exploration = 5 is the other way round."""
    part: str = "coverage"
    """Reward part that exploration groups are trained on."""
    prompt: str = ""
    """Text that is appended to the system message of exploration rollouts."""


class PrefixConfig(Section):
    """Groups that begin with the first turns of a demonstration, fewer and fewer of them over the run."""

    share: float = Field(0.0, ge=0, le=1)
    """Share of the groups that begin with a prefix; 0 is off."""
    start: float = Field(0.8, gt=0, le=1)
    """Share of the turns of the demonstration in the first step."""
    end: float = Field(0.0, ge=0, le=1)
    """Share of the turns after `steps`."""
    kind: Literal["linear", "cosine"] = "linear"
    """How the share falls."""
    steps: int | None = Field(None, ge=1)
    """Training steps until `end`; if unset, training.steps."""


class UniformFailuresConfig(Section):
    """Groups in which every member fails in the same way."""

    action: Literal["off", "count", "drop", "temperature", "prefix"] = "off"
    """`count` reports them; `drop` does not train them; `temperature` and `prefix` sample the next group of their task
    at another temperature, or after a prefix of a demonstration (`exploration.demonstration_prefix`)."""
    temperature: float = Field(1.3, gt=0)
    """Sampling temperature of the next group, for `temperature`."""


class ExplorationConfig(Section):
    """Exploration in training episodes (docs/use/exploration.md); evaluations are sampled without it."""

    temperature: ScheduleConfig = ScheduleConfig()
    """Schedule of the sampling temperature, from rollout.temperature. The learner uses the same temperature."""
    entropy_coef: ScheduleConfig = ScheduleConfig()
    """Schedule of the coefficient of the entropy bonus, from algorithm.entropy_coef."""
    group_temperatures: list[float] = Field([])
    """Sampling temperatures of the members of a group, repeated for larger groups; empty: rollout.temperature."""
    group_top_p: list[float] = Field([])
    """Nucleus (top-p) of the members of a group, repeated for larger groups; empty: rollout.top_p."""
    group_prompts: list[str] = Field([])
    """Texts appended to the system message of the members of a group, repeated for larger groups; "" is the original.
    A member is trained with its own prompt."""
    diverse: DiverseConfig = DiverseConfig()
    epsilon_tool: float = Field(0.0, ge=0, le=1)
    """Probability that a turn begins with a call of a random tool, whose arguments the policy samples. The forced
    tokens are not trained."""
    count_bonus: CountBonusConfig = CountBonusConfig()
    interleave: InterleaveConfig = InterleaveConfig()
    demonstration_prefix: PrefixConfig = PrefixConfig()
    uniform_failures: UniformFailuresConfig = UniformFailuresConfig()

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        for name, schedule in (("temperature", self.temperature), ("entropy_coef", self.entropy_coef)):
            if schedule.kind == "constant" and changed(schedule):
                raise ValueError(f"exploration.{name} has no effect with kind = constant: set kind to linear or cosine")
            if schedule.kind != "constant" and schedule.end is None:
                raise ValueError(f"exploration.{name}.kind = {schedule.kind} needs {name}.end")
        for name, values in (("group_temperatures", self.group_temperatures), ("group_top_p", self.group_top_p)):
            bound = Bound(1e-10, 1e10 if name == "group_temperatures" else 1)
            if invalid := [one for one in values if not bound.contains(one)]:
                raise ValueError(f"exploration.{name} has {invalid[0]:g}: {bound.words}")
        if self.temperature.kind != "constant" and self.temperature.end == 0:
            raise ValueError("exploration.temperature.end must be above 0")
        if self.temperature.kind != "constant" and self.group_temperatures:
            raise ValueError("exploration.temperature and group_temperatures are mutually exclusive")
        prefix, failures = self.demonstration_prefix, self.uniform_failures
        needs_prefix = prefix.share > 0 or failures.action == "prefix"
        unused = {
            "diverse.tries": not self.diverse.tokens and changed(self.diverse),
            "count_bonus.of": not self.count_bonus.weight and changed(self.count_bonus),
            "interleave": not self.interleave.exploration and changed(self.interleave),
            "demonstration_prefix": not needs_prefix and changed(prefix),
            "uniform_failures.temperature": failures.action != "temperature" and "temperature" in changed(failures),
        }
        if found := [name for name, is_unused in unused.items() if is_unused]:
            raise ValueError(f"exploration.{found[0]} has no effect: its part of exploration is off")
        if prefix.end > prefix.start:
            raise ValueError("exploration.demonstration_prefix.end is above start")
        return self

    @property
    def is_off_policy(self) -> bool:
        """Whether members are sampled from another distribution than the one that is trained."""
        lists = self.group_temperatures or self.group_top_p or self.diverse.tokens
        return bool(lists) or self.uniform_failures.action == "temperature"
