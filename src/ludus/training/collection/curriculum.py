"""Curricula: choose the tasks of a step by stage, category, estimated success or perplexity.

All state is in `CurriculumState`, which is part of the algorithm's state in the checkpoint. A choice depends on the
seed and this state alone, so that a resumed run chooses the same tasks. The formulas are in `algorithms.curricula`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ludus.algorithms.curricula import CurriculumState, learnability, sec_probabilities, sec_update, target_weight
from ludus.config.sections.curriculum import CurriculumConfig, StageConfig
from ludus.diagnostics.history import GATE, STAGE
from ludus.envs.base import TaskOrder, TaskSequence, World, permutation
from ludus.training.collection.filters import AlgorithmState, ChosenTasks, choose_tasks
from ludus.training.credit.advantages import TrainingSample
from ludus.types import Task, grouped

log = logging.getLogger(__name__)

MARK = "~"
"""Separator of the identifier of a new task: that of its parent, and the step that made it."""
_FAILED = 0.5
"""Mean success below which a task has failed in a phase."""


@dataclass(frozen=True)
class TaskStage:
    """A stage with its tasks."""

    name: str
    settings: StageConfig
    tasks: tuple[Task, ...]


@dataclass
class Curriculum:
    """Choose tasks, and update the state with the groups of a step. `success` is the outcome part.

    `category` is empty if the order has no categories. `stages` has at least one, with its tasks in the order of the
    epochs for `perplexity`.
    """

    settings: CurriculumConfig
    world: World
    seed: int
    success: str
    stages: tuple[TaskStage, ...]
    category: Mapping[str, str] = field(default_factory=dict)
    _tasks: dict[str, Task | None] = field(init=False)

    def __post_init__(self) -> None:
        self._tasks = {task.id: task for task in self.world.tasks("train")}

    def names(self, stage: int) -> list[str]:
        """Return the categories of a stage, in ascending order."""
        return ordered({self.category[task.id] for task in self.stages[stage].tasks})

    @property
    def min_tasks(self) -> int:
        """The number of tasks of the smallest stage."""
        return min(len(stage.tasks) for stage in self.stages)

    def stage_of(self, state: CurriculumState) -> TaskStage:
        """Return the present stage."""
        return self.stages[min(state.stage, len(self.stages) - 1)]

    def limits(self, state: CurriculumState) -> Mapping[str, int]:
        """Return the limits of an episode in the present stage."""
        return self.stage_of(state).settings.limits

    def choose(
        self, order: TaskSequence, num: int, state: AlgorithmState, taken: Collection[str], step: int
    ) -> ChosenTasks:
        """Return the next `num` tasks outside `taken`, and the state with its new positions."""
        own = state.curriculum
        made = self._next_made(own, num, taken)
        seen, num = {*taken, *(task.id for task in made)}, num - len(made)
        state = replace(state, curriculum=replace(own, draws=own.draws + 1))
        if self.settings.order == "bandit":
            chosen = self._by_category(num, state, seen)
        elif self.settings.order in ("target", "learnability"):
            chosen = self._by_weight(num, state, seen)
        else:
            chosen = self._in_order(order, num, state, seen, step)
        return ChosenTasks((*made, *chosen.tasks), chosen.skipped, chosen.state)

    def _in_order(self, order: TaskSequence, num: int, state: AlgorithmState, seen: set[str], step: int) -> ChosenTasks:
        """Return the next tasks of the stage in shuffled epochs or by perplexity; without stages those of `order`."""
        stage = self.stage_of(state.curriculum)
        if self.settings.order == "perplexity":
            order = RankedOrder(stage.tasks)
        elif self.settings.has_stages:
            order = TaskOrder(stage.tasks, self.seed)
        first = choose_tasks(order, num, state, seen, seed=self.seed, step=step)
        if len(first.tasks) == num or first.skipped:
            return first
        seen |= {task.id for task in first.tasks}  # two epochs meet in this step
        second = choose_tasks(order, num - len(first.tasks), first.state, seen, seed=self.seed, step=step)
        return ChosenTasks((*first.tasks, *second.tasks), second.skipped, second.state)

    def _random(self, state: CurriculumState) -> random.Random:
        return random.Random(f"curriculum/{self.seed}/{state.draws}")

    def probabilities(self, state: CurriculumState) -> dict[str, float]:
        """Return the probability of each category at the next draw; empty for orders without categories."""
        if not self.category:
            return {}
        names = self.names(min(state.stage, len(self.stages) - 1))
        if self.settings.order == "bandit":
            return sec_probabilities({name: state.q.get(name, 0.0) for name in names}, self.settings.tau)
        if self.settings.order not in ("target", "learnability"):
            return {}
        weights = dict.fromkeys(names, 0.0)
        for task in self.stage_of(state).tasks:
            weights[self.category[task.id]] += self.weight(task, state)
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def _by_category(self, num: int, state: AlgorithmState, seen: set[str]) -> ChosenTasks:
        own, rng = state.curriculum, self._random(state.curriculum)
        tasks: dict[str, list[Task]] = {name: [] for name in self.names(min(own.stage, len(self.stages) - 1))}
        for task in self.stage_of(own).tasks:
            tasks[self.category[task.id]].append(task)
        probabilities, positions, chosen = self.probabilities(own), dict(own.positions), list[Task]()
        left = {name: sum(task.id not in seen for task in tasks[name]) for name in tasks}
        while len(chosen) < num and any(left.values()):
            names = [name for name in tasks if left[name]]
            (name,) = rng.choices(names, [probabilities[one] for one in names])
            place = positions.get(name, 0)
            while (task := _at(tasks[name], f"{self.seed}:{name}", place)).id in seen:
                place += 1
            positions[name] = place + 1
            chosen.append(task)
            seen.add(task.id)
            left[name] -= 1
        return ChosenTasks(tuple(chosen), 0, replace(state, curriculum=replace(own, positions=positions)))

    def weight(self, task: Task, state: CurriculumState) -> float:
        """Return the weight of a task by its success, or that of its category; 1 if neither was visited."""
        success = state.success.get(task.id, state.by_category.get(self.category[task.id]))
        if success is None:
            return 1.0
        settings = self.settings
        if settings.order == "target":
            return target_weight(success, settings.target, settings.floor)
        return learnability(success, settings.floor)

    def _by_weight(self, num: int, state: AlgorithmState, seen: set[str]) -> ChosenTasks:
        """Draw tasks without replacement, by the keys `u^(1/w)` of Efraimidis and Spirakis (2006)."""
        own, rng = state.curriculum, self._random(state.curriculum)
        keys = [(rng.random() ** (1 / self.weight(task, own)), task) for task in self.stage_of(own).tasks]
        free = sorted((one for one in keys if one[1].id not in seen), key=lambda one: -one[0])
        return ChosenTasks(tuple(task for _, task in free[:num]), 0, state)

    def record(
        self, state: CurriculumState, samples: Sequence[TrainingSample], step: int
    ) -> tuple[CurriculumState, dict[str, float]]:
        """Return the state after the groups of a step, and its metrics."""
        compared = (one for one in samples if one.advantages is not None and not one.expert)
        groups = grouped(compared, lambda one: one.group)
        means = [(group[0].episode.task, self._mean_success(group)) for group in groups.values()]
        after = self._with_success(self._with_q(state, groups.values()), means)
        if self.settings.evolve.every:
            after = self._evolved(after, means, step)
        metrics = {f"curriculum/p/{name}": p for name, p in self.probabilities(after).items()}
        if self.settings.evolve.every:
            metrics["curriculum/made"] = float(len(after.made))
        if self.settings.has_stages:
            recent = (*after.recent, *(mean for task, mean in means if MARK not in task.id))
            after = replace(after, recent=recent[-self.settings.groups :])
            metrics[STAGE] = after.stage + 1.0
            metrics[GATE] = fmean(after.recent) if after.recent else 0.0
            after = self._after_gate(after, step)
        return after, metrics

    def _mean_success(self, group: Sequence[TrainingSample]) -> float:
        return fmean(min(max(s.episode.trajectory.rewards.get(self.success, 0.0), 0.0), 1.0) for s in group)

    def _with_q(self, state: CurriculumState, groups: Collection[Sequence[TrainingSample]]) -> CurriculumState:
        if self.settings.order != "bandit":
            return state
        sizes: dict[str, list[float]] = {}
        for group in groups:
            if name := self.category.get(group[0].episode.task.id):
                sizes.setdefault(name, []).extend(map(_advantage_size, group))
        q = {name: state.q.get(name, 0.0) for name in ordered(set(self.category.values()))}
        rewards = {name: fmean(values) for name, values in sizes.items()}
        return replace(state, q=sec_update(q, rewards, self.settings.alpha))

    def _with_success(self, state: CurriculumState, means: Sequence[tuple[Task, float]]) -> CurriculumState:
        if self.settings.order not in ("target", "learnability"):
            return state
        alpha, success, by_category = self.settings.alpha, dict(state.success), dict(state.by_category)
        for task, mean in means:
            if name := self.category.get(task.id):
                success[task.id] = (1 - alpha) * success.get(task.id, mean) + alpha * mean
                by_category[name] = (1 - alpha) * by_category.get(name, mean) + alpha * mean
        return replace(state, success=success, by_category=by_category)

    def _after_gate(self, state: CurriculumState, step: int) -> CurriculumState:
        """Return the state in the next stage if the present one ends after `step`."""
        if state.stage >= len(self.stages) - 1:
            return state
        stage, settings = self.stages[state.stage], self.settings
        least = settings.success if stage.settings.success is None else stage.settings.success
        most, mean = stage.settings.steps or settings.steps, fmean(state.recent) if state.recent else 0.0
        passes = len(state.recent) >= settings.groups and mean > least
        if not passes and not (most and step - state.since + 1 >= most):
            return state
        following = self.stages[state.stage + 1].name
        log.info("step %d: stage %s ended at success %.3g; next stage: %s", step, stage.name, mean, following)
        return replace(state, stage=state.stage + 1, since=step + 1, recent=())

    def task(self, name: str) -> Task | None:
        """Return a training task or a new one by its identifier; None if it is unknown or the expert fails."""
        if name not in self._tasks:
            parent, _, _ = name.rpartition(MARK)
            base = self.task(parent) if parent else None
            rng = random.Random(f"variants/{self.seed}/{name}")
            made = None if base is None else self.world.variant(base, rng)
            if base is not None and made is not None:
                made = replace(made, id=name)
                unsolvable = self.world.expert(base) is not None and self.world.expert(made) is None
                made = None if unsolvable else made
            self._tasks[name] = made
        return self._tasks[name]

    def _next_made(self, state: CurriculumState, num: int, taken: Collection[str]) -> list[Task]:
        names = [name for name in state.made if name not in taken][: int(self.settings.evolve.share * num)]
        return [task for task in map(self.task, names) if task is not None]

    def _evolved(self, state: CurriculumState, means: Sequence[tuple[Task, float]], step: int) -> CurriculumState:
        """Keep visited new tasks within the band, and make others from failed tasks at the end of a phase."""
        settings, visited = self.settings.evolve, {task.id: mean for task, mean in means}
        waiting = [name for name in state.made if name not in visited]
        kept = [name for name in state.made if settings.low <= visited.get(name, -1.0) <= settings.high]
        failed = dict.fromkeys([*state.failed, *(name for name, mean in visited.items() if mean < _FAILED)])
        if step % settings.every:
            return replace(state, made=(*waiting, *kept), failed=tuple(failed))
        rng = random.Random(f"evolve/{self.seed}/{step}")
        parents = rng.sample([*failed], min(len(failed), settings.tasks))
        new = [name for name in (f"{parent}{MARK}{step}" for parent in parents) if self.task(name) is not None]
        return replace(state, made=(*new, *waiting, *kept)[: settings.max_tasks], failed=())


@dataclass(frozen=True)
class RankedOrder:
    """An endless order in which every epoch has the tasks in their given order."""

    tasks: Sequence[Task]
    chunk: int = 1

    def take(self, start: int, num: int) -> list[Task]:
        """Return the tasks at positions `start` to `start + num`."""
        return [self.tasks[place % len(self.tasks)] for place in range(start, start + num)]


def _at(tasks: Sequence[Task], seed: str, place: int) -> Task:
    """Return the task at a place of the shuffled epochs of a category."""
    epoch, offset = divmod(place, len(tasks))
    return tasks[permutation(len(tasks), seed, epoch)[offset]]


def _advantage_size(sample: TrainingSample) -> float:
    """Return the mean of `|A|` over the trained action tokens."""
    advantages = sample.advantages or ()
    trains = sample.trains or (True,) * len(advantages)
    sizes = [abs(value) for value, trained in zip(advantages, trains, strict=True) if trained]
    return fmean(sizes) if sizes else 0.0


def ordered(names: Collection[str]) -> list[str]:
    """Return names in ascending order: by number if all are numbers, otherwise by text."""
    try:
        return sorted(names, key=float)
    except ValueError:
        return sorted(names)
