"""Preference training on pairs of trajectories, and KTO and BCO on labelled ones; the losses are `PREFERENCES`.

Pairs come from a file, the rollouts of a run, or newly sampled attempts or trees, which depend on the seed only. The
reference is the model before the first step, which scores every pair once; pairs of trees have logged ones instead.
The pairs of a step depend on the seed and the step only, so a resumed run is bit-identical to an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ludus.algorithms.preference import PREFERENCES, PairInputs, implicit_rewards, kto_baseline
from ludus.config.sections.stages import UNPAIRED_LOSSES, PreferenceConfig
from ludus.engines.base import Engine
from ludus.envs.registry import closing
from ludus.errors import LearnerError, UserError
from ludus.rollouts.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, replaced_file, rollouts_path, write_rollouts
from ludus.rollouts.scheduler import Episode, RolloutRequest, SamplingPlan
from ludus.rollouts.tree_search import TreeSearch, check_searchable
from ludus.training.batches.rows import batch_of_step, microbatches, num_steps
from ludus.training.collection.rollout_collector import EpisodeReporter
from ludus.training.credit.advantages import TrainingSample, failed_status
from ludus.training.datasets.files import write_records
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import Optimizer
from ludus.training.preference.forks import forks_step, nearest_to_half, pairs_of_rewards
from ludus.training.preference.pairs import (
    PAIRS_FILE,
    SEARCH_FILE,
    PairMaker,
    PairSide,
    PreferencePair,
    labels_of_rollouts,
    load_pairs,
    pairs_of_attempts,
    pairs_of_branches,
    pairs_of_file,
    pairs_of_rollouts,
    pairs_of_tree,
    rollout_files,
    search_metrics,
    sides_of,
    tree_search,
    with_mismatched,
    with_reference,
)
from ludus.training.preference.ranking import RankedPairs
from ludus.training.rl.build import frozen_scorer, probe_tokens
from ludus.training.rl.validate import check_rollouts
from ludus.training.rl.weight_sync import WeightSync
from ludus.training.run.checkpoint import TrainerState
from ludus.training.run.run_dir import RunFolder, kind_of
from ludus.training.run.session import (
    TrainingSession,
    check_tokenizer,
    check_vocabulary,
    make_engine,
    session_scheduler,
)
from ludus.training.run.supervised import SupervisedTraining, split_by_tokens, step_metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampledAttempts:
    """Sampled episodes, and the search of `preference.search`, if they are its trees."""

    episodes: Sequence[Episode]
    search: TreeSearch | None = None


async def _sample_attempts(
    session: TrainingSession, engine: Engine, reporter: EpisodeReporter | None
) -> SampledAttempts:
    """Sample `samples` attempts at `tasks` tasks, or all if there are fewer; attempts at a task are consecutive.

    With `preference.search` sample a tree for each task instead.
    """
    config, world, settings = session.config, session.world, session.config.preference
    num = min(settings.tasks, len(world.tasks("train")))
    tasks = world.order(config.run.seed, num, 1).take(0, num)
    samples = 1 if settings.search.simulations else settings.samples
    requests = [RolloutRequest(RolloutKey(0, task.id, i), task) for task in tasks for i in range(samples)]
    plan = SamplingPlan("attempts", config.rollout.temperature, config.run.seed)
    async with closing(world):
        await WeightSync.of(config, session.model, engine, probe_tokens(session)).publish(0)
        scheduler = session_scheduler(session, engine, plan, Ledger())
        search = tree_search(scheduler, settings.search) if settings.search.simulations else None
        scheduler.search = search
        if reporter is None:
            return SampledAttempts(await scheduler.run(requests), search)
        reporter.phase("attempts", len(requests), engine)
        return SampledAttempts(await scheduler.run(requests, reporter.episode), search)


@dataclass(frozen=True)
class GatheredPairs:
    """Pairs to train on, the attempts that were sampled for them, if any, and the metrics of a search."""

    pairs: Sequence[PreferencePair]
    sampled: Sequence[RolloutRecord] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


def gather_pairs(session: TrainingSession, reporter: EpisodeReporter | None = None) -> GatheredPairs:
    """Gather the configured pairs, before anything is written. Raises UserError if there are none.

    If no file or run is configured, the session's model samples attempts, reported to `reporter`. Raises ConfigError
    if the world rewards cheating, EngineError and WorldError as the scheduler.
    """
    settings, limit = session.config.preference, session.config.rollout.max_seq_len
    sampled: Sequence[RolloutRecord] = ()
    metrics: Mapping[str, float] = {}
    if settings.data is not None:
        pairs = pairs_of_file(Path(settings.data), session.renderer, limit, settings.loss in UNPAIRED_LOSSES)
        fault = f"No dialogue of {settings.data} fits into rollout.max_seq_len = {limit}."
    elif settings.run is not None:
        run = RunFolder(Path(settings.run))
        files = rollout_files(run.path)
        check_tokenizer(run, session)
        if _has_labels(settings, run):
            pairs = labels_of_rollouts(files, settings.threshold, limit)
            fault = f"No rollout of {settings.run} has a reward, or all have the same, and fits into {limit} tokens."
        else:
            pairs = pairs_of_rollouts(files, settings.min_reward_gap, limit, _pair_maker(session))
            fault = f"No group of {settings.run} has two attempts with different rewards that make a pair."
    else:
        gathered = _sample_pairs(session, reporter)
        pairs, sampled, metrics = list(gathered.pairs), gathered.sampled, gathered.metrics
        fault = "No task has two attempts of the model with different rewards that make a pair."
    if not pairs:
        raise UserError(fault, "See docs/use/stages.md, lower preference.min_reward_gap, or set preference.threshold.")
    check_vocabulary((side.tokens for pair in pairs for side in pair.all_sides), session)
    if settings.weighs_rollouts:
        return GatheredPairs(nearest_to_half(pairs, settings.forks.groups), sampled, metrics)
    mismatched = PREFERENCES[settings.loss].mismatched
    return GatheredPairs(with_mismatched(pairs, limit) if mismatched else pairs, sampled, metrics)


def _sample_pairs(session: TrainingSession, reporter: EpisodeReporter | None) -> GatheredPairs:
    """Return pairs of attempts by the session's model, or of its search, and the records of all attempts."""
    settings, limit = session.config.preference, session.config.rollout.max_seq_len
    if settings.search.simulations:
        check_searchable(session.world, "preference.search")
    check_rollouts(session.config, session.world)
    engine = make_engine(session)
    try:
        sampled = asyncio.run(_sample_attempts(session, engine, reporter))
    finally:
        asyncio.run(engine.close())
    records = [TrainingSample(episode, *failed_status(episode, "no pair")).record for episode in sampled.episodes]
    metrics: dict[str, float] = {}
    if sampled.search is None:
        pairs = _pair_maker(session)("step-000000", records, settings.min_reward_gap, limit)
    else:
        trees = [(one.task.id, sampled.search.results.get(one.task.id)) for one in sampled.episodes]
        done = [(task, tree) for task, tree in trees if tree is not None]
        found = (pairs_of_tree(f"step-000000/{task}", one.root, settings.search, limit) for task, one in done)
        pairs, metrics = [pair for of_tree in found for pair in of_tree], search_metrics(tree for _, tree in done)
    sides = {side.tokens for pair in pairs for side in pair.all_sides}
    marked = [
        replace(record, outcome=RolloutOutcome.TRAINED, reason="trained") if _is_in_pair(record, sides) else record
        for record in records
    ]
    return GatheredPairs(pairs, marked, metrics)


def _has_labels(settings: PreferenceConfig, run: RunFolder) -> bool:
    """Return whether the rollouts of a run are labelled by their rewards instead of paired."""
    if settings.pairs is None:
        return settings.threshold is not None or (settings.loss in UNPAIRED_LOSSES and kind_of(run) == "sessions")
    return settings.pairs == "none"


def _pair_maker(session: TrainingSession) -> PairMaker:
    settings = session.config.preference
    if settings.weighs_rollouts:
        return pairs_of_rewards
    if settings.model is not None:
        return RankedPairs.of(session)
    return pairs_of_branches if settings.pairs == "steps" else pairs_of_attempts


def _is_in_pair(record: RolloutRecord, sides: Collection[tuple[int, ...]]) -> bool:
    """Return whether a record is a side of a pair, or continues one."""
    if record.trajectory.failure is not None:
        return False
    segments = record.trajectory.segments
    sequences = [tuple(token for i in row for token in segments[i].tokens) for row in record.trajectory.rows]
    return any(tokens[: len(side)] == side for tokens in sequences for side in sides)


class PreferenceTraining(SupervisedTraining):
    """Training on `pairs`; `running` is the baseline of BCO. With the loss forks each pair is one rollout."""

    def __init__(self, session: TrainingSession, folder: RunFolder, gathered: GatheredPairs | None = None) -> None:
        """Load the pairs of the folder. If missing, store `gathered`, or gather pairs, with reference log-probs."""
        self.settings, self.running = session.config.preference, RunningMean()
        file = folder.path / PAIRS_FILE
        if not file.is_file():
            _store_pairs(session, folder, gather_pairs(session) if gathered is None else gathered)
        self.pairs = load_pairs(file)
        self._base = frozen_scorer(session, 1.0) if self.settings.weighs_rollouts else None
        super().__init__(session, folder, self.settings, num_steps(self.settings, len(self.pairs)))
        self._scorer = LogprobScorer(session.model, recompute=session.config.model.activation_checkpointing)

    def restore(self, checkpoint: Path, state: TrainerState) -> None:
        """Restore the weights and the running mean."""
        super().restore(checkpoint, state)
        self.running = RunningMean.from_json(state.algorithm_state)

    def algorithm_state(self) -> str:
        """Return the serialized running mean."""
        return self.running.to_json()

    def train_step(self, step: int) -> dict[str, float]:
        """Take one optimizer step on a batch of pairs."""
        index = batch_of_step(step, len(self.pairs), self.settings.batch_size, self.session.config.run.seed)
        batch = [self.pairs[i] for i in index]
        if self._base is not None:
            return forks_step(self._scorer, self._base, self.optimizer, batch, self.settings)
        metrics = preference_step(self._scorer, self.optimizer, batch, self.settings, self.running)
        search = self.folder.path / SEARCH_FILE
        return metrics | (json.loads(search.read_text("utf-8")) if step == 1 and search.is_file() else {})


def _store_pairs(session: TrainingSession, folder: RunFolder, gathered: GatheredPairs) -> None:
    """Write the pairs, with the reference's log-probabilities if the loss needs them, and the sampled attempts."""
    settings, pairs = session.config.preference, gathered.pairs
    if gathered.sampled and session.config.run.save_rollouts:
        write_rollouts(rollouts_path(folder.path, 0), gathered.sampled)
    forks = settings.weighs_rollouts
    if forks or PREFERENCES[settings.loss].reference:
        pairs = with_reference(pairs, LogprobScorer(session.model), settings.microbatch_tokens, entropies=forks)
    if gathered.metrics:
        with replaced_file(folder.path / SEARCH_FILE) as file:
            file.write(json.dumps(gathered.metrics, indent=1).encode() + b"\n")
    write_records(folder.path / PAIRS_FILE, pairs)
    log.info("%d pairs written to %s", len(pairs), folder.path / PAIRS_FILE)


def planned_steps(folder: RunFolder, settings: PreferenceConfig) -> int | None:
    """Return the number of optimizer steps of a run; None if its pairs are not gathered yet."""
    file = folder.path / PAIRS_FILE
    return num_steps(settings, len(load_pairs(file))) if file.is_file() else None


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
    num_sides = {
        "preference/chosen_logprob": sum(bool(pair.chosen.tokens) for pair in pairs),
        "preference/rejected_logprob": sum(bool(pair.rejected.tokens) for pair in pairs),
    }
    for part in split_by_tokens(pairs, settings.microbatch_tokens):
        inputs = _score_pairs(scorer, part)
        level = baseline.to(inputs["chosen_logprobs"])
        loss = pair_losses(inputs, level, settings).sum() / len(pairs)
        if not torch.isfinite(loss):
            raise LearnerError(f"The loss is {float(loss.detach())}.", "Lower preference.learning_rate.")
        torch.autograd.backward(loss)
        for name, value in _sums(inputs, level, settings).items():
            if num := num_sides.get(name, len(pairs)):
                totals[name] = totals.get(name, 0.0) + value / num
        totals["loss/total"] = totals.get("loss/total", 0.0) + float(loss.detach())
    taken = step_metrics(optimizer)
    if name := PREFERENCES[settings.loss].baseline_metric:
        totals[name] = float(baseline)
    return (
        totals
        | taken
        | {
            "batch/pairs": float(len(pairs)),
            "batch/trained_tokens": float(sum(sum(side.trains) for side in sides_of(pairs))),
            "batch/total_tokens": float(sum(len(side.tokens) for side in sides_of(pairs))),
        }
    )


def pair_losses(pairs: PairInputs, baseline: Tensor, settings: PreferenceConfig) -> Tensor:
    """Return the loss of each pair, [N]; a missing side has an empty mask. Only KTO and BCO use `baseline`."""
    spec = PREFERENCES[settings.loss]
    inputs = _unpaired(pairs) if spec.unpaired else dict(pairs)
    if not spec.reference:
        inputs = {name: value for name, value in inputs.items() if not name.startswith("ref_")}
    if spec.baseline:
        inputs[spec.baseline] = baseline
    options = settings.model_dump(include={*spec.options}, exclude_defaults=True)
    losses = spec.function(**inputs, beta=_beta(settings), **options)
    if not spec.unpaired:
        return losses
    present = torch.stack([pairs["chosen_mask"].any(1), pairs["rejected_mask"].any(1)])
    return (losses.view(2, -1) * present).sum(0) / present.sum(0)


def _unpaired(pairs: PairInputs) -> dict[str, object]:
    """Return both trajectories of each pair, chosen ones first, for losses on single trajectories."""
    num = len(pairs["chosen_mask"])
    return {
        "logprobs": torch.cat([pairs["chosen_logprobs"], pairs["rejected_logprobs"]]),
        "ref_logprobs": torch.cat([pairs["ref_chosen_logprobs"], pairs["ref_rejected_logprobs"]]),
        "mask": torch.cat([pairs["chosen_mask"], pairs["rejected_mask"]]),
        "desirable": torch.arange(2 * num, device=pairs["chosen_mask"].device) < num,
    }


def _beta(settings: PreferenceConfig) -> float:
    return settings.beta or PREFERENCES[settings.loss].beta


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
        logprobs, reference, mask = _score(scorer, list(sides_of(pairs)), settings.microbatch_tokens)
        running.add(implicit_rewards(logprobs=logprobs, ref_logprobs=reference, mask=mask, beta=_beta(settings)))
        return torch.tensor(running.mean, dtype=torch.float64)
    # Only KTO uses mismatched answers, and it may have none.
    mismatched = [side for pair in pairs for side in pair.mismatched]
    if not mismatched:
        return torch.zeros(())
    logprobs, reference, mask = _score(scorer, mismatched, settings.microbatch_tokens)
    return kto_baseline(logprobs=logprobs, ref_logprobs=reference, mask=mask)


def _score(scorer: LogprobScorer, sides: Sequence[PairSide], max_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, reference log-probabilities and mask of the sides, `[N, L]`, without gradient."""
    rows, device = [side.row for side in sides], next(scorer.model.parameters()).device
    logprobs = torch.zeros(len(sides), max(len(side.tokens) for side in sides), device=device)
    for part in microbatches(rows, max_tokens, device, torch.float32, shared=scorer.shares_prefixes):
        scored = scorer.score(part.tokens, part.trains).logprobs
        logprobs[list(part.index), : scored.shape[1]] = scored.to(logprobs.dtype)
    return logprobs, *_reference(sides, logprobs)


def _score_pairs(scorer: LogprobScorer, pairs: Sequence[PreferencePair]) -> PairInputs:
    """Score the pairs in one pass, with gradient; all `[N, L]`, padded to one length. Missing sides are zero."""
    num, sides = len(pairs), [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    existing = [i for i, side in enumerate(sides) if side.tokens]
    rows, device = [sides[i].row for i in existing], next(scorer.model.parameters()).device
    (part,) = microbatches(rows, sys.maxsize, device, torch.float32, shared=scorer.shares_prefixes)
    scored = scorer.score(part.tokens, part.trains).logprobs
    places = torch.tensor([existing[i] for i in part.index], device=device)
    logprobs = scored.new_zeros(2 * num, scored.shape[1]).index_copy(0, places, scored)
    reference, mask = _reference(sides, logprobs)
    return {
        "chosen_logprobs": logprobs[:num],
        "rejected_logprobs": logprobs[num:],
        "ref_chosen_logprobs": reference[:num],
        "ref_rejected_logprobs": reference[num:],
        "chosen_mask": mask[:num],
        "rejected_mask": mask[num:],
    }


def _reference(sides: Sequence[PairSide], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return reference log-probabilities and the training mask, shaped as `like`; 0 without a reference."""
    mask = torch.zeros(like.shape, dtype=torch.bool)
    reference = torch.zeros(like.shape, dtype=like.dtype)
    for i, side in enumerate(sides):
        mask[i, : len(side.trains)] = torch.tensor(side.trains)
        if side.reference:
            reference[i, mask[i]] = torch.tensor(side.reference, dtype=like.dtype)
    return reference.to(like.device), mask.to(like.device)


@torch.no_grad()
def _sums(pairs: PairInputs, baseline: Tensor, settings: PreferenceConfig) -> dict[str, float]:
    """Return the metrics of a microbatch, summed over its pairs.

    The margin of a labelled dialogue is its distance to the baseline of KTO or BCO.
    """
    masks = pairs["chosen_mask"], pairs["rejected_mask"]
    chosen_tokens, rejected_tokens = (mask.sum(1).clamp(min=1) for mask in masks)
    chosen, rejected = pairs["chosen_logprobs"].sum(1), pairs["rejected_logprobs"].sum(1)
    gain = chosen - pairs["ref_chosen_logprobs"].sum(1)
    loss = rejected - pairs["ref_rejected_logprobs"].sum(1)
    spec = PREFERENCES[settings.loss]
    if spec.per_token:
        gain, loss = gain / chosen_tokens, loss / rejected_tokens
    # BCO's baseline is a reward, that is, beta times a log-ratio.
    level = baseline / _beta(settings) if spec.running_mean else baseline
    margin = torch.where(masks[0].any(1), gain, level) - torch.where(masks[1].any(1), loss, level)
    return {
        "preference/margin": float(margin.sum()),
        "preference/accuracy": float((margin > 0).sum()),
        "preference/chosen_logprob": float((chosen / chosen_tokens).sum()),
        "preference/rejected_logprob": float((rejected / rejected_tokens).sum()),
    }
