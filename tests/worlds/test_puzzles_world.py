"""Games for one player: rules, experts, splits without overlap, hidden state, and the transitions of gymnasium."""

import asyncio
import random
from collections import Counter

import pytest

from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.types import Action
from ludus.worlds.puzzles.codes import letters, pins
from ludus.worlds.puzzles.grids import FrozenLake, Sokoban
from ludus.worlds.puzzles.numbers import Blackjack, merged, turned
from ludus.worlds.puzzles.world import PUZZLES, make_puzzles_world

LOST_BY_CHANCE = {"blackjack": 0.3, "bandit": 0.7}
"""Minimum success of the experts of games of chance; all others win always."""


def world_of(**settings):
    return make_puzzles_world({"num_tasks": 100, **settings}, ToolLimits())


def play(puzzle, choose, limit=300):
    """The observations of a player."""
    seen = [puzzle.reset()]
    for _ in range(limit):
        result = puzzle.step(choose(puzzle))
        assert result.valid
        seen.append(result.text)
        if result.done:
            break
    return seen


@pytest.mark.parametrize("game", PUZZLES)
def test_expert_wins_and_random_player_less_often(game):
    world, rng, wins = world_of(game=game, levels=[1, 2, 3]), random.Random(0), Counter()
    tasks = world.tasks("test")[:8]
    for task in tasks:
        for name, choose in (("expert", lambda p: p.expert_action()), ("random", lambda p: rng.choice(p.actions()))):
            puzzle = world.make(task)
            play(puzzle, choose, 300 if name == "expert" else 25)
            wins[name] += puzzle.success
    assert wins["expert"] >= LOST_BY_CHANCE.get(game, 1.0) * len(tasks)
    assert wins["random"] < wins["expert"]


@pytest.mark.parametrize("game", PUZZLES)
def test_equal_tasks_are_equal_games(game):
    world = world_of(game=game, num_tasks=10)
    for task in world.tasks("train")[:3]:
        rngs = random.Random(1), random.Random(1)
        first, second = (play(world.make(task), lambda p, r=r: r.choice(p.actions()), 20) for r in rngs)
        assert first == second
        assert task.prompt[-1]["content"] == first[0]


def test_splits_share_no_initial_state():
    for game, kind in PUZZLES.items():
        if not kind.stochastic:
            world = world_of(game=game)
            states = {split: {world.make(t).instance() for t in world.tasks(split)} for split in world.splits}
            assert all(len(states[split]) == len(world.tasks(split)) for split in world.splits)
            assert not states["train"] & (states["validation"] | states["test"])


@pytest.mark.parametrize("game", PUZZLES)
@pytest.mark.parametrize("text", ["", "fly", "left right", "\x00", "9" * 10_000, "best C", "<action></action>"])
def test_other_texts_change_nothing(game, text):
    world = world_of(game=game, num_tasks=10)
    task = world.tasks("train")[0]

    async def episode():
        environment = world.environment(task)
        await environment.start(task)
        before = environment.state_key()
        result = await environment.step(Action({"role": "assistant", "content": text}))
        return before, environment.state_key(), result

    before, after, result = asyncio.run(episode())
    assert before == after
    assert not result.done
    assert len(result.messages[0]["content"]) < 200


def test_secret_is_in_no_prompt():
    for game in ("wordle", "mastermind"):
        world = world_of(game=game)
        assert not any(world.make(task).secret in str(task.prompt) for task in world.tasks("train"))


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [("allee", "apple", "GYXXG"), ("paper", "apple", "YYGYX"), ("apple", "apple", "GGGGG")],
)
def test_letters_are_marked_as_often_as_they_occur(guess, secret, marks):
    assert letters(guess, secret) == marks


@pytest.mark.parametrize(
    ("guess", "secret", "found"), [("1122", "2211", "0 4"), ("1234", "1243", "2 2"), ("1", "2", "0 0")]
)
def test_pins_count_each_digit_once(guess, secret, found):
    assert pins(guess, secret) == found


def test_tiles_merge_once_in_a_move():
    assert merged((2, 2, 4, 4)) == ((4, 8, 0, 0), 12)
    assert merged((2, 2, 2, 0)) == ((4, 2, 0, 0), 4)
    assert turned(((0, 2), (2, 2)), "down") == (((0, 0), (2, 4)), 4)
    assert turned(((0, 2), (2, 2)), "right") == (((0, 2), (0, 4)), 4)


def test_views_show_the_same_grid():
    grid, text = (FrozenLake(random.Random(3), 1, view) for view in ("grid", "text"))
    assert grid.shown().count("O") == len(text.holes) > 0
    assert all(f"{i},{j}" in text.shown() for i, j in text.holes)
    room = Sokoban(random.Random(3), 3, "text")
    assert [name for name in ("player", "wall", "box", "target") if f"{name}: " in room.shown()] == [
        "player", "wall", "box", "target",
    ]  # fmt: skip


def test_slipping_goes_to_a_side():
    ends = Counter()
    for seed in range(300):
        lake = FrozenLake(random.Random(0), 1)
        lake.holes, lake.slip, lake.rng = set(), 2 / 3, random.Random(seed)
        lake.apply("right")
        ends[lake.at] += 1
    assert set(ends) == {(0, 1), (1, 0), (0, 0)}
    assert all(60 < count < 140 for count in ends.values())


def test_blackjack_counts_aces():
    assert [Blackjack.total(cards) for cards in ([1, 10], [1, 1], [1, 10, 10], [5, 6, 1])] == [
        (21, True), (12, True), (21, False), (12, False),
    ]  # fmt: skip


def test_games_and_settings_that_do_not_exist_are_named():
    with pytest.raises(ConfigError, match="chess"):
        world_of(game="chess")
    with pytest.raises(ConfigError, match="games"):
        world_of(games="2048")


@pytest.mark.foreign
def test_lake_has_the_transitions_of_gymnasium():
    gymnasium = pytest.importorskip("gymnasium")
    for seed in range(5):
        lake = FrozenLake(random.Random(seed), 2)
        rows = lake.shown().replace("P", "S").replace("_", "F").replace("O", "H").split("\n")
        other = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=False).unwrapped
        other.reset(seed=0)
        rng, done = random.Random(seed), False
        while not done:
            number = rng.randrange(4)
            state, reward, done, _, _ = other.step(number)
            lake.apply(lake.actions()[number])
            assert (divmod(int(state), lake.size), reward, done) == (lake.at, lake.success, lake.over)
