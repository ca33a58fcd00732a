"""Grade groups of texts: rubrics, prompts, replies, values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

from ludus.config.sections.parts.judges import JudgeConfig
from ludus.envs.base import World
from ludus.judges.client import JudgeClient, JudgeStats
from ludus.judges.kinds import GroupValues, Value, combine, group_values, questions
from ludus.judges.rubrics import TASK_RUBRIC, WRITTEN_RUBRIC, load_rubric
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.rewards.judge_prompts import JudgedText, JudgePrompt, transcript, writing_prompt
from ludus.rewards.rubric import Rubric
from ludus.types import Task, Trajectory


@dataclass(frozen=True)
class GradedGroup:
    """The value of each text, None if it was not judged, its deviation over replies, and the leaves that hold.

    `leaves` are those of the first judge and sample.
    """

    values: Sequence[float | None]
    stds: Sequence[float]
    leaves: Sequence[Mapping[str, bool]]


@dataclass
class GradingStats(JudgeStats):
    """Counts of a step, also of pairs, quotes and deviations."""

    stds: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Return the counts of requests, and shares: `position_flips` of pairs whose winner depends on the order,
        `first_wins` of the text that comes first, and `unsupported_quotes` of the quotes of a rubric."""
        found, counts = super().metrics(), self.counts
        if counts["pairs"]:
            found["judge/position_flips"] = counts["flips"] / counts["pairs"]
            found["judge/first_wins"] = counts["half_first_wins"] / 2 / counts["pairs"]
        if counts["quotes"]:
            found["judge/unsupported_quotes"] = counts["unsupported"] / counts["quotes"]
        if self.stds:
            found["judge/std"] = fmean(self.stds)
        return found


@dataclass(frozen=True)
class Grader:
    """Grade texts with the judges of the settings."""

    settings: JudgeConfig
    client: JudgeClient
    world: World

    @cached_property
    def _fixed(self) -> Mapping[str, Rubric]:
        """The rubrics that are the same for all tasks."""
        return {name: load_rubric(name) for name in self.settings.rubrics if name not in (TASK_RUBRIC, WRITTEN_RUBRIC)}

    def text_of(self, task: Task, trajectory: Trajectory) -> JudgedText:
        """Return what the judge sees of an episode, with the leaves that the world's rules decide."""
        text = (
            trajectory.answer if self.settings.sees == "answer" else transcript(trajectory.messages[len(task.prompt) :])
        )
        reference = reference_of(self.world, task) if self.settings.kind == "reference" else ""
        checks = self.settings.rubric_rules and TASK_RUBRIC in self.settings.rubrics
        rules = self.world.rubric_checks(task, trajectory) if checks else {}
        return JudgedText(task, text, reference, None, rules)

    async def grade(self, groups: Sequence[Sequence[JudgedText]], step: int, stats: GradingStats) -> list[GradedGroup]:
        """Return the values of the texts of each group, which share a task, within the deadline. Never raises an error
        of a judge."""
        until, settings = time.monotonic() + self.settings.client.deadline_s, self.settings
        written = await self._written([group[0].task for group in groups if group], step, stats, until)
        known = [[self._with_rubric(one, written) for one in group] for group in groups]
        places = [[n for n, one in enumerate(group) if one is not None] for group in known]
        texts = [[one for one in group if one is not None] for group in known]
        asked = [questions(settings, group) for group in texts]
        prompts: list[JudgePrompt[Value]] = [prompt for one in asked for prompt in one.prompts]
        replies = await self.client.replies(prompts, step, stats, until, settings.samples)
        graded, start = [], 0
        for group, own, found, members in zip(groups, texts, asked, places, strict=True):
            end = start + len(found.prompts)
            results = [group_values(settings, own, found, one[start:end]) for one in replies]
            graded.append(self._graded(len(group), members, results, stats))
            start = end
        return graded

    async def _written(
        self, tasks: Sequence[Task], step: int, stats: GradingStats, until: float
    ) -> Mapping[str, Rubric | None]:
        """Return the rubric that the first judge writes for each task; None without a valid one."""
        if WRITTEN_RUBRIC not in self.settings.rubrics:
            return {}
        prompts = [writing_prompt(self.settings, task) for task in tasks]
        first = self.client.backends[:1]
        replies = await self.client.replies(prompts, step, stats, until, backends=first)
        return {task.id: reply for task, reply in zip(tasks, replies[0], strict=True)}

    def _with_rubric(self, one: JudgedText, written: Mapping[str, Rubric | None]) -> JudgedText | None:
        """Return the text with its rubric and the leaves that patterns decide; None if a rubric is missing."""
        trees = []
        for name in self.settings.rubrics:
            of_task = self.world.rubric(one.task) if name == TASK_RUBRIC else written.get(one.task.id)
            if (tree := self._fixed.get(name, of_task)) is None:
                return None
            trees.append(tree)
        if not trees:
            return one
        tree = trees[0] if len(trees) == 1 else Rubric("rubric", 1.0, tuple(trees))
        rules = {**tree.rules(one.text), **one.rules} if self.settings.rubric_rules else {}
        return replace(one, rubric=tree, rules=rules)

    def _graded(
        self, num: int, members: Sequence[int], results: Sequence[GroupValues], stats: GradingStats
    ) -> GradedGroup:
        """Return the values over all judges and samples of the `members`; the rest of the `num` texts has none."""
        values, stds = list[float | None]([None] * num), [0.0] * num
        leaves = list[Mapping[str, bool]]([{}] * num)
        for result in results:
            stats.counts += Counter(pairs=result.pairs, flips=result.flips, quotes=result.quotes)
            stats.counts += Counter(unsupported=result.unsupported, half_first_wins=round(2 * result.first_wins))
        for place, number in enumerate(members):
            known = [value for result in results if (value := result.values[place]) is not None]
            if known:
                values[number], stds[number] = combine(self.settings, known)
            if results and results[0].leaves:
                leaves[number] = results[0].leaves[place]
        if self.settings.num_replies > 1:
            stats.stds += [std for std, value in zip(stds, values, strict=True) if value is not None]
        return GradedGroup(values, stds, leaves)


def reference_of(world: World, task: Task) -> str:
    """Return the reference answer of a task: an accepted answer, a truth that is text, or the expert's; else ""."""
    if isinstance(task.truth, ExpectedAnswers):
        return task.truth.accepted[0]
    if isinstance(task.truth, str):
        return task.truth
    expert = world.expert(task)
    return "" if expert is None else str(expert.messages[-1]["content"])
