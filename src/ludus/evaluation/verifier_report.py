"""Measure a verifier: truth types, speed, stability, acceptance of paraphrases and wrong answers, distinct tasks."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ludus.envs.base import World
from ludus.evaluation.env_audit import AuditEpisode, CheckPlan, CheckReport, Mark, run_agents
from ludus.evaluation.scripted_agents import UNITS, Agent, AgentKind, actions_of, plain_answer, user_prompt
from ludus.evaluation.stats import wilson
from ludus.rewards.exact_match import ExpectedAnswers, normalise
from ludus.types import Action, Message, Task, Timings, Trajectory

MIN_TRIALS = 4
"""Minimum number of trials for a rate to affect a verdict."""
MIN_ACCEPTED = 0.3
"""Acceptance rate of rewritten correct answers below which a verifier fails."""
SLOW_MS = 2000.0
"""Mean grading time, in milliseconds, above which the verdict is `doubtful`."""
GRADINGS = 5
"""Number of gradings per trajectory."""
REGRADINGS = 2
"""Number of repeated gradings by an environment that grades at the end of an episode."""
BASELINES = ("null", "idle", "echo", "majority answer")
"""Names of the agents that use neither tools nor task knowledge."""
EPISODES = 16
"""Number of episodes that measure throughput and replays."""
_PARTICLES = "de|da|di|do|du|del|della|la|le|el|al|of|the|and|van|von|y|e"


@dataclass(frozen=True, slots=True)
class VerdictShare:
    """A count `part` out of `whole`; its value is 0 if `whole` is 0."""

    part: int
    whole: int

    @property
    def value(self) -> float:
        return self.part / self.whole if self.whole else 0.0

    def __str__(self) -> str:
        return f"{self.part} of {self.whole}"


@dataclass(frozen=True, slots=True)
class ScorecardRow:
    """A property of a verifier, its measurement, mark, and the reason unless the mark is `pass`."""

    name: str
    found: str
    mark: Mark = "pass"
    why: str = ""


def _row(name: str, found: str, why: str, *, fails: bool = False, doubtful: bool = False) -> ScorecardRow:
    mark: Mark = "fail" if fails else "doubtful" if doubtful else "pass"
    return ScorecardRow(name, found, mark, "" if mark == "pass" else why)


async def scorecard(report: CheckReport, plan: CheckPlan) -> list[ScorecardRow]:
    """Measure the verifier of a checked world. Raises WorldError if a reward fails now."""
    tasks = report.world.tasks(plan.split)
    truths = Counter(type(task.truth).__name__ for task in tasks)
    plays = [play for row in report.rows for play in row.plays if play.trajectory is not None]
    grading_ms, unstable = await _gradings(report.world, plays, plan)
    alone, together = await _speed(report, plan, 1), await _speed(report, plan, plan.concurrency)
    rewritten, corrupted = await perturbed(report, plan)
    replayed, paraphrased = await _replayed(report, plan), await _paraphrased(report, plan)
    values = {round(play.share, 9) for play in plays}
    speed = f"{alone:,.0f} episodes/s alone, {together:,.0f} with {plan.concurrency} at once"
    slow = "A grading takes seconds and delays training."
    return [
        ScorecardRow("truth", ", ".join(f"{name} ({count} tasks)" for name, count in truths.items())),
        _row("speed", f"{grading_ms:.3f} ms per grading", slow, doubtful=grading_ms > SLOW_MS),
        ScorecardRow("parallelism", speed),
        _noise("stability, graded again", unstable, "trajectories"),
        _noise("stability, replayed", replayed, "episodes"),
        _accepts("paraphrases", paraphrased, "none available", "paraphrased answers or alternative solutions"),
        _accepts("rewritten answers", rewritten, "nothing to rewrite", "answers in other case, spacing or punctuation"),
        wrong_answers_row(corrupted),
        errors_row(paraphrased, rewritten, corrupted),
        ScorecardRow("outcome", f"graded, {len(values)} values seen" if len(values) > 2 else "two values at most"),
        _distinct(tasks),
        _saturation(report),
    ]


def _distinct(tasks: Sequence[Task]) -> ScorecardRow:
    """Return the row on tasks of the split that differ in more than identifiers, names and numbers."""
    share = VerdictShare(len({form_of(user_prompt(task)) for task in tasks}), len(tasks))
    alike = f"The prompts of {share.whole:,} tasks differ only in names and numbers."
    found = f"{share} without identifiers, names and numbers"
    return _row("distinct tasks", found, alike, doubtful=share.whole >= 50 and share.part < 5)


def _saturation(report: CheckReport) -> ScorecardRow:
    """Return the row on tasks that one of the `BASELINES` solves."""
    baselines = [play for row in report.rows if row.agent.name in BASELINES for play in row.plays]
    share = VerdictShare(len({play.task.id for play in baselines if play.succeeded}), len(report.tasks))
    found = f"{share} tasks solved by null, idle, echo or the majority answer"
    many = share.value > 0.5 and share.whole >= MIN_TRIALS
    easy = f"Agents without tools and skill solve {share} tasks."
    return _row("saturation", found, easy, fails=many, doubtful=share.value > 0.25)


def form_of(text: str) -> str:
    """Return a text without identifiers, names and numbers, which characterises the kind of task.

    Names are quoted, capitalised or mixed words, addresses and files, and sequences of them, with particles.
    """
    plain = re.sub(r"\"[^\"]*\"|'[^'\s][^']*'(?!\w)", "N", text)
    plain = re.sub(r"\S+@\S+\w|\b[\w-]+(?:\.[a-z]\w{1,4})+\b", "N", plain)
    plain = re.sub(r"[-+]?\d[\d.,:/-]*\d|\d", "0", plain)
    plain = re.sub(r"\b\w*(?:\d\w*[A-Za-z_]|[A-Za-z_]\w*\d|\w_\w)\w*\b", "N", plain)
    plain = re.sub(r"(?<![.?!\n] )(?<!^)\b[^\W\d_a-zà-öø-ÿ][\w'’-]*", "N", plain)
    plain = re.sub(rf"\bN(?:[\s,-]+(?:(?:{_PARTICLES})[\s-]+)*N\b)+", "N", plain)
    return " ".join(plain.split()).casefold()


async def _gradings(world: World, plays: Sequence[AuditEpisode], plan: CheckPlan) -> tuple[float, VerdictShare]:
    """Return the milliseconds per grading, and the share of trajectories whose reward differs between gradings."""
    if graded := [play for play in plays if play.environment is not None]:
        step = max(1, len(graded) / EPISODES)
        plays = [graded[int(i * step)] for i in range(min(EPISODES, len(graded)))]
    num = unstable = 0
    seconds = 0.0
    plan.watch.phase("graded again", len(plays))
    for play in plays:
        if play.trajectory is None:
            continue
        before, found, spent = await (_regraded if graded else _graded)(world, play, play.trajectory, plan)
        unstable += any(one.rewards != before.rewards for one in found)
        num, seconds = num + len(found), seconds + spent
        plan.watch.done(f"{1000 * spent / max(1, len(found)):.3g} ms per grading")
    return 1000 * seconds / max(num, 1), VerdictShare(unstable, len(plays))


Gradings = tuple[Trajectory, Sequence[Trajectory], float]
"""A trajectory to compare with, the graded ones, and their seconds."""


async def _graded(world: World, play: AuditEpisode, trajectory: Trajectory, plan: CheckPlan) -> Gradings:
    plain = replace(trajectory, timings=Timings())
    found = await asyncio.gather(*(plan.scoring.scored(world, None, play.task, plain) for _ in range(GRADINGS)))
    return found[0], found, sum(one.timings.grading_s for one in found)


async def _regraded(world: World, play: AuditEpisode, trajectory: Trajectory, plan: CheckPlan) -> Gradings:
    """Grade again one after the other, in an environment that grades at the end."""
    begin, found = time.perf_counter(), []
    for _ in range(REGRADINGS):
        report = None if play.environment is None else await play.environment.grade_again()
        if report is None:
            break
        kept = [outcome for outcome in trajectory.outcomes if outcome.tool != report.tool]
        left = replace(trajectory, outcomes=(*kept, report))
        found.append(await plan.scoring.scored(world, None, play.task, left))
    return trajectory, found, time.perf_counter() - begin


async def _speed(report: CheckReport, plan: CheckPlan, concurrency: int) -> float:
    """Return the episodes per second of the oracle, else the demonstrations, the random calls or the first agent."""
    ranks = {AgentKind.ORACLE: 0, AgentKind.SHOWN: 1}
    agents = [row.agent for row in report.rows if row.plays]
    agent = min(agents, key=lambda one: ranks.get(one.kind, 2 + (one.name != "random calls")))
    tasks = report.tasks[:EPISODES]
    plan.watch.phase(f"speed, {concurrency} at a time", len(tasks))
    begin = time.perf_counter()
    (row,) = await run_agents(report.world, tasks, [agent], replace(plan, concurrency=concurrency))
    return len(row.plays) / (time.perf_counter() - begin)


async def _replayed(report: CheckReport, plan: CheckPlan) -> VerdictShare:
    """Count episodes whose reward changes when their actions are replayed."""
    tasks, agents = report.tasks[:EPISODES], [row.agent for row in report.rows]
    changed = num = 0
    plan.watch.phase("played again", len(agents) * len(tasks))
    for before, after in zip(report.rows, await run_agents(report.world, tasks, agents, plan), strict=True):
        first = {play.task.id: play for play in before.plays}
        for play in after.plays:
            one = first[play.task.id].trajectory
            if one is not None and play.trajectory is not None:
                num += 1
                changed += one.rewards != play.trajectory.rewards
    return VerdictShare(changed, num)


async def _paraphrased(report: CheckReport, plan: CheckPlan) -> VerdictShare:
    shown = [task for task in report.tasks if report.shown.get(task.id)]
    texts = [(task, text) for task in shown for text in _others(report.world, task)]
    ways = [(t, actions_of(way)) for t in shown[:EPISODES] for way in report.world.alternative_solutions(t)]
    num = len(texts) + len(ways)
    plan.watch.phase("paraphrases", num)
    accepted = await _num_accepted(report, texts, plan) + await _num_rewarded(report, ways, plan)
    return VerdictShare(accepted, num)


async def perturbed(report: CheckReport, plan: CheckPlan) -> tuple[VerdictShare, VerdictShare]:
    """Return the shares of rewritten correct answers and of near-miss wrong answers that are accepted."""
    answers = [(task, answer) for task in report.tasks[:EPISODES] if (answer := plain_answer(task)) is not None]
    offers = report.world.implements("paraphrases")
    right = [(task, text) for task, answer in answers if not offers for text in rewritten(answer)]
    wrong = [(task, text) for task, answer in answers for text in near_misses(task, answer)]
    plan.watch.phase("perturbed", len(right) + len(wrong))
    num_right, num_wrong = await _num_accepted(report, right, plan), await _num_accepted(report, wrong, plan)
    return VerdictShare(num_right, len(right)), VerdictShare(num_wrong, len(wrong))


def rewritten(answer: str) -> list[str]:
    """Return the answer with other case, spacing, a full stop, and other characters."""
    wide = answer.replace(" ", "\u00a0")
    tried = [f"  {answer} ", f"{answer}\n", f"{answer}.", answer.upper(), answer.lower(), wide]
    return list(dict.fromkeys(text for text in tried if text != answer))


def near_misses(task: Task, answer: str) -> list[str]:
    """Return wrong answers near the correct one, all not accepted: negated, other number or unit, misspelt, cut."""
    tried = [f"not {answer}", f"{answer} or something else entirely", f"I doubt that it is {answer}"]
    if found := re.search(r"\d+", answer):
        number = str(int(found[0]) + 1)
        tried += [answer[: found.start()] + number + answer[found.end() :], f"{answer}0"]
    for unit, wrong in UNITS:
        if re.search(rf"(?<=\d)\s*{re.escape(unit)}(?!\w)", answer):
            tried.append(re.sub(rf"{re.escape(unit)}(?!\w)", wrong, answer))
    if len(answer) > 4 and not answer[0].isdigit():
        middle = len(answer) // 2
        tried += [answer[:middle].strip(), answer[:middle] + "qx" + answer[middle:]]
    right = [answer, *(task.truth.accepted if isinstance(task.truth, ExpectedAnswers) else ())]
    return [text for text in tried if normalise(text) not in map(normalise, right)]


async def _num_accepted(report: CheckReport, texts: Sequence[tuple[Task, str]], plan: CheckPlan) -> int:
    """Count the accepted answers; each replaces the last turn of the known solution."""
    variants = []
    for task, text in texts:
        last = actions_of([Message(role="assistant", content=text)])
        variants.append((task, (*report.shown.get(task.id, ())[:-1], *last)))
    return await _num_rewarded(report, variants, plan)


async def _num_rewarded(report: CheckReport, variants: Sequence[tuple[Task, Sequence[Action]]], plan: CheckPlan) -> int:
    """Count the rewarded variants of solutions."""
    semaphore = asyncio.Semaphore(plan.concurrency)

    async def one(task: Task, turns: Sequence[Action]) -> int:
        agent = Agent("variant", AgentKind.ORACLE, "a variant of the solution", lambda task, tools: turns)
        async with semaphore:
            (row,) = await run_agents(report.world, [task], [agent], plan)
        return row.num_successes

    return sum(await asyncio.gather(*(one(*variant) for variant in variants)))


def _others(world: World, task: Task) -> list[str]:
    """Return paraphrases of the correct answer from the world, else from the accepted answers."""
    if world.implements("paraphrases"):
        return list(world.paraphrases(task))
    if not isinstance(task.truth, ExpectedAnswers):
        return []
    first = normalise(task.truth.accepted[0])
    others = [text for text in task.truth.accepted[1:] if normalise(text) != first]
    return [*others[:3], f" {task.truth.accepted[0].upper()}."]


def _noise(what: str, changed: VerdictShare, which: str) -> ScorecardRow:
    why = f"The verifier is not stable: the reward of {changed} {which} changes."
    return _row(what, f"{changed} {which} change", why, fails=changed.value > 0.05, doubtful=changed.part > 0)


def _accepts(what: str, accepted: VerdictShare, empty: str, which: str) -> ScorecardRow:
    why = f"The verifier rejects {accepted.whole - accepted.part} of {accepted.whole} correct {which}."
    few = accepted.value < MIN_ACCEPTED and accepted.whole >= MIN_TRIALS
    if not accepted.whole:
        return ScorecardRow(what, empty)
    return _row(what, f"{accepted} accepted", why, fails=few, doubtful=accepted.value < 0.9)


def wrong_answers_row(accepted: VerdictShare) -> ScorecardRow:
    """Return the row on wrong answers near the correct one."""
    what, found = "wrong answers near the truth", f"{accepted} accepted" if accepted.whole else "none available"
    why = f"The verifier accepts {accepted} wrong answers near the correct one (negated, cut, other numbers)."
    many = accepted.value > 0.1 and accepted.whole >= MIN_TRIALS
    return _row(what, found, why, fails=many, doubtful=accepted.part > 0)


def errors_row(paraphrased: VerdictShare, rewritten: VerdictShare, corrupted: VerdictShare) -> ScorecardRow:
    """Return the row on rejected correct answers and accepted wrong ones, with intervals."""
    right = paraphrased.whole + rewritten.whole
    refused = VerdictShare(right - paraphrased.part - rewritten.part, right)
    return ScorecardRow("errors", f"false negatives {_rate(refused)}; false positives {_rate(corrupted)}")


def _rate(share: VerdictShare) -> str:
    interval = wilson(share.part, share.whole) if share.whole else None
    return f"{share} [{interval.low:.1%}, {interval.high:.1%}]" if interval else str(share)
