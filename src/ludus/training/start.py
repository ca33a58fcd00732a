"""From a configuration to a finished run: builds the parts, evaluates, trains, evaluates again."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ludus.algorithms.presets import Algorithm, resolve
from ludus.config.schema import Config
from ludus.diagnostics.trackers import Tracker, check_tracker, make_tracker, read_metrics
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.evaluation.evaluate import Evaluation, check_size, load_evaluation, plans
from ludus.rollout.ledger import Ledger
from ludus.training.checkpoint import list_checkpoints, load_trainer, load_weights
from ludus.training.learner import Learner, LearnerSettings, TokenScorer
from ludus.training.optimiser import Optimiser, OptimiserSettings
from ludus.training.rl import Reporter, RlLoop, task_order
from ludus.training.run import RunFolder
from ludus.training.scoring import Scorer, Scores
from ludus.training.session import Session, make_engine, open_session
from ludus.training.sync import WeightSync

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("ludus.start")

PROBE_TOKENS = 64


@dataclass(frozen=True)
class Comparison:
    """Evaluations of one plan before and after training."""

    before: Evaluation
    after: Evaluation


@dataclass(frozen=True)
class AdapterOff:
    """A reference that is the trained model with its adapters switched off."""

    model: PreTrainedModel
    temperature: float

    def score(self, tokens: Tensor, asked: Tensor, *, with_entropy: bool = False) -> Scores:
        """As `Scorer.score`, under the base weights."""
        with self.model.disable_adapter():
            return Scorer(self.model, self.temperature).score(tokens, asked, with_entropy=with_entropy)


def check(config: Config, world: World) -> None:
    """Refuse, before anything is written, what a run would only find out later.

    Raises ConfigError and UserError for settings of the algorithm, trackers and splits.
    """
    training_algorithm(config)
    for name in config.run.trackers:
        check_tracker(name)
    settings = config.evaluation
    for split, num in [
        *((name, settings.tasks) for name in settings.splits),
        (settings.split_during, settings.tasks_during),
    ]:
        check_size(split, world.tasks(split), num)
    task_order(config, world)


def prepare(config: Config) -> Session | None:
    """Check a configuration and load its model, before anything is written.

    None where the model is yet to be made from scratch.
    """
    if config.model.from_scratch:
        check(config, build_world(config.env, config.rollout))
        return None
    session = open_session(config)
    check(config, session.world)
    return session


def train(session: Session, folder: RunFolder, reporter: Reporter) -> list[Comparison]:
    """Run, or go on with, the training in `folder`; gives the evaluations before and after."""
    config = session.config
    algorithm = training_algorithm(config)
    if not config.training.mask_observations:
        text = "Observations are in the loss (training.mask_observations is off): for comparison only."
        log.warning(text)
        reporter.alarm(text)
    loop, done = build_loop(session, folder, algorithm, reporter)
    with _closing(loop):
        return asyncio.run(_run(loop, done))


def training_algorithm(config: Config) -> Algorithm:
    """The algorithm of a configuration, as far as the learner runs it."""
    algorithm = resolve(config.algorithm)
    if algorithm.kl_coef > 0 and algorithm.kl_placement != "loss":
        raise ConfigError(
            f"algorithm.kl_placement = {algorithm.kl_placement!r} is not run by the learner.",
            "Use kl_placement = 'loss'.",
        )
    return algorithm


def build_loop(
    session: Session, folder: RunFolder, algorithm: Algorithm, reporter: Reporter
) -> tuple[RlLoop, int]:
    """The parts of the loop, brought to the newest checkpoint; and the step of that checkpoint."""
    config = session.config
    scorers = _scorers(session, algorithm)
    model = session.model
    updates = config.training.steps * config.training.epochs * config.training.minibatches
    optimiser = Optimiser(model, OptimiserSettings.of(config.training, updates))
    done, ledger = 0, Ledger()
    found = list_checkpoints(folder.checkpoints)
    if found:
        done, path = found[-1]
        load_weights(path, model)
        ledger = Ledger.restore(load_trainer(path, optimiser).ledger)
        log.info("resumed from %s", path)
    _forget_after(folder, done)
    settings = LearnerSettings(
        microbatch_tokens=config.training.microbatch_tokens,
        epochs=config.training.epochs,
        minibatches=config.training.minibatches,
        trajectory_tokens=config.rollout.max_tokens,
    )
    scorer = Scorer(model, config.rollout.temperature or 1.0)
    engine = make_engine(session)
    loop = RlLoop(
        session=session,
        folder=folder,
        engine=engine,
        learner=Learner(scorer, optimiser, algorithm, settings, scorers),
        sync=WeightSync(model, engine, _probe(session), config.training.sync_tolerance),
        algorithm=algorithm,
        trackers=make_trackers(config, folder, done),
        reporter=reporter,
        ledger=ledger,
        history=[row.metrics for row in read_metrics(folder.metrics)] if done else [],
    )
    return loop, done


def make_trackers(config: Config, folder: RunFolder, done: int) -> list[Tracker]:
    """The configured trackers, cut back to the step that the run goes on from."""
    return [make_tracker(name, folder.path, done) for name in config.run.trackers]


async def _run(loop: RlLoop, done: int) -> list[Comparison]:
    config = loop.session.config
    await loop.sync.publish(done)
    before = [await loop.evaluate(plan) for plan in plans(config, 0)] if done == 0 else []
    await loop.run(done)
    after = [await loop.evaluate(plan) for plan in plans(config, config.training.steps)]
    if not before:
        before = load_evaluations(loop.folder, config)
    return [Comparison(b, a) for b, a in zip(before, after, strict=True)]


def load_evaluations(folder: RunFolder, config: Config) -> list[Evaluation]:
    """The evaluations that were made before training."""
    return [load_evaluation(folder.evaluations / f"{plan.name}.json") for plan in plans(config, 0)]


def _scorers(session: Session, algorithm: Algorithm) -> dict[str, TokenScorer]:
    """The models beside the policy: the reference, where it is needed or asked for."""
    training, temperature = session.config.training, session.config.rollout.temperature or 1.0
    if algorithm.kl_coef == 0 and not training.report_kl:
        return {}
    if session.config.model.lora is not None:
        return {"reference": AdapterOff(session.model, temperature)}
    reference = copy.deepcopy(session.model).requires_grad_(False).eval()
    return {"reference": Scorer(reference, temperature)}


def _probe(session: Session) -> tuple[int, ...]:
    """A fixed text of the world, as tokens, on which engine and learner are compared."""
    task = session.world.tasks("train")[0]
    return session.renderer.prompt(task.prompt, ())[:PROBE_TOKENS]


def _forget_after(folder: RunFolder, done: int) -> None:
    """Remove rollouts and evaluations of steps that will be done again."""
    for path in [*folder.rollouts.glob("step-*"), *folder.evaluations.glob("step-*")]:
        if int(path.name.split("-")[1].split(".")[0]) > done:
            path.unlink()


@contextmanager
def _closing(loop: RlLoop) -> Iterator[None]:
    """Close engine and trackers, whatever happens."""
    try:
        yield
    finally:
        asyncio.run(loop.engine.close())
        for tracker in loop.trackers:
            tracker.close()
