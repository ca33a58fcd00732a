"""Whether an environment pays for what it is about: scripted agents play it, and none may cheat its way.

An agent that does not do the task (`AgentKind.CHEAT`) is paid where it gets more than a tenth of the
outcome's reward on one task; what shaping gives it is reported. One that guesses (`AgentKind.CHANCE`) is paid
where more than half of its tasks go to it, by the low end of the interval. A task on which doing nothing is
right says so by the tag `null = "true"`; there a cheat may be paid, and such tasks are counted apart. Oracles
have to succeed on all tasks, demonstrations on one.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal, Protocol

from ludus.envs.base import Regradable, World, check_tasks
from ludus.errors import ConfigError, LudusError, UserError, WorldError
from ludus.evaluation.scripted_agents import Agent, AgentKind, ScriptedChatSession, actions_of, asked, cheats, knowing
from ludus.evaluation.stats import Interval, wilson
from ludus.rewards.base import Reward, success
from ludus.rollout.episode import EpisodeLimits, fresh_environment, run_unscored
from ludus.rollout.reward_executor import RewardExecutor, RewardTimeout, ThreadRewardExecutor
from ludus.types import Action, StopReason, Task, Trajectory

NULL_TAG = "null"
"""The tag that says by "true" that doing nothing is right."""
CHEAT_SHARE = 0.1
"""Above this share of the full outcome an episode of a cheat counts as paid."""
PAID_SHARE = 0.5
"""From this share of the full outcome on, an episode of an agent that guesses counts as paid."""
LUCK = 0.5
"""The share of tasks that may go to an agent that guesses."""
START_TASKS = 6
"""Tasks on which training checks its environment before its first step."""
MOST_LATE = 2
"""Rewards that may be late in a check, all agents together; it ends with the last of them."""
NUM_DEMONSTRATIONS = 2000
"""How many demonstrations are looked through for ones of the tasks."""


Mark = Literal["pass", "doubtful", "fail"]
"""What a row of a check comes to; a single `fail` makes the check fail."""


class AuditProgress(Protocol):
    """Whoever watches a check: a progress bar."""

    def phase(self, name: str, total: int) -> None:
        """So many things follow, called so."""
        ...

    def done(self, what: str = "") -> None:
        """One of them has been done."""
        ...


class SilentProgress:
    """A check that nobody watches."""

    def phase(self, name: str, total: int) -> None:
        """Nothing is shown."""

    def done(self, what: str = "") -> None:
        """Nothing is shown."""


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """What is played: `num_tasks` tasks of a split, drawn by the seed, `concurrency` episodes at a time; and
    where their rewards are computed, and who watches."""

    split: str = "train"
    num_tasks: int = 50
    seed: int = 0
    concurrency: int = 8
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    scoring: RewardExecutor = field(default_factory=ThreadRewardExecutor, repr=False, compare=False)
    watch: AuditProgress = field(default_factory=SilentProgress, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class AuditEpisode:
    """An episode of an agent. `share` is that of the full outcome; `failure` is empty where it was played.

    `shaping` is what the parts that are no outcome gave, weights included. `excused`: doing nothing is right
    on this task. `environment` is kept where it can grade again what it graded. `late`: its rewards took too
    long, which is its failure.
    """

    task: Task
    trajectory: Trajectory | None
    succeeded: bool = False
    share: float = 0.0
    failure: str = ""
    shaping: float = 0.0
    environment: Regradable | None = field(default=None, repr=False, compare=False)
    late: bool = False

    @property
    def excused(self) -> bool:
        """Whether doing nothing is right."""
        return self.task.tags.get(NULL_TAG) == "true"


@dataclass(frozen=True)
class AuditRow:
    """What an agent got. `plays` lacks the tasks in which it has nothing to do."""

    agent: Agent
    plays: Sequence[AuditEpisode]

    @property
    def counted(self) -> list[AuditEpisode]:
        """The episodes that count: for a cheat those on which doing nothing is wrong. Failed ones do not."""
        forgives = self.agent.kind in (AgentKind.CHEAT, AgentKind.CHANCE)
        return [play for play in self.plays if not play.failure and not (forgives and play.excused)]

    @property
    def excused(self) -> list[AuditEpisode]:
        """The episodes that are counted apart."""
        counted = {play.task.id for play in self.counted}
        return [play for play in self.plays if not play.failure and play.task.id not in counted]

    @property
    def failures(self) -> list[AuditEpisode]:
        """The episodes in which the environment broke."""
        return [play for play in self.plays if play.failure]

    @property
    def broke(self) -> str:
        """What the environment said first, where it broke in every episode; else empty."""
        return self.failures[0].failure if self.plays and len(self.failures) == len(self.plays) else ""

    @property
    def mean_reward(self) -> float:
        """Over the episodes that count, all parts together; 0 without any."""
        rewards = [play.trajectory.reward for play in self.counted if play.trajectory is not None]
        return sum(rewards) / len(rewards) if rewards else 0.0

    @property
    def most_shaping(self) -> float:
        """The most that parts without outcome gave in an episode that counts; 0 without any."""
        return max((play.shaping for play in self.counted), default=0.0)

    @property
    def num_successes(self) -> int:
        """Episodes that count and solved their tasks."""
        return sum(play.succeeded for play in self.counted)

    @property
    def interval(self) -> Interval:
        """Of the success rate, 95 %. Raises ValueError without episodes."""
        return wilson(self.num_successes, len(self.counted))

    @property
    def problem(self) -> str:
        """What is wrong, in one sentence; empty where nothing is."""
        cheats = self.agent.kind is AgentKind.CHEAT
        paid = [p for p in self.counted if (p.share > CHEAT_SHARE if cheats else p.share >= PAID_SHARE)]
        unpaid = [play for play in self.counted if not play.succeeded]
        name = self.agent.name
        if self.broke:
            return f"The environment broke in every episode of the agent {name}: {self.broke}"
        if cheats and paid:
            return f"The agent {name} ({self.agent.what}) is paid on {_named(paid)}."
        if self.agent.kind is AgentKind.CHANCE and self.counted and wilson(len(paid), len(self.counted)).low > LUCK:
            share = len(paid) / len(self.counted)
            return f"The agent {name} ({self.agent.what}) is paid on {share:.0%} of tasks: {_named(paid)}."
        if self.agent.kind is AgentKind.ORACLE and unpaid:
            return f"The agent {name} is not paid on {_named(unpaid)}{_stopped(unpaid)}."
        if self.agent.kind is AgentKind.SHOWN and self.counted and not self.num_successes:
            return f"No demonstration is paid, not that of {_named(unpaid[:1])}{_stopped(unpaid)}."
        return ""

    @property
    def mark(self) -> Mark:
        """`doubtful` is an agent that guesses and is paid on a quarter of its tasks, or a broken episode."""
        if self.problem:
            return "fail"
        guesses = self.agent.kind is AgentKind.CHANCE and self.counted
        lucky = guesses and self.num_successes / len(self.counted) > LUCK / 2 and len(self.counted) > 4
        return "doubtful" if lucky or self.failures else "pass"


@dataclass(frozen=True)
class CheckReport:
    """What all agents got, and the turns that solve tasks, by task id, where the world shows any."""

    world: World
    tasks: Sequence[Task]
    rows: Sequence[AuditRow]
    shown: Mapping[str, Sequence[Action]]

    @property
    def problems(self) -> list[str]:
        """One sentence for each agent that is paid and should not be, or the other way round, and for each
        cause that broke all episodes of agents."""
        return problems_of(self.rows)

    @property
    def shaped(self) -> Mapping[str, float]:
        """The most that shaping gave each cheat in an episode, by its name, where it gave anything."""
        cheats = [row for row in self.rows if row.agent.kind is AgentKind.CHEAT]
        return {row.agent.name: row.most_shaping for row in cheats if row.most_shaping > 0}


def problems_of(rows: Sequence[AuditRow]) -> list[str]:
    """The problems of the rows. A cause that breaks all episodes of several agents is told once, also where
    one of them met it through a tool."""
    said = [row.broke for row in rows if row.broke]
    causes: dict[str, list[str]] = {}
    for row in rows:
        if row.broke:
            cause = min((other for other in said if other in row.broke), key=len)
            causes.setdefault(cause, []).append(row.agent.name)
    found = {
        f"The environment broke in every episode of the agent{'s' * (len(names) > 1)} {', '.join(names)}: {cause}": None
        for cause, names in causes.items()
    }
    return [*found, *(row.problem for row in rows if row.problem and not row.broke)]


def check_world(world: World, plan: CheckPlan) -> CheckReport:
    """Let all agents play some tasks. For use outside an event loop.

    Raises WorldError where `MOST_LATE` rewards were late.
    """
    tasks = some_tasks(world, plan)
    shown, flawless = solutions(world, tasks)
    agents = (*cheats(tasks, vocabulary(tasks), plan.seed), *_own_cheats(world, tasks))
    agents = (*agents, *knowing(tasks, shown, flawless))
    plan.watch.phase(f"{world.name}: agents play", len(agents) * len(tasks))
    return CheckReport(world, tasks, asyncio.run(play_all(world, tasks, agents, plan)), shown)


def refuse_cheats(world: World, plan: CheckPlan) -> None:
    """A few of the plan's tasks for each agent that must not be paid. For use outside an event loop.

    Raises ConfigError, naming agent and task, where one is, and WorldError where `MOST_LATE` rewards were
    late. Episodes in which the environment breaks otherwise say nothing here.
    """
    plan = replace(plan, num_tasks=START_TASKS)
    tasks = some_tasks(world, plan)
    agents = (*cheats(tasks, vocabulary(tasks), plan.seed), *knowing(tasks, {}, flawless=False)[:2])
    plan.watch.phase(f"{world.name}: agents that must not be paid", len(agents) * len(tasks))
    rows = asyncio.run(play_all(world, tasks, agents, plan))
    problems = [row.problem for row in rows if row.counted and row.problem]
    if problems:
        raise ConfigError(
            f"The world {world.name!r} pays for cheating. {problems[0]}",
            "Mend its rewards (`ludus env check` says more), mark tasks on which doing nothing is right by "
            "the tag null = 'true', or set env.check false.",
        )


def some_tasks(world: World, plan: CheckPlan) -> list[Task]:
    """Tasks of the plan's split, in its order. Raises UserError for a split without any."""
    tasks = world.tasks(plan.split)
    if not tasks:
        raise UserError(f"The split {plan.split!r} of the world {world.name!r} is empty.", "Name another.")
    check_tasks(plan.split, tasks)
    chosen = random.Random(plan.seed).sample(range(len(tasks)), min(plan.num_tasks, len(tasks)))
    return [tasks[i] for i in sorted(chosen)]


def _own_cheats(world: World, tasks: Sequence[Task]) -> tuple[Agent, ...]:
    """The cheats that the world itself knows."""
    plans: dict[str, dict[str, Sequence[Action]]] = {}
    for task in tasks:
        for name, messages in world.cheats(task).items():
            plans.setdefault(name, {})[task.id] = actions_of(messages)
    return tuple(_scripted(name, plan) for name, plan in plans.items())


def _scripted(name: str, plan: Mapping[str, Sequence[Action]]) -> Agent:
    return Agent(name, AgentKind.CHEAT, "a cheat of this world", lambda task, _: plan.get(task.id))


def vocabulary(tasks: Sequence[Task]) -> list[str]:
    """The words of the prompts, without punctuation around them."""
    said = " ".join(asked(task) for task in tasks)
    return list(dict.fromkeys(re.findall(r"\w(?:[\w'.-]*\w)?", said)))


def solutions(world: World, tasks: Sequence[Task]) -> tuple[dict[str, Sequence[Action]], bool]:
    """The turns that solve tasks, by task id, and whether all of them claim to be right.

    They come from the world's expert, else from its demonstrations; empty where it has neither.
    """
    if world.implements("expert"):
        shown = {task.id: world.expert(task) for task in tasks}
        found = {name: actions_of(one.messages) for name, one in shown.items() if one is not None}
        if found:
            return dict(found), True
    return (_demonstrated(world, tasks), False) if world.implements("demonstrations") else ({}, False)


def _demonstrated(world: World, tasks: Sequence[Task]) -> dict[str, Sequence[Action]]:
    """The first demonstration of each task, among the first ones of the world."""
    wanted = {str(task.prompt): task for task in tasks}
    lengths = {len(task.prompt) for task in tasks}
    found: dict[str, Sequence[Action]] = {}
    try:
        for dialogue in islice(world.demonstrations(0), NUM_DEMONSTRATIONS):
            for length in lengths:
                task = wanted.pop(str(tuple(dialogue.messages[:length])), None)
                if task is not None:
                    found[task.id] = actions_of(dialogue.messages[length:])
            if not wanted:
                break
    except UserError:  # a world that shows nothing says so by this
        return {}
    return found


async def play_all(world: World, tasks: Sequence[Task], agents: Sequence[Agent], plan: CheckPlan) -> list[AuditRow]:
    """Each agent on each task, in fresh environments.

    Raises WorldError where `MOST_LATE` rewards were late.
    """
    places = asyncio.Semaphore(plan.concurrency)
    late: list[AuditEpisode] = []

    async def one(agent: Agent, task: Task) -> AuditEpisode | None:
        async with places:
            played = await play(world, task, agent, plan)
        plan.watch.done(agent.name)
        if played is not None and played.late:
            late.append(played)
            if len(late) >= MOST_LATE:
                raise WorldError(
                    f"{len(late)} rewards of the world {world.name!r} were late, and its check ends with "
                    f"them. {late[0].failure}",
                    "At the start of training env.check = false leaves it out.",
                )
        return played

    rows = []
    for agent in agents:
        plays = await asyncio.gather(*(one(agent, task) for task in tasks))
        rows.append(AuditRow(agent, [play for play in plays if play is not None]))
    return rows


async def play(world: World, task: Task, agent: Agent, plan: CheckPlan) -> AuditEpisode | None:
    """An episode of an agent; None where it has nothing to do in it."""
    try:
        environment = fresh_environment(world, task)
        actions = agent.plan(task, environment.tools)
        if not actions:
            return None
        conversation = ScriptedChatSession(actions)
        played = await run_unscored(task, 0, environment, conversation, plan.limits)
        trajectory = await plan.scoring.scored(world, environment, task, played)
    except LudusError as error:
        return AuditEpisode(task, None, failure=str(error), late=isinstance(error, RewardTimeout))
    rewards = environment.rewards
    share = outcome_share(rewards, trajectory)
    shaped = shaping_of(rewards, trajectory)
    again = environment if isinstance(environment, Regradable) else None
    solved = success(rewards, trajectory)
    return AuditEpisode(task, trajectory, solved, share, shaping=shaped, environment=again)


def outcome_share(rewards: Sequence[Reward], trajectory: Trajectory) -> float:
    """The weighted outcome as a share of its full value, 1 for each outcome part."""
    weights = {part.name: part.weight for part in rewards if part.outcome}
    earned = sum(weight * trajectory.rewards.get(name, 0.0) for name, weight in weights.items())
    return earned / sum(weights.values())


def shaping_of(rewards: Sequence[Reward], trajectory: Trajectory) -> float:
    """The weighted sum of the parts that are no outcome."""
    return sum(part.weight * trajectory.rewards.get(part.name, 0.0) for part in rewards if not part.outcome)


def _named(plays: Sequence[AuditEpisode]) -> str:
    first = f"task {plays[0].task.id!r}"
    return first if len(plays) == 1 else f"{first} and {len(plays) - 1} more"


def _stopped(plays: Sequence[AuditEpisode]) -> str:
    """Why the first of these episodes ended, where that was not by an answer."""
    trajectory = plays[0].trajectory
    if trajectory is None or trajectory.stop_reason is StopReason.ANSWERED:
        return ""
    return f" (which ended with {trajectory.stop_reason})"
