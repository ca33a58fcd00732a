"""Build, query and train the value model of an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.spec.resolve import resolve
from ludus.config.schema import Config
from ludus.rollouts.ledger import RolloutOutcome
from ludus.training.batches.rows import Row, apply_mask, last_actions, row_of_trajectory, row_segments
from ludus.training.credit.advantages import CUT_OFF, Estimates, TrainingSample
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives
from ludus.training.learner.learner import Learner
from ludus.training.learner.optimizer import OptimizerSettings
from ludus.training.value_models.base import ValueModelSettings
from ludus.training.value_models.critic import Critic, OutcomeCritic, ProcessReward
from ludus.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CRITIC_RATE = 2.0
"""Default learning rate of a critic as a multiple of the policy's."""

ValueModel = Critic | OutcomeCritic | ProcessReward


def make_value_model(
    config: Config, algorithm: Algorithm, model: PreTrainedModel, success: str, ranks: Collectives = ONE_PROCESS
) -> ValueModel | None:
    """Build the critic or process reward model of the algorithm, or None; `ranks` train it together.

    `success` is the reward part that defines task success.
    """
    training, critic, prime = config.training, config.critic, config.critic.prime
    spec = algorithm.advantage_spec
    common = ValueModelSettings(
        success=success, microbatch_tokens=training.microbatch_tokens, recompute=config.model.activation_checkpointing
    )
    if spec.has(Need.PROCESS_REWARD_MODEL):
        beta, temperature = algorithm.number("advantage", "beta"), config.rollout.temperature or 1.0
        settings = replace(common, epochs=prime.epochs, beta=beta, temperature=temperature)
        steps = training.steps * prime.epochs
        optimizer = OptimizerSettings(learning_rate=prime.learning_rate, total_steps=steps)
        return ProcessReward(model, optimizer, settings, ranks)
    if not (spec.has(Need.OUTCOME_CRITIC) or spec.has(Need.CRITIC)):
        return None
    settings = replace(
        common,
        epochs=critic.epochs,
        minibatches=critic.minibatches,
        clip=critic.clip or None,
        turns=spec.has(Need.TURN_VALUES),
        on_policy=critic.model == "head",
    )
    optimizer = OptimizerSettings(
        learning_rate=critic.learning_rate or CRITIC_RATE * training.learning_rate,
        total_steps=training.steps * critic.epochs * critic.minibatches,
    )
    return (OutcomeCritic if spec.has(Need.OUTCOME_CRITIC) else Critic)(model, optimizer, settings, ranks)


def checkpoint_parts(value_model: ValueModel | None) -> dict[str, dict[str, Tensor]]:
    """Return the value model's part of a checkpoint by its name; empty without one."""
    return {} if value_model is None else {value_model.part: value_model.state()}


def warmup_steps(config: Config, started: int | None = None) -> int:
    """Return the number of initial steps that train only the critic; default: a tenth of the run.

    A resumed run uses the `started` value, so that extending a run does not freeze the policy again.
    """
    spec, configured = resolve(config.algorithm).advantage_spec, config.critic.warmup_steps
    if configured is not None and (spec.has(Need.CRITIC) or spec.has(Need.OUTCOME_CRITIC)):
        return configured
    if not spec.has(Need.CRITIC):
        return 0
    return config.training.steps // 10 if started is None else started


def estimate_values(
    value_model: ValueModel, samples: Sequence[TrainingSample], rows: Sequence[Row], learner: Learner
) -> Estimates:
    """Return the estimates for the samples' rows, before training on them.

    Raises LearnerError if a reference is needed and missing.
    """
    solved = _is_solved(samples, value_model.settings.success)
    with value_model.ranks.call_on_ranks("score_values", rows, solved):
        scores = at_actions(value_model.score(rows, solved), rows)
    match value_model:
        case Critic():
            has_bootstrap = learner.algorithm.number("advantage", "bootstrap") != 0
            bootstrap = bootstrap_values(value_model, samples, rows) if has_bootstrap else None
            return Estimates(values=scores, bootstrap=bootstrap)
        case OutcomeCritic():
            return Estimates(outcome_probs=scores)
        case ProcessReward():
            return Estimates(prm_logprobs=scores, ref_logprobs=at_actions(learner.reference(rows), rows))


def bootstrap_values(value_model: Critic, samples: Sequence[TrainingSample], rows: Sequence[Row]) -> list[Tensor]:
    """Return V after the last action token of each row, 0 unless a token limit truncated the episode."""
    scored = [torch.zeros(max(1, len(sample.episode.trajectory.rows)), dtype=torch.float64) for sample in samples]
    cuts: dict[int, dict[int, int]] = {}
    ends = []
    for i, trajectory in enumerate(sample.episode.trajectory for sample in samples):
        cut = {path.row for path in trajectory.paths() if path.trajectory.stop_reason in CUT_OFF}
        truncated = {n: position for n, position in last_actions(trajectory).items() if n in cut}
        if truncated:
            cuts[i], marked = truncated, set(truncated.values())
            ends.append(replace(rows[i], trains=tuple(place in marked for place in range(len(rows[i].tokens)))))
    if not ends:
        return scored
    with value_model.ranks.call_on_ranks("score_values", ends, (), True):
        scores = value_model.score(ends, after=True)
    for i, values in zip(cuts, scores, strict=True):
        for path, position in cuts[i].items():
            scored[i][path] = values[position]
    return scored


def train_value_model(value_model: ValueModel, samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Train on all trained trajectories; return metrics.

    A critic is trained at training tokens, outcome predictors on the whole trajectory.
    """
    trained = [sample for sample in samples if sample.outcome is RolloutOutcome.TRAINED]
    rows = [row_of_trajectory(sample.episode.trajectory, 0.0) for sample in trained]
    if not rows:
        return {}
    if isinstance(value_model, Critic):
        if value_model.settings.turns:
            trajectories = [sample.episode.trajectory for sample in trained]
            rows = [at_turn_starts(row, one) for row, one in zip(rows, trajectories, strict=True)]
        rows = [apply_mask(row, sample.trains) for row, sample in zip(rows, trained, strict=True)]
    solved = _is_solved(trained, value_model.settings.success)
    inputs: list[list[tuple[float, ...] | None]] = []
    if isinstance(value_model, Critic):
        inputs = [[sample.targets for sample in trained], [sample.values for sample in trained]]
    elif isinstance(value_model, ProcessReward):
        inputs = [[sample.reference for sample in trained]]
    tables = tuple([_scatter_to_row(v, row) for v, row in zip(values, rows, strict=True)] for values in inputs)
    with value_model.ranks.call_on_ranks("train_values", rows, tables, solved):
        return value_model.train(rows, tables, solved)


def at_actions(values: Sequence[Tensor], rows: Sequence[Row]) -> list[Tensor]:
    """Return the values `[T]` of each row at its action tokens."""
    return [each[torch.tensor(row.trains, device=each.device)] for each, row in zip(values, rows, strict=True)]


def at_turn_starts(row: Row, trajectory: Trajectory) -> Row:
    """Return the row with only the first action token of each turn trained."""
    opens: list[bool] = []
    turn: int | None = None
    for segment, new in row_segments(trajectory):
        action = segment.kind == "action" and bool(segment.tokens)
        opens += [new and action and segment.turn != turn and i == 0 for i in range(len(segment.tokens))]
        if action:
            turn = segment.turn
        elif segment.kind == "prompt":  # another path
            turn = None
    return replace(row, trains=tuple(opens))


def _is_solved(samples: Sequence[TrainingSample], success: str) -> list[bool]:
    return [sample.episode.trajectory.rewards.get(success, 0.0) >= 1 for sample in samples]


def _scatter_to_row(values: Sequence[float] | None, row: Row) -> Tensor:
    """Map action token values to the row, `[T]`."""
    table = torch.zeros(len(row.tokens), dtype=torch.float64)
    table[torch.tensor(row.sampled)] = torch.tensor(values or (), dtype=torch.float64)
    return table
