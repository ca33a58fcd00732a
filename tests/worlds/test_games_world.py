"""Games of two players: rules, opponents, rewards by player, and the exploitability of Kuhn strategies."""

import asyncio
import random
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest

from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.rewards.base import score
from ludus.rollouts.agent_runs import AgentRunner
from ludus.types import StopReason
from ludus.worlds.games.kuhn import INFORMATION_SETS, Kuhn, chips, exploitability, information_set
from ludus.worlds.games.tictactoe import TicTacToe
from ludus.worlds.games.world import make_games_world
from small_worlds import make_chat, scripted

LIMITS = RolloutConfig(max_turns=10)
GAMES = [TicTacToe(), Kuhn()]


def world_of(game="tictactoe", **settings):
    return make_games_world({"game": game, **settings}, ToolLimits())


def play(world, task, *moves, seed=1):
    """Return the scored game in which the policy makes the moves in order."""
    places = iter(moves)
    engine = scripted(lambda request, turn: next(places))
    environment = world.environment(task)
    make = lambda: make_chat(engine, seed=seed)  # noqa: E731
    found = asyncio.run(AgentRunner().run(task, 0, environment, make, LIMITS))
    return score(environment.rewards, task, found)


def prompts(trajectory, agent):
    return sum(s.kind == "action" for s in trajectory.segments if s.agent == agent)


def test_self_play_has_a_row_for_each_move_and_a_reward_for_each_player():
    world = world_of()
    empty = next(task for task in world.tasks("train") if task.truth == "")
    found = play(world, empty, "1", "4", "2", "5", "3")
    assert found.agent_rewards == {"x": 1.0, "o": 0.0}
    assert (prompts(found, "x"), prompts(found, "o"), len(found.rows)) == (3, 2, 5)
    drawn = play(world, empty, *"123546879")
    assert (drawn.agent_rewards, drawn.rewards["drawn"]) == ({"x": 0.5, "o": 0.5}, 1.0)


class Past:
    """A past version whose replies are longer than `most` tokens."""

    version = 7

    def __init__(self, most=1):
        self.most = most

    def chat(self, make):
        chat = make_chat(scripted(lambda request, turn: "a long reply that is cut"))
        return replace(chat, params=replace(chat.params, max_new_tokens=self.most))


def test_opponent_that_is_cut_short_plays_on_with_random_moves_and_is_named_in_its_games_only():
    world = world_of(opponents=["past", "self"])
    for opponent in ("past", "self"):
        task = next(one for one in world.tasks("train") if one.tags["opponent"] == opponent and not one.truth)
        environment, own = world.environment(task), scripted(lambda request, turn: str(turn + 1))
        make = partial(make_chat, own, seed=1)
        found = asyncio.run(AgentRunner(opponents=Past()).run(task, 0, environment, make, LIMITS))
        assert found.stop_reason is StopReason.ANSWERED
        assert found.tags.get("opponent_version") == ("7" if opponent == "past" else None)
        assert opponent == "self" or prompts(found, task.tags["seat"]) > 1


@pytest.mark.parametrize("move", ["1", "10", "", "x", "5 "])
def test_illegal_move_loses_and_is_a_draw_for_the_other_player(move):
    world = world_of()
    task = next(task for task in world.tasks("train") if task.truth == "15")
    found = play(world, task, "2", move)
    assert found.agent_rewards == {"x": 0.5, "o": 0.0}
    assert found.rewards == {"payoff": 0.5, "drawn": 1.0, "lost": 0.0}


def test_moves_of_an_opponent_are_no_rows_and_depend_on_the_seed_only():
    world = world_of()
    task = next(task for task in world.tasks("test") if task.tags == {"opponent": "random", "seat": "o"})
    games = [play(world, task, "1", "1", "1", seed=seed) for seed in (1, 1, 2, 3, 4, 5)]
    assert games[0].segments == games[1].segments
    assert len({one.segments for one in games}) > 1
    assert {s.agent for one in games for s in one.segments} == {"o"}
    assert all(set(one.agent_rewards) == {"o"} for one in games)


@pytest.mark.slow
def test_expert_never_loses_tic_tac_toe():
    game, rng = TicTacToe(), random.Random(0)
    results = set()
    for number in range(200):
        position = ""
        while (end := game.payoffs(position)) is None:
            expert = game.to_move(position) == number % 2
            position += game.expert_move(position, rng) if expert else rng.choice(game.legal(position))
        results.add(end[number % 2])
    assert results == {0.5, 1.0}


def test_exploitability_is_exact_for_known_strategies():
    game = Kuhn()
    nash = {}
    for deal in game.openings():
        for moves in ("", "c", "b", "cb"):
            rng = random.Random(0)
            plays = [game.expert_move(deal + moves, rng) == "bet" for _ in range(3000)]
            nash[information_set(deal + moves)] = round(3 * sum(plays) / len(plays)) / 3
    assert set(nash) == set(INFORMATION_SETS)
    assert exploitability(nash) == pytest.approx(0, abs=1e-12)
    assert exploitability(dict.fromkeys(INFORMATION_SETS, 0.5)) == pytest.approx(11 / 24)
    # an opponent who bets every hand wins the ante of 1 from a player who always checks
    assert exploitability(dict.fromkeys(INFORMATION_SETS, 0.0)) == pytest.approx(1.0)
    assert exploitability(nash | {"2b": 1.0}) > 0.01


def test_kuhn_pays_the_higher_card_and_the_bettor_after_a_fold():
    ends = {"12cc": -1, "21cc": 1, "31bb": 2, "13bb": -2, "13bc": 1, "31cbc": -1, "12cbb": -2, "12": None, "12cb": None}
    assert {position: chips(position) for position in ends} == ends
    world = world_of("kuhn")
    task = next(task for task in world.tasks("train") if task.truth == "31")
    assert play(world, task, "bet", "bet").agent_rewards == {"first": 1.0, "second": 0.0}
    assert play(world, task, "check", "bet", "check").agent_rewards == {"first": 0.25, "second": 0.75}
    assert play(world, task, "bet", "check").rewards["payoff"] == 0.75


def test_demonstrations_are_legal_moves_of_all_players_in_both_games():
    seen = set()
    for dialogue in islice(world_of().demonstrations(0), 200):
        assert [m["role"] for m in dialogue.messages] == ["system", "user", "assistant"]
        seen.add(dialogue.messages[1]["content"].split()[0])
        legal = dialogue.messages[0]["content"].startswith("Kuhn") and {"bet", "check"}
        rows = dialogue.messages[1]["content"].split(": ")[1].split(" | ")[0].replace(" ", "")
        free = {str(number) for number, square in enumerate(rows, start=1) if square == "."}
        assert dialogue.messages[2]["content"] in (legal or free)
    assert seen == {f"{player}:" for game in GAMES for player in game.players}


def test_tasks_cover_openings_seats_and_opponents():
    world = world_of(opponents=["self", "past", "random"], num_games=10)
    tags = {(task.tags["opponent"], task.tags["seat"]) for task in world.tasks("train")}
    assert tags == {("self", "x"), *((name, seat) for name in ("past", "random") for seat in ("x", "o"))}
    assert len(world.tasks("train")) == 82 * 5
    assert len(world.tasks("test")) == 20
    assert world.needs_opponents
    assert not world_of().needs_opponents
    with pytest.raises(ConfigError, match="opponents"):
        world_of(opponents=["nobody"])
