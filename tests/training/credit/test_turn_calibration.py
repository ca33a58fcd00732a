"""Event rewards are calibrated against the advantage, and those that act against their sign are removed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from statistics import fmean

import pytest

from ludus.algorithms.spec.resolve import PRESETS
from ludus.cli.results.calibrate import recorded_groups
from ludus.config.load import load_config
from ludus.envs.registry import build_world
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, rollouts_path, write_rollouts
from ludus.rollouts.trees import with_chains
from ludus.training.credit.advantages import BASELINE, assign_credit
from ludus.training.credit.turn_rewards import align, calibration_algorithm, measure, with_turn_rewards
from ludus.types import Leaf, StopReason, ToolStatus
from tests.rewards.test_turn_verifiers import calls_of, play
from tests.training.batches.test_branches import tree
from tests.training.credit.test_combine import episode
from tests.training.credit.test_reward_terms import outcome

HYBRID = PRESETS["turn_return_hybrid"]


def group():
    """Two successes that answer at once, a failure that looks and one whose call raises."""
    made = [(1, ()), (1, ()), (0, (outcome(0),)), (0, (outcome(0, status=ToolStatus.RAISED),))]
    return [episode(won, 0, 0, outcomes=done, sample=i) for i, (won, done) in enumerate(made)]


def test_event_advantage_is_the_mean_over_its_turns():
    rewards = {"look": 0.1, "raised": -0.05}
    played = [replace(e, trajectory=with_turn_rewards(e.trajectory, rewards)) for e in group()]
    looked, raised = (assign_credit([played], HYBRID)[i].advantages for i in (2, 3))
    answers = [c.advantages[at] for c in assign_credit([played], HYBRID) for at in (0, 2)]
    found = measure([group()], rewards, HYBRID).advantages
    assert found["look"] == pytest.approx(looked[0])
    assert found["raised"] == pytest.approx(raised[0])
    rest = [a for place, a in enumerate(answers) if place not in (4, 6)]
    assert found["answer"] == pytest.approx(fmean(rest))


def test_misaligned_event_reward_is_removed_and_the_rest_remeasured():
    """Looking is rewarded and occurs in a failure alone: what follows weighs more than its reward."""
    rounds = align([group()], {"look": 0.1, "raised": -0.1}, HYBRID)
    assert [one.misaligned for one in rounds] == [["look"], []]
    assert [dict(one.rewards) for one in rounds] == [{"look": 0.1, "raised": -0.1}, {"raised": -0.1}]
    assert rounds[0].advantages["look"] != rounds[1].advantages["look"]
    assert len(align([group()], {"raised": -0.1}, HYBRID)) == 1
    assert align([[]], {"look": 0.1}, HYBRID)[0].advantages == {}


def test_calibration_replaces_advantages_without_turn_comparison():
    assert calibration_algorithm(PRESETS["turn_grpo"]) is PRESETS["turn_grpo"]
    assert calibration_algorithm(PRESETS["ppo"]) == calibration_algorithm(PRESETS["grpo"]) == HYBRID


def test_recorded_attempts_drop_run_turn_rewards_and_get_progress(tmp_path):
    words = ["--env.settings.num_tasks", "20", "--env.settings.levels", "[4]", "--rewards.turns.answer", "0.01"]
    config = load_config("functions", [*words, "--algorithm.preset", "turn_grpo"])
    world = build_world(config.env, config.rollout)
    task = next(t for t in world.tasks("train") if len(t.truth.gold) == 2)
    played = asyncio.run(play(world, task, calls_of(world.expert(task))[0]))
    trained = replace(played, turn_rewards=(0.25, 0.01))
    paths = [rollouts_path(tmp_path, 1), tmp_path / "evaluations" / "test.jsonl.gz"]
    for path in paths:
        path.parent.mkdir(parents=True)
        records = [
            RolloutRecord(1, task.id, RolloutOutcome.TRAINED, reason, trained) for reason in ("trained", BASELINE)
        ]
        write_rollouts(path, records)
    (own,), (evaluated,) = recorded_groups(config, world, paths)
    assert own.trajectory.turn_rewards == (0.25, 0.0)
    assert evaluated.trajectory.turn_rewards == (0.25, 0.01)
    assert own.trajectory.turn_progress == evaluated.trajectory.turn_progress == (0.5, 0.0)
    assert own.trajectory.reward == played.reward


def test_turn_progress_of_a_tree_round_trips_through_paths():
    whole = replace(tree(), leaves=tuple(Leaf((), StopReason.ANSWERED) for _ in range(3)))
    chains = [replace(one, turn_progress=(0.5, 0.1 * i)) for i, one in enumerate(whole.attempts())]
    joined = with_chains(whole, chains)
    assert joined.turn_progress == pytest.approx((0.5, 0.0, 0.2, 0.1, 0.0))
    apart = [one.turn_progress for one in joined.attempts()]
    assert apart == [pytest.approx(row) for row in ((0.5, 0.0), (0.5, 0.1), (0.5, 0.2, 0.0))]
