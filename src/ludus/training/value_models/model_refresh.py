"""Refresh of reward models during a run: training on the verified outcomes of the run's own rollouts.

A reward model is exact only near its training data, and the policy leaves it (arXiv:2210.10760). Every
`rewards.model_refresh.every` steps each model of `rewards.model` takes some optimizer steps on the rollouts of the last
steps, whose outcomes the world's verifier has decided. Batches depend only on seed, step and member; weights, moments
and the examples of the steps since the last refresh are part of the checkpoint, so a resumed run is bit-identical.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import correlation, fmean

from pydantic import TypeAdapter
from torch import Tensor

from ludus.config.schema import Config
from ludus.config.sections.parts.terms import ModelRefreshConfig
from ludus.errors import LearnerError
from ludus.evaluation.roc import auc
from ludus.rewards.base import Reward, success
from ludus.rewards.registry import MODEL_PART
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.training.credit.advantages import TrainingSample
from ludus.training.distributed.collectives import copy_into
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.run.checkpoint import load_part, load_text
from ludus.training.run.run_dir import RunFolder
from ludus.training.value_models.labels import TurnLabels, examples_of_rollouts
from ludus.training.value_models.reward_model import (
    RewardEnsemble,
    RewardExample,
    ScoredSequence,
    action_ends,
    is_usable,
    reward_step,
)
from ludus.types import Trajectory

REFRESH_FILE = "reward_model_refresh.json"
"""Text file of a checkpoint: examples by step, and the number of optimizer steps."""


@dataclass
class RewardModelRefresh:
    """Training of the members of `ensemble` in place; `rewards` are the world's. `examples` are by step."""

    ensemble: RewardEnsemble
    rewards: Sequence[Reward]
    settings: ModelRefreshConfig
    seed: int
    microbatch_tokens: int
    max_seq_len: int
    labels: TurnLabels
    optimizers: tuple[Optimizer, ...]
    examples: dict[int, list[RewardExample]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, rewards: Sequence[Reward], ensemble: RewardEnsemble) -> RewardModelRefresh:
        """Make the models of an ensemble trainable, without a change of their weights."""
        settings, training = config.rewards.model_refresh, config.training
        schedule = OptimizerSettings(learning_rate=settings.learning_rate, total_steps=settings.steps)
        masters = config.model.master_weights
        optimizers = tuple(
            Optimizer(member.states.model.requires_grad_(True), schedule, master_weights=masters)
            for member in ensemble.members
        )
        labels = training_labels(Path(config.rewards.models[0]))
        limits = training.microbatch_tokens, config.rollout.max_seq_len
        return cls(ensemble, rewards, settings, config.run.seed, *limits, labels, optimizers)

    def add(self, step: int, samples: Sequence[TrainingSample]) -> None:
        """Add the rollouts of a step, and forget those outside the window."""
        if not self.settings.every:
            return
        records = [sample.record for sample in samples if is_usable(sample.record, self.max_seq_len)]
        self.examples[step] = verified_examples(self.ensemble, records, self.rewards, self.labels)
        window = self.settings.window or self.settings.every
        self.examples = {known: own for known, own in self.examples.items() if known > step - window}

    def update(self, step: int) -> dict[str, float]:
        """Train each model if the step is due; return metrics. Without examples of both outcomes nothing is trained."""
        if not self.settings.every or step % self.settings.every:
            return {}
        examples = [example for own in self.examples.values() for example in own]
        targets = {target for example in examples for sequence in example.sequences for target in sequence.targets}
        if len(targets) < 2:
            return {"reward_model/refresh_examples": 0.0}
        losses = []
        for number, (member, optimizer) in enumerate(zip(self.ensemble.members, self.optimizers, strict=True)):
            rng = random.Random(f"refresh:{self.seed}:{step}:{number}")
            for _ in range(self.settings.steps):
                batch = rng.sample(examples, min(self.settings.batch_size, len(examples)))
                losses.append(reward_step(member, optimizer, batch, self.microbatch_tokens)["loss/total"])
        return {"reward_model/refresh_examples": float(len(examples)), "reward_model/refresh_loss": fmean(losses)}

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a checkpoint: weights and moments of each member."""
        found = {}
        for number, (member, optimizer) in enumerate(zip(self.ensemble.members, self.optimizers, strict=True)):
            weights = {f"model/{name}": p.detach() for name, p in member.states.model.named_parameters()}
            moments = {f"optimizer/{name}": tensor for name, tensor in optimizer.state_dict().items()}
            found[_part(number)] = weights | moments
        return found

    def text(self) -> str:
        """Return the other state as JSON."""
        examples = {str(step): [asdict(example) for example in own] for step, own in self.examples.items()}
        return json.dumps({"num_steps": self.optimizers[0].num_steps, "examples": examples}) + "\n"

    def restore(self, checkpoint: Path) -> None:
        """Restore the state of a checkpoint. Raises LearnerError if the models of `rewards.model` are others."""
        text = load_text(checkpoint, REFRESH_FILE)
        if text is None:
            return
        state = TypeAdapter(_State).validate_json(text)
        self.examples = dict(state.examples)
        for number, (member, optimizer) in enumerate(zip(self.ensemble.members, self.optimizers, strict=True)):
            stored = load_part(checkpoint, _part(number))
            for name, parameter in member.states.model.named_parameters():
                weight = stored.get(f"model/{name}")
                if weight is None or weight.shape != parameter.shape:
                    raise LearnerError(f"The checkpoint's reward model {number} does not match: {name}.")
                copy_into(parameter, weight)
            prefix = "optimizer/"
            moments = {n.removeprefix(prefix): tensor for n, tensor in stored.items() if n.startswith(prefix)}
            optimizer.load_state_dict(moments, state.num_steps)


@dataclass(frozen=True)
class _State:
    num_steps: int
    examples: Mapping[int, list[RewardExample]]


def _part(number: int) -> str:
    return f"reward_model_{number}"


def restored_refresh(
    config: Config, rewards: Sequence[Reward], ensemble: RewardEnsemble | None, checkpoint: Path | None
) -> RewardModelRefresh | None:
    """Return the refresh of a run, restored from a checkpoint; None if its models are and stay the original ones.

    A checkpoint with refreshed models restores them even if the refresh is off from now on.
    """
    was_on = checkpoint is not None and load_text(checkpoint, REFRESH_FILE) is not None
    if ensemble is None or not (config.rewards.model_refresh.every or was_on):
        return None
    refresh = RewardModelRefresh.of(config, rewards, ensemble)
    if checkpoint is not None:
        refresh.restore(checkpoint)
    return refresh


def training_labels(path: Path) -> TurnLabels:
    """Return the targets of turns that a reward model was trained on, given its run folder or a checkpoint."""
    for folder in (path, path.parent.parent):
        if (folder / "config.toml").is_file():
            settings = RunFolder(folder).load_config().reward_model
            return TurnLabels("return" if settings.labels == "inverse" else settings.labels, settings.discount)
    return TurnLabels()


def verified_examples(
    ensemble: RewardEnsemble, records: Sequence[RolloutRecord], rewards: Sequence[Reward], labels: TurnLabels
) -> list[RewardExample]:
    """Return examples for the ensemble's kind, with the outcomes of the verifier as targets.

    Pairs are the n-th success and the n-th failure of a task: the reward, which contains the model's own part, does
    not count.
    """
    named = [(f"{record.step}/{record.group}/{record.trajectory.sample}", record) for record in records]
    if ensemble.kind != "pairwise":
        return examples_of_rollouts(named, rewards, labels if ensemble.kind == "process" else None)
    sides: dict[str, tuple[list[Trajectory], list[Trajectory]]] = {}
    for record in records:
        sides.setdefault(record.group, ([], []))[not success(rewards, record.trajectory)].append(record.trajectory)
    examples = []
    for group, (chosen, rejected) in sides.items():
        for pair in zip(chosen, rejected, strict=False):
            sequences = tuple(
                ScoredSequence(one.token_ids, action_ends(one)[-1:], (target,))
                for one, target in zip(pair, (1.0, 0.0), strict=True)
            )
            examples.append(RewardExample(group, pair[0].action_mask.index(True), sequences))
    return examples


def model_quality(trajectories: Sequence[Trajectory], success_part: str) -> dict[str, float]:
    """Return AUC and Pearson correlation of the part reward_model with the verifier on a step's rollouts.

    Each is absent if it is undefined: outcomes of one class, equal values.
    """
    known = [t for t in trajectories if t.failure is None and MODEL_PART in t.rewards]
    values = [t.rewards[MODEL_PART] for t in known]
    outcomes = [t.rewards.get(success_part, 0.0) for t in known]
    metrics = {}
    if (area := auc(values, [outcome >= 1 for outcome in outcomes])) is not None:
        metrics["reward_model/auc"] = area
    if len(set(values)) > 1 and len(set(outcomes)) > 1:
        metrics["reward_model/correlation"] = correlation(values, outcomes)
    return metrics
