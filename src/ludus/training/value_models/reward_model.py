"""Reward models: a policy's body with a scalar head, ensembles of them, their examples, losses and optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ludus.config.schema import Config
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.errors import LearnerError, UserError
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.training.batches.rows import pad_table
from ludus.training.learner.optimizer import Optimizer
from ludus.training.run.checkpoint import load_part
from ludus.training.run.run_dir import list_checkpoints
from ludus.training.run.session import TrainingSession
from ludus.training.run.supervised import split_by_tokens, step_metrics
from ludus.training.value_models.base import HeadModel
from ludus.types import Trajectory

Kind = Literal["pairwise", "pointwise", "process"]


@dataclass(frozen=True)
class RewardModel:
    """Scores of attempts; `sigmoid(score)` is a probability or a value in [0, 1].

    `inverse_discount`: train the scores as values Q of which `Q_t - inverse_discount * Q_{t+1}` is a logit.
    """

    states: HeadModel
    kind: Kind
    inverse_discount: float | None = None

    def scores(self, sequences: Sequence[ScoredSequence]) -> list[Tensor]:
        """Return the score at each position of each attempt, `[K]` each, with gradient."""
        states = self.states
        tokens = pad_table([sequence.tokens for sequence in sequences], torch.int64)
        rows = torch.tensor([i for i, sequence in enumerate(sequences) for _ in sequence.positions])
        columns = torch.tensor([position for sequence in sequences for position in sequence.positions])
        device = states.device
        values = states.read(tokens.to(device), (rows.to(device), columns.to(device)))[:, 0]
        return list(torch.split(values, [len(sequence.positions) for sequence in sequences]))

    def logits(self, sequences: Sequence[ScoredSequence]) -> Tensor:
        """Return the logits of the targets of all attempts, one after another, with gradient.

        They are the scores, or with `inverse_discount` the rewards `Q_t - discount * Q_{t+1}`, with 0 after the last.
        """
        scores, discount = self.scores(sequences), self.inverse_discount
        if discount is not None:
            scores = [q - discount * torch.cat([q[1:], q.new_zeros(1)]) for q in scores]
        return torch.cat(scores)

    @torch.no_grad()
    def predict(self, sequences: Sequence[ScoredSequence], max_tokens: int) -> list[tuple[float, ...]]:
        """Return `sigmoid(score)` at each position, in batches of at most `max_tokens` tokens or one attempt."""
        found: list[tuple[float, ...]] = []
        for part in split_by_tokens(sequences, max_tokens):
            found += [tuple(torch.sigmoid(score.double()).tolist()) for score in self.scores(part)]
        return found


@dataclass(frozen=True)
class RewardPrediction:
    """Ensemble result for one attempt: a value in [0, 1] per position, and the mean standard deviation."""

    values: tuple[float, ...]
    std: float

    @property
    def mean(self) -> float:
        """The mean over positions; 0 without any."""
        return sum(self.values) / len(self.values) if self.values else 0.0


@dataclass(frozen=True)
class RewardEnsemble:
    """Reward models of one kind, combined conservatively: mean - std_coef * std, at least 0.

    The standard deviation is over members (ddof 0). Subtracting it counters over-optimization on attempts far
    from the training data (arXiv:2310.02743, which subtracts the variance).
    """

    members: tuple[RewardModel, ...]
    std_coef: float = 0.0

    @property
    def kind(self) -> Kind:
        """The kind of the members."""
        return self.members[0].kind

    def predict(self, sequences: Sequence[ScoredSequence], max_tokens: int) -> list[RewardPrediction]:
        """Return each attempt's prediction, in batches of at most `max_tokens` tokens (or one attempt)."""
        predictions = [member.predict(sequences, max_tokens) for member in self.members]
        return [self._pooled(torch.tensor(each, dtype=torch.float64)) for each in zip(*predictions, strict=True)]

    def predict_trajectories(self, trajectories: Sequence[Trajectory], max_tokens: int) -> list[RewardPrediction]:
        """Return the predictions at the last action or, for a process model, at each turn.

        A trajectory without actions or with several rows has no values.
        """
        known = [i for i, t in enumerate(trajectories) if t.num_action_tokens and len(t.rows) == 1]
        ends = [action_ends(trajectories[i]) for i in known]
        if self.kind != "process":
            ends = [places[-1:] for places in ends]
        inputs = [
            ScoredSequence(trajectories[i].token_ids, places, (0.0,) * len(places))
            for i, places in zip(known, ends, strict=True)
        ]
        found = dict(zip(known, self.predict(inputs, max_tokens), strict=True)) if inputs else {}
        return [found.get(i, RewardPrediction((), 0.0)) for i in range(len(trajectories))]

    def _pooled(self, values: Tensor) -> RewardPrediction:
        """Combine values `[members, positions]`."""
        std = values.std(0, correction=0)
        pooled = (values.mean(0) - self.std_coef * std).clamp(min=0.0)
        return RewardPrediction(tuple(pooled.tolist()), float(std.mean()))


def head_name(kind: Kind) -> str:
    """Return the checkpoint part of the head; the name includes the kind."""
    return f"reward_{kind}"


def make_reward_model(session: TrainingSession) -> RewardModel:
    """Add a zero head to the session's model. Raises UserError if the model is unsupported."""
    recompute = session.config.model.activation_checkpointing
    hint = "Use another model, for example with --model."
    states = HeadModel(session.model, "reward model", hint, recompute=recompute)
    settings = session.config.reward_model
    return RewardModel(states, settings.kind, settings.discount if settings.labels == "inverse" else None)


def find_reward_model(path: Path) -> tuple[Path, Kind]:
    """Return the newest reward model checkpoint of a run folder or path, and its kind.

    Raises UserError if there is none.
    """
    found = list_checkpoints(path / "checkpoints")
    folder = found[-1][1] if found else path
    kind = next((k for k in get_args(Kind) if (folder / "trainer" / f"{head_name(k)}.safetensors").is_file()), None)
    if kind is None:
        raise UserError(
            f"{path} does not contain a reward model.", "Train one with `ludus reward-model` and use its folder."
        )
    return folder, kind


def load_reward_model(path: Path, config: Config) -> RewardModel:
    """Load the reward model of a run folder (newest checkpoint) or checkpoint, without gradients.

    Raises UserError if there is none.
    """
    folder, kind = find_reward_model(path)
    policy = load_model(str(folder), config.model.dtype, config.model.device).requires_grad_(False)
    states = HeadModel(policy, "reward model", "Train a new one.")
    states.load_head(load_part(folder, head_name(kind)))
    return RewardModel(states, kind)


def check_ensemble(paths: Sequence[str]) -> None:
    """Raise UserError for a path without a reward model, or models of different kinds."""
    kinds = {path: find_reward_model(Path(path))[1] for path in paths}
    if len(set(kinds.values())) > 1:
        kinds_by_path = ", ".join(f"{path} is {kind}" for path, kind in kinds.items())
        raise UserError(f"The reward models of an ensemble differ in kind: {kinds_by_path}.", "Use models of one kind.")


def check_reward_vocabulary(paths: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for a reward model whose vocabulary differs from the policy's."""
    for path in paths:
        vocabulary = load_tokenizer(str(find_reward_model(Path(path))[0]), needs_template=False).get_vocab()
        if vocabulary != tokenizer.get_vocab():
            raise UserError(
                f"The reward model {path} has a different vocabulary from the policy.",
                "Train one from this policy's model.",
            )


def load_ensemble(paths: Sequence[str], std_coef: float, config: Config) -> RewardEnsemble:
    """Load the reward models at `paths`. Raises UserError as `check_ensemble`."""
    check_ensemble(paths)
    return RewardEnsemble(tuple(load_reward_model(Path(path), config) for path in paths), std_coef)


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """One attempt: tokens `[T]`, scored positions `[K]`, and a target in [0, 1] for each.

    The score at a position uses the state after its token. The targets 1 and 0 of a pair only mark which is
    better.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    targets: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class RewardExample:
    """One attempt, or the better and the worse of a pair.

    `prompt_length` counts the tokens before the first action; `held_out` examples are only evaluated.
    """

    source: str
    prompt_length: int
    sequences: tuple[ScoredSequence, ...]
    held_out: bool = False

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all attempts; a shared prompt counts once."""
        return sum(len(sequence.tokens) for sequence in self.sequences) - (len(self.sequences) - 1) * self.prompt_length


def attempt_scores(model: RewardEnsemble, attempts: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """Return the value of each attempt after its last action; minus infinity if it failed or is not linear."""
    known = [
        i for i, one in enumerate(attempts) if one.failure is None and one.num_action_tokens and len(one.rows) == 1
    ]
    inputs = [ScoredSequence(attempts[i].token_ids, action_ends(attempts[i])[-1:], (0.0,)) for i in known]
    scores = [-math.inf] * len(attempts)
    for i, found in zip(known, model.predict(inputs, max_tokens) if inputs else (), strict=True):
        scores[i] = found.values[0]
    return scores


def action_ends(trajectory: Trajectory) -> tuple[int, ...]:
    """Return the position of the last action token of each turn in a linear trajectory."""
    ends: dict[int, int] = {}
    for place, (turn, action) in enumerate(zip(trajectory.turn_index, trajectory.action_mask, strict=True)):
        if action:
            ends[turn] = place
    return tuple(ends.values())


def is_usable(record: RolloutRecord, max_tokens: int) -> bool:
    """Return whether a record is a scored linear trajectory with action tokens, within `max_tokens`."""
    trajectory = record.trajectory
    return (
        record.is_scored
        and trajectory.num_action_tokens > 0
        and len(trajectory.rows) == 1
        and len(trajectory.token_ids) <= max_tokens
    )


def reward_step(
    model: RewardModel, optimizer: Optimizer, batch: Sequence[RewardExample], max_tokens: int
) -> dict[str, float]:
    """Take one optimizer step on the mean loss. Raises LearnerError if the loss is not finite."""
    total = 0.0
    for part in split_by_tokens(batch, max_tokens):
        loss = losses(model, part).sum() / num_terms(model.kind, batch)
        if not torch.isfinite(loss):
            raise LearnerError(f"The loss is {float(loss.detach())}.", "Lower reward_model.learning_rate.")
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return {
        "loss/total": total,
        **step_metrics(optimizer),
        "batch/examples": float(len(batch)),
        "batch/scores": float(sum(len(sequence.positions) for example in batch for sequence in example.sequences)),
        "batch/total_tokens": float(sum(len(sequence.tokens) for example in batch for sequence in example.sequences)),
    }


def num_terms(kind: Kind, examples: Sequence[RewardExample]) -> int:
    """Return the number of losses of a batch: one per pair, otherwise one per scored position."""
    if kind == "pairwise":
        return len(examples)
    return sum(len(sequence.positions) for example in examples for sequence in example.sequences)


def losses(model: RewardModel, examples: Sequence[RewardExample]) -> Tensor:
    """Return the loss of each pair (`-log sigmoid(s_chosen - s_rejected)`, Bradley-Terry) or of each position.

    The latter is the binary cross-entropy of the `sigmoid` of the logit and the target, which may lie between 0 and 1.
    """
    sequences = [sequence for example in examples for sequence in example.sequences]
    scores = model.logits(sequences)
    if model.kind == "pairwise":
        return -torch.nn.functional.logsigmoid(scores[::2] - scores[1::2])
    targets = torch.tensor([target for sequence in sequences for target in sequence.targets]).to(scores)
    return torch.nn.functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")
