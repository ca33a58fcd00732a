"""Groups with the largest variance, and StarPO: whole runs with a critic on the selected groups."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from algorithm_parts import GREEDY_ADVANTAGES
from ludus.algorithms import advantages
from ludus.algorithms.filters import variance_top, variance_top_p
from ludus.algorithms.spec.resolve import PRESETS, resolve
from ludus.config.load import load_config
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.envs.base import TaskOrder
from ludus.rollouts.ledger import Ledger, RolloutOutcome
from ludus.training.collection.filters import empty_batch_guard, filter_low_variance
from ludus.training.collection.prompt_stream import PromptStream
from ludus.training.collection.rollout_collector import RolloutCollector, filter_batch, num_training_groups
from ludus.training.credit.advantages import assign_credit, record_outcomes, training_rows
from ludus.types import StopReason, Task
from tests.training.credit.test_credit import group, same, table
from tests.training.learner.test_learner import gradients, largest_difference, learner, tiny_model
from tests.training.rl.test_baselines import run

FLAT, WIDE, NARROW, EQUAL = (0.5, 0.4, 0.5, 0.4), (1.0, 0.0, 1.0, 0.0), (1.0, 0.8, 1.0, 0.8), (0.3,) * 4
SPREADS = (FLAT, WIDE, NARROW, EQUAL)


def groups():
    return [group(rewards, f"t{i}") for i, rewards in enumerate(SPREADS)]


def test_highest_variance_groups_are_kept_and_dropped_ones_counted():
    credits = filter_low_variance(
        assign_credit(groups(), PRESETS["ppo"]), replace(PRESETS["ppo"], top_variance_fraction=0.5)
    )
    fate = {c.episode.task.id: (c.outcome, c.reason) for c in credits}
    dropped = (RolloutOutcome.DROPPED, "variance_top")
    assert fate == {
        "t0": dropped,
        "t1": (RolloutOutcome.TRAINED, "trained"),
        "t2": (RolloutOutcome.TRAINED, "trained"),
        "t3": dropped,
    }
    rewards = [c.episode.trajectory.reward for c in credits]
    keep = variance_top(rewards=rewards, group=[c.group for c in credits], p=0.5).tolist()
    assert [c.outcome is RolloutOutcome.TRAINED for c in credits] == keep
    ledger = Ledger()
    for credit in credits:
        ledger.start(credit.episode.key)
    record_outcomes(ledger, credits)
    assert ledger.close(1, trained=8).metrics()["ledger/dropped/variance_top"] == 8


def top_p_by_hand(deviations, p):
    """RAGEN-2's rule as a plain loop: the largest first, as long as the sum so far is below the limit."""
    kept, total = set(), 0.0
    for number in sorted(range(len(deviations)), key=lambda i: -deviations[i]):
        if deviations[number] <= 1e-10 or (p < 1 and total >= p * sum(deviations) - 0.01):
            break
        kept.add(number)
        total += deviations[number]
    return kept


@pytest.mark.parametrize("p", [0.3, 0.5, 0.6, 0.9, 1.0])
def test_top_p_keeps_groups_holding_that_share_of_deviation(p):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.rand(7, 4, generator=generator, dtype=torch.float64)
        rewards[torch.randint(7, (2,), generator=generator)] = 0.3
        ids = torch.arange(7).repeat_interleave(4)
        kept = variance_top_p(rewards=rewards.flatten(), group=ids, p=p)
        assert set(ids[kept].tolist()) == top_p_by_hand(rewards.std(1).tolist(), p), seed
    scores = torch.tensor([[-1.0, 1.0], [2.0, 2.0], [0.0, 6.0]], dtype=torch.float64).flatten()
    ids = [0, 0, 1, 1, 2, 2]
    for share, expected in ((0.9, [0, 2]), (0.5, [2]), (1.0, [0, 2])):
        kept = variance_top_p(rewards=scores, group=ids, p=share)
        assert sorted({i for i, k in zip(ids, kept.tolist(), strict=True) if k}) == expected
    flat = variance_top_p(rewards=[1.0, 1.0, 0.0, 0.0], group=[0, 0, 1, 1], p=p)
    assert not flat.any()
    assert not variance_top_p(rewards=[0.0, 0.01], group=[0, 0], p=0.9).any()


def test_top_p_filter_is_configurable_and_drops_equal_groups():
    config = AlgorithmConfig(preset="rloo", variance_filter="top_p")
    algorithm = resolve(config)
    assert (algorithm.variance_filter, algorithm.top_variance_fraction) == ("top_p", 0.9)
    assert resolve(config.model_copy(update={"top_variance_fraction": 0.5})).top_variance_fraction == 0.5
    credits = filter_batch(assign_credit(groups(), algorithm), algorithm, 0)
    kept = {c.episode.task.id for c in credits if c.outcome is RolloutOutcome.TRAINED}
    assert kept == {"t1", "t2"}
    flat = [group(EQUAL, "a"), group(EQUAL, "b")]
    credits = filter_batch(assign_credit(flat, algorithm), algorithm, 0)
    assert {(c.outcome, c.reason) for c in credits} == {(RolloutOutcome.DROPPED, "variance_top")}


def test_five_consecutive_empty_batches_stop_the_run():
    algorithm = replace(PRESETS["ppo"], variance_filter="top_p", top_variance_fraction=0.9)
    empty, full = {"ledger/trained": 0.0}, {"ledger/trained": 4.0}

    def verdicts(*steps, filtered=algorithm):
        guard = empty_batch_guard(filtered)
        return [bool(guard.update(metrics)) for metrics in steps]

    assert verdicts(*[empty] * 5) == [False] * 4 + [True]
    assert verdicts(*[empty] * 4, full, *[empty] * 4) == [False] * 9
    assert verdicts(*[empty] * 9, filtered=PRESETS["ppo"]) == [False] * 9
    guard = empty_batch_guard(algorithm)
    guard.restore([full, *[empty] * 4])
    assert "5 steps in a row" in guard.update(empty)
    guard = empty_batch_guard(algorithm)
    guard.restore([empty] * 5)
    assert not guard.update(empty)


def test_zero_variance_reason_precedes_the_variance_filter():
    algorithm = replace(PRESETS["grpo"], top_variance_fraction=0.25)
    credits = filter_batch(assign_credit(groups(), algorithm), algorithm, 0)
    reasons = {c.episode.task.id: c.reason for c in credits}
    assert reasons == {"t0": "variance_top", "t1": "trained", "t2": "variance_top", "t3": "zero_variance"}


def test_dropped_groups_are_excluded_from_batch_statistics():
    algorithm = replace(PRESETS["reinforce_pp_baseline"], kl_coef=0.0, top_variance_fraction=0.5)
    credits = filter_batch(assign_credit(groups(), algorithm), algorithm, 0)
    kept = [c for c in credits if c.outcome is RolloutOutcome.TRAINED]
    found, mask = table(kept)
    rewards = torch.tensor([*WIDE, *NARROW], dtype=torch.float64)
    ids = torch.tensor([0] * 4 + [1] * 4)
    same(found, advantages.reinforce_pp_baseline(rewards=rewards, group=ids, mask=mask))
    assert all(c.advantages is None for c in credits if c.outcome is RolloutOutcome.DROPPED)


def test_several_rounds_are_filtered_as_one_batch():
    algorithm = replace(PRESETS["reinforce_pp"], kl_coef=0.0)
    rounds = assign_credit(groups()[:2], algorithm) + assign_credit(groups()[2:], algorithm, 0, 2)
    assert filter_batch(rounds, algorithm, 0) == assign_credit(groups(), algorithm)


def test_truncated_sample_counts_in_the_baseline_but_is_masked():
    episodes = group()
    cut = replace(episodes[0].trajectory, stop_reason=StopReason.TRUNCATED)
    episodes[0] = replace(episodes[0], trajectory=cut)
    masking = replace(PRESETS["grpo"], overlong_mask=True)
    credits = assign_credit([episodes], masking)
    trained = (RolloutOutcome.TRAINED, "trained")
    assert [(c.outcome, c.reason) for c in credits] == [(RolloutOutcome.MASKED, "overlong"), *[trained] * 3]
    plain = assign_credit([episodes], PRESETS["grpo"])
    assert [(c.outcome, c.reason) for c in plain] == [trained] * 4
    assert [c.advantages for c in plain] == [c.advantages for c in credits]


@pytest.mark.parametrize("name", ["starpo", "starpo_s"])
def test_starpo_is_ppo_over_whole_trajectories(name):
    preset = PRESETS[name]
    assert (preset.advantage, preset.loss) == ("gae", "ppo_clip")
    assert (preset.kl_coef > 0, preset.clip_high > preset.clip_low) == (name == "starpo", name == "starpo_s")


@pytest.mark.slow
def test_starpo_s_run_trains_only_on_kept_groups(tmp_path):
    reporter = run(
        tmp_path / "run",
        algorithm__preset="starpo_s",
        algorithm__top_variance_fraction="0.5",
        training__steps="1",
        rollout__temperature="2",
        rollout__max_tokens_per_turn="24",
        critic__warmup_steps="0",
    )
    metrics = reporter.steps[0][1]
    assert (metrics["ledger/trained"], metrics["ledger/dropped/variance_top"]) == (2, 2)
    assert metrics["batch/trained_rows"] == 2
    assert "critic/loss" in metrics


@pytest.mark.parametrize(("rounds", "played"), [(0, 2), (1, 4), (2, 5), (3, 5)])
def test_resample_rounds_replace_zero_variance_groups(rounds, played):
    """The first, second and fourth task teach nothing; a round asks for as many as the step still lacks."""
    order = TaskOrder([Task(name, (), None) for name in "abcdefgh"], 0)
    names = [task.id for task in order.take(0, 8)]
    asked = []

    async def roll_out(step, tasks):
        asked.extend(task.id for task in tasks)
        return [group(EQUAL if names.index(t.id) in (0, 1, 3) else WIDE, t.id) for t in tasks]

    session = SimpleNamespace(config=load_config("search", ["--training.prompts_per_step", "2"]))
    algorithm = replace(PRESETS["dapo"], max_resample_rounds=rounds, overlong_buffer=0.0)
    sampler = RolloutCollector(session, None, algorithm, None, Ledger())
    sampler.roll_out = roll_out
    credits = asyncio.run(sampler.sample(1, order))
    assert asked == names[:played]
    kept = {c.episode.task.id for c in credits if c.outcome is RolloutOutcome.TRAINED}
    assert kept == {name for k, name in enumerate(names[:played]) if k in (2, 4)}


def test_stream_replaces_as_many_zero_variance_groups_in_every_step():
    algorithm = replace(PRESETS["dapo"], max_resample_rounds=1, overlong_buffer=0.0)
    collector = RolloutCollector(None, None, algorithm, None, Ledger())
    stream = PromptStream(collector, TaskOrder([Task("a", (), None)], 0), per_step=2)
    for _ in range(2):
        stream.begin_step()
        assert [stream.counts(group(rewards, "a")) for rewards in (EQUAL, WIDE, EQUAL, EQUAL)] == [
            False,
            True,
            False,
            True,
        ]


def cut_off(members):
    """A group of which a token limit ended every member."""
    return [replace(e, trajectory=replace(e.trajectory, stop_reason=StopReason.TRUNCATED)) for e in members]


def with_gradient(credits, algorithm):
    model = tiny_model()
    one = learner(model, replace(algorithm, kl_coef=0.0))
    statistics, tokens = one.gradient(training_rows(credits, mask_observations=True))
    return gradients(model), statistics, tokens


@pytest.mark.parametrize("name", ["grpo", "dapo", "reinforce_pp_baseline", "ppo", "dr_grpo", "gspo"])
def test_fully_truncated_group_does_not_affect_the_gradient(name):
    """With the filter it is compared, counted as masked and in no normaliser; without, it trains as any."""
    algorithm = replace(PRESETS[name], overlong_mask=True)
    rare = (1.0, 0.0, 0.0, 0.0)
    groups = [cut_off(group(rare, "t0")), group(NARROW, "t1")]
    credits = assign_credit(groups, algorithm)
    fates = [(c.outcome, c.reason) for c in credits]
    assert fates == [(RolloutOutcome.MASKED, "overlong")] * 4 + [(RolloutOutcome.TRAINED, "trained")] * 4
    assert all(math.isfinite(a) for c in credits for a in c.advantages)
    ledger = Ledger()
    for credit in credits:
        ledger.start(credit.episode.key)
    record_outcomes(ledger, credits)
    assert ledger.close(1, trained=4).metrics()["ledger/masked/overlong"] == 4
    found, statistics, tokens = with_gradient(credits, algorithm)
    alone, expected, num_alone = with_gradient(assign_credit([groups[1]], algorithm), algorithm)
    assert largest_difference(found, alone) == 0
    assert (statistics.loss, tokens) == (expected.loss, num_alone)
    off = replace(algorithm, overlong_mask=False)
    unfiltered, whole, num_whole = with_gradient(assign_credit(groups, off), off)
    assert num_whole == sum(c.episode.trajectory.num_action_tokens for c in credits)
    assert math.isfinite(whole.loss)
    assert largest_difference(found, unfiltered) > 1e-4
    uncut, _, _ = with_gradient(assign_credit([group(rare, "t0"), groups[1]], off), off)
    assert largest_difference(unfiltered, uncut) == 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i % 3 else []) for i, name in enumerate(PRESETS)]
)
def test_step_with_only_truncated_samples_leaves_weights_unchanged(name):
    algorithm = replace(PRESETS[name], overlong_mask=True, filter_zero_variance=False)
    members = cut_off(group((1.0, 0.0, 1.0, 0.0, 0.0), "t0"))
    greedy = algorithm.advantage in GREEDY_ADVANTAGES
    members[4] = replace(members[4], greedy=greedy)
    credits = filter_batch(assign_credit([members], algorithm), algorithm, 0)
    fates = [(c.outcome, c.reason) for c in credits]
    assert sorted(fates) == [
        *[(RolloutOutcome.MASKED, "baseline")] * greedy,
        *[(RolloutOutcome.MASKED, "overlong")] * (5 - greedy),
    ]
    assert all(math.isfinite(a) for c in credits for a in c.advantages or ())
    assert num_training_groups(credits) == 0
    model = tiny_model()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    assert learner(model, algorithm).train(training_rows(credits, mask_observations=True), seed=0) == {}
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


def test_fully_truncated_group_is_resampled():
    order = TaskOrder([Task(name, (), None) for name in "abcdefgh"], 0)
    names = [task.id for task in order.take(0, 8)]
    asked = []

    async def roll_out(step, tasks):
        asked.extend(task.id for task in tasks)
        return [cut_off(group(WIDE, t.id)) if t.id == names[0] else group(WIDE, t.id) for t in tasks]

    session = SimpleNamespace(config=load_config("search", ["--training.prompts_per_step", "2"]))
    sampler = RolloutCollector(session, None, replace(PRESETS["dapo"], overlong_mask=True), None, Ledger())
    sampler.roll_out = roll_out
    credits = asyncio.run(sampler.sample(1, order))
    assert asked == names[:3]
    assert {c.episode.task.id for c in credits if c.outcome is RolloutOutcome.TRAINED} == set(names[1:3])
