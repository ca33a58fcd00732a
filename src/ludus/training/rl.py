"""The synchronous RL loop: sample groups, give credit, train, publish, measure, save.

Takes a session and a run folder. Gives new weights, one line of metrics a step and checkpoints. Waits for
every episode of a step before it learns from them. Never trains a partial group, never samples the next
step from weights that the engine has not proved to hold. In reproducible mode all it writes but the timings
is the same, bit for bit, for the same seed, also across a kill and resume at any moment.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ludus.algorithms.algorithm import GREEDY_ADVANTAGES, Algorithm
from ludus.algorithms.kl_run import KlControl
from ludus.algorithms.resolve import resolve
from ludus.config.schema import Config
from ludus.diagnostics.metrics import alarms, rollout_metrics
from ludus.diagnostics.timings import StepTimings
from ludus.diagnostics.trackers import Tracker
from ludus.engines.base import Engine
from ludus.envs.base import World, order_of
from ludus.errors import ConfigError, LearnerError
from ludus.evaluation.evaluate import (
    Evaluation,
    EvaluationPlan,
    evaluate,
    name_in_run,
    plan_during,
    save_evaluation,
)
from ludus.rollout.ledger import Ledger, Outcome, RolloutKey
from ludus.rollout.scheduler import Episode, Job
from ludus.rollout.setup import Play, engine_scheduler
from ludus.rollout.store import rollouts_path, write_rollouts
from ludus.tasks.order import Order
from ludus.training.checkpoint import TrainerState, prune, save_checkpoint
from ludus.training.combine import Combiner
from ludus.training.credit import Credit, assign_credit, settle, training_rows
from ludus.training.experts import Experts
from ludus.training.judges import Judge, part_name, train_judge, warmup_steps
from ludus.training.learner import Learner
from ludus.training.memory import Memory
from ludus.training.refine import refine
from ludus.training.run import RunFolder, resume_command
from ludus.training.selection import as_one_batch, with_role_baselines
from ludus.training.session import Session
from ludus.training.skipping import Draw, after_visits, choose, greso_metrics
from ludus.training.sync import WeightSync
from ludus.types import Group, Task

log = logging.getLogger("ludus.rl")


class Reporter(Protocol):
    """Whoever watches a run: a progress bar, a test."""

    def phase(self, name: str, total: int | None, engine: Engine | None = None) -> None:
        """A phase of `total` episodes begins, played with `engine`; None where it is not of episodes."""
        ...

    def episode(self, episode: Episode) -> None:
        """One of them has ended."""
        ...

    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """A training step is done."""
        ...

    def alarm(self, text: str) -> None:
        """Something needs a look."""
        ...


@dataclass
class RlLoop:
    """The parts of a run, and its steps. `step` counts from 1; 0 is the model before training."""

    session: Session
    folder: RunFolder
    engine: Engine
    learner: Learner
    sync: WeightSync
    algorithm: Algorithm
    trackers: Sequence[Tracker]
    reporter: Reporter
    kl: KlControl
    judge: Judge | None = None
    memory: Memory = field(default_factory=Memory)
    combiner: Combiner | None = None
    experts: Experts | None = None
    ledger: Ledger = field(default_factory=Ledger)
    history: list[Mapping[str, float]] = field(default_factory=list)
    _checked: bool = field(default=False, init=False)
    _skipped: int = field(default=0, init=False)

    async def run(self, done: int = 0) -> None:
        """Train from step `done` to the last.

        Raises LearnerError, behind a checkpoint, where the guard of the KL pauses the run.
        """
        training = self.session.config.training
        await self.sync.publish(done)
        order = task_order(self.session.config, self.session.world)
        for step in range(done + 1, training.steps + 1):
            metrics = await self.step(step, order)
            verdict = self.control_kl(metrics)
            if verdict or step % training.checkpoint_every == 0 or step == training.steps:
                self.save(step)
            if verdict:
                raise LearnerError(
                    f"{verdict} The run is paused after step {step}.",
                    "Go on with a larger algorithm.kl_coef, a lower training.learning_rate or another"
                    f" kl_control.guard_factor: {resume_command(self.folder)}",
                )

    async def step(self, step: int, order: Order) -> dict[str, float]:
        """One step: everything between two versions of the weights."""
        clock = StepTimings()
        self.engine.stats(reset=True)
        with clock.phase("rollout"):
            credits = await self.sample(step, order)
        clock.engine = self.engine.stats(reset=True).metrics()
        self.reporter.phase(f"step {step}: learning", None)
        with clock.phase("learn"):
            credits, learned = self.learn(step, credits)
        with clock.phase("sync"):
            proof = await self.sync.publish(step)
        if self.experts is not None:
            foreign = [credit for credit in credits if credit.expert]
            credits = [credit for credit in credits if not credit.expert]
            learned["experts/count"] = float(len(foreign))
            learned["experts/trained"] = float(sum(c.outcome is Outcome.TRAINED for c in foreign))
        trained = sum(credit.outcome is Outcome.TRAINED for credit in credits)
        counts = self.ledger.close(step, trained=trained)
        metrics = rollout_metrics(_groups(credits), self.session.world.rewards[0].name)
        if self.combiner is not None:
            metrics |= self.combiner.metrics(step, _groups(credits))
        metrics |= learned | counts.metrics() | {"sync/probe_gap": proof.probe_gap}
        if self.algorithm.greso:
            metrics |= greso_metrics(self.memory, self._skipped)
        with clock.phase("evaluate"):
            metrics |= await self.evaluate_during(step)
        self.record(step, credits, metrics, clock)
        return metrics

    def control_kl(self, metrics: Mapping[str, float]) -> str:
        """Let the control see the KL of a step; gives the reason to pause, empty where there is none."""
        kl = metrics.get("policy/kl_reference")
        if kl is None:
            return ""
        verdict = self.kl.verdict(kl)
        self.kl = self.kl.update(kl, round(metrics["ledger/trained"]))
        return verdict

    async def sample(self, step: int, order: Order) -> list[Credit]:
        """Roll out groups, in rounds until enough of them can train or the rounds are used up."""
        num_tasks = self.session.config.training.tasks_per_step
        rounds = self.algorithm.resample_rounds + 1
        credits: list[Credit] = []
        self._skipped = 0
        for number in range(rounds):
            wanted = num_tasks - _num_training_groups(credits)
            if self.algorithm.greso:
                tasks = self.choose(step, order, wanted, credits)
            else:
                tasks = order.take(((step - 1) * rounds + number) * num_tasks, wanted)
            groups = await self.roll_out(step, tasks)
            if self.experts is not None:
                groups = self.experts.join(groups)
            if self.combiner is not None:
                groups = self.combiner.combine(step, groups)
            credits += assign_credit(groups, self.algorithm, self._max_action_tokens, number * num_tasks)
            if _num_training_groups(credits) >= num_tasks:
                break
        if self.algorithm.greso:
            self.memory = after_visits(self.memory, credits, self.session.world.rewards[0].name)
        if self.algorithm.advantage == "rae":
            credits, averages = with_role_baselines(credits, self.session.world.name, self.memory.averages)
            self.memory = replace(self.memory, averages=averages)
        return as_one_batch(credits, self.algorithm, self._max_action_tokens)

    def choose(self, step: int, order: Order, wanted: int, credits: Sequence[Credit]) -> Sequence[Task]:
        """The next tasks that GRESO does not skip, none of those played in this step already."""
        taken = {credit.episode.task.id for credit in credits}
        draw = Draw(self.session.config.run.seed, step)
        chosen = choose(order, wanted, self.memory, taken, draw)
        self.memory = chosen.memory
        self._skipped += chosen.skipped
        return chosen.tasks

    def learn(self, step: int, credits: Sequence[Credit]) -> tuple[list[Credit], dict[str, float]]:
        """Settle what trains and train on it; gives the final credits and the metrics."""
        limit = self._max_action_tokens
        coef = self.kl.coef(step)
        if self.kl.acts:
            self.learner.algorithm = replace(self.learner.algorithm, kl_coef=coef)
        credits = refine(credits, self.learner, limit, self.judge, check=not self._checked)
        self._checked = self._checked or any(credit.outcome is Outcome.TRAINED for credit in credits)
        settle(self.ledger, credits)
        rows = training_rows(
            credits,
            mask_observations=self.session.config.training.mask_observations,
            rewards=self.session.world.rewards,
        )
        metrics = {} if self.judge is None else train_judge(self.judge, credits)
        if step > warmup_steps(self.judge, self.session.config):
            metrics |= self.learner.train(rows, seed=step)
        return credits, metrics | ({"kl/coef": coef} if self.kl.acts else {})

    @property
    def _max_action_tokens(self) -> int:
        """The most action tokens that an episode may have."""
        rollout = self.session.config.rollout
        return min(rollout.max_tokens, rollout.max_turns * rollout.max_new_tokens)

    async def roll_out(self, step: int, tasks: Sequence[Task]) -> list[list[Episode]]:
        """One group of episodes for each task, with a greedy one at its end where that is the baseline."""
        config = self.session.config
        play = Play("train", config.rollout.temperature, config.run.seed)
        scheduler = engine_scheduler(
            self.session.world, self.engine, self.session.renderer, config.rollout, play, self.ledger
        )
        members = self.algorithm.group_size
        size = members + (self.algorithm.advantage in GREEDY_ADVANTAGES)
        jobs = [Job(RolloutKey(step, task.id, i), task, i >= members) for task in tasks for i in range(size)]
        self.reporter.phase(f"step {step}: episodes", len(jobs), self.engine)
        episodes = await scheduler.run(jobs, self.reporter.episode)
        return [episodes[i : i + size] for i in range(0, len(episodes), size)]

    async def evaluate(self, plan: EvaluationPlan, name: str | None = None) -> Evaluation:
        """Evaluate the engine's present weights; keep result and rollouts under `name` (None: the plan's)."""
        session = self.session
        play = Play("evaluate", plan.temperature, plan.seed)
        scheduler = engine_scheduler(
            session.world, self.engine, session.renderer, session.config.rollout, play, Ledger()
        )
        self.reporter.phase(
            f"step {plan.step}: evaluation episodes, {plan.split}",
            plan.num_tasks * plan.samples,
            self.engine,
        )
        result, episodes = await evaluate(
            scheduler, session.world.tasks(plan.split), plan, self.reporter.episode
        )
        save_evaluation(self.folder.evaluations, result, episodes, name)
        return result

    async def evaluate_during(self, step: int) -> dict[str, float]:
        """The metrics of an evaluation, on the steps that have one."""
        config = self.session.config
        if step % config.evaluation.every:
            return {}
        plan = plan_during(config, step)
        return (await self.evaluate(plan, name_in_run(plan, config))).metrics()

    def record(
        self, step: int, credits: Sequence[Credit], metrics: dict[str, float], clock: StepTimings
    ) -> None:
        """Write what the step left behind, and say what looks wrong."""
        if self.session.config.run.save_rollouts:
            write_rollouts(rollouts_path(self.folder.path, step), [credit.record for credit in credits])
        for tracker in self.trackers:
            tracker.log(step, metrics)
        timings = clock.metrics([credit.episode.trajectory for credit in credits])
        clock.write(self.folder.timings, step, timings)
        self.history.append(metrics)
        for text in alarms(self.history):
            log.warning("step %d: %s", step, text)
            self.reporter.alarm(text)
        self.reporter.step(step, metrics, timings)

    def save(self, step: int) -> None:
        """Write a checkpoint and remove the oldest."""
        state = TrainerState(
            step=step,
            optimiser_steps=self.learner.optimiser.num_steps,
            ledger=self.ledger.state(),
            judge_steps=0 if self.judge is None else self.judge.optimiser.num_steps,
            memory=self.memory.to_json(),
            reward_moments="" if self.combiner is None else self.combiner.moments.to_json(),
            kl=self.kl.state,
        )
        shelf = self.folder.checkpoints
        parts = {} if self.judge is None else {part_name(self.judge): self.judge.state()}
        session = self.session
        save_checkpoint(shelf, session.model, session.tokenizer, self.learner.optimiser, state, parts)
        prune(shelf, self.session.config.training.keep_checkpoints)
        log.info("checkpoint of step %d written", step)


def task_order(config: Config, world: World) -> Order:
    """Which tasks come when. Raises ConfigError where one step needs more than there are."""
    tasks = world.tasks("train")
    chunk = config.training.tasks_per_step * (resolve(config.algorithm).resample_rounds + 1)
    if len(tasks) < chunk:
        raise ConfigError(
            f"One step may need {chunk} tasks, and the split train has {len(tasks)}.",
            "Lower training.tasks_per_step or algorithm.resample_rounds.",
        )
    return order_of(world, config.run.seed, chunk, config.training.steps)


def _groups(credits: Sequence[Credit]) -> list[Group]:
    """The episodes by task, as the metrics take them: without baselines."""
    by_task: dict[str, list[Episode]] = {}
    for credit in credits:
        if not credit.episode.greedy:
            by_task.setdefault(credit.episode.task.id, []).append(credit.episode)
    return [Group(e[0].task, tuple(x.trajectory for x in e)) for e in by_task.values()]


def _num_training_groups(credits: Sequence[Credit]) -> int:
    """Groups that no filter dropped."""
    taking_part = (c for c in credits if not c.episode.greedy)
    return len({c.episode.task.id for c in taking_part if c.outcome in ("trained", "masked")})
