"""Mixtures of worlds: settings, sampling, tasks and rewards of members, runs and their metrics."""

import asyncio
import itertools
import json
import math
import shutil
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.config import config_from_toml, load_config, to_toml
from ludus.diagnostics.alarms import find_alarms
from ludus.diagnostics.metrics import rollout_metrics
from ludus.envs.mixture import MixedWorld, MixtureMember, MixtureOrder, Shares, TaskPool
from ludus.envs.registry import build_world
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import ToolWorld
from ludus.errors import ConfigError, UserError
from ludus.evaluation.evaluate import Conditions, load_evaluation
from ludus.rewards.base import Reward, score, success
from ludus.rollouts.episode import EngineChatSession
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import Episode, RolloutRequest, SamplingPlan, engine_scheduler, rollout_for
from ludus.training.collection.rewards.reward_mixing import build_reward_mixer
from ludus.training.collection.rewards.reward_plan import check_reward_settings
from ludus.types import Group, Segment, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from small_runs import lasting_files
from tiny_run import RECIPE, WORLD, copy_run, ludus, refused

MIXED = f"""
[env]
name = "mixture"

[env.mixture.prices]
world = "{WORLD}"
weight = 2.0
max_turns = 2
max_tool_output = 40

[env.mixture.games]
world = "guess"
max_turns = 3
max_tokens_per_turn = 8
max_seq_len = 200
settings = {{sizes = [5], composition_size = 7, num_tasks = 120}}
"""
TINY = RECIPE.replace(f'[env]\nname = "{WORLD}"\ncheck = false\n', MIXED)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixed") / "mixed.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def world(recipe):
    config = load_config(recipe)
    return build_world(config.env, config.rollout)


@pytest.fixture(scope="module")
def run(recipe):
    """A whole run over the mixture."""
    said = ludus("train", recipe, "--from-scratch", "--run.dir", recipe.parent / "run")
    assert said.code == 0, said
    assert "average of the worlds" in said.out
    return recipe.parent / "run"


def pool(name, weight, end=None, num=60):
    return TaskPool(name, [Task(f"{name}/{i}", (), None) for i in range(num)], weight, end)


# settings


def test_mixture_settings_from_the_command_line_round_trip_through_toml(recipe):
    words = ["--env.mixture.games.weight", "4", "--env.mixture.prices.settings.roles", "true"]
    config = load_config(recipe, words)
    assert config.env.mixture["games"].weight == 4
    assert config.env.mixture["prices"].settings == {"roles": True}
    assert config_from_toml(to_toml(config)) == config
    alone = load_config(recipe, ["--env.mixture.games", "none", "--env.mixture.more.world", "search"])
    assert list(alone.env.mixture) == ["prices", "more"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--env.mixture.games.weight 0", "env.mixture.games.weight is 0, but must be above 0"),
        ("--env.mixture.games.wieght 1", "the nearest is env.mixture.games.weight"),
        ("--env.mixture.games 3", "env.mixture.games is 3, but must be a section"),
        ("--env.settings.k 3", "env.settings applies to a single world"),
        ("--env.name search", 'env.mixture has worlds (prices, games), but env.name is "search"'),
        ("--env.mixture.games.max_turns 9", "env.mixture.games.max_turns (9) is above rollout.max_turns (3)"),
        ("--env.mixture.prices.max_tokens_per_turn 20 --env.mixture.prices.max_seq_len 16", "must be below"),
        ("--env.mixture.games.weight_end 0 --env.mixture.prices.weight_end 0", "every weight_end in env.mixture is 0"),
        ("--env.mixture.'a/b'.weight 1", "names may contain"),
        ("--env.mixture.games none --env.mixture.prices none", "env.mixture has no world"),
    ],
)
def test_invalid_mixture_settings_raise_config_error(recipe, words, said):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, words.split())
    assert said in str(caught.value)


def test_duplicate_mixture_world_names_raise_config_error():
    twice = MIXED + "\n[env.mixture.games]\nweight = 1.0\n"
    with pytest.raises(ConfigError, match=r"line 1[0-9].*games"):
        config_from_toml(twice)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--env.mixture.gues.weight 1", "'gues' is not known. Did you mean 'guess'?"),
        ("--env.mixture.games.settings.size 3", "env.mixture.games.settings.size (= 3) is not a setting"),
        (
            '--env.rendering tags --env.mixture.math.settings {tool="calculator",num_tasks=60}',
            "the worlds share none: prices has look; math has calculator",
        ),
    ],
)
def test_invalid_mixture_members_raise_error_naming_the_cause(recipe, words, said):
    for command in (("env", "show"), ("config",)):
        assert said in refused(*command, recipe, *words.split())


# whose turn it is


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 9), st.none() | st.floats(0.05, 9)), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 8),
)
def test_pool_counts_stay_within_one_of_their_share_at_every_position(weights, chunk, num_chunks):
    shares = Shares([pool(str(i), *pair) for i, pair in enumerate(weights)], chunk, num_chunks)
    counts: Counter[int] = Counter()
    sums = [0.0] * len(weights)
    for position, turn in enumerate(itertools.islice(shares.turns(), chunk * num_chunks + 20)):
        counts[turn] += 1
        sums = [s + share for s, share in zip(sums, shares.at(position // chunk), strict=True)]
        for i, total in enumerate(sums):
            assert math.floor(total + 1e-6) <= counts[i] <= math.ceil(total - 1e-6)


def test_steps_contain_exact_shares_without_repeated_tasks():
    order = MixtureOrder([pool("a", 2.0, num=20), pool("b", 1.0, num=7)], seed=3, chunk=9)
    steps = [[task.id for task in order.take(9 * i, 9)] for i in range(8)]
    for ids in steps:
        assert Counter(task[0] for task in ids) == {"a": 6, "b": 3}
        assert len(set(ids)) == 9
    assert len({task for ids in steps[:2] for task in ids if task[0] == "b"}) == 6
    again = MixtureOrder([pool("a", 2.0, num=20), pool("b", 1.0, num=7)], seed=3, chunk=9)
    assert [task.id for task in again.take(9 * 5, 9)] == steps[5]
    other = MixtureOrder([pool("a", 2.0, num=20), pool("b", 1.0, num=7)], seed=4, chunk=9)
    assert [task.id for task in other.take(0, 9)] != steps[0]


def test_mixture_weights_shift_from_the_first_step_to_the_last():
    order = MixtureOrder([pool("a", 1.0, 0.0), pool("b", 1.0)], seed=0, chunk=8, num_chunks=5)
    shares = [Counter(t.id[0] for t in order.take(8 * i, 8))["a"] / 8 for i in range(7)]
    assert shares[0] == 0.5
    assert shares == sorted(shares, reverse=True)
    assert shares[4:] == [0.0, 0.0, 0.0]


def test_a_world_with_too_few_tasks_for_a_step_is_refused():
    with pytest.raises(ConfigError, match=r"may need 6 tasks of the world 'b'.*has 5"):
        MixtureOrder([pool("a", 1.0), pool("b", 3.0, num=5)], seed=0, chunk=8)


# the world


def test_mixed_tasks_are_prefixed_by_world_and_restored_to_the_originals(world):
    tasks = world.tasks("test")
    assert [task.id.partition("/")[0] for task in tasks[:4]] == ["prices", "games", "prices", "games"]
    assert tasks[0].tags["family"].startswith("prices/")
    assert tasks[0].tags["world"] == "prices"
    assert world.splits == ("train", "validation", "test", "composition")
    for member in world.members:
        mine = [task for task in tasks if task.tags["world"] == member.name]
        assert [member.own(task) for task in mine] == list(member.world.tasks("test"))
    assert {task.tags["world"] for task in world.tasks("composition")} == {"games"}


def test_mixed_episode_uses_the_environment_of_its_own_world(world):
    price, game = world.tasks("train")[:2]
    shop, guess = world.environment(price), world.environment(game)
    assert [tool.name for tool in shop.tools] == ["look"]
    assert not guess.tools
    assert guess.implements("state_key")
    assert not shop.implements("state_key")
    assert asyncio.run(guess.start(game)) == list(game.prompt)
    assert guess.state_key() == f"{game.tags['low']}-{game.tags['high']}"


def test_mixed_world_keeps_grade_again_of_its_member_environments(world):
    report = ToolOutcome("", "report", ToolStatus.OK, "1")

    class Judged(ToolEnv):
        async def grade_again(self):
            return report

    class JudgedWorld(ToolWorld):
        def environment(self, task):
            return Judged(self.tools, self.rewards, self.limits)

    plain = world.members[0].world
    made = JudgedWorld(plain.name, plain.task_lists, plain.tools, plain.rewards)
    mixed = MixedWorld((replace(world.members[0], world=made), *world.members[1:]))
    judged, other = (mixed.environment(task) for task in mixed.tasks("train")[:2])
    assert asyncio.run(judged.grade_again()) == report
    assert judged.implements("grade_again")
    assert not other.implements("grade_again")


def solve(task):
    said = task.truth if isinstance(task.truth, str) else task.truth.accepted[0]
    messages = (*task.prompt, {"role": "assistant", "content": said})
    return Trajectory(task.id, 0, (Segment("action", (1,)),), messages, StopReason.ANSWERED, tags=task.tags)


def test_mixed_rewards_combine_member_outcomes_on_one_scale(world):
    price, game = world.tasks("train")[:2]
    assert [part.name for part in world.rewards] == ["solved", "prices/f1", "prices/well_formed"]
    bought, won = (score(world.rewards, task, solve(task)) for task in (price, game))
    assert bought.rewards == {"solved": 1.0, "prices/f1": 1.0, "prices/well_formed": 1.0}
    assert bought.reward == pytest.approx(1.1)
    assert won.rewards == {"solved": 1.0}
    assert won.reward == 1.0
    assert success(world.rewards, bought)
    assert success(world.rewards, won)


def one_world(name, rewards):
    question = ({"role": "user", "content": "?"},)
    tasks = {"train": [Task("1", question, "x", {"split": "train"})]}
    return ToolWorld(name, tasks, (), rewards, ToolLimits())


def test_several_weighted_outcomes_are_normalised_to_one_scale():
    rewards = [
        Reward("passed", lambda task, t: 0.5, weight=3.0, outcome=True),
        Reward("clean", lambda task, t: 1.0, weight=1.0, outcome=True),
        Reward("short", lambda task, t: 1.0, weight=0.4),
    ]
    config = load_config(None)
    mixed = MixedWorld((MixtureMember("code", one_world("code", rewards), config.rollout),))
    (task,) = mixed.tasks("train")
    found = score(mixed.rewards, task, solve(task))
    assert found.rewards["solved"] == (3 * 0.5 + 1) / 4
    assert found.rewards["code/passed"] == 0.5
    assert not success(mixed.rewards, found)
    assert found.reward == pytest.approx((3 * 0.5 + 1 + 0.4) / 4)


def test_outcome_above_one_does_not_compensate_for_a_failed_outcome():
    rewards = [Reward("a", lambda task, t: 3.0, outcome=True), Reward("b", lambda task, t: 0.0, outcome=True)]
    mixed = MixedWorld((MixtureMember("odd", one_world("odd", rewards), load_config(None).rollout),))
    (task,) = mixed.tasks("train")
    assert not success(mixed.rewards, score(mixed.rewards, task, solve(task)))


def test_reserved_world_tag_in_a_task_raises_config_error():
    shop = one_world("shop", [Reward("a", lambda task, t: 1.0, outcome=True)])
    tasks = {"train": [replace(shop.tasks("train")[0], tags={"world": "earth"})]}
    mixed = MixedWorld((MixtureMember("shop", replace(shop, task_lists=tasks), load_config(None).rollout),))
    with pytest.raises(ConfigError, match="have a tag 'world'"):
        mixed.tasks("train")


def test_demonstrations_are_drawn_in_proportion_to_the_weights(world):
    shown = list(itertools.islice(world.demonstrations(0), 30))
    assert sum(bool(one.tools) for one in shown) == 20
    silent = MixedWorld((replace(world.members[0], world=replace(world.members[0].world, show=None)),))
    with pytest.raises(UserError, match="has no demonstrations"):
        next(silent.demonstrations(0))


def test_each_mixed_world_uses_its_own_turn_and_token_limits(world, recipe):
    config = load_config(recipe)
    play = SamplingPlan("train", 1.0, 0)
    price, game = world.tasks("train")[:2]

    class Engine:
        batch_invariant = True
        context_tokens = 512

    scheduler = engine_scheduler(world, Engine(), None, config.rollout, play, Ledger())
    found = {}
    for task in (price, game):
        conversation = scheduler.make_chat(RolloutRequest(RolloutKey(1, task.id, 0), task))
        assert isinstance(conversation, EngineChatSession)
        limits = rollout_for(world, config.rollout, task)
        found[task.tags["world"]] = (limits.max_turns, conversation.params.max_new_tokens, conversation.max_tokens)
    assert found == {"prices": (2, 48, 320), "games": (3, 8, 200)}


# numbers


def test_metrics_and_alarms_are_reported_by_world(world):
    price, game = world.tasks("train")[:2]
    lost = replace(solve(game), messages=(*game.prompt, {"role": "assistant", "content": "no"}))
    groups = [
        Group(price, (score(world.rewards, price, solve(price)),) * 2),
        Group(game, tuple(score(world.rewards, game, one) for one in (lost, lost))),
    ]
    metrics = rollout_metrics(groups, "solved")
    assert metrics["env/prices/success"] == 1.0
    assert metrics["env/games/success"] == 0.0
    assert metrics["env/prices/reward"] == pytest.approx(1.1)
    assert metrics["env/games/share"] == 0.5
    assert metrics["env/games/zero_variance"] == 1.0
    assert metrics["reward/prices/well_formed"] == 1.0
    found = {alarm.name: alarm.evidence for alarm in find_alarms([metrics] * 5)}
    assert "in the world games in the last 5 steps" in found["zero_reward"]


def test_rewards_are_normalised_by_world(world, recipe):
    words = ("--rewards.normalise_by", "world", "--rewards.normalise_over")
    price, game = world.tasks("train")[:2]
    lost = replace(solve(game), messages=(*game.prompt, {"role": "assistant", "content": "no"}))
    groups = [
        [Episode(RolloutKey(1, task.id, i), task, score(world.rewards, task, one)) for i, one in found]
        for task, found in ((price, [(0, solve(price))]), (game, [(0, solve(game)), (1, lost)]))
    ]
    for over in ("run", "batch"):
        config = load_config(recipe, [*words, over])
        check_reward_settings(config, world)
        combiner = build_reward_mixer(config, world, takes_turns=False)

        def combined(step, some, combiner=combiner):
            found = combiner.combine(step, some)
            whole = iter(combiner.normalize_batch([one for group in found for one in group]))
            return [[next(whole) for _ in group] for group in found]

        first = combined(1, groups)
        assert [e.trajectory.reward for e in first[1]] == pytest.approx([0.5**0.5, -(0.5**0.5)])
        assert first[0][0].trajectory.reward == pytest.approx(0.0)
        again = combined(2, [groups[0], groups[1][:1]])
        expected = 0.0 if over == "batch" else (1 - 2 / 3) / (1 / 3) ** 0.5
        assert again[1][0].trajectory.reward == pytest.approx(expected)
    with pytest.raises(ConfigError, match="normalise_over needs"):
        load_config(recipe, [words[2], "batch"])


def test_shaping_weight_limit_applies_to_each_mixture_world_separately():
    def member(name):
        rewards = [Reward("a", lambda t, x: 1.0, outcome=True), Reward("s", lambda t, x: 1.0, weight=0.3)]
        return MixtureMember(name, one_world(name, rewards), load_config(None).rollout)

    mixed = MixedWorld(tuple(map(member, "xyz")))
    config = load_config(None, ["--rewards.aggregation", "gated"])
    assert len(build_reward_mixer(config, mixed, takes_turns=False).parts) == 4
    config = load_config(None, ["--rewards.weights", '{"x/s" = 0.7}'])
    with pytest.raises(ConfigError):
        build_reward_mixer(config, mixed, takes_turns=False)


# runs


@pytest.mark.slow
def test_mixture_run_reports_metrics_per_world(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["env/prices/share"] == pytest.approx(2 / 3)
        assert {"env/games/success", "env/games/turns", "env/prices/tool_errors"} <= row.keys()
        assert row["eval/validation/greedy/macro"] == pytest.approx(
            (row["eval/validation/greedy/env/prices"] + row["eval/validation/greedy/env/games"]) / 2
        )
    for step in (1, 2):
        records = list(read_rollouts(rollouts_path(run, step)))
        assert {len({r.trajectory.tags["world"] for r in records if r.group == g.group}) for g in records} == {1}
    result = load_evaluation(run / "evaluations" / "step-000002-test-greedy.json")
    found = result.by_world()
    assert {name: one.num_tasks for name, one in found.items()} == {"prices": 4, "games": 4}
    assert result.macro == pytest.approx(sum(one.rate for one in found.values()) / 2)
    assert not any(
        "weight" in one for one in json.loads(Conditions.of(load_config(run / "config.toml")).world_settings).values()
    )


@pytest.mark.slow
def test_resumed_mixture_run_is_bitwise_identical(run, tmp_path):
    """From the checkpoint of its first step, as after a kill."""
    again = copy_run(run, tmp_path)
    shutil.rmtree(again / "checkpoints" / "step-000002")
    for file in again.rglob("*step-000002*"):
        file.unlink()
    assert ludus("train", "--resume", again).code == 0
    assert lasting_files(again) == lasting_files(run)
    said = refused("train", "--resume", again, "--env.mixture.games.weight", "3")
    assert "env.mixture.games.weight = 1.0 (not 3.0)" in said


@pytest.mark.slow
def test_replay_eval_and_check_commands_support_a_mixture(run, recipe):
    shown = ludus("rewards", "replay", run)
    assert shown.code == 0, shown
    assert "bit for bit" in shown.out
    measured = ludus("eval", "--run", run, "--evaluation.temperatures", "[0.0]")
    assert measured.code == 0, measured
    assert "average of the worlds" in measured.out
    assert "reproduces" in measured.out
    checked = ludus("env", "check", recipe, "--tasks", "3")
    assert "computed in this process" not in checked.err
    assert checked.code == 0, checked
    assert "'prices' rewards no agent" in checked.out
    assert "'guess' rewards no agent" in checked.out
