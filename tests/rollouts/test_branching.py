"""Branching rollouts: forks, replayed prefixes, rewards of leaves, and a run with trees."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.sections.rewards import LengthConfig, RewardsConfig
from ludus.config.sections.rollout import BranchConfig
from ludus.diagnostics.metrics import rollout_metrics
from ludus.envs.registry import build_world
from ludus.errors import ConfigError, WorldError
from ludus.rewards.base import Reward
from ludus.rollouts.episode import RestoreError
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.trees import run_tree
from ludus.training.collection.rewards.reward_mixing import RewardMixer
from ludus.training.collection.rewards.reward_plan import plan_parts
from ludus.training.credit.advantages import assign_credit
from ludus.training.rl.validate import check_branch, inactive_parts
from ludus.types import Group, Message, Segment, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from small_runs import lasting_files
from tests.rollouts.test_partial import metrics, run
from tests.training.batches.test_branches import episodes
from tiny_run import ludus

TURNS = 3


def played(told: tuple[Segment, ...], number: int, surprise=(1.0, 3.0, 2.0)) -> Trajectory:
    """An episode of three turns of two tokens; a branch of number n samples the tokens n0, n1, ..."""
    segments = list(told) or [Segment("prompt", (1, 2, 3))]
    begun = sum(segment.kind == "action" for segment in told)
    for turn in range(begun, TURNS):
        tokens = (100 * number + 10 * turn, 7)
        segments.append(Segment("action", tokens, turn, None, "policy", (-surprise[turn],) * 2, (number,) * 2))
        if turn < TURNS - 1:
            segments.append(Segment("observation", (5, turn), turn))
    outcomes = tuple(ToolOutcome(f"call_{turn}_0", "look", ToolStatus.OK, "") for turn in range(TURNS - 1))
    stop = StopReason.ANSWERED if number % 2 == 0 else StopReason.MAX_TOKENS
    said = (Message(role="assistant", content=str(number)),)
    return Trajectory(
        "t",
        0,
        tuple(segments),
        said,
        stop,
        outcomes,
        rewards={"right": float(number % 2), "neat": 0.1 * number},
        reward=number % 2 + 0.1 * number,
        turn_rewards=tuple(0.5 * segment.tokens[0] for segment in segments if segment.kind == "action"),
        anchors=tuple(f"state {segment.tokens[0]}" for segment in segments if segment.kind == "action"),
    )


def grow(play=played, **settings) -> tuple[Trajectory, list[Trajectory]]:
    """The tree, and the paths as they were played."""
    chains = []

    async def path(told, number):
        chains.append(play(told, number))
        return chains[-1]

    return asyncio.run(run_tree(BranchConfig(**settings), path)), chains


def firsts(tree: Trajectory) -> list[list[int]]:
    """The first token of each action of each path."""
    return [[tree.segments[i].tokens[0] for i in row if tree.segments[i].kind == "action"] for row in tree.rows]


def test_chosen_turns_fork_the_trunk_and_then_its_branches():
    tree, chains = grow(branches=1, turns=[0, 2], max_leaves=9)
    assert firsts(tree) == [[0, 10, 20], [100, 110, 120], [0, 10, 220], [100, 110, 320]]
    assert tree.attempts() == chains
    assert tree.num_action_tokens == 2 * 8  # each sampled once
    assert firsts(grow(branches=2, turns=[1], max_leaves=9)[0]) == [[0, 10, 20], [0, 110, 120], [0, 210, 220]]
    assert len(grow(branches=3, turns=[0, 1, 2], max_leaves=5)[1]) == 5


def test_the_turns_of_the_highest_entropy_fork_first():
    tree, _ = grow(branches=1, entropy_turns=2, max_leaves=3)
    assert firsts(tree) == [[0, 10, 20], [0, 110, 120], [0, 10, 220]]
    tree, _ = grow(branches=1, entropy_turns=1, max_leaves=4)
    assert firsts(tree) == [[0, 10, 20], [0, 110, 120], [0, 110, 220]]


def test_episode_ending_before_the_fork_has_no_branches():
    tree, (chain,) = grow(branches=2, turns=[5])
    assert tree == chain
    assert not tree.leaves


def test_tree_shares_common_prefixes_and_averages_its_leaf_rewards():
    tree, chains = grow(branches=2, turns=[1])
    assert [leaf.rewards for leaf in tree.leaves] == [chain.rewards for chain in chains]
    assert tree.leaf_rewards == tuple(chain.reward for chain in chains)
    assert tree.reward == pytest.approx(fmean(tree.leaf_rewards))
    assert tree.rewards == pytest.approx({"right": 1 / 3, "neat": 0.1})
    assert tree.segments[1].versions == (0, 0)
    found = rollout_metrics([Group(Task("t", (), None), (tree,))], "right")
    assert found["episode/stop/max_tokens"] == pytest.approx(1 / 3)
    assert found["tools/calls_per_episode"] == 2
    assert found["tree/leaves"] == 3
    assert found["response_length/mean"] == 14


def test_a_nondeterministic_world_is_reported():
    def other(told, number):
        chain = played(told, number)
        changed = replace(chain.segments[0], tokens=(1, 2, 4 + number))
        return replace(chain, segments=(changed, *chain.segments[1:]))

    def restores_not(told, number):
        if told:
            raise RestoreError("The world does not repeat: so and so.")
        return played(told, number)

    def ends_early(told, number):
        chain = played(told, number)
        return replace(chain, segments=chain.segments[:2]) if told else chain

    for play in (other, restores_not, ends_early):
        with pytest.raises(WorldError, match="cannot branch") as error:
            grow(play, branches=1, turns=[1])
        assert not isinstance(error.value, RestoreError)  # it would be played again for ever


def test_parts_lengths_and_turns_apply_to_each_leaf():
    settings = RewardsConfig(
        weights={"neat": 0.2}, length=LengthConfig(kind="linear", target=2, lam=0.001, cap=0.05), turns={"look": 0.01}
    )
    config = Config(rewards=settings)
    parts = [Reward("right", lambda t, a: 0.0, outcome=True), Reward("neat", lambda t, a: 0.0, weight=0.1)]
    one = RewardMixer(settings, plan_parts(config, parts))
    tree, chains = grow(branches=2, turns=[1])
    long = replace(chains[1], segments=(*chains[1].segments, Segment("action", (9,), 3, None, "policy", (-1.0,))))
    group = [tree, long]
    ((combined, plain),) = one.combine(1, [episodes(*group)])
    apart = one.combine(1, [episodes(*chains, long)])[0]
    assert combined.trajectory.leaf_rewards == tuple(e.trajectory.reward for e in apart[:3])
    assert [leaf.rewards for leaf in combined.trajectory.leaves] == [e.trajectory.rewards for e in apart[:3]]
    assert combined.trajectory.attempts() == [e.trajectory for e in apart[:3]]
    assert plain.trajectory == apart[3].trajectory
    assert combined.trajectory.timings == tree.timings


def test_tokens_are_masked_only_if_all_their_leaves_are_truncated():
    tree, _ = grow(branches=2, turns=[1])
    other = replace(played((), 1), stop_reason=StopReason.ANSWERED)
    algorithm = replace(PRESETS["grpo"], overlong_mask=True)
    first, _ = assign_credit([episodes(tree, other)], algorithm)
    marked = dict(zip(sorted({p for own in tree.paths() for p in own.places}), first.trains, strict=True))
    assert [all(marked[p] for p in own.places) for own in tree.paths()] == [True, False, True]
    assert marked[0]  # the first action is that of all leaves


@pytest.mark.parametrize("scale", ["std", "none"])
def test_branch_advantage_is_relative_to_its_siblings(scale):
    """A plain loop over the nodes, by their tokens."""
    tree, _ = grow(branches=2, turns=[1, 2], max_leaves=6)
    other, _ = grow(lambda told, number: played(told, number + 7), branches=1, turns=[0])
    algorithm = replace(
        PRESETS["grpo"], advantage="siblings", options=PartOptions(advantage={"scale": scale}), std_ddof=0
    )
    credits = assign_credit([episodes(tree, other)], algorithm)
    leaves = [leaf for one in (tree, other) for leaf in zip(firsts(one), one.leaf_rewards, strict=True)]

    def worth(node):
        return fmean(reward for row, reward in leaves if tuple(row[: len(node)]) == node)

    def advantage(node):
        nodes = {tuple(row[: len(node)]) for row, _ in leaves if tuple(row[: len(node) - 1]) == node[:-1]}
        if len(nodes) == 1:
            return advantage(node[:-1])
        values = torch.tensor([worth(one) for one in sorted(nodes)], dtype=torch.float64)
        std = float(values.std(correction=0)) + 1e-6 if scale == "std" else 1.0
        return (worth(node) - float(values.mean())) / std

    for credit, one in zip(credits, (tree, other), strict=True):
        for row, path in zip(firsts(one), one.paths(), strict=True):
            expected = [advantage(tuple(row[: turn + 1])) for turn in range(TURNS) for _ in range(2)]
            found = [credit.advantages[place] for place in path.places]
            assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--rollout.partial.tokens", "50"], "rollout.partial"),
        (["--rollout.temperature", "0"], "needs sampling"),
        (["--rollout.branch.turns", "[9]"], "has turn 9"),
    ],
)
def test_settings_incompatible_with_branching_raise_config_error(words, why):
    given = ["--rollout.branch.branches", "1", "--rollout.branch.turns", "[1]", *words]
    with pytest.raises(ConfigError, match=why):
        check_branch(load_config("search", given))


@pytest.mark.parametrize(
    "settings", [{"branches": 1}, {"turns": [1]}, {"branches": 1, "turns": [1], "entropy_turns": 1}]
)
def test_incomplete_or_conflicting_fork_settings_raise_error(settings):
    with pytest.raises(ValueError, match=r"rollout\.branch"):
        BranchConfig(**settings)


BRANCH = {
    "rollout__partial__tokens": 0,
    "staleness__max_staleness": 0,
    "rollout__branch__branches": 2,
    "rollout__branch__turns": "[0, 1]",
    "rollout__branch__max_leaves": 4,
    "training__checkpoint_every": 1,
    "training__steps": 2,
    "algorithm__advantage": "siblings",
    "rewards__length__kind": "linear",
    "rewards__length__target": 4,
    "rewards__length__cap": 0.05,
}


@pytest.fixture(scope="module")
def branched(tiny_run, tmp_path_factory):
    return run(tiny_run, tmp_path_factory.mktemp("branched"), **BRANCH)


@pytest.mark.slow
def test_training_run_with_branching_records_consistent_trees_and_metrics(branched):
    records = [r for step in (1, 2) for r in read_rollouts(rollouts_path(branched, step))]
    trees = [r.trajectory for r in records if r.trajectory.leaves]
    assert trees
    assert {len(tree.rows) for tree in trees} <= {2, 3, 4}
    for tree in trees:
        for chain, reward in zip(tree.attempts(), tree.leaf_rewards, strict=True):
            assert chain.rewards.keys() >= {"exact_match", "well_formed", "length"}
            assert chain.reward == reward
            assert chain.messages[-1]["role"] in ("assistant", "tool")
            for segment in chain.segments:
                assert segment.kind != "action" or len(segment.logprobs) == len(segment.tokens) > 0
        assert len({tuple(t for s in chain.segments for t in s.tokens) for chain in tree.attempts()}) > 1
    for row in metrics(branched):
        assert row["ledger/started"] == 9
        assert row["tree/leaves"] > 1
        assert row["mismatch/logprob_diff"] < 1e-3  # the learner agrees on every token of the trees
    shown = ludus("show", branched, "--step", "1")
    assert shown.code == 0, shown
    assert ludus("rewards", "replay", branched).out.count("bit for bit") == 1


@pytest.mark.slow
def test_resumed_branching_run_equals_the_uninterrupted_run(branched, tmp_path):
    cut = Path(shutil.copytree(branched, tmp_path / "run"))
    shutil.rmtree(cut / "checkpoints/step-000002")
    assert ludus("train", "--resume", cut).code == 0
    before, after = lasting_files(branched), lasting_files(cut)
    assert [name for name in before if before[name] != after.get(name)] == []


def test_siblings_advantage_without_branching_is_reported_as_inactive():
    words = ["--algorithm.advantage", "siblings", "--training.minibatches", "2"]
    config = load_config("guess", words)
    assert any("siblings" in one for one in inactive_parts(config, build_world(config.env, config.rollout)))
    forked = ["--rollout.branch.branches", "1", "--rollout.branch.turns", "[0]"]
    config = load_config("guess", [*words, *forked])
    assert not inactive_parts(config, build_world(config.env, config.rollout))
