"""Build the parts of a training run from its settings, restore a checkpoint, and run it."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.kl import KLController, kl_controller
from ludus.algorithms.spec.resolve import algorithm_of, minibatches_of
from ludus.config.schema import Config
from ludus.config.sections.exploration import ExplorationConfig
from ludus.diagnostics.history import MetricsHistory
from ludus.diagnostics.trackers import Tracker, make_tracker, read_metrics
from ludus.engines.base import ROLE_ADAPTER, Engine
from ludus.engines.models.fingerprint import fingerprint_adapted
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.engines.models.lora import use_adapter
from ludus.engines.models.vision import image_tokens
from ludus.engines.role_engines import RoleEngines
from ludus.errors import ConfigError, UserError
from ludus.judges.client import JUDGE_FILE
from ludus.rollouts.ledger import Ledger
from ludus.rollouts.rollout_files import token_values_path, truncate_lines
from ludus.training.batches.chunked_lm_head import Entropy, HiddenStates, TokenScores
from ludus.training.collection.demonstrations import Demonstrations, given_dialogues, make_demonstrations
from ludus.training.collection.exploration import Explorer
from ludus.training.collection.filters import AlgorithmState
from ludus.training.collection.guidance import Guidance, make_teacher_prompts
from ludus.training.collection.opponents import OpponentPool
from ludus.training.collection.prompt_stream import STREAM_FILE, WAITING_FILE, PromptStream, StreamState
from ludus.training.collection.rewards.judging import make_judge
from ludus.training.collection.rewards.reward_mixing import RewardMixer, make_reward_mixer
from ludus.training.collection.rollout_collector import RemoteSampler, RolloutCollector
from ludus.training.collection.task_categories import PERPLEXITY_FILE, make_curriculum, perplexities
from ludus.training.collection.task_notes import NOTES_FILE, TaskNotes
from ludus.training.datasets.token_limits import rollout_warnings
from ludus.training.distributed.collectives import Collectives, broadcast_weights
from ludus.training.distributed.launcher import launch_ranks
from ludus.training.learner.ema_teacher import EMA_TEACHER, EmaTeacher
from ludus.training.learner.learner import Learner, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer, TokenScorer
from ludus.training.learner.moe_routing_replay import RoutingReplay
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.learner.role_learners import RoleLearners, read_counted
from ludus.training.learner.token_values import TokenValues
from ludus.training.rl.async_trainer import TOO_LATE, AsyncTrainer
from ludus.training.rl.memory_check import check_memory
from ludus.training.rl.sync_trainer import Comparison, EvaluatedTrainer, Reporter, SyncTrainer, task_order
from ludus.training.rl.train_step import TrainStep
from ludus.training.rl.validate import config_warnings, inactive_parts, updates_of
from ludus.training.rl.weight_sync import WeightSync
from ludus.training.run.checkpoint import (
    Adjustments,
    TrainerState,
    checkpoint_path,
    load_part,
    load_text,
    load_trainer,
    load_weights,
    read_state,
)
from ludus.training.run.run_dir import RunFolder, damaged, list_checkpoints, save_config
from ludus.training.run.session import TrainingSession, busy_warning, make_engine
from ludus.training.value_models.factory import ValueModel, make_value_model, warmup_steps
from ludus.training.value_models.model_refresh import RewardModelRefresh, restored_refresh

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger(__name__)

PROBE_TOKENS = 64


@dataclass
class AdapterOff:
    """Reference model: the trained model with its adapters disabled."""

    model: PreTrainedModel
    temperature: float

    def score(self, tokens: Tensor, scored: Tensor, entropy: Entropy = "none") -> TokenScores:
        with use_adapter(self.model):
            return self._tempered.score(tokens, scored, entropy)

    def distributions(self, tokens: Tensor, scored: Tensor) -> HiddenStates:
        with use_adapter(self.model):
            return self._tempered.distributions(tokens, scored)

    @property
    def _tempered(self) -> LogprobScorer:
        self._scorer.temperature = self.temperature
        return self._scorer

    @cached_property
    def _scorer(self) -> LogprobScorer:
        return LogprobScorer(self.model, self.temperature)


def train(
    session: TrainingSession, folder: RunFolder, reporter: Reporter, remote: RemoteSampler | None = None
) -> list[Comparison]:
    """Run or resume the training in `folder`, with episodes here or `remote`; return its first and last evaluations."""
    config = session.config
    warnings = (*config_warnings(config), *inactive_parts(config, session.world), *rollout_warnings(session))
    for text in filter(None, [*warnings, busy_warning(config)]):
        log.warning(text)
        reporter.alarm(text)
    with launch_ranks(config, next(session.model.parameters()).device) as ranks:
        trainer, done = build_trainer(session, folder, reporter, ranks, remote)
        with closing_parts(trainer):
            check_memory(config, trainer.train_step.learner)
            return asyncio.run(trainer.run(done, training_loop(trainer, done)))


def training_loop(trainer: SyncTrainer, done: int) -> Callable[[int], Awaitable[None]]:
    """Return the loop of `training.mode` from the step `done`; restored episodes that it does not use are dropped."""
    training, collector = trainer.session.config.training, trainer.collector
    order = task_order(trainer.session.config, trainer.session.world)
    source = PromptStream(collector, order, training.prompts_per_step, trainer.session.config.staleness.oversample)
    stream, waiting = restore_stream(trainer.folder, source, done), restore_groups(trainer.folder, source, done)
    dropped = (waiting if training.streams else stream).num_ended
    if dropped:
        collector.ledger.drop_restored(done + 1, dropped, TOO_LATE)
    if training.streams:
        return lambda done: AsyncTrainer.build(trainer, done, stream).run(done, stream)
    late = [group.requests[0] for group in stream.groups if group.requests[0].key.step <= done]
    collector.add_untrained_tasks(request.task.id for request in late)
    collector.start(waiting.groups)
    return trainer.train_one_step_behind if training.mode == "one_step" else trainer.train


def restore_groups(folder: RunFolder, source: PromptStream, done: int, file: str = WAITING_FILE) -> StreamState:
    """Return the groups in a file of the checkpoint of step `done`; empty if the file is missing."""
    text = load_text(checkpoint_path(folder.checkpoints, done), file) if done else None
    if text is None:
        return StreamState()
    return StreamState.from_text(text, {task.id: task for task in source.order.tasks}, source.jobs_of)


def restore_stream(folder: RunFolder, source: PromptStream, done: int) -> StreamState:
    """Return the stream of step `done`'s checkpoint, or a new one that skips the tasks of earlier steps."""
    path = checkpoint_path(folder.checkpoints, done)
    if done == 0 or load_text(path, STREAM_FILE) is not None:
        state = restore_groups(folder, source, done, STREAM_FILE)
        return replace(state, next_number=source.free(state.next_number, state.groups)) if done else state
    if read_state(path).mode == "async":
        raise damaged(path, f"trainer/{STREAM_FILE} is missing")
    return StreamState(max([done, *source.collector.ledger.steps_ahead]) * source.order.chunk)


def build_trainer(
    session: TrainingSession, folder: RunFolder, reporter: Reporter, ranks: Collectives, remote: RemoteSampler | None
) -> tuple[SyncTrainer, int]:
    """Build the trainer from the newest checkpoint, then change the run folder; return the trainer and its step."""
    config, algorithm = session.config, algorithm_of(session.config)
    control = kl_controller(config, algorithm.kl_coef)
    demonstrations, reward_mixer = make_demonstrations(session, algorithm), make_reward_mixer(session, algorithm)
    done, path = next(reversed(list_checkpoints(folder.checkpoints)), (0, None))
    has_waiting = path is not None and (path / "trainer" / WAITING_FILE).is_file()
    spanning = config.training.streams or config.rollout.partial.is_set or has_waiting
    ledger = Ledger(spanning=spanning)
    measured = perplexities(session, folder.path / PERPLEXITY_FILE)
    state, rule = (
        AlgorithmState.start(algorithm, rule=config.training.curriculum.greso),
        config.training.curriculum.greso,
    )
    engine = None if remote is None else remote.engine()
    if ranks.world_size > 1:  # before the weights are sharded
        engine = engine or make_engine(session)
    with ranks.call_on_ranks("start", config, folder.path, path):
        parts = with_role_learners(make_parts(session, algorithm, ranks, path), session, path)
    stored = parts.stored
    if stored is not None:
        check_reference_digests(stored.reference_digests, parts.reference_digests, session)
        ledger = Ledger.restore(stored.ledger, spanning=spanning)
        state = AlgorithmState.start(algorithm, stored.algorithm_state, rule)
        control = control.restored(stored.kl)
        if reward_mixer is not None:
            reward_mixer.restore(stored.reward_moments)
        log.info("resumed from %s", path)
    engine = engine or make_engine(session)
    probe = probe_tokens(session)
    save_config(folder, config)
    remove_later_steps(folder, done)
    warmup = warmup_steps(config, None if stored is None else stored.warmup_steps)
    if warmup > done:
        log.info("only the critic is trained until step %d (critic.warmup_steps)", warmup)
    parts.learner.token_values = TokenValues(folder.path) if config.run.token_values else None
    masks = config.training.streams and config.staleness.on_stale == "mask"
    max_age, entropy = config.staleness.max_staleness if masks else None, state.initial_entropy
    changed = Adjustments() if stored is None else stored.adjustments
    step = TrainStep(session, parts.learner, control, ledger, parts.value_model, max_age, warmup, entropy, changed)
    extra = reward_mixer, demonstrations, remote, make_opponents(session, folder), make_notes(config, folder, done)
    order = make_curriculum(config, session.world, measured), make_explorer(session)
    judge = make_judge(config, session.world, folder.path, (engine, session.renderer))
    more = *order, judge, Guidance.of(session), make_teacher_prompts(session, algorithm, demonstrations)
    collector = RolloutCollector(session, engine, algorithm, reporter, ledger, state, *extra, *more)
    trainer = SyncTrainer(
        session=session,
        folder=folder,
        collector=collector,
        train_step=step,
        refresh=make_refresh(session, reward_mixer, path),
        reference_digests=parts.reference_digests,
        weight_sync=make_weight_sync(session, engine, probe, ranks),
        trackers=make_trackers(config, folder, done),
        reporter=reporter,
        history=MetricsHistory(row.metrics for row in read_metrics(folder.metrics)) if done else MetricsHistory(),
    )
    return trainer, done


def make_refresh(
    session: TrainingSession, mixer: RewardMixer | None, checkpoint: Path | None
) -> RewardModelRefresh | None:
    """Return the refresh of the reward models, restored from a checkpoint, if there is one."""
    models = None if mixer is None else mixer.model
    return restored_refresh(session.config, session.world.rewards, models, checkpoint)


def make_opponents(session: TrainingSession, folder: RunFolder) -> OpponentPool | None:
    """Return the pool of past versions if `rollout.opponents` is set."""
    settings, seed = session.config.rollout.opponents, session.config.run.seed
    if not settings.every:
        return None
    return OpponentPool(folder.opponents, folder.checkpoints, session.model, make_engine(session), settings, seed)


def make_notes(config: Config, folder: RunFolder, done: int) -> TaskNotes | None:
    """Return the notes of the steps up to `done` if they persist over episodes."""
    path, settings = folder.path / NOTES_FILE, config.rollout.notes
    shared = settings.scope == "run"
    return TaskNotes.load(path, settings.max_notes, done, shared=shared) if settings.persists else None


def make_explorer(session: TrainingSession) -> Explorer | None:
    """Return the explorer, with demonstrations of `experts.path` or the world; None if `exploration` is unset."""
    if session.config.exploration == ExplorationConfig():
        return None
    shown = Demonstrations(session, given_dialogues(session))
    name = session.world.rewards[0].name
    return Explorer(session.config, name, lambda task: next(iter(shown.dialogues(task)), ()))


@dataclass(frozen=True)
class LearnerParts:
    """The trained parts of a run and the restored trainer state (None without a checkpoint)."""

    learner: Learner
    value_model: ValueModel | None
    stored: TrainerState | None
    reference_digests: Mapping[str, str] = field(default_factory=dict)
    """On rank 0: digests of models and data outside the checkpoint."""


def make_parts(
    session: TrainingSession, algorithm: Algorithm, ranks: Collectives, resumed: Path | None
) -> LearnerParts:
    """Build policy, optimizer, scorers and judge on every rank, restored from a checkpoint; copies precede sharding."""
    config, model, training = session.config, session.model, session.config.training
    if config.training.learner.shard and image_tokens(model) is not None:
        raise UserError("Vision-language models cannot be sharded.", "Set training.learner.shard = false.")
    broadcast_weights(model, ranks)
    scorers = _scorers(session, algorithm, kl_controller(config, algorithm.kl_coef))
    digests = reference_digests(session, scorers) if ranks.rank == 0 else {}
    value_model = make_value_model(config, algorithm, model, session.world.rewards[0].name, ranks)
    if resumed is not None:
        load_weights(resumed, model)
    ranks.shard_model(model)
    for scorer in scorers.values():
        if isinstance(scorer, LogprobScorer):
            ranks.shard_model(scorer.model)
    schedule = OptimizerSettings.from_config(training, training.steps * updates_of(config))
    optimizer = Optimizer(model, schedule, master_weights=config.model.master_weights, ranks=ranks)
    stored = None
    if resumed is not None:
        stored = load_trainer(resumed, optimizer)
        if value_model is not None:
            part = load_part(resumed, value_model.part, value_model.state(blank=True))
            value_model.load_state(part, stored.value_model_steps)
        if isinstance(teacher := scorers.get("teacher"), EmaTeacher) and teacher.state():
            teacher.load_state(load_part(resumed, EMA_TEACHER, teacher.state()))
    settings = LearnerSettings(
        microbatch_tokens=training.microbatch_tokens,
        epochs=training.epochs,
        minibatches=minibatches_of(config),
        trajectory_tokens=config.rollout.max_seq_len,
        old_logprobs=training.learner.old_logprobs,
        halve_on_oom=training.learner.halve_on_oom,
    )
    temperature, replay = config.rollout.temperature or 1.0, training.learner.replay_routing
    routing = RoutingReplay.of(model) if replay else None
    scorer = LogprobScorer(model, temperature, config.model.activation_checkpointing, routing)
    return LearnerParts(Learner(scorer, optimizer, algorithm, settings, scorers, ranks), value_model, stored, digests)


def with_role_learners(parts: LearnerParts, session: TrainingSession, resumed: Path | None) -> LearnerParts:
    """Return the parts with a learner for each separate model of a role, restored from a checkpoint."""
    if not session.role_models:
        return parts
    shared, learners, digests = parts.learner, dict[str, Learner](), dict(parts.reference_digests)
    for policy, model in session.role_models.items():
        own = make_parts(replace(session, model=model), shared.algorithm, shared.ranks, None)
        digests |= {f"{name} of {policy}": digest for name, digest in own.reference_digests.items()}
        learners[policy] = own.learner
        if resumed is not None:
            load_weights(resumed / policy, model)
            own.learner.optimizer.load_state_dict(*read_counted(load_part(resumed, policy)))
    trained = (shared.scorer, shared.optimizer, shared.algorithm, shared.settings, shared.scorers, shared.ranks)
    frozen = {f"{ROLE_ADAPTER}{role}" for role in session.config.model.frozen_roles}
    return replace(parts, learner=RoleLearners(*trained, learners, frozen), reference_digests=digests)


def make_weight_sync(
    session: TrainingSession, engine: Engine, probe: tuple[int, ...], ranks: Collectives
) -> WeightSync:
    """Return the publication of the weights to the engine, and of separate models of roles to theirs."""
    sync = WeightSync.of(session.config, session.model, engine, probe, ranks)
    if not isinstance(engine, RoleEngines):
        return sync
    engines = engine.by_policy
    others = [
        WeightSync.of(session.config, model, engines[policy], probe) for policy, model in session.role_models.items()
    ]
    return replace(sync, others=tuple(others))


def make_trackers(config: Config, folder: RunFolder, done: int) -> list[Tracker]:
    """Build the configured trackers, truncated to the resumed step."""
    return [make_tracker(name, folder.path, done) for name in config.run.trackers]


def _scorers(session: TrainingSession, algorithm: Algorithm, control: KLController) -> dict[str, TokenScorer]:
    scorers: dict[str, TokenScorer] = {}
    if algorithm.loss_spec.has(Need.TEACHER):
        scorers["teacher"] = load_teacher(session)
    temperature = session.config.rollout.temperature or 1.0
    if algorithm.loss_spec.has(Need.SELF_TEACHER):
        scorers["teacher"] = EmaTeacher(session.model, temperature, session.config.teacher.ema_rate)
    needed = control.needs_reference or algorithm.advantage_spec.has(Need.PROCESS_REWARD_MODEL)
    if needed or session.config.training.report_kl:
        scorers["reference"] = frozen_scorer(session, temperature)
    return scorers


def frozen_scorer(session: TrainingSession, temperature: float) -> TokenScorer:
    """Return the scorer of the model before the training: a copy, or the model without its adapters."""
    if session.config.model.lora is not None:
        return AdapterOff(session.model, temperature)
    return LogprobScorer(copy.deepcopy(session.model).requires_grad_(False).eval(), temperature)


def probe_tokens(session: TrainingSession) -> tuple[int, ...]:
    """Return the tokens of a fixed prompt for comparing engine and learner."""
    return session.renderer.prompt(session.world.tasks("train")[0].prompt, ())[:PROBE_TOKENS]


def remove_later_steps(folder: RunFolder, done: int) -> None:
    """Remove rollouts, token values, evaluations, alarms, opponents and judges' replies of steps after `done`."""
    truncate_lines(folder.alarms, done)
    truncate_lines(folder.path / JUDGE_FILE, done)
    parents = (folder.rollouts, folder.evaluations, token_values_path(folder.path, 0).parent, folder.opponents)
    for path in [path for parent in parents for path in parent.glob("step-*")]:
        if int(path.name.split("-")[1].split(".")[0]) > done:
            path.unlink()


@contextmanager
def closing_parts(trainer: EvaluatedTrainer) -> Iterator[None]:
    """Close engines and trackers on exit."""
    try:
        yield
    finally:
        asyncio.run(trainer.engine.close())
        if isinstance(trainer, SyncTrainer) and trainer.collector.opponents is not None:
            asyncio.run(trainer.collector.opponents.engine.close())
        for tracker in trainer.trackers:
            tracker.close()


def load_teacher(session: TrainingSession) -> LogprobScorer:
    """Load the teacher, frozen, at the rollout temperature. Raises ConfigError for another vocabulary."""
    config = session.config
    path = config.teacher.path or ""
    teacher_tokens, tokens = load_tokenizer(path, needs_template=False).get_vocab(), session.tokenizer.get_vocab()
    if teacher_tokens != tokens:
        differing = min(t for t in teacher_tokens.keys() | tokens.keys() if teacher_tokens.get(t) != tokens.get(t))
        raise ConfigError(
            f"The teacher {path} has a different vocabulary from the policy ({len(teacher_tokens)} tokens and"
            f" {len(tokens)}; first difference: {differing!r}).",
            "Use a teacher with the policy's tokenizer.",
        )
    model = load_model(path, config.model.dtype, config.model.device).requires_grad_(False).eval()
    return LogprobScorer(model, config.rollout.temperature or 1.0)


def reference_digests(session: TrainingSession, scorers: Mapping[str, TokenScorer]) -> dict[str, str]:
    """Return the digests of the fixed models by name, before a checkpoint is loaded; `start` is the initial model."""
    digests = {}
    if "reference" in scorers or session.config.model.lora is not None:
        digests["start"] = fingerprint_adapted(session.model, {})
    if isinstance(teacher := scorers.get("teacher"), LogprobScorer):
        digests["teacher"] = fingerprint_adapted(teacher.model, {})
    return digests


def check_reference_digests(stored: Mapping[str, str], now: Mapping[str, str], session: TrainingSession) -> None:
    """Raise UserError if a model differs from the checkpoint's digest, as far as it has one."""
    texts = {
        "start": f"model that the run started with ({session.source})",
        "teacher": f"teacher ({session.config.teacher.path})",
    }
    for name, digest in now.items():
        before = stored.get(name, digest)
        if before != digest:
            raise UserError(
                f"The {texts.get(name, f'model {name}')} has changed: the digest of its weights is {digest[:12]}, "
                f"and was {before[:12]} when the checkpoint was written.",
                "Restore them, or start a new run.",
            )
