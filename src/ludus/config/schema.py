"""All settings of a run, with their defaults, units and bounds.

Unknown keys are errors that name the nearest setting, and invalid combinations are rejected before anything is loaded.
The docstring of a field states the meaning of None. A new setting needs only a field with a docstring: the command
line, `ludus config --keys` and the saved configuration read the schema.
"""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from ludus.config.sections.algorithm import (
    AlgorithmConfig,
    CriticConfig,
    DemonstrationsConfig,
    KLControlConfig,
    TeacherConfig,
)
from ludus.config.sections.cluster import ClusterConfig
from ludus.config.sections.exploration import ExplorationConfig
from ludus.config.sections.model import ModelConfig
from ludus.config.sections.rewards import RewardModelConfig, RewardsConfig
from ludus.config.sections.rollout import EngineConfig, EnvConfig, RolloutConfig, SandboxConfig, check_budgets
from ludus.config.sections.section import Section
from ludus.config.sections.stages import PreferenceConfig, RftConfig, SftConfig
from ludus.config.sections.training import StalenessConfig, TrainingConfig
from ludus.config.sections.tree_search import DecodingSearchConfig, check_search


class EvaluationConfig(Section):
    """Held-out evaluation before, during and after training, and by `ludus eval`."""

    splits: list[str] = Field(["test"])
    """Splits evaluated before and after training, and by `ludus eval`."""
    temperatures: list[float] = Field([0.0, 1.0])
    """Each split is evaluated once at each of these temperatures; 0 is greedy."""
    tasks: int = Field(512, ge=1)
    """Maximum tasks per split, the first ones."""
    tasks_before: int = Field(64, ge=0)
    """Maximum tasks per split of the evaluation before training, at most `tasks`; 0 skips it. A number as large as
    `tasks` makes the comparison with the model after training as exact as possible, and delays the first step."""
    samples: int = Field(1, ge=1)
    """Attempts per task; pass@k needs k of them."""
    select_by: str | list[str] | None = None
    """`ludus eval`: a reward model (run folder of `ludus reward-model` or checkpoint, or an ensemble) that selects one
    of the `samples` attempts at each task, reported as best of N; if unset, none is selected."""
    every: int = Field(10, ge=1)
    """Training steps between evaluations during training."""
    split_during: str = "validation"
    """Split of evaluations during training."""
    tasks_during: int = Field(96, ge=1)
    """Maximum tasks of an evaluation during training, the same ones each time."""
    search: DecodingSearchConfig = DecodingSearchConfig()

    @model_validator(mode="after")
    def _search_has_attempts(self) -> Self:
        if self.search.method != "none" and (self.samples < 2 or not any(self.temperatures)):
            raise ValueError("evaluation.search needs evaluation.samples of at least 2 and a temperature above 0")
        return self

    @model_validator(mode="after")
    def _selects_among_several(self) -> Self:
        if self.select_by is not None and self.samples < 2:
            raise ValueError("evaluation.select_by selects among attempts: set evaluation.samples to at least 2")
        return self


AlarmAction = Literal["off", "note", "warn", "lower_learning_rate", "raise_kl", "pause", "stop"]
"""Effect of an alarm: nothing, a note, a warning, a change of a coefficient, or a checkpoint and the end of the run."""


class AlarmsConfig(Section):
    """Alarms: problems that the metrics of a run show (docs/use/read_a_run.md)."""

    actions: dict[str, AlarmAction] = Field({})
    """Action by alarm, in place of its default: off, note, warn, lower_learning_rate, raise_kl, pause (write a
    checkpoint and end the run, which can be resumed) or stop (the same without advice to resume it)."""
    learning_rate_factor: float = Field(0.5, gt=0, lt=1)
    """Factor of the policy's learning rate for lower_learning_rate, at most down to 1 % of the set rate."""
    kl_factor: float = Field(2.0, gt=1)
    """Factor of the KL coefficient for raise_kl, at most up to 100 times the coefficient."""
    cooldown_steps: int = Field(10, ge=1)
    """Minimum steps between two changes by the same action; an alarm that is still raised then acts again."""
    webhook: str | None = None
    """URL that receives each new alarm as a JSON object by POST; if unset, none is sent."""


class DiagnosticsConfig(Section):
    """Metrics that need more than the rollouts of a step."""

    collapse_every: int = Field(0, ge=0, le=50)
    """Training steps between measurements of template collapse (`collapse/...`); 0 is off. A measurement scores each
    sample under every prompt: with 64 samples of 16 prompts the forward passes of 1,024 first turns."""
    collapse_samples: int = Field(64, ge=2)
    """Maximum first turns of a measurement, taken evenly from the prompts of the step."""
    judges: list[str] = Field(["reward_model", "judge"])
    """Reward parts that judge what the outcome verifies; their agreement is `judge/NAME/agreement`."""
    test_calls: dict[str, str] = Field({})
    """Calls that run tests: by tool, a regular expression that is found in the arguments (JSON text; "" is any call).
    `tools/untested` is the share of answered episodes without such a call; empty is off."""

    @field_validator("test_calls")
    @classmethod
    def _patterns_compile(cls, patterns: dict[str, str]) -> dict[str, str]:
        for tool, pattern in patterns.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{tool} is {pattern!r}, which is not a regular expression: {error}") from None
        return patterns


class RunConfig(Section):
    """The run folder and the machine."""

    dir: str | None = None
    """The run folder; if unset, a new `runs/NAME-N`."""
    seed: int = Field(0, ge=0)
    """Seed of all random numbers."""
    threads: int = Field(0, ge=0)
    """Compute threads of the learner; 0 is one per core (or OMP_NUM_THREADS), at most 4. On a busy machine 1 is faster.
    The embedded engine uses the same number, but one for a model below 20 million parameters."""
    trackers: list[str] = Field(["jsonl"])
    """Metric trackers: jsonl, tensorboard, wandb, mlflow, trackio, or `path/to/file.py:name`."""
    metrics: list[str] = Field([])
    """Custom metrics, `path/to/file.py:name`: functions of the groups of a step (docs/extend/plugins.md)."""
    save_rollouts: bool = True
    """Save every training episode in rollouts/."""
    token_values: bool = False
    """Save advantage, log-probabilities, entropy and clipping of each trained token in token_values/, for `ludus view`.
    Not with training.transitions; with several ranks, only the rows of rank 0."""
    alarms: AlarmsConfig = AlarmsConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()


class RolloutSections(Section):
    """The sections about the rollouts of a run."""

    model: ModelConfig = ModelConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    exploration: ExplorationConfig = ExplorationConfig()


class Config(RolloutSections):
    """The configuration of a run."""

    sandbox: SandboxConfig = SandboxConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    kl_control: KLControlConfig = KLControlConfig()
    teacher: TeacherConfig = TeacherConfig()
    experts: DemonstrationsConfig = DemonstrationsConfig()
    training: TrainingConfig = TrainingConfig()
    staleness: StalenessConfig = StalenessConfig()
    rewards: RewardsConfig = RewardsConfig()
    critic: CriticConfig = CriticConfig()
    sft: SftConfig = SftConfig()
    preference: PreferenceConfig = PreferenceConfig()
    rft: RftConfig = RftConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _can_search(self) -> Self:
        if self.evaluation.search.method == "mcts":
            check_search("evaluation.search.method mcts", self.rollout)
        if self.preference.search.simulations:
            check_search("preference.search", self.rollout)
            if self.rollout.temperature != 1:
                why = "the logged log-probabilities are the reference"
                raise ValueError(f"preference.search needs rollout.temperature 1: {why}")
        return self

    @model_validator(mode="after")
    def _budgets_fit(self) -> Self:
        tokens, total = self.rollout.max_tokens_per_turn, self.rollout.max_seq_len
        if tokens >= total:
            raise ValueError(f"rollout.max_tokens_per_turn ({tokens}) must be below rollout.max_seq_len ({total})")
        check_budgets(self.rollout, self.env.mixture)
        streams, most = self.staleness.max_concurrent_rollouts, self.rollout.concurrency
        if self.training.streams and streams > most:
            above = f"must not be above rollout.concurrency ({most})"
            raise ValueError(f"staleness.max_concurrent_rollouts ({streams}) {above}")
        return self
