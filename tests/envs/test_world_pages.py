"""Each world has its parts and a page that describes them, with a real episode."""

import asyncio
import re

import pytest
from generators.reports.__main__ import OUT, REPORTS, report

from ludus.config import load_config
from ludus.envs.registry import WORLDS, build_world
from ludus.envs.simulator_world import SimulatorEnv
from ludus.envs.tool_env import ToolLimits
from ludus.evaluation.env_audit import CheckPlan, run_agent
from ludus.evaluation.scripted_agents import Agent, AgentKind, actions_of
from ludus.recipes import recipe_folder
from ludus.types import Message
from ludus.worlds.guess.world import make_guess_world

SECTIONS = {"tasks": r"The tasks?\b", "tools": r"The (tools|functions)\b", "rewards": r"The rewards\b"}
FEWER = {
    "sql": ["--env.settings.tasks", "60"],
    "gui": ["--env.settings.num_tasks", "60"],
    "judging": ["--env.settings.num_tasks", "60"],
    "proofs": ["--env.settings.num_tasks", "60"],
    "research": ["--env.settings.num_tasks", "60"],
    "shop": ["--env.settings.num_tasks", "60"],
    "web": ["--env.settings.num_tasks", "60"],
    "puzzles": ["--env.settings.num_tasks", "60"],
    "service": ["--env.settings.num_tasks", "200", "--env.settings.num_held_out", "60"],
}
"""Settings with which a world starts faster."""
WITHOUT_TOOLS = {"games", "guess", "judging", "proposals"}
PREPARED = {"swe"}
"""Worlds whose tasks are there once their sources were fetched."""


def page(name: str) -> str:
    return (recipe_folder(name) / "README.md").read_text("utf-8")


def transcripts(text: str) -> list[str]:
    """The blocks in which a user and the assistant speak."""
    blocks = re.findall(r"```text\n(.*?)```", text, re.S)
    return [block for block in blocks if re.search(r"^assistant\b", block, re.M)]


def said(lines: str) -> list[str]:
    """What is said in a transcript, without who says it; lines that go on are joined."""
    return [re.sub(r"\n {11}", "\n", turn) for turn in re.findall(r"^\w+ +(.*(?:\n {11}.*)*)", lines, re.M)]


@pytest.mark.parametrize("name", WORLDS)
def test_world_page_has_all_sections_and_an_episode_transcript(name):
    text = page(name)
    for part, pattern in SECTIONS.items():
        assert re.search(rf"^\*\*{pattern}", text, re.M), part
    assert transcripts(text)


REPORTED = ("code", "functions", "math", "sql", "swe", "terminal")
"""Worlds whose pages show how many tasks differ, and what is solved without skill."""


@pytest.mark.parametrize("name", REPORTED)
def test_world_page_tables_match_the_difficulty_report(name):
    """Those of the world with its default settings."""
    config = load_config(None, ["--env.name", name])
    told = build_world(config.env, config.rollout, config.sandbox).difficulty_report()
    blocks = told.split("\n\n")
    assert max(len(block.splitlines()) for block in blocks) > 3
    for block in blocks:
        assert block in page(name)


@pytest.mark.pages
@pytest.mark.parametrize("name", REPORTS)
def test_shipped_difficulty_report_matches_the_generated_report(name):
    assert (OUT / name / "data/difficulty_report.txt").read_text("utf-8") == report(name)


def test_a_world_without_prepared_tasks_has_a_difficulty_report():
    config = load_config("swe")
    assert build_world(config.env, config.rollout, config.sandbox).implements("difficulty_report")


@pytest.mark.parametrize("name", sorted(WORLDS.keys() - PREPARED))
def test_a_world_has_tasks_environments_tools_and_rewards(name):
    config = load_config(name, FEWER.get(name, []))
    world = build_world(config.env, config.rollout, config.sandbox)
    task = world.tasks("train")[0]
    environment = world.environment(task)
    assert task.prompt
    assert environment.tools or isinstance(environment, SimulatorEnv) or name in WITHOUT_TOOLS
    assert any(reward.outcome for reward in world.rewards)
    assert [part.name for part in environment.rewards] == [part.name for part in world.rewards]
    assert world.implements("difficulty_report") == (name in REPORTED)


def test_search_page_transcript_matches_the_expert_episode():
    config = load_config("search")
    world = build_world(config.env, config.rollout)
    (shown,) = transcripts(page("search"))
    task = next(task for task in world.tasks("train") if task.prompt[-1]["content"] in shown)
    turns = []
    for message in world.expert(task).messages:
        calls = [call["function"] for call in message.get("tool_calls", [])]
        turns += [f"{call['name']} {call['arguments']}" for call in calls] or [message["content"]]
    assert said(shown) == turns


def test_guess_page_transcript_replays_successfully():
    world = make_guess_world({}, ToolLimits())
    (shown,) = transcripts(page("guess"))
    opening, *turns = said(shown)
    task = next(t for t in world.tasks("train") if t.prompt[-1]["content"] == opening and t.truth == turns[-1])
    moves = actions_of([Message(role="assistant", content=turn) for turn in turns[::2]])
    agent = Agent("the page", AgentKind.SHOWN, "plays what it shows", lambda task, tools: moves)
    played = asyncio.run(run_agent(world, task, agent, CheckPlan()))
    assert played.succeeded
    assert [message["content"] for message in played.trajectory.messages][1:] == turns
