"""Token-level advantages: turns, KL in reward and advantage, soft overlong penalty, conflict tokens, rejection."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from algorithm_parts import FUNCTIONS, GREEDY_ADVANTAGES, GROUP_ADVANTAGES, TURN_READING_ADVANTAGES
from ludus.algorithms import advantages
from ludus.algorithms.advantages import optimal_token_baseline
from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.kl import kl_controller, penalised_advantages, penalised_rewards
from ludus.algorithms.shaping import soft_overlong
from ludus.algorithms.spec.resolve import PRESETS, resolve
from ludus.config.load import load_config
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.errors import LearnerError, SyncError
from ludus.recipes import list_recipes
from ludus.rewards.base import Reward
from ludus.rollouts.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.scheduler import Episode
from ludus.training.batches.rows import row_of_trajectory
from ludus.training.collection.filters import AlgorithmState
from ludus.training.collection.rollout_collector import overlong_limit
from ludus.training.credit.advantages import Estimates, assign_credit, training_rows, with_estimates
from ludus.training.rl.sync_trainer import SyncTrainer
from ludus.training.rl.train_step import (
    TrainStep,
    check_parity,
    check_samples,
    filter_and_estimate,
    rejected_share,
    with_entropy_filter,
)
from ludus.types import Failure, Segment, StopReason, Task, Trajectory
from tests.training.learner.test_learner import learner, tiny_model

REWARDS = (1.0, 0.0, 0.4, 0.0)


def trajectory(sample: int, reward: float, *, turns: int = 2) -> Trajectory:
    """A prompt, then actions of 3, 4, ... tokens with observations between; its turn rewards differ."""
    segments = [Segment("prompt", (1, 2, 3))]
    for turn in range(turns):
        action = tuple((sample * 7 + turn * 3 + i) % 50 + 4 for i in range(3 + turn))
        lps = tuple(-1.0 - 0.1 * i for i in range(len(action)))
        segments.append(Segment("action", action, turn, logprobs=lps, versions=(0,) * len(action)))
        if turn < turns - 1:
            segments.append(Segment("observation", (5, 6), turn))
    given = tuple(0.1 * sample + turn for turn in range(turns))
    return Trajectory("t", sample, tuple(segments), (), StopReason.ANSWERED, reward=reward, turn_rewards=given)


def group(rewards=REWARDS, name="t"):
    task = Task(name, (), None)
    return [
        Episode(RolloutKey(1, name, i), task, trajectory(i, reward, turns=2 + i % 2))
        for i, reward in enumerate(rewards)
    ]


def table(credits):
    width = max(len(c.advantages) for c in credits)
    found = torch.zeros(len(credits), width, dtype=torch.float64)
    mask = torch.zeros(len(credits), width, dtype=torch.bool)
    for i, credit in enumerate(credits):
        found[i, : len(credit.advantages)] = torch.tensor(credit.advantages, dtype=torch.float64)
        mask[i, : len(credit.advantages)] = True
    return found, mask


def same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def inputs(credits):
    _, mask = table(credits)
    turn = torch.zeros(mask.shape, dtype=torch.int64)
    given = torch.zeros(len(credits), 3, dtype=torch.float64)
    for i, credit in enumerate(credits):
        sizes = [3 + turn for turn in range(2 + i % 2)]
        of_tokens = [k for k, size in enumerate(sizes) for _ in range(size)]
        turn[i, : len(of_tokens)] = torch.tensor(of_tokens)
        rewards = credit.episode.trajectory.turn_rewards
        given[i, : len(rewards)] = torch.tensor(rewards, dtype=torch.float64)
    return mask, turn, given


@pytest.mark.parametrize("name", ["turn_grpo", "turn_return", "turn_return_hybrid"])
def test_turn_level_advantages_differ_between_turns(name):
    algorithm = replace(PRESETS[name], options=PartOptions())
    credits = assign_credit([group()], algorithm)
    mask, turn, turn_rewards = inputs(credits)
    rewards, ids = torch.tensor(REWARDS, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    expected = FUNCTIONS[name](rewards=rewards, turn_rewards=turn_rewards, turn=turn, group=ids, mask=mask)
    found, _ = table(credits)
    same(found, expected)
    assert len(set(credits[1].advantages)) > 1
    row = training_rows(credits, mask_observations=True)[1]
    assert [a for a, action in zip(row.advantages, row.sampled, strict=True) if action] == list(credits[1].advantages)


def test_trained_observation_has_the_advantage_of_the_preceding_action():
    row = row_of_trajectory(trajectory(0, 1.0), [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0], mask_observations=False)
    assert row.advantages == (0.0,) * 3 + (1.0,) * 5 + (2.0,) * 4


def test_record_advantage_is_the_mean_over_tokens():
    credits = assign_credit([group()], PRESETS["turn_return"])
    assert credits[1].record.advantage == pytest.approx(sum(credits[1].advantages) / len(credits[1].advantages))
    assert assign_credit([group()], PRESETS["grpo"])[0].record.advantage == credits_of_grpo()[0]


def credits_of_grpo():
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    ids, mask = torch.zeros(4, dtype=torch.int64), torch.ones(4, 1, dtype=torch.bool)
    return advantages.grpo(rewards=rewards, group=ids, mask=mask)[:, 0].tolist()


@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_kl_is_applied_before_or_after_group_normalisation(placement):
    algorithm = replace(PRESETS["grpo"], kl_coef=0.3, kl_placement=placement)
    credits = assign_credit([group()], algorithm)
    _, mask = table(credits)
    kl = torch.rand(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * mask
    rows = [kl[i, : len(c.advantages)] for i, c in enumerate(credits)]
    found, _ = table(with_estimates(credits, algorithm, 0, Estimates(kl=rows)))
    rewards, ids = torch.tensor(REWARDS, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    if placement == "reward":
        rewards = penalised_rewards(rewards=rewards, kl=kl, mask=mask, coef=0.3)
    expected = advantages.grpo(rewards=rewards, group=ids, mask=mask)
    if placement == "advantage":
        expected = penalised_advantages(advantages=expected, kl=kl, mask=mask, coef=0.3)
    same(found, expected)


def test_reinforce_pp_applies_the_kl_per_token():
    algorithm = PRESETS["reinforce_pp"]
    credits = assign_credit([group()], algorithm)
    _, mask = table(credits)
    kl = torch.rand(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * mask
    rows = [kl[i, : len(c.advantages)] for i, c in enumerate(credits)]
    found, _ = table(with_estimates(credits, algorithm, 0, Estimates(kl=rows)))
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    same(found, advantages.reinforce_pp(rewards=rewards, mask=mask, kl=kl, kl_coef=algorithm.kl_coef))


@pytest.mark.parametrize("measure", ["sequence", "action_tokens"])
def test_soft_overlong_penalty_reduces_rewards_near_the_limit(measure):
    algorithm = replace(PRESETS["dr_grpo"], overlong_buffer=0.5, overlong_measure=measure)
    longest = {"sequence": 19, "action_tokens": 14}[measure]
    credits = assign_credit([group()], algorithm, longest)
    _, mask = table(credits)
    lengths = mask.sum(1)
    if measure == "sequence":
        lengths = torch.tensor([len(c.episode.trajectory.token_ids) for c in credits])
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    shaped = rewards + soft_overlong(lengths=lengths, max_length=longest, cache=max(1, round(longest / 2)))
    assert float(shaped.sum()) < float(rewards.sum())
    found, _ = table(credits)
    ids = torch.zeros(4, dtype=torch.int64)
    same(found, advantages.dr_grpo(rewards=shaped, group=ids, mask=mask))
    assert [c.episode.trajectory.reward for c in credits] == list(REWARDS)


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("measure", ["sequence", "action_tokens"])
def test_truncated_episodes_are_penalised_in_every_recipe(recipe, measure):
    """One action of rollout.max_tokens_per_turn without an end, or as many as fill rollout.max_seq_len."""
    words = ["--algorithm.preset", "dapo", "--algorithm.overlong_measure", measure]
    config = load_config(recipe.config, words)
    algorithm, rollout = resolve(config.algorithm), config.rollout
    own = [m for m in config.env.mixture.values() if m.max_seq_len is not None]
    fewest = min([rollout.max_seq_len, *(m.max_seq_len for m in own)])
    per_turn = min([rollout.max_tokens_per_turn, *(m.max_tokens_per_turn or rollout.max_tokens_per_turn for m in own)])

    def played(length, turns, stop, reward=0.0):
        action = (7,) * length
        segments = [Segment("prompt", (1, 2, 3))]
        for turn in range(turns):
            lps = {"logprobs": (-1.0,) * length, "versions": (0,) * length}
            segments += [Segment("action", action, turn, **lps), Segment("observation", (5, 6), turn)]
        return Trajectory("t", 0, tuple(segments), (), stop, reward=reward)

    right, wrong = (played(2, 1, StopReason.ANSWERED, reward) for reward in (1.0, 0.0))
    for cut in (
        played(per_turn, 1, StopReason.TRUNCATED),
        played(per_turn, max(1, (fewest - 3) // (per_turn + 2)), StopReason.MAX_TOKENS),
        played(per_turn // 4, 1, StopReason.MAX_TOKENS),
    ):
        task = Task("t", (), None)
        episodes = [Episode(RolloutKey(1, "t", i), task, one) for i, one in enumerate((right, wrong, cut))]
        credits = assign_credit([episodes], algorithm, overlong_limit(config, algorithm))
        assert [c.outcome for c in credits] == [RolloutOutcome.TRAINED] * 3
        assert credits[2].advantage < credits[1].advantage <= credits[0].advantage


def test_overlong_limit_is_configured_or_derived_from_token_limits():
    def longest(*words):
        config = load_config("search", ["--algorithm.preset", "dapo", *words])
        return overlong_limit(config, resolve(config.algorithm))

    assert longest() == 640
    assert longest("--algorithm.overlong_measure", "action_tokens") == 6 * 64
    assert longest("--algorithm.overlong_length", "200") == 200


def turn_groups():
    """Six groups of equal outcomes: in five the turns differ, in one they do not."""
    found = []
    for number in range(6):
        members = group((0.0,) * 4, f"t{number}")
        turns = [(0.5, 0.0, 0.0), (0.5, 0.0, 0.0), *[((number < 5) * 0.5, 0.0, 0.0)] * 2]
        turns = turns if number < 5 else [(0.5, 0.0, 0.0)] * 4
        turns[0] = (0.1 * number, 0.0, 0.0) if number < 5 else turns[0]
        pairs = zip(members, turns, strict=True)
        found.append([replace(e, trajectory=replace(e.trajectory, turn_rewards=t)) for e, t in pairs])
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_zero_variance_filter_keeps_groups_with_nonzero_advantage(name):
    """Outcomes, turns and lengths differ or not; what an advantage does not read keeps no group."""
    algorithm = replace(PRESETS[name], filter_zero_variance=True, kl_coef=0.0, overlong_mask=False)
    if algorithm.advantage in (*GREEDY_ADVANTAGES, "rae", "raw", "reinforce_pp"):
        pytest.skip("compares no members of a group")
    groups = [*turn_groups(), group(name="t6"), group((1.0,) * 4, "t7"), group((0.0,) * 4, "t8")]
    if algorithm.advantage == "pass_at_k":
        groups[6] = group((1.0, 0.0, 0.0, 0.0), "t6")
    credits = assign_credit(groups, algorithm)
    free = assign_credit(groups, replace(algorithm, filter_zero_variance=False))
    dropped = {c.group for c in credits if c.reason == "zero_variance"}
    compares = algorithm.advantage in GROUP_ADVANTAGES and algorithm.advantage != "reinforce_pp_baseline"
    for credit in free:
        if credit.group in dropped and compares:
            assert not any(credit.advantages), (name, credit.group)
    by_turns = algorithm.advantage in TURN_READING_ADVANTAGES
    assert 6 not in dropped
    if name != "gigpo":  # its returns of turns are compared among equal states alone: here there are none
        assert ({0, 1, 2, 3, 4} & dropped == set()) == by_turns
        assert 5 in dropped


@pytest.mark.parametrize("name", ["grpo", "turn_grpo"])
def test_zero_variance_metric_equals_the_share_dropped_by_the_filter(name):
    """Rewards of turns differ where those of outcomes are equal: `turn_grpo` reads them, `grpo` does not."""
    algorithm = replace(PRESETS[name], filter_zero_variance=True)
    failed = replace(trajectory(0, 0.0), failure=Failure("engine", "gone", 1), stop_reason=StopReason.FAILED)
    lost = [replace(episode, trajectory=failed) for episode in group(name="t9")]
    groups = [*turn_groups(), group(name="t6"), group((1.0,) * 4, "t7"), lost]
    credits = assign_credit(groups, algorithm)
    dropped = {c.group for c in credits if c.reason == "zero_variance"}
    loop = SimpleNamespace(
        collector=SimpleNamespace(
            algorithm=algorithm,
            demonstrations=None,
            reward_mixer=None,
            explorer=None,
            judge=None,
            guidance=None,
            ledger=SimpleNamespace(close=lambda step, trained: SimpleNamespace(metrics=dict)),
        ),
        session=SimpleNamespace(
            config=load_config("search"), world=SimpleNamespace(rewards=[Reward("right", len, outcome=True)])
        ),
        collector_state=SimpleNamespace(partial={}, curriculum={}),
        untrained_counts={},
    )
    metrics = SyncTrainer.account(loop, 1, list(credits), {})
    assert metrics["groups/zero_variance"] == pytest.approx(len(dropped) / (len(groups) - 1))
    assert (len(dropped) == len(groups) - 2) == (name == "grpo")


def test_gtpo_does_not_penalise_tokens_shared_with_good_trajectories():
    good, bad = trajectory(0, 1.0), trajectory(0, 0.0)
    task = Task("t", (), None)
    episodes = [Episode(RolloutKey(1, "t", i), task, t) for i, t in enumerate((good, bad))]
    credits = assign_credit([episodes], PRESETS["gtpo"])
    plain = assign_credit([episodes], PRESETS["grpo"])
    assert credits[1].advantages == (0.0,) * 7
    assert credits[0].advantages == tuple(2 * a for a in plain[0].advantages)


def real_group(rewards=REWARDS, shift=0.0):
    """Episodes whose recorded log-probabilities are those of the model, but for `shift`, and the learner."""
    model = tiny_model()
    algorithm = replace(PRESETS["grpo"], correction="reject_sequence")
    one = learner(model, algorithm)
    found = []
    for i, episode in enumerate(group(rewards)):
        row = row_of_trajectory(episode.trajectory, 0.0)
        scored = one.score([row])[0].tolist()
        at, segments = 0, []
        for segment in episode.trajectory.segments:
            lps = tuple(x - shift * (i == 0) for x in scored[at : at + len(segment.tokens)])
            segments.append(replace(segment, logprobs=lps) if segment.kind == "action" else segment)
            at += len(segment.tokens)
        found.append(replace(episode, trajectory=replace(episode.trajectory, segments=tuple(segments))))
    return found, one


def test_trajectory_with_ratio_out_of_bounds_is_masked():
    episodes, one = real_group(shift=1.0)
    credits = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0)
    assert [c.outcome for c in credits] == [RolloutOutcome.MASKED, *[RolloutOutcome.TRAINED] * 3]
    assert credits[0].reason == "rejected"
    lengths = [len(c.advantages) for c in credits]
    assert rejected_share(credits) == lengths[0] / sum(lengths)
    wide = PartOptions(correction={"high": 3.0})
    one.algorithm = replace(one.algorithm, options=wide)
    kept = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0)
    assert all(c.outcome is RolloutOutcome.TRAINED for c in kept)
    assert rejected_share(kept) == rejected_share([]) == 0.0


def test_token_level_rejection_masks_tokens_and_trains_the_rest():
    """One token of the first episode was likelier to the engine by 2 nats."""
    episodes, one = real_group()
    segments = list(episodes[0].trajectory.segments)
    place = next(i for i, s in enumerate(segments) if s.kind == "action")
    first, *rest = segments[place].logprobs
    segments[place] = replace(segments[place], logprobs=(first + 2.0, *rest))
    changed = replace(episodes[0], trajectory=replace(episodes[0].trajectory, segments=tuple(segments)))
    group_of = [changed, *episodes[1:]]
    by_token, veto = {"by": "token"}, {"by": "largest", "veto": 0.2}
    for correction, options, trains in (
        ("reject_sequence", by_token, True),
        ("reject_sequence", veto, False),
        ("m2po", {"bound": 0.01}, True),
    ):
        parts = PartOptions(correction=options)
        one.algorithm = replace(one.algorithm, correction=correction, options=parts)
        found = filter_and_estimate(assign_credit([group_of], one.algorithm), one, 0)
        count = len(found[0].advantages)
        if trains:
            assert found[0].trains == (False, *[True] * (count - 1))
            assert [c.outcome for c in found] == [RolloutOutcome.TRAINED] * 4
            assert rejected_share(found) == 1 / sum(len(c.advantages) for c in found)
        else:
            assert [c.outcome for c in found] == [RolloutOutcome.MASKED, *[RolloutOutcome.TRAINED] * 3]
        assert {c.trains for c in found[1:]} == {None}


def test_optimal_token_baseline_uses_the_policy_distributions():
    played, one = real_group()
    episodes = [replace(e, trajectory=replace(e.trajectory, turn_rewards=())) for e in played]
    one.algorithm = PRESETS["optimal_token_baseline"]
    found = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0)
    columns = {"old": [], "squares": []}
    for episode in episodes:
        row = row_of_trajectory(episode.trajectory, 0.0)
        with torch.no_grad():
            table = one.scorer.model(input_ids=torch.tensor([row.tokens])).logits[0].double().log_softmax(-1)
        at = torch.tensor(row.sampled[1:])
        picked = table[:-1].gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0]
        columns["old"].append(picked[at])
        columns["squares"].append(table[:-1].exp().square().sum(-1)[at])
    padded = {k: torch.nn.utils.rnn.pad_sequence(v, batch_first=True) for k, v in columns.items()}
    lengths = torch.tensor([len(row) for row in columns["old"]])
    expected = optimal_token_baseline(
        rewards=torch.tensor([e.trajectory.reward for e in episodes], dtype=torch.float64),
        group=torch.zeros(len(episodes), dtype=torch.long),
        mask=torch.arange(padded["old"].shape[1]) < lengths[:, None],
        old_logprobs=padded["old"],
        sum_pi_squared=padded["squares"],
    )
    for credit, row in zip(found, expected.tolist(), strict=True):
        assert credit.advantages == pytest.approx(row[: len(credit.advantages)], abs=1e-5)
    assert any(len(set(c.advantages)) > 1 for c in found)


def test_engine_learner_parity_is_checked_by_position():
    episodes, one = real_group()
    credits = assign_credit([episodes], one.algorithm)
    measured = check_parity([row_of_trajectory(e.trajectory, 0.0) for e in episodes], one)
    assert measured.labels[0] == "<=512"
    assert measured.buckets[0].tokens == sum(e.trajectory.num_action_tokens for e in episodes)
    assert measured.buckets[0].gap_max < 1e-9
    check_samples(credits, one)
    others, _ = real_group(shift=0.5)
    with pytest.raises(SyncError, match="at positions <=512"):
        check_samples(assign_credit([others], one.algorithm), one)


def test_gtpo_masks_high_entropy_completions():
    episodes, one = real_group()
    one.algorithm = replace(PRESETS["gtpo"], options=PartOptions(loss={"entropy_bound": 0.01}))
    credits = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0)
    assert {(c.outcome, c.reason) for c in credits} == {(RolloutOutcome.MASKED, "entropy")}
    one.algorithm = replace(one.algorithm, options=PartOptions(loss={"entropy_bound": math.log(61)}))
    assert all(
        c.outcome is RolloutOutcome.TRAINED
        for c in filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0)
    )


def gtpo_parts(credits, one):
    """The plain advantages, the mean entropies and the weights of conflict tokens, each by a plain loop."""
    plain = [c.advantages for c in assign_credit([[c.episode for c in credits]], PRESETS["grpo"])]
    rows = [row_of_trajectory(c.episode.trajectory, 0.0) for c in credits]
    scored = zip(one.entropies(rows), rows, strict=True)
    means = [float(e[torch.tensor(row.trains)].double().mean()) for e, row in scored]
    return plain, means


def test_gtpo_advantage_has_a_mean_entropy_penalty():
    episodes, one = real_group()
    for penalty in (0.1, 0.0, 0.7):
        loss = {"entropy_bound": 10.0} | ({} if penalty == 0.1 else {"entropy_penalty": penalty})
        one.algorithm = replace(PRESETS["gtpo"], options=PartOptions(loss=loss))
        before = assign_credit([episodes], one.algorithm)
        credits = filter_and_estimate(before, one, 0)
        plain, means = gtpo_parts(credits, one)
        for i, credit in enumerate(credits):
            weights = [a / p for a, p in zip(before[i].advantages, plain[i], strict=True)]
            expected = [w * (p - penalty * means[i]) for w, p in zip(weights, plain[i], strict=True)]
            assert credit.advantages == pytest.approx(expected, abs=1e-6)


def test_gtpo_entropy_filter_is_disabled_at_high_initial_entropy():
    algorithm = PRESETS["gtpo"]
    assert with_entropy_filter(algorithm, 0.69) == algorithm
    assert with_entropy_filter(algorithm, 0.70).options.loss["entropy_bound"] == math.inf
    wide = replace(algorithm, options=PartOptions(loss={"entropy_bound": 2.0, "amplify": 3.0}))
    assert with_entropy_filter(wide, 1.9) == wide
    assert with_entropy_filter(wide, 2.0).options.loss == {"entropy_bound": math.inf, "amplify": 3.0}


@pytest.mark.parametrize(("bound", "filters"), [(math.log(61) + 0.1, True), (1.0, False)])
def test_initial_entropy_is_measured_once_and_saved(bound, filters):
    """The tiny model starts near ln 61; a bound below that would keep nothing, and is switched off."""
    episodes, one = real_group()
    one.algorithm = replace(PRESETS["gtpo"], options=PartOptions(loss={"entropy_bound": bound}))
    control = kl_controller(load_config("guess", []), one.algorithm.kl_coef)
    learning = TrainStep(SimpleNamespace(config=load_config("guess", [])), one, control, Ledger())
    credits = learning._prepare(1, assign_credit([episodes], one.algorithm))
    assert {c.outcome for c in credits} == {RolloutOutcome.TRAINED}
    assert one.algorithm.options.loss["entropy_bound"] == (bound if filters else math.inf)
    first = learning.initial_entropy
    with torch.no_grad():
        one.scorer.model.get_output_embeddings().weight.zero_()
    learning._prepare(2, assign_credit([episodes], one.algorithm))
    assert learning.initial_entropy == first
    memory = replace(AlgorithmState(), initial_entropy=first)
    assert AlgorithmState.start(one.algorithm, memory.to_json()).initial_entropy == first


def test_gtpo_conflict_tokens_are_contiguous_by_default():
    task = Task("t", (), None)
    actions = [(9, 1, 9, 1), (9, 2, 9, 2)]
    episodes = [
        Episode(
            RolloutKey(1, "t", i),
            task,
            replace(
                trajectory(0, 1.0 - i, turns=1),
                segments=(Segment("prompt", (1,)), Segment("action", own, 0, logprobs=(-1.0,) * 4, versions=(0,) * 4)),
            ),
        )
        for i, own in enumerate(actions)
    ]
    found = {}
    for contiguous in (1.0, 0.0):
        options = PartOptions(loss={"contiguous": contiguous})
        (_, bad) = assign_credit([episodes], replace(PRESETS["gtpo"], options=options))
        found[contiguous] = [a == 0 for a in bad.advantages]
    assert found == {1.0: [True, False, False, False], 0.0: [True, False, True, False]}
    assert [a == 0 for a in assign_credit([episodes], PRESETS["gtpo"])[1].advantages] == found[1.0]


PENALISING = [name for name, preset in PRESETS.items() if preset.kl_coef]


@pytest.fixture(scope="module")
def spread():
    """Episodes with spread rewards, and another model."""
    return real_group((1.0, *[0.0] * 5))[0], tiny_model(seed=1)


FIRST_OF_LOSS = {preset.loss: name for name, preset in reversed(PRESETS.items())}
UPDATED = [
    pytest.param(name, marks=[] if name in FIRST_OF_LOSS.values() else pytest.mark.slow)
    for name in PRESETS
    if name not in ("sdpo", "sdft")  # need a taught row
]


@pytest.mark.parametrize("name", UPDATED)
def test_every_preset_updates_weights_with_finite_metrics(name, spread):
    """One step on a batch with spread rewards: a finite loss, and weights that move."""
    algorithm = replace(resolve(AlgorithmConfig(preset=name)), correction="none")
    if name == "gtpo":
        algorithm = replace(algorithm, options=PartOptions(loss={"entropy_bound": 10.0}))
    model, episodes, reference = tiny_model(), *spread
    one = learner(model, algorithm, scorers=dict.fromkeys(("reference", "teacher"), learner(reference).scorer))
    before = {n: p.clone() for n, p in model.named_parameters()}
    if algorithm.advantage in GREEDY_ADVANTAGES:
        episodes = [*episodes, replace(episodes[-1], key=RolloutKey(1, "t", len(episodes)), greedy=True)]
    credits = filter_and_estimate(assign_credit([episodes], algorithm, 30), one, 30)
    metrics = one.train(training_rows(credits, mask_observations=True), seed=0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert any(not torch.equal(before[n], p) for n, p in model.named_parameters())
    assert metrics["mismatch/logprob_diff/<=512"] == pytest.approx(metrics["mismatch/logprob_diff"])


def test_pass_at_k_with_a_fractional_reward_raises():
    with pytest.raises(LearnerError, match=r"is 0\.4, but the advantage pass_at_k needs 0 or 1"):
        assign_credit([group()], PRESETS["pass_at_k"])
    found = assign_credit([group((1.0, 0.0, 0.0, 0.0, 0.0))], PRESETS["pass_at_k"])
    assert found[0].advantages[0] > 0
