"""Build and validate the parts of a training run, then evaluate, train and evaluate again."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.kl import KlControl, control_of
from ludus.algorithms.spec.resolve import algorithm_of, minibatches_of
from ludus.config.schema import Config
from ludus.diagnostics.trackers import Tracker, make_tracker, read_metrics
from ludus.engines.models.fingerprint import fingerprint_adapted
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.envs.registry import closing
from ludus.errors import ConfigError, UserError
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan, load_evaluation, plans
from ludus.rollout.ledger import Ledger
from ludus.training.batches.chunked_lm_head import Entropy, HiddenStates
from ludus.training.collection.demonstrations import make_experts
from ludus.training.collection.filters import AlgorithmState
from ludus.training.collection.prompt_stream import STREAM_FILE, WAITING_FILE, PromptStream, StreamState
from ludus.training.collection.reward_mixing import make_combiner
from ludus.training.collection.rollout_collector import RemoteSampler, RolloutCollector
from ludus.training.datasets.token_limits import rollout_warnings
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives, same_weights
from ludus.training.distributed.launcher import StartRanks, leading
from ludus.training.learner.learner import Learner, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer, ScoredTokens, TokenScorer
from ludus.training.learner.moe_routing_replay import RoutingReplay
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.rl.async_trainer import TOO_LATE, AsyncTrainer
from ludus.training.rl.memory_check import dry_run_of
from ludus.training.rl.one_step_trainer import run_one_step
from ludus.training.rl.sync_trainer import Reporter, SyncTrainer, task_order
from ludus.training.rl.train_step import TrainStep
from ludus.training.rl.validate import config_warnings, inactive_parts, updates_of
from ludus.training.rl.weight_sync import WeightSync
from ludus.training.run.checkpoint import (
    TrainerState,
    broken,
    checkpoint_path,
    list_checkpoints,
    load_part,
    load_text,
    load_trainer,
    load_weights,
    read_state,
)
from ludus.training.run.run_dir import RunFolder, save_config
from ludus.training.run.session import TrainingSession, busy_warning, make_engine
from ludus.training.value_models.factory import ValueModel, make_value_model, part_name, warmup_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger("ludus.start")

PROBE_TOKENS = 64


@dataclass(frozen=True)
class Comparison:
    """Evaluations before and after training, on one split with one sampling setting.

    `before` is None if there is none. The number of tasks or other conditions differ if the run was resumed
    with other settings.
    """

    before: Evaluation | None
    after: Evaluation


@dataclass(frozen=True)
class AdapterOff:
    """Reference model: the trained model with its adapters disabled."""

    model: PreTrainedModel
    temperature: float

    def score(self, tokens: Tensor, scored: Tensor, entropy: Entropy = "none") -> ScoredTokens:
        """Score as `LogprobScorer.score`, under the base weights."""
        with self.model.disable_adapter():
            return self._scorer.score(tokens, scored, entropy)

    def distributions(self, tokens: Tensor, scored: Tensor) -> HiddenStates:
        """Return `LogprobScorer.distributions` under the base weights."""
        with self.model.disable_adapter():
            return self._scorer.distributions(tokens, scored)

    @cached_property
    def _scorer(self) -> LogprobScorer:
        return LogprobScorer(self.model, self.temperature)


def train(
    session: TrainingSession, folder: RunFolder, reporter: Reporter, remote: RemoteSampler | None = None
) -> list[Comparison]:
    """Run or resume the training in `folder` and return the evaluations before and after.

    Episodes run in this process unless `remote` is set.
    """
    config = session.config
    algorithm = algorithm_of(config)
    warnings = (*config_warnings(config), *inactive_parts(config, session.world), *rollout_warnings(session))
    for text in filter(None, [*warnings, busy_warning(config)]):
        log.warning(text)
        reporter.alarm(text)
    with leading(config, next(session.model.parameters()).device) as ranks:
        loop, done = build_loop(session, folder, algorithm, reporter, ranks, remote)
        with _closing(loop):
            dry_run_of(config, loop.learning.learner)
            return asyncio.run(_run(loop, done, stream_before(loop, done), waiting_before(loop, done)))


def stream_before(loop: SyncTrainer, done: int) -> StreamState:
    """Return the stream of the checkpoint of step `done`, or a new one if there is none."""
    training, sampler = loop.session.config.training, loop.sampler
    if done == 0:
        return StreamState()
    text = load_text(checkpoint_path(loop.folder.checkpoints, done), STREAM_FILE)
    order = task_order(loop.session.config, loop.session.world)
    path = checkpoint_path(loop.folder.checkpoints, done)
    if text is None and read_state(path).mode == "async":
        raise broken(path, f"trainer/{STREAM_FILE} is missing")
    if text is None:  # the checkpoint was not written by asynchronous training
        return StreamState(max([done, *sampler.ledger.steps_ahead]) * order.chunk)
    source = PromptStream(sampler, order, training.prompts_per_step, loop.session.config.staleness.oversample)
    state = StreamState.from_text(text, {task.id: task for task in order.tasks}, source.jobs_of)
    return replace(state, next_number=source.free(state.next_number, state.groups))


def waiting_before(loop: SyncTrainer, done: int) -> StreamState:
    """Return the leftover episodes in the checkpoint of step `done` for the next step."""
    path = checkpoint_path(loop.folder.checkpoints, done)
    text = load_text(path, WAITING_FILE) if done else None
    if text is None:
        return StreamState()
    order = task_order(loop.session.config, loop.session.world)
    source = PromptStream(loop.sampler, order, loop.session.config.training.prompts_per_step)
    return StreamState.from_text(text, {task.id: task for task in order.tasks}, source.jobs_of)


def build_loop(
    session: TrainingSession,
    folder: RunFolder,
    algorithm: Algorithm,
    reporter: Reporter,
    ranks: Collectives = ONE_PROCESS,
    remote: RemoteSampler | None = None,
) -> tuple[SyncTrainer, int]:
    """Build the trainer and restore the newest checkpoint; return both the trainer and its step.

    The run folder is not changed until all parts are built.
    """
    config, model = session.config, session.model
    control = control_of(config, algorithm.kl_coef)
    experts = make_experts(session, algorithm)
    combiner = make_combiner(session, algorithm)
    found = list_checkpoints(folder.checkpoints)
    waits = bool(found) and (found[-1][1] / "trainer" / WAITING_FILE).is_file()
    spanning = config.training.streams or config.rollout.partial.is_set or waits
    done, ledger, memory = 0, Ledger(spanning=spanning), AlgorithmState.start(algorithm)
    engine = None
    if remote is not None:
        engine = remote.engine()
    elif ranks.count > 1:  # before the weights are sharded
        engine = make_engine(session)
    with ranks.together(StartRanks(config, folder.path, found[-1][1] if found else None)):
        parts = make_parts(session, algorithm, ranks, found[-1][1] if found else None)
    stored = parts.stored
    if stored is not None:
        done, path = found[-1]
        check_origins(stored.reference_digests, parts.origins, session)
        ledger = Ledger.restore(stored.ledger, spanning=spanning)
        memory = AlgorithmState.start(algorithm, stored.algorithm_state)
        control = control.restored(stored.kl)
        if combiner is not None:
            combiner.restore(stored.reward_moments)
        log.info("resumed from %s", path)
    engine = engine or make_engine(session)
    probe = probe_tokens(session)
    save_config(folder, config)
    remove_after(folder, done)
    warmup = warmup_steps(parts.value_model, config, None if stored is None else stored.warmup_steps)
    if warmup > done:
        log.info("only the critic is trained until step %d (critic.warmup_steps)", warmup)
    bound, entropy = over_age_bound(config), memory.initial_entropy
    sampler = RolloutCollector(session, engine, algorithm, reporter, ledger, memory, combiner, experts, remote)
    loop = SyncTrainer(
        session=session,
        folder=folder,
        sampler=sampler,
        learning=TrainStep(session, parts.learner, control, ledger, parts.value_model, bound, warmup, entropy),
        origins=parts.origins,
        sync=WeightSync.of(config, model, engine, probe, ranks),
        trackers=make_trackers(config, folder, done),
        reporter=reporter,
        history=[row.metrics for row in read_metrics(folder.metrics)] if done else [],
    )
    return loop, done


def over_age_bound(config: Config) -> int | None:
    """Return the age in versions beyond which tokens are masked, or None if episodes wait instead."""
    masks = config.training.streams and config.staleness.on_stale == "mask"
    return config.staleness.max_staleness if masks else None


@dataclass(frozen=True)
class LearnerParts:
    """The trained parts of a run and the restored trainer state (None without a checkpoint)."""

    learner: Learner
    value_model: ValueModel | None
    stored: TrainerState | None
    origins: Mapping[str, str] = field(default_factory=dict)
    """On rank 0: digests of models and data outside the checkpoint."""


def make_parts(
    session: TrainingSession, algorithm: Algorithm, ranks: Collectives, resumed: Path | None
) -> LearnerParts:
    """Build policy, optimizer, scorers and judge, and restore a checkpoint; runs on every rank.

    Copies of the model are made before the weights are sharded.
    """
    config, model = session.config, session.model
    same_weights(model, ranks)
    scorers = _scorers(session, algorithm, control_of(config, algorithm.kl_coef))
    origins = origins_of(session, scorers) if ranks.rank == 0 else {}
    value_model = make_value_model(config, algorithm, model, session.world.rewards[0].name, ranks)
    if resumed is not None:
        load_weights(resumed, model)
    ranks.split(model)
    for scorer in scorers.values():
        if isinstance(scorer, LogprobScorer):
            ranks.split(scorer.model)
    updates = config.training.steps * updates_of(config)
    how = OptimizerSettings.of(config.training, updates)
    optimiser = Optimizer(model, how, masters=config.model.master_weights, ranks=ranks)
    stored = None
    if resumed is not None:
        stored = load_trainer(resumed, optimiser)
        if value_model is not None:
            part = load_part(resumed, part_name(value_model), value_model.blank_state())
            value_model.load_state(part, stored.value_model_steps)
    return LearnerParts(make_learner(session, algorithm, optimiser, scorers), value_model, stored, origins)


def make_learner(
    session: TrainingSession, algorithm: Algorithm, optimiser: Optimizer, scorers: Mapping[str, TokenScorer]
) -> Learner:
    """Build the learner of the session's model from the configuration."""
    config, training = session.config, session.config.training
    settings = LearnerSettings(
        microbatch_tokens=training.microbatch_tokens,
        epochs=training.epochs,
        minibatches=minibatches_of(config),
        trajectory_tokens=config.rollout.max_seq_len,
        old_logprobs=training.learner.old_logprobs,
        halve_on_oom=training.learner.halve_on_oom,
    )
    scorer = LogprobScorer(
        session.model,
        config.rollout.temperature or 1.0,
        config.model.activation_checkpointing,
        RoutingReplay.of(session.model) if training.learner.replay_routing else None,
    )
    return Learner(scorer, optimiser, algorithm, settings, scorers, optimiser.ranks)


def make_trackers(config: Config, folder: RunFolder, done: int) -> list[Tracker]:
    """Build the configured trackers, truncated to the resumed step."""
    return [make_tracker(name, folder.path, done) for name in config.run.trackers]


async def _run(loop: SyncTrainer, done: int, before: StreamState, waiting: StreamState) -> list[Comparison]:
    config = loop.session.config
    async with closing(loop.session.world):
        await loop.sync.publish(done)
        if done == 0:
            for plan in plans(config, 0):
                await _evaluate_once(loop, plan)
        await run_trainer(loop, done, before, waiting)
        after = [await _evaluate_once(loop, plan) for plan in plans(config, config.training.steps)]
    untrained = [stored_evaluation(loop.folder, plan) for plan in plans(config, 0)]
    return [Comparison(b, a) for b, a in zip(untrained, after, strict=True)]


async def run_trainer(loop: SyncTrainer, done: int, before: StreamState, waiting: StreamState) -> None:
    """Train from step `done` to the last in the configured `training.mode`.

    `before` and `waiting` are the restored stream and the restored leftover episodes. They are dropped if the
    mode does not use them.
    """
    training, ledger = loop.session.config.training, loop.sampler.ledger
    gone = waiting if training.streams else before
    if gone.num_ended:
        ledger.drop_restored(done + 1, gone.num_ended, TOO_LATE)
    if training.streams:
        await AsyncTrainer.of(loop, done, before).run(done, before)
        return
    late = [group.jobs[0] for group in before.groups if group.jobs[0].key.step <= done]
    memory = loop.sampler.memory
    loop.sampler.memory = replace(memory, untrained_tasks=(*memory.untrained_tasks, *(job.task.id for job in late)))
    loop.sampler.restore_partial(waiting.groups)
    try:
        await (run_one_step(loop, done) if training.one_step_behind else loop.run(done))
    finally:
        if loop.sampler.partial is not None:
            await loop.sampler.partial.close()


async def _evaluate_once(loop: SyncTrainer, plan: EvaluationPlan) -> Evaluation:
    """Run an evaluation plan unless an evaluation of that name exists."""
    kept = stored_evaluation(loop.folder, plan)
    if kept is None:
        return await loop.evaluate(plan)
    log.info("evaluation %s already exists, skipping it", plan.name)
    return kept


def stored_evaluation(folder: RunFolder, plan: EvaluationPlan) -> Evaluation | None:
    """Return the stored evaluation of a plan, or None."""
    path = folder.evaluations / f"{plan.name}.json"
    return load_evaluation(path) if path.is_file() else None


def _scorers(session: TrainingSession, algorithm: Algorithm, control: KlControl) -> dict[str, TokenScorer]:
    """Build the scorers besides the policy: teacher and reference, if needed or configured."""
    found: dict[str, TokenScorer] = {}
    if algorithm.loss_spec.has(Need.TEACHER):
        found["teacher"] = load_teacher(session)
    training, temperature = session.config.training, session.config.rollout.temperature or 1.0
    needed = control.needs_reference or algorithm.advantage_spec.has(Need.PROCESS_REWARD_MODEL)
    if not needed and not training.report_kl:
        return found
    if session.config.model.lora is not None:
        return found | {"reference": AdapterOff(session.model, temperature)}
    reference = copy.deepcopy(session.model).requires_grad_(False).eval()
    return found | {"reference": LogprobScorer(reference, temperature)}


def probe_tokens(session: TrainingSession) -> tuple[int, ...]:
    """Return a fixed text of the world as tokens, used to compare engine and learner."""
    task = session.world.tasks("train")[0]
    return session.renderer.prompt(task.prompt, ())[:PROBE_TOKENS]


def remove_after(folder: RunFolder, done: int) -> None:
    """Remove rollouts and evaluations of steps after `done`."""
    for path in [*folder.rollouts.glob("step-*"), *folder.evaluations.glob("step-*")]:
        if int(path.name.split("-")[1].split(".")[0]) > done:
            path.unlink()


@contextmanager
def _closing(loop: SyncTrainer) -> Iterator[None]:
    """Close engine and trackers on exit."""
    try:
        yield
    finally:
        asyncio.run(loop.engine.close())
        for tracker in loop.trackers:
            tracker.close()


def load_teacher(session: TrainingSession) -> LogprobScorer:
    """Load the configured teacher, frozen, at the rollout temperature.

    Raises ConfigError if its vocabulary differs from the policy's.
    """
    config = session.config
    path = config.teacher.path or ""
    theirs, own = load_tokenizer(path, needs_template=False).get_vocab(), session.tokenizer.get_vocab()
    if theirs != own:
        odd = min(t for t in theirs.keys() | own.keys() if theirs.get(t) != own.get(t))
        raise ConfigError(
            f"The teacher {path} has a different vocabulary from the policy ({len(theirs)} tokens and"
            f" {len(own)}; first difference: {odd!r}).",
            "Use a teacher with the policy's tokenizer.",
        )
    model = load_model(path, config.model.dtype, config.model.device).requires_grad_(False).eval()
    return LogprobScorer(model, config.rollout.temperature or 1.0)


START, TEACHER = "start", "teacher"


def origins_of(session: TrainingSession, scorers: Mapping[str, TokenScorer]) -> dict[str, str]:
    """Return the digests of the fixed models by name, before a checkpoint is loaded.

    `start` is the initial model, if it is the reference or the base of adapters.
    """
    found = {}
    if "reference" in scorers or session.config.model.lora is not None:
        found[START] = fingerprint_adapted(session.model, {})
    teacher = scorers.get(TEACHER)
    if isinstance(teacher, LogprobScorer):
        found[TEACHER] = fingerprint_adapted(teacher.model, {})
    return found


def check_origins(stored: Mapping[str, str], now: Mapping[str, str], session: TrainingSession) -> None:
    """Raise UserError if a model differs from the checkpoint's digest.

    Models without a stored digest are not compared.
    """
    paths = {START: f"model that the run started with ({session.source})"}
    paths[TEACHER] = f"teacher ({session.config.teacher.path})"
    for name, digest in now.items():
        before = stored.get(name, digest)
        if before != digest:
            raise UserError(
                f"The {paths[name]} has changed: its weights have the digest {digest[:12]}, and had"
                f" {before[:12]} when the checkpoint was written.",
                "Restore them, or start a new run.",
            )
