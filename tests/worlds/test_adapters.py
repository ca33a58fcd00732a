"""Environments of other packages as worlds (`make foreign` installs the packages; a missing one skips its tests)."""

import asyncio
import importlib
import random
import shutil
import subprocess
import sys

import pytest

from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.envs.registry import ADAPTERS, build_world
from ludus.errors import ConfigError, UserError
from ludus.evaluation.env_audit import CheckPlan, check_world, run_agent
from ludus.evaluation.scripted_agents import Agent, AgentKind, actions_of
from ludus.types import Message
from ludus.worlds.adapters import base

MODULES = {"gem": "gem", "openspiel": "pyspiel", "textworld_express": "textworld_express"}
"""Module of a world's package, if it does not have the name of the world."""
JAVA = ("scienceworld", "textworld_express")
QUEST = {"kwargs": {"nb_rooms": 2, "nb_objects": 3, "quest_length": 2}, "num_tasks": 2, "num_held_out": 1}
SMALL = {"num_tasks": 12, "num_held_out": 6}
SOLVED = {
    "FrozenLake": ("gymnasium", {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}),
    "Taxi": ("gymnasium", {"id": "Taxi-v4", "success_return": 0.0}),
    "BabyAI": ("gymnasium", {"id": "BabyAI-GoToLocal-v0"}),
    "textworld": ("textworld", QUEST),
    "textworld-express": ("textworld_express", {"id": "cookingworld"}),
    "scienceworld": ("scienceworld", {"id": "find-living-thing", "num_tasks": 2, "num_held_out": 1}),
}
"""Cases with an expert."""
UNSOLVED = {
    "Blackjack": ("gymnasium", {"id": "Blackjack-v1"}),
    "CartPole": ("gymnasium", {"id": "CartPole-v1"}),
    "Pendulum": ("gymnasium", {"id": "Pendulum-v1", "max_steps": 20}),
    "one player": ("textarena", {"id": "Mastermind-v0"}),
    "two players": ("textarena", {"id": "TicTacToe-v0"}),
    "cards": ("textarena", {"id": "KuhnPoker-v0"}),
    "gem": ("gem", {"id": "game:GuessTheNumber-v0-hard"}),
    "gem puzzle": ("gem", {"id": "rg:basic_arithmetic"}),
    "dice": ("openspiel", {"id": "backgammon", "max_steps": 20}),
    "search": ("openspiel", {"id": "connect_four", "opponent": "mcts", "simulations": 20}),
}
CASES = SOLVED | UNSOLVED
QUICK = sorted(CASES.keys() - {"scienceworld"})
"""Cases whose episodes take less than a second."""
HOSTILE = (
    *("", " ", "x" * 20_000, "[" * 9_000, "9" * 5_000, "-1", "nan", "[nan]", "1e999", "null", "{}", "[[0]]"),
    *("\u202e\x00\ud800💥", "[99999999999999]", "\\boxed{}", "\\boxed{9e9}", "save", "quit", "٣", "1_0", "<action>"),
)


@pytest.fixture(scope="module")
def worlds():
    """A function that returns the world of a case; each is made once."""
    made = {}

    def get(case):
        name, settings = CASES[case]
        pytest.importorskip(MODULES.get(name, name))
        if case == "BabyAI":
            pytest.importorskip("minigrid")
        if name in JAVA and not shutil.which("java"):
            pytest.skip("needs Java")
        if case not in made:
            made[case] = build_world(EnvConfig(name=name, settings=SMALL | settings), RolloutConfig())
        return made[case]

    yield get
    for world in made.values():
        asyncio.run(world.close())


def play(world, task, choose):
    """Return the observations, and the success, of an episode."""
    simulator = world.make(task)
    try:
        texts = [simulator.reset()]
        for turn in range(200):
            seen = simulator.step(choose(simulator, turn))
            texts.append(seen.text)
            if seen.done:
                break
        return texts, simulator.success
    finally:
        simulator.close()


def random_player(seed):
    rng = random.Random(seed)
    return lambda simulator, turn: rng.choice([*simulator.actions(), "0", "[1]", "\\boxed{5}"])


@pytest.mark.foreign
@pytest.mark.parametrize("case", SOLVED)
def test_expert_solves_every_task(case, worlds):
    world = worlds(case)
    assert world.implements("expert")
    for task in [task for split in world.splits for task in world.tasks(split)[:4]]:
        moves = actions_of(world.expert(task).messages)
        agent = Agent("expert", AgentKind.ORACLE, "", lambda task, tools, moves=moves: moves)
        played = asyncio.run(run_agent(world, task, agent, CheckPlan(limits=RolloutConfig(max_turns=200))))
        assert played.succeeded, (task.id, played)
    assert not play(world, task, lambda simulator, turn: "")[1]


@pytest.mark.foreign
@pytest.mark.parametrize("case", QUICK)
def test_equal_seeds_and_actions_have_equal_observations(case, worlds):
    world = worlds(case)
    task, other = world.tasks("train")[:2]
    state = random.getstate()
    before = play(world, task, random_player(0))
    play(world, other, random_player(1))
    assert play(world, task, random_player(0)) == before
    assert random.getstate() == state


@pytest.mark.foreign
@pytest.mark.parametrize("case", QUICK)
def test_hostile_actions_are_observations(case, worlds):
    world = worlds(case)
    for shift in (0, 1, 7):
        texts, success = play(world, world.tasks("train")[0], lambda _, turn, at=shift: HOSTILE[(turn + at) % 21])
        assert all(isinstance(text, str) for text in texts)
        assert success <= 0.5 or case in ("cards", "gem", "one player")


@pytest.mark.foreign
@pytest.mark.parametrize("case", QUICK)
def test_tasks_differ_by_seed_and_prompts_hold_no_state(case, worlds):
    world = worlds(case)
    tasks = [task for split in world.splits for task in world.tasks(split)]
    assert len({task.id for task in tasks}) == len(tasks)
    prompts = {str(task.prompt) for task in tasks}
    assert len(prompts) == 1, "the prompt is the same for all seeds, so that it tells nothing of them"
    assert all(task.truth is None for task in tasks)
    if "variation" not in tasks[0].tags:
        splits = [{task.seed for task in world.tasks(split)} for split in world.splits]
        assert case == "textworld-express" or not set.intersection(*splits)
    if CASES[case][0] in JAVA:
        return
    again = build_world(EnvConfig(name=CASES[case][0], settings=SMALL | CASES[case][1]), RolloutConfig())
    assert [task for split in again.splits for task in again.tasks(split)] == tasks


@pytest.mark.foreign
@pytest.mark.parametrize("case", ["FrozenLake", "CartPole", "two players"])
def test_audit_finds_no_rewarded_cheat(case, worlds):
    report = check_world(worlds(case), CheckPlan(num_tasks=3, limits=RolloutConfig(max_turns=200)))
    assert report.problems == []


@pytest.mark.foreign
@pytest.mark.parametrize(("name", "game"), [("textarena", "TicTacToe-v0"), ("openspiel", "tic_tac_toe")])
def test_self_play_rewards_each_seat(name, game):
    pytest.importorskip(MODULES.get(name, name))
    settings = SMALL | {"id": game, "opponent": "self"}
    world = build_world(EnvConfig(name=name, settings=settings), RolloutConfig())
    assert world.roles == ("player0", "player1")
    session = Session(str if name == "openspiel" else "[{}]".format)
    asyncio.run(world.environment(world.tasks("train")[0]).drive(world.tasks("train")[0], session))
    assert session.agent_rewards == {"player0": 1.0, "player1": 0.0}
    assert [agent for agent, _ in session.asked] == ["player0", "player1"] * 3 + ["player0"]
    assert all("player 1" not in text.casefold() for agent, text in session.asked[:1])
    single = Session(lambda turn: "?")
    asyncio.run(world.environment(world.tasks("test")[1]).drive(world.tasks("test")[1], single))
    assert single.agent_rewards == {"player1": 0.0}


class Session:
    """A policy that replies by the number of its turn."""

    def __init__(self, reply):
        self.reply, self.asked, self.agent_rewards = reply, [], {}

    async def chat(self, messages, tools=(), agent="policy"):
        self.asked.append((agent, messages[-1]["content"]))
        return Message(role="assistant", content=self.reply(len(self.asked) - 1))


@pytest.mark.foreign
def test_opponent_by_search_wins_more_than_a_random_one(worlds):
    pytest.importorskip("pyspiel")

    def mean(opponent):
        settings = SMALL | {"id": "tic_tac_toe", "opponent": opponent, "simulations": 200}
        world = build_world(EnvConfig(name="openspiel", settings=settings), RolloutConfig())
        return sum(play(world, task, random_player(task.id))[1] for task in world.tasks("train")) / 12

    assert mean("mcts") < 0.25 < mean("random")


@pytest.mark.foreign
def test_spaces_have_text_forms():
    spaces = pytest.importorskip("gymnasium.spaces")
    from ludus.worlds.adapters.spaces import describe, parse, render

    both = spaces.Dict({"go": spaces.Discrete(3, start=1), "at": spaces.Box(-1, 1, (2,))})
    assert (
        describe(both)
        == "a JSON object of: at: 2 numbers, separated by spaces, from -1 to 1; go: a whole number from 1 to 3"
    )
    value = parse(both, '{"go": 3, "at": [0.25, "-1"]}'.replace('"-1"', "-1"))
    assert render(both, value) == "at: 0.25 -1\ngo: 3"
    pair = spaces.Tuple((spaces.MultiBinary(2), spaces.Text(3)))
    assert render(pair, parse(pair, '[[0, 1], "ab"]')) == "0 1, ab"
    assert parse(spaces.MultiDiscrete([2, 5]), "1, 4").tolist() == [1, 4]
    assert parse(spaces.Discrete(2), " UP ", ("down", "up")) == 1
    for space in (both, pair, spaces.MultiDiscrete([2, 5]), spaces.Box(-1, 1, (2,)), spaces.Discrete(4)):
        for text in (*HOSTILE, "5", "1.5", "2 2", '{"go": 4, "at": [0, 0]}', "[" * 5_000, "1e40 0", "300 0"):
            with pytest.raises(ValueError, match=r"."):
                parse(space, text)
    with pytest.raises(ValueError, match="no text form"):
        render(spaces.Box(0, 255, (64, 64, 3), "uint8"), spaces.Box(0, 255, (64, 64, 3), "uint8").sample())


@pytest.mark.foreign
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gymnasium", {"id": "Nothing-v9"}, "cannot be started"),
        ("gymnasium", {"action_names": ["a"]}, "1 names for 4 actions"),
        ("textarena", {"id": "Wordle-v0"}, "download"),
        ("textarena", {"id": "GuessTheNumber-v0", "opponent": "self"}, "one player"),
        ("gem", {"id": "game:Nothing"}, "cannot be started"),
        ("openspiel", {"id": "goofspiel"}, "do not take turns"),
        ("openspiel", {"id": "negotiation"}, "does not depend on a seed"),
        ("textworld", {"id": "tw-nothing"}, "no kind of game"),
    ],
)
def test_environment_that_cannot_be_used_is_refused(name, settings, message):
    pytest.importorskip(MODULES.get(name, name))
    with pytest.raises(ConfigError, match=message):
        build_world(EnvConfig(name=name, settings=settings), RolloutConfig())


@pytest.mark.foreign
def test_observations_do_not_depend_on_the_process():
    pytest.importorskip("textarena")
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from tests.worlds.test_adapters import play, random_player
from ludus.worlds.adapters.textarena import make_textarena_world
from ludus.envs.tool_env import ToolLimits
for game in ("Mastermind-v0", "KuhnPoker-v0", "Minesweeper-v0"):
    world = make_textarena_world(dict(id=game, num_tasks=3), ToolLimits())
    print([play(world, task, random_player(0)) for task in world.tasks("train")])
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != ""


REQUIRED = {"openenv": {"url": "http://127.0.0.1:1"}, "verifiers": {"taskset": "x"}}
"""Settings without a default."""


@pytest.mark.parametrize("name", sorted(ADAPTERS.keys() - {"nemo_gym", "remote", "tools"}))
def test_missing_package_names_its_extra(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    extra = name.replace("_", "-")
    with pytest.raises(UserError, match=rf"Install it: pip install 'ludus\[{extra}\]'"):
        build_world(EnvConfig(name=name, settings=REQUIRED.get(name, {})), RolloutConfig())


def test_global_generators_are_seeded_in_the_block_only():
    state = random.getstate()
    with base.seeded_globally("a"):
        first = random.random()
    with base.seeded_globally("a"):
        assert random.random() == first
    assert random.getstate() == state


def test_episode_ends_after_its_last_step():
    class Echo(base.BoundedSimulator):
        def reset(self):
            return "go"

        def act(self, action):
            return base.Observation(action)

    echo = Echo(2)
    assert not echo.step("x" * (base.MAX_ACTION + 1)).valid
    assert echo.step("\ud800") == ("?", 0.0, True, True)
