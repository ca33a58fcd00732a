"""The groups of a step that vary most, and StarPO: whole runs with a critic on what is kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ludus.algorithms import advantages
from ludus.algorithms.filters import variance_top
from ludus.algorithms.presets import PRESETS
from ludus.config.load import load_config
from ludus.rollout.ledger import Ledger, Outcome
from ludus.tasks.order import TaskOrder
from ludus.training.credit import assign_credit, settle
from ludus.training.sampling import Sampler
from ludus.training.selection import as_one_batch, keep_most_varied
from ludus.types import StopReason, Task
from test_baselines import run
from test_credit import group, same, table

FLAT, WIDE, NARROW, EQUAL = (0.5, 0.4, 0.5, 0.4), (1.0, 0.0, 1.0, 0.0), (1.0, 0.8, 1.0, 0.8), (0.3,) * 4
SPREADS = (FLAT, WIDE, NARROW, EQUAL)


def groups():
    return [group(rewards, f"t{i}") for i, rewards in enumerate(SPREADS)]


def test_the_groups_that_vary_most_are_kept_and_the_others_counted():
    credits = keep_most_varied(assign_credit(groups(), PRESETS["ppo"]), 0.5)
    fate = {c.episode.task.id: (c.outcome, c.reason) for c in credits}
    dropped = (Outcome.DROPPED, "variance_top")
    assert fate == {
        "t0": dropped,
        "t1": (Outcome.TRAINED, "trained"),
        "t2": (Outcome.TRAINED, "trained"),
        "t3": dropped,
    }
    rewards = [c.episode.trajectory.reward for c in credits]
    keep = variance_top(rewards=rewards, group=[c.group for c in credits], p=0.5).tolist()
    assert [c.outcome is Outcome.TRAINED for c in credits] == keep
    ledger = Ledger()
    for credit in credits:
        ledger.start(credit.episode.key)
    settle(ledger, credits)
    assert ledger.close(1, trained=8).metrics()["ledger/dropped/variance_top"] == 8


def test_a_group_without_variance_keeps_the_word_of_that_filter():
    algorithm = replace(PRESETS["grpo"], variance_top=0.25)
    credits = as_one_batch(assign_credit(groups(), algorithm), algorithm, 0)
    reasons = {c.episode.task.id: c.reason for c in credits}
    assert reasons == {"t0": "variance_top", "t1": "trained", "t2": "variance_top", "t3": "zero_variance"}


def test_what_is_dropped_is_in_no_mean_over_the_batch():
    algorithm = replace(PRESETS["reinforce_pp_baseline"], kl_coef=0.0, variance_top=0.5)
    credits = as_one_batch(assign_credit(groups(), algorithm), algorithm, 0)
    kept = [c for c in credits if c.outcome is Outcome.TRAINED]
    found, mask = table(kept)
    rewards = torch.tensor([*WIDE, *NARROW], dtype=torch.float64)
    ids = torch.tensor([0] * 4 + [1] * 4)
    same(found, advantages.reinforce_pp_baseline(rewards=rewards, group=ids, mask=mask))
    assert all(c.advantages is None for c in credits if c.outcome is Outcome.DROPPED)


def test_several_rounds_are_one_batch():
    algorithm = replace(PRESETS["reinforce_pp"], kl_coef=0.0)
    rounds = assign_credit(groups()[:2], algorithm) + assign_credit(groups()[2:], algorithm, 0, 2)
    assert as_one_batch(rounds, algorithm, 0) == assign_credit(groups(), algorithm)


def test_what_a_limit_cut_off_is_compared_and_does_not_train():
    episodes = group()
    cut = replace(episodes[0].trajectory, stop_reason=StopReason.TRUNCATED)
    episodes[0] = replace(episodes[0], trajectory=cut)
    credits = assign_credit([episodes], PRESETS["dapo"])
    trained = (Outcome.TRAINED, "trained")
    assert [(c.outcome, c.reason) for c in credits] == [(Outcome.MASKED, "overlong"), *[trained] * 3]
    plain = assign_credit([episodes], replace(PRESETS["dapo"], overlong_mask=False))
    assert [(c.outcome, c.reason) for c in plain] == [trained] * 4
    assert [c.advantages for c in plain] == [c.advantages for c in credits]


@pytest.mark.parametrize("name", ["starpo", "starpo_s"])
def test_starpo_is_ppo_over_whole_trajectories(name):
    preset = PRESETS[name]
    assert (preset.advantage, preset.loss) == ("gae", "ppo_clip")
    assert (preset.kl_coef > 0, preset.eps_high > preset.eps_low) == (name == "starpo", name == "starpo_s")


def test_a_run_of_starpo_s_trains_on_the_share_that_is_kept(tmp_path):
    reporter = run(
        tmp_path / "run",
        algorithm__preset="starpo_s",
        algorithm__variance_top="0.5",
        training__steps="1",
        rollout__temperature="2",
    )
    metrics = reporter.steps[0][1]
    assert (metrics["ledger/trained"], metrics["ledger/dropped/variance_top"]) == (2, 2)
    assert metrics["batch/trained_rows"] == 2
    assert "critic/loss" in metrics


@pytest.mark.parametrize(("rounds", "played"), [(0, 2), (1, 4), (2, 5), (3, 5)])
def test_a_round_more_replaces_the_groups_without_variance(rounds, played):
    """The first, second and fourth task teach nothing; a round asks for as many as the step still lacks."""
    order = TaskOrder([Task(name, (), None) for name in "abcdefgh"], 0)
    names = [task.id for task in order.take(0, 8)]
    asked = []

    async def roll_out(step, tasks):
        asked.extend(task.id for task in tasks)
        return [group(EQUAL if names.index(t.id) in (0, 1, 3) else WIDE, t.id) for t in tasks]

    session = SimpleNamespace(config=load_config("search", ["--training.tasks_per_step", "2"]))
    algorithm = replace(PRESETS["dapo"], resample_rounds=rounds, overlong_cache=0.0)
    sampler = Sampler(session, None, algorithm, None, Ledger())
    sampler.roll_out = roll_out
    credits = asyncio.run(sampler.sample(1, order))
    assert asked == names[:played]
    kept = {c.episode.task.id for c in credits if c.outcome is Outcome.TRAINED}
    assert kept == {name for k, name in enumerate(names[:played]) if k in (2, 4)}
