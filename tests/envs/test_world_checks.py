"""Every shipped world resists reward hacking: cheats and guesses earn no outcome reward and no shaping reward."""

import asyncio
import json

import pytest

from ludus.config import load_config
from ludus.config.schema import Config
from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.envs.registry import WORLDS, build_world, closing
from ludus.evaluation.env_audit import CheckPlan, check_world, run_agent
from ludus.evaluation.scripted_agents import Agent, AgentKind, actions_of
from ludus.rewards.base import score, success
from ludus.types import Message, StopReason, Trajectory

QUICK = {
    "archive": ("archive", {"num_documents": 12}, 6),
    "functions": ("functions", {}, 6),
    "guess": ("guess", {}, 6),
    "judging": ("judging", {"num_tasks": 400}, 12),
    "proofs": ("proofs", {"num_tasks": 60}, 6),
    "math with a calculator": ("math", {"tool": "calculator", "num_tasks": 60}, 6),
    "math without tools": ("math", {"tool": "none", "num_tasks": 60}, 12),
    "puzzles": ("puzzles", {"levels": [1], "num_tasks": 60}, 6),
    "research": ("research", {"num_tasks": 60}, 4),
    "search": ("search", {}, 4),
    "sql": ("sql", {"tasks": 60}, 4),
}
"""World, settings, number of tasks."""
SLOW = {
    "gui": ("gui", {"num_tasks": 60}, 8),
    "web": ("web", {"num_tasks": 60}, 8),
    "service": ("service", {"num_tasks": 60, "num_held_out": 10}, 8),
    "shop": ("shop", {"num_tasks": 60}, 12),
    "research reports": ("research", {"tasks": "report", "num_tasks": 60}, 8),
    "code": ("code", {}, 30),
    "functions": ("functions", {}, 200),
    "math in python": ("math", {}, 40),
    "search with passages": ("search", {"access": "once"}, 100),
    "sql": ("sql", {}, 100),
    "sql without tools": ("sql", {"access": "none"}, 60),
    "terminal": ("terminal", {}, 30),
}
TURNS = 16
"""As many as the oracle of `math` takes on the highest level, and more."""
ELSEWHERE = {
    "games": "test_games_world.py, against opponents",
    "household": "test_household_world.py, with more turns",
    "proposals": "test_proposals_world.py, with a proposer",
    "swe": "test_swe_world.py, on a package of its own",
}


def check(name, settings, num_tasks):
    rollout = RolloutConfig(max_turns=TURNS)
    config = Config(env=EnvConfig(name=name, settings=settings), rollout=rollout)
    world = build_world(config.env, config.rollout, config.sandbox)
    return check_world(world, CheckPlan(num_tasks=num_tasks, limits=config.rollout))


def assert_sound(report):
    assert report.problems == []
    assert report.shaped == {}
    assert not [row.failures[0].failure for row in report.rows if row.failures]
    for row in report.rows:
        if row.agent.kind is AgentKind.ORACLE:
            assert len(row.plays) == row.num_successes == len(report.tasks)


def test_every_world_is_covered_by_a_check_case():
    assert {name for name, _, _ in (*QUICK.values(), *SLOW.values())} | ELSEWHERE.keys() == set(WORLDS)


@pytest.mark.parametrize("case", QUICK)
def test_world_rewards_no_cheating_agent(case):
    assert_sound(check(*QUICK[case]))


@pytest.mark.scale
@pytest.mark.parametrize("case", SLOW)
def test_world_with_programs_or_many_tasks_rewards_no_cheating_agent(case):
    assert_sound(check(*SLOW[case]))


@pytest.mark.parametrize("name", ["math", "sql"])
def test_paraphrased_correct_answers_are_rewarded(name):
    config = load_config(name, {"sql": ["--env.settings.tasks", "300"]}.get(name, []))
    world = build_world(config.env, config.rollout, config.sandbox)
    tasks = world.tasks("test")[:60]
    refused, num = [], 0
    for task in tasks:
        for text in world.paraphrases(task):
            said = Trajectory(task.id, 0, (), (Message(role="assistant", content=text),), StopReason.ANSWERED)
            num += 1
            if not success(world.rewards, score(world.rewards, task, said)):
                refused.append((task.id, text))
    assert refused == []
    assert num >= len(tasks)


@pytest.mark.parametrize(("name", "num_tasks"), [("functions", 40), ("terminal", 4)])
def test_alternative_solutions_are_correct(name, num_tasks):
    config = load_config(None, ["--env.name", name])
    world = build_world(config.env, config.rollout, config.sandbox)
    tasks = world.tasks("train")[:num_tasks]
    plan = CheckPlan(limits=RolloutConfig(max_turns=TURNS))

    async def played(task, messages):
        agent = Agent("other way", AgentKind.ORACLE, "does it otherwise", lambda *_: actions_of(messages))
        return task.id, messages, (await run_agent(world, task, agent, plan)).succeeded

    async def all_played():
        async with closing(world):
            ways = [(task, way) for task in tasks for way in world.alternative_solutions(task)]
            return await asyncio.gather(*(played(*one) for one in ways))

    found = asyncio.run(all_played())
    assert [one for one in found if not one[2]] == []
    assert len(found) > num_tasks
    for task in tasks:
        ways = [json.dumps(list(way)) for way in world.alternative_solutions(task)]
        shown = json.dumps(list(world.expert(task).messages[len(task.prompt) :]))
        assert len({shown, *ways}) == len(ways) + 1, task.id


@pytest.mark.parametrize("name", ["code", "terminal"])
def test_a_recorded_final_state_is_scored_again_with_the_same_result(name):
    config = load_config(name)
    world = build_world(config.env, config.rollout, config.sandbox)

    async def scenario():
        async with closing(world):
            task = world.tasks("train")[0]
            turns = actions_of(world.expert(task).messages[len(task.prompt) :])
            agent = Agent("oracle", AgentKind.ORACLE, "knows", lambda task, tools: turns)
            plan = CheckPlan(limits=config.rollout)
            one = await run_agent(world, task, agent, plan)
            return one, await one.environment.grade_again()

    one, again = asyncio.run(scenario())
    assert one.succeeded
    assert (again.tool, again.output) == (one.trajectory.outcomes[-1].tool, one.trajectory.outcomes[-1].output)
