"""What a verifier is like: its truth, speed and noise, and how many different tasks there are."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ludus.envs.base import World
from ludus.evaluation.env_audit import AuditEpisode, CheckPlan, CheckReport, play_all
from ludus.evaluation.perturb import other, plain_answer, same
from ludus.evaluation.scripted_agents import Agent, AgentKind, actions_of, asked
from ludus.rewards.exact_match import ExpectedAnswers, normalise
from ludus.tools.base import Tool
from ludus.types import Action, Message, Task, Timings

GRADINGS = 5
"""How often each trajectory is graded."""
REGRADINGS = 2
"""How often an environment grades again what it graded at its end."""
BASELINES = ("null", "idle", "echo", "majority answer")
"""The agents that need no tool and no skill."""
EPISODES = 16
"""Episodes by which parallelism and replays are measured."""
_PARTICLES = "de|da|di|do|du|del|della|la|le|el|al|of|the|and|van|von|y|e"


@dataclass(frozen=True, slots=True)
class VerdictShare:
    """`part` of `whole`."""

    part: int
    whole: int

    @property
    def value(self) -> float:
        """As a number; 0 of nothing."""
        return self.part / self.whole if self.whole else 0.0


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The verifier's rule in numbers.

    `truths` counts the tasks by the type of their truth. `grading_ms` is the mean time of a grading: where an
    environment runs tests at its end, of running them on what was left then.
    `alone_per_s` and `together_per_s` are episodes of a scripted agent a second, one at a time and
    `concurrency` at once, the world's own work included. `unstable` counts
    trajectories whose reward differs between gradings, `replayed` episodes whose reward differs when the same
    actions are played again, `paraphrased` right answers in other words and right episodes done otherwise
    that are accepted. `rewritten` are right answers in other case, with blanks and the like, and `spoilt`
    wrong ones near the right one, each of those that were accepted: of tasks whose truth is an answer, the
    former where a world offers no paraphrases. `values` are those that the outcome took. `distinct` counts
    the tasks of the split that differ in more than identifiers,
    names and numbers. `saturated` counts the tasks that an agent without tools and skill solves.
    """

    truths: Mapping[str, int]
    grading_ms: float
    alone_per_s: float
    together_per_s: float
    concurrency: int
    unstable: VerdictShare
    replayed: VerdictShare
    paraphrased: VerdictShare
    rewritten: VerdictShare
    spoilt: VerdictShare
    values: tuple[float, ...]
    distinct: VerdictShare
    saturated: VerdictShare

    @property
    def is_graded(self) -> bool:
        """Whether the outcome took values besides its lowest and its highest."""
        return len(self.values) > 2


def scorecard(report: CheckReport, plan: CheckPlan) -> Scorecard:
    """The scorecard of a world that was checked. For use outside an event loop.

    Raises WorldError where a reward fails that went well in the check.
    """
    return asyncio.run(_scorecard(report, plan))


async def _scorecard(report: CheckReport, plan: CheckPlan) -> Scorecard:
    tasks = report.world.tasks(plan.split)
    plays = [play for row in report.rows for play in row.plays if play.trajectory is not None]
    grading_ms, unstable = await _gradings(report.world, plays, plan)
    alone = await _speed(report, plan, 1)
    together = await _speed(report, plan, plan.concurrency)
    rewritten, spoilt = await perturbed(report, plan)
    return Scorecard(
        truths=Counter(type(task.truth).__name__ for task in tasks),
        grading_ms=grading_ms,
        alone_per_s=alone,
        together_per_s=together,
        concurrency=plan.concurrency,
        unstable=unstable,
        replayed=await _replayed(report, plan),
        paraphrased=await _paraphrased(report, plan),
        rewritten=rewritten,
        spoilt=spoilt,
        values=tuple(sorted({round(play.share, 9) for play in plays})),
        distinct=VerdictShare(len({form_of(asked(task)) for task in tasks}), len(tasks)),
        saturated=_saturated(report),
    )


def form_of(text: str) -> str:
    """A text without identifiers, names and numbers: what is left is the kind of task.

    Quoted words, addresses, names of files, words with digits or underscores and capitalised words that do
    not begin a sentence are names; a row of them, also with small words like `of` in it, is one.
    """
    plain = re.sub(r"\"[^\"]*\"|'[^'\s][^']*'(?!\w)", "N", text)
    plain = re.sub(r"\S+@\S+\w|\b[\w-]+(?:\.[a-z]\w{1,4})+\b", "N", plain)
    plain = re.sub(r"[-+]?\d[\d.,:/-]*\d|\d", "0", plain)
    plain = re.sub(r"\b\w*(?:\d\w*[A-Za-z_]|[A-Za-z_]\w*\d|\w_\w)\w*\b", "N", plain)
    plain = re.sub(r"(?<![.?!\n] )(?<!^)\b[^\W\d_a-zà-öø-ÿ][\w'’-]*", "N", plain)
    plain = re.sub(rf"\bN(?:[\s,-]+(?:(?:{_PARTICLES})[\s-]+)*N\b)+", "N", plain)
    return " ".join(plain.split()).casefold()


async def _gradings(world: World, plays: Sequence[AuditEpisode], plan: CheckPlan) -> tuple[float, VerdictShare]:
    """Milliseconds of a grading, and how many trajectories get another reward in one of them."""
    graded = [play for play in plays if play.environment is not None]
    if graded:
        return await _graded_again(world, _spread(graded, EPISODES), plan)
    unstable, seconds = 0, 0.0
    plan.watch.phase("graded again", len(plays))
    for play in plays:
        if play.trajectory is not None:
            plain = replace(play.trajectory, timings=Timings())
            asked = (plan.scoring.scored(world, None, play.task, plain) for _ in range(GRADINGS))
            given = await asyncio.gather(*asked)
            unstable += any(one.rewards != given[0].rewards for one in given)
            spent = sum(one.timings.grading_s for one in given)
            seconds += spent
            plan.watch.done(f"{1000 * spent / GRADINGS:.3g} ms a grading")
    return 1000 * seconds / max(GRADINGS * len(plays), 1), VerdictShare(unstable, len(plays))


async def _graded_again(world: World, plays: Sequence[AuditEpisode], plan: CheckPlan) -> tuple[float, VerdictShare]:
    """As `_gradings`, of what environments graded at their end: they do so again, one at a time."""
    num = unstable = 0
    plan.watch.phase("graded again", len(plays))
    begin = time.perf_counter()
    for play in plays:
        trajectory, changed = play.trajectory, False
        for _ in range(REGRADINGS):
            report = None if play.environment is None else await play.environment.grade_again()
            if trajectory is None or report is None:
                break
            kept = [outcome for outcome in trajectory.outcomes if outcome.tool != report.tool]
            left = replace(trajectory, outcomes=(*kept, report))
            again = await plan.scoring.scored(world, None, play.task, left)
            num += 1
            changed |= again.rewards != trajectory.rewards
        unstable += changed
        plan.watch.done()
    return 1000 * (time.perf_counter() - begin) / max(num, 1), VerdictShare(unstable, len(plays))


def _spread(plays: Sequence[AuditEpisode], most: int) -> Sequence[AuditEpisode]:
    """At most so many of them, from all over."""
    step = max(1, len(plays) / most)
    return [plays[int(i * step)] for i in range(min(most, len(plays)))]


def _best(report: CheckReport) -> Agent:
    """The agent that does most: who knows, or who calls at random, or who talks."""
    played = [row for row in report.rows if row.plays]
    order = (AgentKind.ORACLE, AgentKind.SHOWN)
    knows = [row.agent for kind in order for row in played if row.agent.kind is kind]
    calls = [row.agent for row in played if row.agent.name == "random calls"]
    return [*knows, *calls, played[0].agent][0]


async def _speed(report: CheckReport, plan: CheckPlan, places: int) -> float:
    """Episodes a second with so many at once."""
    agent, tasks = _best(report), report.tasks[:EPISODES]
    plan.watch.phase(f"speed, {places} at a time", len(tasks))
    begin = time.perf_counter()
    (row,) = await play_all(report.world, tasks, [agent], replace(plan, concurrency=places))
    return len(row.plays) / (time.perf_counter() - begin)


async def _replayed(report: CheckReport, plan: CheckPlan) -> VerdictShare:
    """Episodes that earn something else when their actions are played again."""
    tasks = report.tasks[:EPISODES]
    names = {task.id for task in tasks}
    changed = num = 0
    for before, after in zip(report.rows, await _again(report, tasks, plan), strict=True):
        first = {play.task.id: play for play in before.plays if play.task.id in names}
        for play in after:
            one = first[play.task.id].trajectory
            if one is not None and play.trajectory is not None:
                num += 1
                changed += one.rewards != play.trajectory.rewards
    return VerdictShare(changed, num)


async def _again(report: CheckReport, tasks: Sequence[Task], plan: CheckPlan) -> list[Sequence[AuditEpisode]]:
    agents = [row.agent for row in report.rows]
    plan.watch.phase("played again", len(agents) * len(tasks))
    return [row.plays for row in await play_all(report.world, tasks, agents, plan)]


async def _paraphrased(report: CheckReport, plan: CheckPlan) -> VerdictShare:
    """Right answers in other words, and right episodes done otherwise, that succeed, of those to be had."""
    shown = [(task, report.shown[task.id]) for task in report.tasks if report.shown.get(task.id)]
    tried = [(task, turns, text) for task, turns in shown for text in _others(report.world, task)]
    agents = [(task, _with_answer(turns, text)) for task, turns, text in tried]
    ways = _other_ways(report.world, [task for task, _ in shown][:EPISODES])
    accepted = 0
    plan.watch.phase("paraphrases", len(agents) + sum(len(turns) for turns in ways))
    for task, agent in agents:
        (row,) = await play_all(report.world, [task], [agent], plan)
        accepted += row.num_successes
    for turns in ways:
        agent = Agent("other way", AgentKind.ORACLE, "does it otherwise", partial(_turns_of, turns))
        tasks = [task for task, _ in shown if task.id in turns]
        (row,) = await play_all(report.world, tasks, [agent], plan)
        accepted += row.num_successes
    return VerdictShare(accepted, len(agents) + sum(len(turns) for turns in ways))


async def perturbed(report: CheckReport, plan: CheckPlan) -> tuple[VerdictShare, VerdictShare]:
    """The right answers in other writings, and the wrong ones near them, that succeed, of all."""
    answers = [(task, answer) for task in report.tasks[:EPISODES] if (answer := plain_answer(task)) is not None]
    offers = report.world.implements("paraphrases")
    tried = [[(task, text) for task, answer in answers if not offers for text in same(answer)]]
    tried.append([(task, text) for task, answer in answers for text in other(task, answer)])
    plan.watch.phase("perturbed", sum(map(len, tried)))
    found = []
    for texts in tried:
        accepted = 0
        for task, text in texts:
            agent = _with_answer(report.shown.get(task.id, ()), text)
            (row,) = await play_all(report.world, [task], [agent], plan)
            accepted += row.num_successes
        found.append(VerdictShare(accepted, len(texts)))
    return found[0], found[1]


def _other_ways(world: World, tasks: Sequence[Task]) -> list[Mapping[str, Sequence[Action]]]:
    """The first other way of each task by its id, then the second ones, and so on."""
    ways = {task.id: [actions_of(messages) for messages in world.alternative_solutions(task)] for task in tasks}
    most = max(map(len, ways.values()), default=0)
    return [{id_: found[n] for id_, found in ways.items() if len(found) > n} for n in range(most)]


def _turns_of(turns: Mapping[str, Sequence[Action]], task: Task, tools: Sequence[Tool]) -> Sequence[Action]:
    return turns[task.id]


def _others(world: World, task: Task) -> list[str]:
    """Other words for the right answer: the world's own, else those that a truth accepts."""
    if world.implements("paraphrases"):
        return list(world.paraphrases(task))
    if not isinstance(task.truth, ExpectedAnswers):
        return []
    first = normalise(task.truth.accepted[0])
    others = [text for text in task.truth.accepted[1:] if normalise(text) != first]
    return [*others[:3], f" {task.truth.accepted[0].upper()}."]


def _with_answer(turns: Sequence[Action], text: str) -> Agent:
    """An agent that takes these turns and says the text in place of the last one."""
    last = actions_of([Message(role="assistant", content=text)])
    return Agent("paraphrase", AgentKind.ORACLE, "says it in other words", lambda task, _: (*turns[:-1], *last))


def _saturated(report: CheckReport) -> VerdictShare:
    """Tasks that one of the baselines solves, those on which nothing is right included."""
    solved = {
        play.task.id for row in report.rows if row.agent.name in BASELINES for play in row.plays if play.succeeded
    }
    return VerdictShare(len(solved), len(report.tasks))
