"""The guessing game: its replies and rewards, its splits, and that it can be won."""

import asyncio
import itertools
import math
import re

import pytest

from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError, UserError
from ludus.types import Action, StopReason, Trajectory
from ludus.worlds.guess.world import found, make_guess_world, make_task

WORLD = make_guess_world({}, ToolLimits())


def say(text):
    return Action({"role": "assistant", "content": text})


def play(task, player, limit=20):
    """The replies and rewards of a player, a function of (low, high)."""
    low, high = int(task.tags["low"]), int(task.tags["high"])

    async def episode():
        nonlocal low, high
        environment = WORLD.environment(task)
        assert await environment.start(task) == list(task.prompt)
        results = []
        while len(results) < limit:
            guess = player(low, high)
            result = await environment.step(say(str(guess)))
            results.append(result)
            if result.done:
                break
            if result.messages[0]["content"] == "higher":
                low = max(low, guess + 1)
            else:
                high = min(high, guess - 1)
            assert environment.state_key() == f"{low}-{high}"
        await environment.close()
        return results

    return asyncio.run(episode())


@pytest.mark.parametrize("split", WORLD.splits)
def test_bisection_finds_every_number_within_the_turn_limit(split):
    for task in WORLD.tasks(split)[:60]:
        results = play(task, lambda low, high: (low + high) // 2)
        assert results[-1].done
        assert len(results) <= math.ceil(math.log2(int(task.tags["size"]) + 1))
        assert sum(result.reward for result in results) == pytest.approx(1.0)


def test_uninformed_guess_has_no_reward():
    task = make_task(10, 15, 12, "test")
    rewards = [result.reward for result in play(task, lambda low, high: 24, limit=3)]
    assert rewards[0] == pytest.approx(math.log(15 / 14) / math.log(15))
    assert rewards[1:] == [0.0, 0.0]


@pytest.mark.parametrize("text", ["", "seven", "-3", "1.5", "١٢", "9" * 30, "12 or 13"])
def test_values_that_are_not_numbers_are_rejected(text):
    async def episode():
        environment = WORLD.environment(task)
        await environment.start(task)
        return await environment.step(say(text))

    task = make_task(1, 15, 7, "test")
    result = asyncio.run(episode())
    assert (result.messages[0]["content"], result.done, result.reward) == ("say a number", False, 0.0)


def test_only_the_number_itself_counts():
    task = make_task(1, 15, 7, "test")

    def ended(text, reason=StopReason.ANSWERED):
        return Trajectory(task.id, 0, (), (*task.prompt, {"role": "assistant", "content": text}), reason)

    assert found(task, ended(" 7 ")) == 1
    assert found(task, ended("8")) == 0
    assert found(task, ended("7", StopReason.MAX_TURNS)) == 0


def test_splits_share_no_game_and_composition_has_another_range():
    games = [(t.tags["low"], t.tags["size"], t.truth) for split in WORLD.splits for t in WORLD.tasks(split)]
    assert len(set(games)) == len(games) > 500
    sizes = {split: {t.tags["size"] for t in WORLD.tasks(split)} for split in WORLD.splits}
    assert sizes["composition"] == {"19"}
    assert sizes["train"] == sizes["test"] == {"11", "13", "15"}


def test_demonstrations_are_of_training_games_and_end_with_the_number():
    games = {task.prompt[0]["content"] for task in WORLD.tasks("train")}
    for dialogue in itertools.islice(WORLD.demonstrations(3), 50):
        question, *_, hint, last = dialogue.messages if len(dialogue.messages) > 2 else (*dialogue.messages,) * 2
        assert question["content"] in games
        assert last["role"] == "assistant"
        assert hint["role"] in ("user", "assistant")


def test_demonstrations_forget_bounds_as_often_as_set():
    def outside(flaw):
        world = make_guess_world({"flaw": flaw}, ToolLimits())
        guesses = misses = 0
        for dialogue in itertools.islice(world.demonstrations(0), 200):
            low, high = map(int, re.findall(r"\d+", dialogue.messages[0]["content"]))
            for said, reply in zip(dialogue.messages[1::2], dialogue.messages[2::2], strict=False):
                guess = int(said["content"])
                guesses, misses = guesses + 1, misses + (not low <= guess <= high)
                low, high = (max(low, guess + 1), high) if reply["content"] == "higher" else (low, min(high, guess - 1))
        return misses / guesses

    assert outside(0.0) == 0.0
    assert 0.05 < outside(0.5) < 0.5


def test_invalid_settings_and_splits_are_reported():
    with pytest.raises(ConfigError, match="flaw"):
        make_guess_world({"flaws": 0.1}, ToolLimits())
    with pytest.raises(UserError, match="no split 'tests'"):
        WORLD.tasks("tests")


def test_a_list_of_sizes_is_a_setting_like_any_other():
    world = make_guess_world({"sizes": [7, 9]}, ToolLimits())
    assert {task.tags["size"] for task in world.tasks("train")} == {"7", "9"}
