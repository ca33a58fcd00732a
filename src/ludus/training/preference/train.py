"""Preference training on pairs of trajectories, and KTO and BCO on labelled ones; the losses are `LOSSES`.

The reference is the model before the first step; it scores every pair once. The pairs of a step depend on the
seed and the step alone, so a resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from ludus.algorithms import preference as losses
from ludus.algorithms.preference import PREFERENCES
from ludus.config.sections.stages import PreferenceConfig
from ludus.diagnostics.trackers import Tracker
from ludus.errors import LearnerError
from ludus.rollout.ledger import Ledger
from ludus.rollout.rollout_files import rollouts_path, write_rollouts
from ludus.training.batches.rows import batch_of_step, microbatches, num_steps
from ludus.training.datasets.files import write_records
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.preference.pairs import PAIRS_FILE, PairSide, PreferencePair, arms_of, load_pairs, with_reference
from ludus.training.preference.sources import GatheredPairs, gather_pairs
from ludus.training.run.checkpoint import (
    TrainerState,
    list_checkpoints,
    load_trainer,
    load_weights,
    prune,
    save_checkpoint,
)
from ludus.training.run.run_dir import RunFolder
from ludus.training.run.session import TrainingSession

log = logging.getLogger("ludus.preference")

OnStep = Callable[[int, Mapping[str, float]], None]

SIMPO_GAMMA = 1.0
EXO_SMOOTHING = 1e-3
DISCOPOP_TAU = 0.05


@dataclass(frozen=True, slots=True)
class PairTensors:
    """Pairs of one microbatch: all `[N, L]`, padded to one length; `baseline` is that of KTO or BCO.

    The mask of a labelled dialogue's missing side is empty.
    """

    chosen_logprobs: Tensor
    rejected_logprobs: Tensor
    ref_chosen_logprobs: Tensor
    ref_rejected_logprobs: Tensor
    chosen_mask: Tensor
    rejected_mask: Tensor
    baseline: Tensor


@dataclass(frozen=True)
class PreferenceTraining:
    """Session to train on `pairs` from step `done`; `last` is the checkpoint of that step."""

    session: TrainingSession
    folder: RunFolder
    optimizer: Optimizer
    pairs: Sequence[PreferencePair]
    steps: int
    done: int
    last: Path
    running: RunningMean


def open_training(session: TrainingSession, folder: RunFolder, gathered: GatheredPairs | None) -> PreferenceTraining:
    """Restore session and optimizer from the newest checkpoint in `folder`, if any.

    The reference scores the pairs unless the folder already contains them. `gathered` None: gather them as
    configured.
    """
    settings = session.config.preference
    file = folder.path / PAIRS_FILE
    if file.is_file():
        pairs: Sequence[PreferencePair] = load_pairs(file)
    else:
        gathered = gather_pairs(session) if gathered is None else gathered
        pairs = gathered.pairs
        if gathered.sampled and session.config.run.save_rollouts:
            write_rollouts(rollouts_path(folder.path, 0), gathered.sampled)
        if PREFERENCES[settings.loss].reference:
            pairs = with_reference(pairs, LogprobScorer(session.model), settings.microbatch_tokens)
        write_records(file, pairs)
        log.info("%d pairs written to %s", len(pairs), file)
    steps = num_steps(settings, len(pairs))
    optimizer = Optimizer(
        session.model,
        OptimizerSettings.from_config(settings, steps),
        master_weights=session.config.model.master_weights,
    )
    done, last, running = 0, folder.checkpoints, RunningMean()
    if found := list_checkpoints(folder.checkpoints):
        done, last = found[-1]
        load_weights(last, session.model)
        running = RunningMean.from_json(load_trainer(last, optimizer).memory)
        log.info("resumed from %s", last)
    return PreferenceTraining(session, folder, optimizer, pairs, steps, done, last, running)


def planned_steps(folder: RunFolder, settings: PreferenceConfig) -> int | None:
    """Return the number of optimizer steps of a run; None if its pairs are not gathered yet."""
    file = folder.path / PAIRS_FILE
    return num_steps(settings, len(load_pairs(file))) if file.is_file() else None


def run_preference(training: PreferenceTraining, trackers: Sequence[Tracker], on_step: OnStep) -> Path:
    """Train to the last step; return its checkpoint."""
    session, folder, optimizer, last = training.session, training.folder, training.optimizer, training.last
    settings, pairs = session.config.preference, training.pairs
    scorer = LogprobScorer(session.model, recompute=session.config.model.activation_checkpointing)
    for step in range(training.done + 1, training.steps + 1):
        clock = time.perf_counter()
        places = batch_of_step(step, len(pairs), settings.batch_size, session.config.run.seed)
        metrics = preference_step(scorer, optimizer, [pairs[i] for i in places], settings, training.running)
        for tracker in trackers:
            tracker.log(step, metrics)
        on_step(step, metrics | {"time/step_s": time.perf_counter() - clock})
        if step % settings.checkpoint_every == 0 or step == training.steps:
            state = TrainerState(step, optimizer.num_steps, Ledger().state(), memory=training.running.to_json())
            last = save_checkpoint(folder.checkpoints, session.model, session.tokenizer, optimizer, state)
            prune(folder.checkpoints, settings.keep_checkpoints)
    return last


def preference_step(
    scorer: LogprobScorer,
    optimizer: Optimizer,
    pairs: Sequence[PreferencePair],
    settings: PreferenceConfig,
    running: RunningMean,
) -> dict[str, float]:
    """Take one optimizer step on the mean loss of `pairs`; updates `running` if the loss uses it.

    Raises LearnerError if the loss is not finite.
    """
    baseline = _baseline(scorer, pairs, settings, running)
    totals: dict[str, float] = {}
    shares = _shares(pairs)
    for part in _parts(pairs, settings.microbatch_tokens):
        tensors = _tensors(scorer, part, baseline)
        loss = LOSSES[settings.loss](tensors, settings).sum() / len(pairs)
        if not torch.isfinite(loss):
            raise LearnerError(f"The loss is {float(loss.detach())}.", "Lower preference.learning_rate.")
        torch.autograd.backward(loss)
        for name, value in _sums(tensors, settings).items():
            if num := shares.get(name, len(pairs)):
                totals[name] = totals.get(name, 0.0) + value / num
        totals["loss/total"] = totals.get("loss/total", 0.0) + float(loss.detach())
    rate = optimizer.settings.learning_rate_at(optimizer.num_steps)
    norm = optimizer.step()
    if name := PREFERENCES[settings.loss].baseline_metric:
        totals[name] = float(baseline)
    return totals | {
        "optim/grad_norm": norm,
        "optim/learning_rate": rate,
        "batch/pairs": float(len(pairs)),
        "batch/trained_tokens": float(sum(sum(arm.trains) for arm in arms_of(pairs))),
        "batch/total_tokens": float(sum(len(arm.tokens) for arm in arms_of(pairs))),
    }


def _pair(pairs: PairTensors) -> losses.PairInputs:
    return {
        "chosen_logprobs": pairs.chosen_logprobs,
        "rejected_logprobs": pairs.rejected_logprobs,
        "ref_chosen_logprobs": pairs.ref_chosen_logprobs,
        "ref_rejected_logprobs": pairs.ref_rejected_logprobs,
        "chosen_mask": pairs.chosen_mask,
        "rejected_mask": pairs.rejected_mask,
    }


class _Alone(TypedDict):
    logprobs: Tensor
    ref_logprobs: Tensor
    mask: Tensor
    desirable: Tensor


def _alone(pairs: PairTensors) -> _Alone:
    """Return both trajectories of each pair, chosen ones first, for losses that score them separately."""
    num = len(pairs.chosen_mask)
    return {
        "logprobs": torch.cat([pairs.chosen_logprobs, pairs.rejected_logprobs]),
        "ref_logprobs": torch.cat([pairs.ref_chosen_logprobs, pairs.ref_rejected_logprobs]),
        "mask": torch.cat([pairs.chosen_mask, pairs.rejected_mask]),
        "desirable": torch.arange(2 * num, device=pairs.chosen_mask.device) < num,
    }


def _beta(settings: PreferenceConfig) -> float:
    return settings.beta or PREFERENCES[settings.loss].beta


def _simpo(pairs: PairTensors, settings: PreferenceConfig) -> Tensor:
    return losses.simpo(
        chosen_logprobs=pairs.chosen_logprobs,
        rejected_logprobs=pairs.rejected_logprobs,
        chosen_mask=pairs.chosen_mask,
        rejected_mask=pairs.rejected_mask,
        beta=_beta(settings),
        gamma=SIMPO_GAMMA if settings.gamma is None else settings.gamma,
        label_smoothing=settings.label_smoothing,
    )


def _kto(pairs: PairTensors, settings: PreferenceConfig) -> Tensor:
    found = losses.kto(
        **_alone(pairs), baseline=pairs.baseline, beta=_beta(settings), undesirable_weight=settings.undesirable_weight
    )
    return _mean_of_sides(found, pairs)


def _mean_of_sides(found: Tensor, pairs: PairTensors) -> Tensor:
    """Return the mean loss over the existing sides of each pair."""
    there = torch.stack([pairs.chosen_mask.any(1), pairs.rejected_mask.any(1)])
    return (found.view(2, -1) * there).sum(0) / there.sum(0)


LOSSES: Mapping[str, Callable[[PairTensors, PreferenceConfig], Tensor]] = {
    "dpo": lambda p, s: losses.dpo(**_pair(p), beta=_beta(s), label_smoothing=s.label_smoothing),
    "robust": lambda p, s: losses.dpo(**_pair(p), beta=_beta(s), label_smoothing=s.label_smoothing, robust=True),
    "simpo": _simpo,
    "ipo": lambda p, s: losses.ipo(**_pair(p), beta=_beta(s)),
    "kto": _kto,
    "hinge": lambda p, s: losses.hinge(**_pair(p), beta=_beta(s)),
    "exo": lambda p, s: losses.exo(**_pair(p), beta=_beta(s), label_smoothing=s.label_smoothing or EXO_SMOOTHING),
    "nca": lambda p, s: losses.nca(**_pair(p), beta=_beta(s)),
    "sppo": lambda p, s: losses.sppo(**_pair(p), beta=_beta(s)),
    "discopop": lambda p, s: losses.discopop(**_pair(p), beta=_beta(s), tau=s.tau or DISCOPOP_TAU),
    "apo_zero": lambda p, s: losses.apo_zero(**_pair(p), beta=_beta(s)),
    "apo_down": lambda p, s: losses.apo_down(**_pair(p), beta=_beta(s)),
    "bco": lambda p, s: _mean_of_sides(losses.bco(**_alone(p), delta=p.baseline, beta=_beta(s)), p),
    "bco_pair": lambda p, s: losses.bco_pair(**_pair(p), delta=p.baseline, beta=_beta(s)),
}
"""Losses of pairs `[N]` by name."""


@dataclass
class RunningMean:
    """Mean of all numbers added so far."""

    count: int = 0
    mean: float = 0.0

    def add(self, values: Tensor) -> None:
        """Add `values` [N], at least one."""
        self.count += len(values)
        self.mean += (float(values.double().mean()) - self.mean) * len(values) / self.count

    @classmethod
    def from_json(cls, text: str) -> RunningMean:
        """Restore `to_json`; empty text is the empty mean."""
        return cls(**json.loads(text)) if text else cls()

    def to_json(self) -> str:
        """Serialize to one line; round-trips exactly."""
        return json.dumps(asdict(self)) if self.count else ""


@torch.no_grad()
def _baseline(
    scorer: LogprobScorer, pairs: Sequence[PreferencePair], settings: PreferenceConfig, running: RunningMean
) -> Tensor:
    """Return the baseline of the batch: KTO's KL, BCO's running mean, 0 for other losses."""
    if PREFERENCES[settings.loss].running_mean:
        logprobs, reference, mask = _scored(scorer, list(arms_of(pairs)), settings.microbatch_tokens)
        running.add(losses.implicit_rewards(logprobs=logprobs, ref_logprobs=reference, mask=mask, beta=_beta(settings)))
        return torch.tensor(running.mean, dtype=torch.float64)
    # Only KTO uses mismatched answers, and it may have none.
    others = [arm for pair in pairs for arm in pair.others]
    if not others:
        return torch.zeros(())
    logprobs, reference, mask = _scored(scorer, others, settings.microbatch_tokens)
    return losses.kto_baseline(logprobs=logprobs, ref_logprobs=reference, mask=mask)


def _scored(scorer: LogprobScorer, arms: Sequence[PairSide], max_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, reference log-probabilities and mask of the arms, `[N, L]`, without gradient."""
    rows, device = [arm.row for arm in arms], next(scorer.model.parameters()).device
    logprobs = torch.zeros(len(arms), max(len(arm.tokens) for arm in arms), device=device)
    for part in microbatches(rows, max_tokens, device, torch.float32, shared=scorer.shares_prefixes):
        found = scorer.score(part.tokens, part.trains).logprobs
        logprobs[list(part.index), : found.shape[1]] = found.to(logprobs.dtype)
    return logprobs, *_reference(arms, logprobs)


def _parts(pairs: Sequence[PreferencePair], max_tokens: int) -> list[list[PreferencePair]]:
    """Split the pairs in order into parts of at most `max_tokens` tokens or one pair; prompts count once."""
    parts: list[list[PreferencePair]] = []
    size = 0
    for pair in pairs:
        sides = pair.sides
        own = sum(len(arm.tokens) for arm in sides) - (len(sides) - 1) * sides[0].prompt_length
        if parts and size + own <= max_tokens:
            parts[-1].append(pair)
        else:
            parts.append([pair])
            size = 0
        size += own
    return parts


def _tensors(scorer: LogprobScorer, pairs: Sequence[PreferencePair], baseline: Tensor) -> PairTensors:
    """Score the pairs in one pass, with gradient."""
    arms = list(arms_of(pairs))
    device, dtype = next(scorer.model.parameters()).device, torch.float32
    (part,) = microbatches([a.row for a in arms], sys.maxsize, device, dtype, shared=scorer.shares_prefixes)
    back = torch.tensor(part.index, device=device).argsort()
    logprobs = scorer.score(part.tokens, part.trains).logprobs[back]
    reference, mask = _reference(arms, logprobs)
    num = len(pairs)
    places = _places(pairs, device)
    logprobs, reference, mask = (_at(places, rows, 2 * num) for rows in (logprobs, reference, mask))
    return PairTensors(
        logprobs[:num], logprobs[num:], reference[:num], reference[num:], mask[:num], mask[num:], baseline.to(logprobs)
    )


def _places(pairs: Sequence[PreferencePair], device: torch.device) -> Tensor:
    """Return the indices of the arms of `arms_of` among all `chosen` and `rejected`, missing ones included."""
    sides = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    return torch.tensor([i for i, arm in enumerate(sides) if arm.tokens], device=device)


def _at(places: Tensor, rows: Tensor, num: int) -> Tensor:
    """Scatter the rows to their places among `num`; other rows are zero."""
    return rows.new_zeros(num, rows.shape[1]).index_copy(0, places, rows)


def _shares(pairs: Sequence[PreferencePair]) -> dict[str, int]:
    """Return the number of pairs over which one-sided metrics are averaged."""
    chosen = sum(bool(pair.chosen.tokens) for pair in pairs)
    rejected = sum(bool(pair.rejected.tokens) for pair in pairs)
    return {"preference/chosen_logprob": chosen, "preference/rejected_logprob": rejected}


def _reference(arms: Sequence[PairSide], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return reference log-probabilities and the training mask, shaped as `like`; 0 without a reference."""
    mask = torch.zeros(like.shape, dtype=torch.bool)
    reference = torch.zeros(like.shape, dtype=like.dtype)
    for i, arm in enumerate(arms):
        mask[i, : len(arm.trains)] = torch.tensor(arm.trains)
        if arm.reference:
            reference[i, mask[i]] = torch.tensor(arm.reference, dtype=like.dtype)
    return reference.to(like.device), mask.to(like.device)


@torch.no_grad()
def _sums(pairs: PairTensors, settings: PreferenceConfig) -> dict[str, float]:
    """Return the metrics of a microbatch, summed over its pairs.

    The margin of a labelled dialogue is its distance to the baseline of KTO or BCO.
    """
    there = [mask.any(1) for mask in (pairs.chosen_mask, pairs.rejected_mask)]
    chosen_tokens, rejected_tokens = (mask.sum(1).clamp(min=1) for mask in (pairs.chosen_mask, pairs.rejected_mask))
    chosen, rejected = pairs.chosen_logprobs.sum(1), pairs.rejected_logprobs.sum(1)
    gain = chosen - pairs.ref_chosen_logprobs.sum(1)
    loss = rejected - pairs.ref_rejected_logprobs.sum(1)
    spec = PREFERENCES[settings.loss]
    if spec.per_token:
        gain, loss = gain / chosen_tokens, loss / rejected_tokens
    # BCO's baseline is a reward, that is, beta times a log-ratio.
    level = pairs.baseline / _beta(settings) if spec.running_mean else pairs.baseline
    margin = torch.where(there[0], gain, level) - torch.where(there[1], loss, level)
    return {
        "preference/margin": float(margin.sum()),
        "preference/accuracy": float((margin > 0).sum()),
        "preference/chosen_logprob": float((chosen / chosen_tokens).sum()),
        "preference/rejected_logprob": float((rejected / rejected_tokens).sum()),
    }
