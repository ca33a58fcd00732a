"""The example of unlabelled demonstrations: its maze, its walks, and the pipeline from labels to RL."""

import importlib.util
import json
import random
import sys
from functools import cache
from pathlib import Path

import pytest

from ludus.config import load_config
from ludus.envs.registry import build_world
from ludus.envs.tool_env import ToolLimits
from ludus.evaluation.env_audit import CheckPlan, check_world
from ludus.evaluation.scripted_agents import AgentKind

FILE = Path(__file__).parent.parent / "examples" / "unlabelled_demonstrations.py"


@cache
def example():
    spec = importlib.util.spec_from_file_location("unlabelled_demonstrations", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_cell_is_reached_and_passages_go_both_ways():
    u = example()
    assert len(u.distances((0, 0))) == u.SIZE**2
    assert all(any((u.beside(cell, move), back) in u.passages() for back in u.MOVES) for cell, move in u.passages())
    assert all(u.distances(goal)[cell] == u.distances(cell)[goal] for cell in u.distances((0, 0)) for goal in [(2, 3)])


@pytest.mark.slow
def test_world_of_the_configuration_is_solved_by_its_expert_only():
    config = load_config(FILE.with_suffix(".toml"))
    world = build_world(config.env, config.rollout)
    ids = [task.id for split in world.splits for task in world.tasks(split)]
    assert len(set(ids)) == len(ids) == example().SIZE ** 2 * (example().SIZE ** 2 - 1)
    report = check_world(world, CheckPlan(num_tasks=10, limits=config.rollout))
    assert report.problems == []
    assert next(row for row in report.rows if row.agent.kind is AgentKind.ORACLE).num_successes == 10


def test_wall_stops_a_step():
    u = example()
    maze = u.Maze((0, 0), (3, 3))
    assert maze.reset() == "at 0 0, goal 3 3"
    assert maze.step("north")._replace(done=False) == ("at 0 0", 0.0, False, False)
    move = maze.actions()[0]
    assert maze.step(move).text == "at {} {}".format(*u.beside((0, 0), move))


def test_walks_determine_their_actions_and_dialogues():
    u = example()
    walks = u.record_walks(u.make_world({}, ToolLimits()), 20, seed=1)
    assert walks == u.record_walks(u.make_world({}, ToolLimits()), 20, seed=1)
    for walk in walks:
        assert len(walk.pairs()) == len(walk.actions) == len(walk.observations) - 1
        cells = [tuple(map(int, text.split()[1:3])) for text in walk.observations]
        assert [u.beside(cell, action) for cell, action in zip(cells, walk.actions, strict=False)] == cells[1:]
        wrong = [random.Random(0).choice(list(u.MOVES)) for _ in walk.actions]
        dialogue = walk.dialogue(wrong)
        assert dialogue[: len(walk.task.prompt)] == list(walk.task.prompt)
        assert [message["content"] for message in dialogue if message["role"] == "assistant"] == wrong
        assert [message["content"] for message in dialogue if message["role"] == "user"][1:] == walk.observations[1:-1]


@pytest.mark.slow
def test_pipeline_measures_every_stage(tmp_path):
    gains = example().run_pipeline(tmp_path, labelled=4, unlabelled=4, steps=3, rl_steps=1)
    assert list(gains) == ["labels", "labelled", "pseudo", "true", "rl"]
    assert gains == json.loads((tmp_path / "gains.json").read_text())
    for name, values in gains.items():
        assert 0 <= values["greedy_low"] <= values["greedy"] <= values["greedy_high"] <= 1, name
    sizes = {
        name: len((tmp_path / f"{name}.jsonl").read_text().splitlines()) for name in ("labelled", "pseudo", "true")
    }
    assert sizes["labelled"] == 4 <= sizes["pseudo"] <= sizes["true"] == 8
