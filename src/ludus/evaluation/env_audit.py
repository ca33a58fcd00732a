"""Audit the rewards of an environment with scripted agents: cheats must not be rewarded.

A cheat (`AgentKind.CHEAT`) is rewarded if it gets more than a tenth of the outcome on one task; its shaping rewards
are reported. A guesser (`AgentKind.CHANCE`) is rewarded if the lower end of the interval of its success rate exceeds a
half. A task on which doing nothing is correct has the tag `null = "true"`; there cheats may be rewarded, and such tasks
are counted separately. Oracles must succeed on all tasks, demonstrations on one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.base import Environment, World, check_tasks
from ludus.errors import ConfigError, LudusError, UserError, WorldError
from ludus.evaluation.scripted_agents import (
    Agent,
    AgentKind,
    ScriptedChatSession,
    actions_of,
    blind_agents,
    informed_agents,
)
from ludus.evaluation.stats import wilson
from ludus.rewards.base import success
from ludus.rollouts.episode import fresh_environment, run_unscored
from ludus.rollouts.reward_executor import RewardExecutor, RewardTimeout, ThreadRewardExecutor
from ludus.types import Action, StopReason, Task, Trajectory

NULL_TAG = "null"
"""The tag whose value "true" means that doing nothing is correct."""
CHEAT_SHARE = 0.1
"""Fraction of the full outcome above which an episode of a cheat counts as rewarded."""
PAID_SHARE = 0.5
"""Fraction of the full outcome from which an episode of a guesser counts as rewarded."""
LUCK = 0.5
"""Highest success rate allowed for a guesser."""
START_TASKS = 6
"""Tasks in the check before training."""
MAX_LATE = 2
"""Number of reward timeouts, all agents together, that ends a check."""
NUM_DEMONSTRATIONS = 2000
"""Number of demonstrations searched for the prompts of the sampled tasks."""


Mark = Literal["pass", "doubtful", "fail"]
"""The verdict on a row of a check; one `fail` makes the check fail."""


class AuditProgress:
    """Progress callbacks of a check; the default implementation does nothing."""

    def phase(self, name: str, total: int) -> None:
        """Start a phase of `total` items."""

    def done(self, what: str = "") -> None:
        """Count one item."""


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """Settings of a check: `num_tasks` random tasks of a split, `concurrency` episodes at a time."""

    split: str = "train"
    num_tasks: int = 50
    seed: int = 0
    concurrency: int = 8
    limits: RolloutConfig = field(default_factory=RolloutConfig)
    scoring: RewardExecutor = field(default_factory=ThreadRewardExecutor, repr=False, compare=False)
    watch: AuditProgress = field(default_factory=AuditProgress, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class AuditEpisode:
    """An episode of an agent. `share` is the fraction of the full outcome, `shaping` the sum of the other parts.

    `failure` is empty unless it failed, `late` by a reward timeout. `environment` is set if it supports regrading.
    """

    task: Task
    trajectory: Trajectory | None
    succeeded: bool = False
    share: float = 0.0
    failure: str = ""
    shaping: float = 0.0
    environment: Environment | None = field(default=None, repr=False, compare=False)
    late: bool = False

    @property
    def excused(self) -> bool:
        return self.task.tags.get(NULL_TAG) == "true"


@dataclass(frozen=True)
class AuditRow:
    """The episodes of an agent, without the tasks to which it does not apply."""

    agent: Agent
    plays: Sequence[AuditEpisode]

    @property
    def counted(self) -> list[AuditEpisode]:
        """The episodes that count: not failed, and for cheats and guessers those on which doing nothing is wrong."""
        forgives = self.agent.kind in (AgentKind.CHEAT, AgentKind.CHANCE)
        return [play for play in self.plays if not play.failure and not (forgives and play.excused)]

    @property
    def excused(self) -> list[AuditEpisode]:
        counted = {play.task.id for play in self.counted}
        return [play for play in self.plays if not play.failure and play.task.id not in counted]

    @property
    def failures(self) -> list[AuditEpisode]:
        return [play for play in self.plays if play.failure]

    @property
    def broke(self) -> str:
        """The first error of the environment if it failed in every episode, otherwise ""."""
        return self.failures[0].failure if self.plays and len(self.failures) == len(self.plays) else ""

    @property
    def mean_reward(self) -> float:
        rewards = [play.trajectory.reward for play in self.counted if play.trajectory is not None]
        return sum(rewards) / len(rewards) if rewards else 0.0

    @property
    def max_shaping(self) -> float:
        return max((play.shaping for play in self.counted), default=0.0)

    @property
    def num_successes(self) -> int:
        return sum(play.succeeded for play in self.counted)

    @property
    def problem(self) -> str:
        """Description of the problem in one sentence; empty if there is none."""
        cheats = self.agent.kind is AgentKind.CHEAT
        rewarded = [p for p in self.counted if (p.share > CHEAT_SHARE if cheats else p.share >= PAID_SHARE)]
        unrewarded = [play for play in self.counted if not play.succeeded]
        name = self.agent.name
        if self.broke:
            return f"The environment failed in every episode of the agent {name}: {self.broke}"
        if cheats and rewarded:
            return f"The agent {name} ({self.agent.what}) is rewarded on {_named(rewarded)}."
        if self.agent.kind is AgentKind.CHANCE and self.counted and wilson(len(rewarded), len(self.counted)).low > LUCK:
            share = len(rewarded) / len(self.counted)
            return f"The agent {name} ({self.agent.what}) is rewarded on {share:.0%} of tasks: {_named(rewarded)}."
        if self.agent.kind is AgentKind.ORACLE and unrewarded:
            return f"The agent {name} is not rewarded on {_named(unrewarded)}{_stopped(unrewarded)}."
        if self.agent.kind is AgentKind.SHOWN and self.counted and not self.num_successes:
            return f"No demonstration is rewarded, for example {_named(unrewarded[:1])}{_stopped(unrewarded)}."
        return ""

    @property
    def mark(self) -> Mark:
        """`doubtful`: a guesser that is rewarded on more than a quarter of its tasks, or a failed episode."""
        if self.problem:
            return "fail"
        guesses = self.agent.kind is AgentKind.CHANCE and self.counted
        lucky = guesses and self.num_successes / len(self.counted) > LUCK / 2 and len(self.counted) > 4
        return "doubtful" if lucky or self.failures else "pass"


@dataclass(frozen=True)
class CheckReport:
    """The rows of all agents, and the solutions of the world by task id, if it has any."""

    world: World
    tasks: Sequence[Task]
    rows: Sequence[AuditRow]
    shown: Mapping[str, Sequence[Action]]

    @property
    def problems(self) -> list[str]:
        """One sentence per agent with wrong rewards, and one per error that failed all episodes of agents."""
        broken = [row for row in self.rows if row.broke]
        causes: dict[str, list[str]] = {}
        for row in broken:
            cause = min((other.broke for other in broken if other.broke in row.broke), key=len)
            causes.setdefault(cause, []).append(row.agent.name)
        what = "The environment failed in every episode of the agent"
        found = [f"{what}{'s' * (len(names) > 1)} {', '.join(names)}: {cause}" for cause, names in causes.items()]
        return [*found, *(row.problem for row in self.rows if row.problem and not row.broke)]

    @property
    def shaped(self) -> Mapping[str, float]:
        """The largest shaping reward of each cheat, by name, if positive."""
        cheats = (row for row in self.rows if row.agent.kind is AgentKind.CHEAT)
        return {row.agent.name: row.max_shaping for row in cheats if row.max_shaping > 0}


def check_world(world: World, plan: CheckPlan) -> CheckReport:
    """Run all agents on sampled tasks, outside an event loop. Raises WorldError after `MAX_LATE` reward timeouts."""
    tasks = sample_tasks(world, plan)
    shown, flawless = solutions(world, tasks)
    own = {task.id: world.cheats(task) for task in tasks}

    def own_cheat(name: str) -> Agent:
        plans = {id_: actions_of(cheats[name]) for id_, cheats in own.items() if name in cheats}
        return Agent(name, AgentKind.CHEAT, "a cheat of this world", lambda task, _: plans.get(task.id))

    own_cheats = map(own_cheat, dict.fromkeys(name for cheats in own.values() for name in cheats))
    agents = (*blind_agents(tasks, plan.seed), *own_cheats, *informed_agents(tasks, shown, flawless))
    plan.watch.phase(f"{world.name}: run agents", len(agents) * len(tasks))
    return CheckReport(world, tasks, asyncio.run(run_agents(world, tasks, agents, plan)), shown)


def reject_cheats(world: World, plan: CheckPlan) -> None:
    """Run the agents that must not be rewarded on a few tasks; outside an event loop. Ignores failures.

    Raises ConfigError with agent and task if one is rewarded, and WorldError after `MAX_LATE` reward timeouts.
    """
    plan = replace(plan, num_tasks=START_TASKS)
    tasks = sample_tasks(world, plan)
    agents = (*blind_agents(tasks, plan.seed), *informed_agents(tasks, {}, flawless=False)[:2])
    plan.watch.phase(f"{world.name}: reward audit", len(agents) * len(tasks))
    rows = asyncio.run(run_agents(world, tasks, agents, plan))
    problems = [row.problem for row in rows if row.counted and row.problem]
    if problems:
        raise ConfigError(
            f"The world {world.name!r} rewards cheating. {problems[0]}",
            "Fix its rewards (see `ludus env check`), tag tasks on which doing nothing is correct with null = 'true', "
            "or set env.check to false.",
        )


def sample_tasks(world: World, plan: CheckPlan) -> list[Task]:
    """Return random tasks of the plan's split, in its order. Raises UserError for an empty split."""
    tasks = world.tasks(plan.split)
    if not tasks:
        raise UserError(f"The split {plan.split!r} of the world {world.name!r} is empty.", "Choose another split.")
    check_tasks(plan.split, tasks)
    chosen = random.Random(plan.seed).sample(range(len(tasks)), min(plan.num_tasks, len(tasks)))
    return [tasks[i] for i in sorted(chosen)]


def solutions(world: World, tasks: Sequence[Task]) -> tuple[dict[str, Sequence[Action]], bool]:
    """Return the turns of experts, else of demonstrations, by task id, and whether all are guaranteed correct."""
    if world.implements("expert"):
        experts = ((task.id, world.expert(task)) for task in tasks)
        found: dict[str, Sequence[Action]] = {id_: actions_of(one.messages) for id_, one in experts if one is not None}
        if found:
            return found, True
    return (_demonstrated(world, tasks), False) if world.implements("demonstrations") else ({}, False)


def _demonstrated(world: World, tasks: Sequence[Task]) -> dict[str, Sequence[Action]]:
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
    except UserError:  # the world has no demonstrations
        return {}
    return found


async def run_agents(world: World, tasks: Sequence[Task], agents: Sequence[Agent], plan: CheckPlan) -> list[AuditRow]:
    """Run each agent on each task, in new environments. Raises WorldError after `MAX_LATE` reward timeouts."""
    semaphore = asyncio.Semaphore(plan.concurrency)
    late: list[str] = []

    async def one(agent: Agent, task: Task) -> AuditEpisode | None:
        async with semaphore:
            played = await run_agent(world, task, agent, plan)
        plan.watch.done(agent.name)
        if played is not None and played.late:
            late.append(played.failure)
            if len(late) >= MAX_LATE:
                text = f"{len(late)} rewards of the world {world.name!r} timed out, and its check was aborted."
                hint = "To skip the check before training, set env.check to false."
                raise WorldError(f"{text} {late[0]}", hint)
        return played

    rows = []
    for agent in agents:
        plays = await asyncio.gather(*(one(agent, task) for task in tasks))
        rows.append(AuditRow(agent, [play for play in plays if play is not None]))
    return rows


async def run_agent(world: World, task: Task, agent: Agent, plan: CheckPlan) -> AuditEpisode | None:
    """Run one episode of an agent; return None if the agent does not apply to the task."""
    try:
        environment = fresh_environment(world, task)
        actions = agent.plan(task, environment.tools)
        if not actions:
            return None
        played = await run_unscored(task, 0, environment, ScriptedChatSession(actions), plan.limits)
        trajectory = await plan.scoring.scored(world, environment, task, played)
    except LudusError as error:
        return AuditEpisode(task, None, failure=str(error), late=isinstance(error, RewardTimeout))
    parts = environment.rewards
    outcome, shaping = (
        sum(part.weight * trajectory.rewards.get(part.name, 0.0) for part in parts if part.outcome is kind)
        for kind in (True, False)
    )
    share = outcome / sum(part.weight for part in parts if part.outcome)
    again = environment if environment.implements("grade_again") else None
    return AuditEpisode(task, trajectory, success(parts, trajectory), share, shaping=shaping, environment=again)


def _named(plays: Sequence[AuditEpisode]) -> str:
    first = f"task {plays[0].task.id!r}"
    return first if len(plays) == 1 else f"{first} and {len(plays) - 1} more"


def _stopped(plays: Sequence[AuditEpisode]) -> str:
    reason = StopReason.ANSWERED if plays[0].trajectory is None else plays[0].trajectory.stop_reason
    return "" if reason is StopReason.ANSWERED else f" (which ended with {reason})"
