"""Critic targets: the advantage of each token plus its value, before advantages are changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ludus.algorithms import advantages
from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.spec.resolve import PRESETS, algorithm_of
from ludus.config.load import load_config
from ludus.training.batches.rows import row_of_trajectory
from ludus.training.credit.advantages import Estimates, assign_credit, with_estimates
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.rl.train_step import filter_and_estimate
from ludus.training.value_models.factory import at_turn_starts, make_value_model, train_value_model
from ludus.types import Segment, StopReason, Trajectory
from tests.training.credit.test_credit import group, inputs, real_group
from tests.training.learner.test_learner import tiny_model

GAE = replace(PRESETS["ppo"], options=PartOptions(advantage={"lam": 0.9}))


def estimated(algorithm, *, kl_scale=1.0, dtype=torch.float64, episodes=None):
    """Credits of a group with values and KL of each action token; and both as `[N, L]`."""
    credits = assign_credit([episodes or group()], algorithm)
    mask, _, _ = inputs(credits)
    draw = torch.Generator().manual_seed(3)
    values = torch.rand(mask.shape, dtype=torch.float64, generator=draw).to(dtype)
    kl = kl_scale * torch.rand(mask.shape, dtype=torch.float64, generator=draw)
    rows = [[table[i, : len(c.advantages)] for i, c in enumerate(credits)] for table in (values, kl)]
    return with_estimates(credits, algorithm, 0, Estimates(values=rows[0], kl=rows[1])), values, kl


def of_one_token(episode):
    """The episode with 7 for each token that it sampled: all of a group are in conflict."""
    segments = tuple(
        replace(segment, tokens=(7,) * len(segment.tokens)) if segment.kind == "action" else segment
        for segment in episode.trajectory.segments
    )
    return replace(episode, trajectory=replace(episode.trajectory, segments=segments))


def expected(credits, values, **given):
    mask, turn, turn_rewards = inputs(credits)
    rewards = torch.tensor([c.episode.trajectory.reward for c in credits], dtype=torch.float64)
    found = advantages.gae(values=values, mask=mask, rewards=rewards, turn=turn, turn_rewards=turn_rewards, **given)
    return advantages.value_targets(advantages=found, values=values, mask=mask)


def check(credits, wanted):
    for i, credit in enumerate(credits):
        assert credit.targets == pytest.approx(wanted[i, : len(credit.targets)].tolist(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_targets_are_exact_in_float64_whatever_the_critic_computes_in(dtype):
    credits, values, _ = estimated(GAE, dtype=dtype)
    check(credits, expected(credits, values.double()))


@pytest.mark.parametrize("lam", [1.0, 0.7, 0.0])
@pytest.mark.parametrize(("name", "own"), [("gae", {"lam": 0.9}), ("vapo", {"alpha": 0.3})])
def test_critic_targets_use_a_separate_lambda(name, own, lam):
    """What the policy's lam forgets of a late reward the critic still learns."""
    given = PartOptions(advantage=own | {"lam_critic": lam})
    credits, values, _ = estimated(replace(GAE, advantage=name, options=given))
    check(credits, expected(credits, values, lam=lam))
    plain, _, _ = estimated(replace(GAE, advantage=name, options=PartOptions(advantage=own)))
    assert [c.advantages for c in credits] == [c.advantages for c in plain]


def test_kl_in_the_advantage_is_not_in_the_value_targets():
    plain, values, _ = estimated(GAE)
    placed, _, _ = estimated(replace(GAE, kl_coef=1.0, kl_placement="advantage"), kl_scale=6.0)
    assert placed[0].advantages != plain[0].advantages
    check(placed, expected(placed, values))


def test_a_kl_in_the_reward_is_part_of_the_targets():
    placed, values, kl = estimated(replace(GAE, kl="k1", kl_coef=0.3, kl_placement="reward"))
    check(placed, expected(placed, values, kl=kl, kl_coef=0.3))


@pytest.mark.parametrize("name", ["vtrace", "retrace"])
def test_on_policy_a_kl_in_the_reward_is_once_in_the_targets_of_vtrace_and_retrace(name):
    """Where the engine and the learner agree both are gae with lam 1, whose targets are returns."""
    given = {"kl": "k1", "kl_coef": 0.3, "kl_placement": "reward", "options": PartOptions()}
    plain, values, kl = estimated(replace(GAE, **given))
    traced, _, _ = estimated(replace(GAE, advantage=name, **given))
    for ours, theirs in zip(traced, plain, strict=True):
        assert ours.advantages == pytest.approx(theirs.advantages, abs=1e-12)
        assert ours.targets == pytest.approx(theirs.targets, abs=1e-12)
    check(traced, expected(traced, values, kl=kl, kl_coef=0.3))


def test_conflict_token_weights_do_not_enter_the_value_targets():
    """They say how strongly a token trains and not what it earns."""
    alike = [of_one_token(episode) for episode in group((9.0, -9.0, 9.0, -9.0))]
    weighed, values, _ = estimated(replace(GAE, loss="gtpo"), episodes=alike)
    plain, _, _ = estimated(GAE, episodes=alike)
    assert weighed[0].advantages != plain[0].advantages
    check(weighed, expected(weighed, values))


def judge_of(preset, model):
    config = load_config("search", ["--algorithm.preset", preset, "--critic.clip", "0"])
    return make_value_model(config, algorithm_of(config), model, "success")


@pytest.mark.parametrize(("preset", "tokens"), [("step_ppo", 10), ("turn_ppo", 38), ("ppo", 38)])
def test_turn_level_critic_trains_only_on_first_tokens_of_turns(preset, tokens):
    """Its loss is the mean over those: the targets of other tokens would be their own values, and move."""
    episodes, one = real_group()
    one.algorithm = replace(PRESETS[preset])
    judge = judge_of(preset, one.scorer.model)
    train_value_model(judge, filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge))
    credits = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge)
    errors = []
    for i, credit in enumerate(credits):
        first = [0, 3, 7][: 2 + i % 2] if preset == "step_ppo" else range(len(credit.values))
        errors += [0.5 * (credit.values[t] - credit.targets[t]) ** 2 for t in first]
    assert len(errors) == tokens
    assert train_value_model(judge, credits)["critic/loss"] == pytest.approx(sum(errors) / tokens, abs=1e-9)


@pytest.mark.parametrize(("preset", "tokens"), [("step_ppo", 9), ("ppo", 35)])
def test_critic_does_not_train_on_stale_tokens(preset, tokens):
    """Three tokens of the first turn of one attempt do not train: neither the policy nor the critic."""
    episodes, one = real_group()
    one.algorithm = replace(PRESETS[preset])
    judge = judge_of(preset, one.scorer.model)
    credits = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge)
    length = len(credits[0].values)
    credits[0] = replace(credits[0], trains=tuple(i >= 3 for i in range(length)))
    errors = []
    for i, credit in enumerate(credits):
        first = [0, 3, 7][: 2 + i % 2] if preset == "step_ppo" else range(len(credit.values))
        young = [t for t in first if credit.trains is None or credit.trains[t]]
        errors += [0.5 * (credit.values[t] - credit.targets[t]) ** 2 for t in young]
    assert len(errors) == tokens
    assert train_value_model(judge, credits)["critic/loss"] == pytest.approx(sum(errors) / tokens, abs=1e-9)


@pytest.mark.parametrize("preset", ["ppo", "coderl", "prime"])
def test_autocast_does_not_affect_value_model_training(preset):
    """Trap 7: what it says, and what it learns, is computed in its own types."""
    found = []
    for under in (False, True):
        episodes, one = real_group()
        one.algorithm = replace(PRESETS[preset])
        one.scorers["reference"] = LogprobScorer(tiny_model(seed=1), 1.0)
        judge = judge_of(preset, tiny_model(torch.float32))
        greedy = replace(episodes[1], key=replace(episodes[1].key, sample=4), greedy=True)
        group = [*episodes, *([greedy] if preset == "coderl" else [])]
        with torch.autocast("cpu", torch.bfloat16, enabled=under):
            credits = filter_and_estimate(assign_credit([group], one.algorithm), one, 0, judge)
            metrics = train_value_model(judge, credits)
        weights = torch.cat([p.detach().flatten() for p in judge.model.parameters()])
        found.append(([c.advantages for c in credits], metrics, weights.tolist()))
    assert found[0] == found[1]


def test_each_turn_of_a_tree_opens_once():
    """Two answers to one first turn: three turns, of which the first is in both paths and opens once."""
    segments = (
        Segment("prompt", (1, 2)),
        Segment("action", (3, 4), 0, logprobs=(-1.0,) * 2, versions=(0,) * 2),
        Segment("observation", (5,), 0),
        Segment("action", (6, 7), 1, logprobs=(-1.0,) * 2, versions=(0,) * 2),
        Segment("action", (8, 9), 1, logprobs=(-1.0,) * 2, versions=(0,) * 2, parent=2),
    )
    tree = Trajectory("t", 0, segments, (), StopReason.ANSWERED)
    row = at_turn_starts(row_of_trajectory(tree, 0.0), tree)
    assert [token for token, opens in zip(row.tokens, row.trains, strict=True) if opens] == [3, 6, 8]
