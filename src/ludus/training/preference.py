"""Preference training: DPO, SimPO, IPO and KTO on pairs of trajectories, KTO on labelled ones too.

Takes a session and pairs. Gives new weights, a line of metrics a step and checkpoints. The reference is the
model as it is before the first step; it scores every pair once. Which pairs a step takes depends on the seed
and the step alone, so that a resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ludus.algorithms import preference as losses
from ludus.config.stages import PreferenceConfig
from ludus.diagnostics.trackers import Tracker
from ludus.errors import LearnerError
from ludus.rollout.ledger import Ledger
from ludus.rollout.store import rollouts_path, write_rollouts
from ludus.training.batch import microbatches
from ludus.training.checkpoint import (
    TrainerState,
    list_checkpoints,
    load_trainer,
    load_weights,
    prune,
    save_checkpoint,
)
from ludus.training.laps import batch_of_step, num_steps
from ludus.training.optimiser import Optimiser, OptimiserSettings
from ludus.training.pair_sources import Gathered, gather_pairs
from ludus.training.pairs import (
    PAIRS_FILE,
    Arm,
    Pair,
    arms_of,
    load_pairs,
    with_reference,
)
from ludus.training.records import write_records
from ludus.training.run import RunFolder
from ludus.training.scoring import Scorer
from ludus.training.session import Session

log = logging.getLogger("ludus.preference")

OnStep = Callable[[int, Mapping[str, float]], None]

BETA = 0.1
SIMPO_BETA = 2.0
SIMPO_GAMMA = 1.0


@dataclass(frozen=True, slots=True)
class PairTensors:
    """Pairs of one microbatch: all `[N, L]`, padded to one length; `baseline` is KTO's.

    The mask of a side that a labelled dialogue does not have is empty.
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
    """A session that is to be trained on `pairs` from step `done` on; `last` is that step's checkpoint."""

    session: Session
    folder: RunFolder
    optimiser: Optimiser
    pairs: Sequence[Pair]
    steps: int
    done: int
    last: Path


def open_training(session: Session, folder: RunFolder, gathered: Gathered | None) -> PreferenceTraining:
    """Bring session and optimiser to the newest checkpoint in `folder`, if there is one.

    The reference scores the pairs unless the folder holds them already. `gathered` None: as the settings say.
    """
    settings = session.config.preference
    file = folder.path / PAIRS_FILE
    if file.is_file():
        pairs: Sequence[Pair] = load_pairs(file)
    else:
        gathered = gather_pairs(session) if gathered is None else gathered
        pairs = gathered.pairs
        if gathered.sampled and session.config.run.save_rollouts:
            write_rollouts(rollouts_path(folder.path, 0), gathered.sampled)
        if settings.loss != "simpo":
            pairs = with_reference(pairs, Scorer(session.model), settings.microbatch_tokens)
        write_records(file, pairs)
        log.info("%d pairs written to %s", len(pairs), file)
    steps = num_steps(settings, len(pairs))
    optimiser = Optimiser(
        session.model,
        OptimiserSettings.of(settings, steps),
        masters=session.config.model.master_weights,
    )
    done, last = 0, folder.checkpoints
    if found := list_checkpoints(folder.checkpoints):
        done, last = found[-1]
        load_weights(last, session.model)
        load_trainer(last, optimiser)
        log.info("resumed from %s", last)
    return PreferenceTraining(session, folder, optimiser, pairs, steps, done, last)


def steps_of_run(folder: RunFolder, settings: PreferenceConfig) -> int | None:
    """Optimiser steps of the run in a folder; None where it has not made its pairs yet."""
    file = folder.path / PAIRS_FILE
    return num_steps(settings, len(load_pairs(file))) if file.is_file() else None


def run_preference(training: PreferenceTraining, trackers: Sequence[Tracker], on_step: OnStep) -> Path:
    """Train to the last step; gives its checkpoint."""
    session, folder, optimiser, last = training.session, training.folder, training.optimiser, training.last
    settings, pairs = session.config.preference, training.pairs
    scorer = Scorer(session.model, recompute=session.config.model.activation_checkpointing)
    for step in range(training.done + 1, training.steps + 1):
        clock = time.perf_counter()
        places = batch_of_step(step, len(pairs), settings.batch_size, session.config.run.seed)
        metrics = preference_step(scorer, optimiser, [pairs[i] for i in places], settings)
        for tracker in trackers:
            tracker.log(step, metrics)
        on_step(step, metrics | {"time/step_s": time.perf_counter() - clock})
        if step % settings.checkpoint_every == 0 or step == training.steps:
            state = TrainerState(step, optimiser.num_steps, Ledger().state())
            last = save_checkpoint(folder.checkpoints, session.model, session.tokenizer, optimiser, state)
            prune(folder.checkpoints, settings.keep_checkpoints)
    return last


def preference_step(
    scorer: Scorer, optimiser: Optimiser, pairs: Sequence[Pair], settings: PreferenceConfig
) -> dict[str, float]:
    """One optimiser step on the mean loss of `pairs`. Raises LearnerError where the loss is not finite."""
    baseline = _kto_baseline(scorer, pairs, settings.microbatch_tokens)
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
    rate = optimiser.settings.rate(optimiser.num_steps)
    norm = optimiser.step()
    if settings.loss == "kto":
        totals["preference/kto_baseline"] = float(baseline)
    return totals | {
        "optim/grad_norm": norm,
        "optim/learning_rate": rate,
        "batch/pairs": float(len(pairs)),
        "batch/trained_tokens": float(sum(sum(arm.trains) for arm in arms_of(pairs))),
        "batch/total_tokens": float(sum(len(arm.tokens) for arm in arms_of(pairs))),
    }


def _dpo(pairs: PairTensors, settings: PreferenceConfig) -> Tensor:
    return losses.dpo(
        chosen_logprobs=pairs.chosen_logprobs,
        rejected_logprobs=pairs.rejected_logprobs,
        ref_chosen_logprobs=pairs.ref_chosen_logprobs,
        ref_rejected_logprobs=pairs.ref_rejected_logprobs,
        chosen_mask=pairs.chosen_mask,
        rejected_mask=pairs.rejected_mask,
        beta=settings.beta or BETA,
        label_smoothing=settings.label_smoothing,
    )


def _simpo(pairs: PairTensors, settings: PreferenceConfig) -> Tensor:
    return losses.simpo(
        chosen_logprobs=pairs.chosen_logprobs,
        rejected_logprobs=pairs.rejected_logprobs,
        chosen_mask=pairs.chosen_mask,
        rejected_mask=pairs.rejected_mask,
        beta=settings.beta or SIMPO_BETA,
        gamma=SIMPO_GAMMA if settings.gamma is None else settings.gamma,
        label_smoothing=settings.label_smoothing,
    )


def _ipo(pairs: PairTensors, settings: PreferenceConfig) -> Tensor:
    return losses.ipo(
        chosen_logprobs=pairs.chosen_logprobs,
        rejected_logprobs=pairs.rejected_logprobs,
        ref_chosen_logprobs=pairs.ref_chosen_logprobs,
        ref_rejected_logprobs=pairs.ref_rejected_logprobs,
        chosen_mask=pairs.chosen_mask,
        rejected_mask=pairs.rejected_mask,
        beta=settings.beta or BETA,
    )


def _kto(pairs: PairTensors, settings: PreferenceConfig) -> Tensor:
    """Both trajectories of a pair are judged alone; its loss is the mean of those that there are."""
    num = len(pairs.chosen_mask)
    mask = torch.cat([pairs.chosen_mask, pairs.rejected_mask])
    found = losses.kto(
        logprobs=torch.cat([pairs.chosen_logprobs, pairs.rejected_logprobs]),
        ref_logprobs=torch.cat([pairs.ref_chosen_logprobs, pairs.ref_rejected_logprobs]),
        mask=mask,
        desirable=torch.arange(2 * num, device=mask.device) < num,
        baseline=pairs.baseline,
        beta=settings.beta or BETA,
        undesirable_weight=settings.undesirable_weight,
    )
    there = mask.any(1)
    return (found * there).view(2, num).sum(0) / there.view(2, num).sum(0)


LOSSES: Mapping[str, Callable[[PairTensors, PreferenceConfig], Tensor]] = {
    "dpo": _dpo,
    "simpo": _simpo,
    "ipo": _ipo,
    "kto": _kto,
}
"""The loss of each pair `[N]`, by the name in the settings."""


@torch.no_grad()
def _kto_baseline(scorer: Scorer, pairs: Sequence[Pair], max_tokens: int) -> Tensor:
    """KTO's estimate of the KL over the whole batch; 0 where no pair has a prompt with another's answer."""
    arms = [arm for pair in pairs for arm in pair.others]
    shift = torch.zeros(())
    if not arms:
        return shift
    rows, device = [arm.row for arm in arms], next(scorer.model.parameters()).device
    logprobs = torch.zeros(len(arms), max(len(arm.tokens) for arm in arms), device=device)
    for part in microbatches(rows, max_tokens, device, torch.float32, shared=scorer.shares_prefixes):
        found = scorer.score(part.tokens, part.trains).logprobs
        logprobs[list(part.index), : found.shape[1]] = found.to(logprobs.dtype)
    reference, mask = _reference(arms, logprobs)
    return losses.kto_baseline(logprobs=logprobs, ref_logprobs=reference, mask=mask)


def _parts(pairs: Sequence[Pair], max_tokens: int) -> list[list[Pair]]:
    """The pairs in order, in parts of at most `max_tokens` tokens (or one pair); their prompt counts once."""
    parts: list[list[Pair]] = []
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


def _tensors(scorer: Scorer, pairs: Sequence[Pair], baseline: Tensor) -> PairTensors:
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
        logprobs[:num],
        logprobs[num:],
        reference[:num],
        reference[num:],
        mask[:num],
        mask[num:],
        baseline.to(logprobs),
    )


def _places(pairs: Sequence[Pair], device: torch.device) -> Tensor:
    """Where the arms of `arms_of` stand among every `chosen` and `rejected`, absent ones counted."""
    sides = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    return torch.tensor([i for i, arm in enumerate(sides) if arm.tokens], device=device)


def _at(places: Tensor, rows: Tensor, num: int) -> Tensor:
    """The rows at their places among `num`, and zeros elsewhere."""
    return rows.new_zeros(num, rows.shape[1]).index_copy(0, places, rows)


def _shares(pairs: Sequence[Pair]) -> dict[str, int]:
    """Of how many pairs the metrics of one side are the mean."""
    chosen = sum(bool(pair.chosen.tokens) for pair in pairs)
    rejected = sum(bool(pair.rejected.tokens) for pair in pairs)
    return {"preference/chosen_logprob": chosen, "preference/rejected_logprob": rejected}


def _reference(arms: Sequence[Arm], like: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's log-probabilities of the arms and the mask of what trains, both shaped as `like`.

    0 where there is no reference.
    """
    mask = torch.zeros(like.shape, dtype=torch.bool)
    reference = torch.zeros(like.shape, dtype=like.dtype)
    for i, arm in enumerate(arms):
        mask[i, : len(arm.trains)] = torch.tensor(arm.trains)
        if arm.reference:
            reference[i, mask[i]] = torch.tensor(arm.reference, dtype=like.dtype)
    return reference.to(like.device), mask.to(like.device)


@torch.no_grad()
def _sums(pairs: PairTensors, settings: PreferenceConfig) -> dict[str, float]:
    """The metrics of a microbatch, summed over its pairs.

    The margin of a labelled dialogue is that over KTO's baseline, or below it.
    """
    there = [mask.any(1) for mask in (pairs.chosen_mask, pairs.rejected_mask)]
    chosen_tokens, rejected_tokens = (
        mask.sum(1).clamp(min=1) for mask in (pairs.chosen_mask, pairs.rejected_mask)
    )
    chosen, rejected = pairs.chosen_logprobs.sum(1), pairs.rejected_logprobs.sum(1)
    gain = chosen - pairs.ref_chosen_logprobs.sum(1)
    loss = rejected - pairs.ref_rejected_logprobs.sum(1)
    if settings.loss in ("simpo", "ipo"):
        gain, loss = gain / chosen_tokens, loss / rejected_tokens
    margin = torch.where(there[0], gain, pairs.baseline) - torch.where(there[1], loss, pairs.baseline)
    return {
        "preference/margin": float(margin.sum()),
        "preference/accuracy": float((margin > 0).sum()),
        "preference/chosen_logprob": float((chosen / chosen_tokens).sum()),
        "preference/rejected_logprob": float((rejected / rejected_tokens).sum()),
    }
