"""Preference training: pairs from rollouts as sampled, their losses, bit-identical resume."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from ludus.algorithms import preference as losses
from ludus.config import load_config
from ludus.config.sections.stages import SMOOTHED, PreferenceConfig, PreferenceLoss
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import ConfigError
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts, rollouts_path, write_rollouts
from ludus.training.batches.rows import batch_of_step, num_steps
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.preference.pairs import (
    NO_SIDE,
    PairSide,
    PreferencePair,
    load_pairs,
    pairs_of_branches,
    pairs_of_rollouts,
    with_mismatched,
    with_reference,
)
from ludus.training.preference.train import RunningMean, pair_losses, preference_step
from ludus.training.run.session import open_session
from ludus.types import Failure, Segment, StopReason, Trajectory
from small_runs import lasting_files
from tiny_run import cold_start, ludus, make_recipe, refused, with_unlike_rewards

TINY = ("--preference.batch_size", "4", "--preference.checkpoint_every", "2", "--preference.learning_rate", "1e-3")


@pytest.fixture(scope="module")
def source(tiny_run, tmp_path_factory) -> Path:
    """The tiny run with rewards that differ within every group."""
    return with_unlike_rewards(tiny_run, tmp_path_factory.mktemp("source") / "run")


def model_words(source: Path) -> tuple[str, ...]:
    """The recipe's model is the cold start of the run that the pairs are from."""
    return ("--model", str(cold_start(source)))


def train(source: Path, folder: Path, *words: str):
    recipe = make_recipe(folder.parent)
    given = ("preference", recipe, "--run", source, *model_words(source), *TINY, "--run.dir", folder, *words)
    return ludus(*given)


@pytest.fixture(scope="module")
def trained(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    said = train(source, folder, "--preference.steps", "4")
    assert said.code == 0, said
    return folder


def rollout(sample: int, reward: float, group: str = "a", **changes) -> RolloutRecord:
    tokens = (5 + sample, 6)
    segments = (
        Segment("prompt", (1, 2)),
        Segment("action", tokens, 0, logprobs=(-1.0, -1.0), versions=(0, 0), finish_reason="stop"),
        Segment("observation", (3,), 0),
        Segment("action", (4,), 1, logprobs=(-1.0,), versions=(0,), finish_reason="stop"),
    )
    trajectory = Trajectory(group, sample, segments, (), StopReason.ANSWERED, reward=reward)
    return RolloutRecord(1, group, RolloutOutcome.TRAINED, "trained", replace(trajectory, **changes))


def pairs_from(
    tmp_path: Path, *records: RolloutRecord, min_gap: float = 0.0, max_tokens: int = 99
) -> list[PreferencePair]:
    path = rollouts_path(tmp_path, 1)
    write_rollouts(path, records)
    return pairs_of_rollouts([path], min_gap, max_tokens)


def test_group_yields_a_pair_of_its_best_and_worst_sample(tmp_path):
    records = [rollout(0, 0.5), rollout(1, 1.0), rollout(2, 0.0), rollout(3, 1.0), rollout(4, 0.0)]
    (pair,) = pairs_from(tmp_path, *records)
    assert pair.chosen.tokens == (1, 2, 6, 6, 3, 4)
    assert pair.rejected.tokens == (1, 2, 7, 6, 3, 4)
    assert pair.chosen.trains == (False, False, True, True, False, True)
    assert (pair.gap, pair.source) == (1.0, "step-000001/a")


def test_equal_rewards_and_small_gaps_give_no_pair(tmp_path):
    equal = [rollout(i, 1.0, "b") for i in range(3)]
    near = [rollout(0, 0.3, "c"), rollout(1, 0.1, "c")]
    assert [pair.source[-1] for pair in pairs_from(tmp_path, *equal, *near)] == ["c"]
    assert pairs_from(tmp_path, *equal, *near, min_gap=0.25) == []


def test_failed_branching_empty_or_overlong_samples_form_no_pair(tmp_path):
    failed = rollout(0, 9.0, segments=(), failure=Failure("engine", "gone", 1), stop_reason=StopReason.FAILED)
    silent = rollout(1, 9.0, segments=(Segment("prompt", (1, 2)),))
    fork = (Segment("prompt", (1, 2)), Segment("action", (3,), parent=0, logprobs=(0.0,), versions=(0,)))
    branched = rollout(2, 9.0, segments=(*fork, replace(fork[1], tokens=(4,))))
    long = rollout(3, 9.0, segments=(Segment("prompt", (1,) * 50), fork[1]))
    bad = [failed, silent, branched, long]
    assert pairs_from(tmp_path, *bad, rollout(4, 1.0), max_tokens=40) == []
    (pair,) = pairs_from(tmp_path, *bad, rollout(4, 1.0), rollout(5, 0.0), max_tokens=40)
    assert pair.gap == 1.0


def test_a_step_yields_its_best_and_worst_branch_as_a_pair(tmp_path):
    """A tree with two ways after its first action, and a chain that took one of them and then another."""
    stem = (Segment("prompt", (1, 2)), Segment("action", (3,), logprobs=(-1.0,), versions=(0,)))
    seen = Segment("observation", (4,))
    ways = [
        Segment("action", tokens, 1, parent=2, logprobs=(-1.0,) * len(tokens), versions=(0,) * len(tokens))
        for tokens in ((5, 6), (7,))
    ]
    tree = rollout(0, 0.5, segments=(*stem, seen, *ways), leaf_rewards=(1.0, 0.0))
    again = Segment("action", (8,), 2, logprobs=(-1.0,), versions=(0,))
    more = (*stem, seen, replace(ways[1], parent=None), replace(seen, tokens=(9,)), again)
    chain, other = (rollout(1, 0.5, segments=more), rollout(2, 0.75, segments=(stem[0], replace(again, turn=0))))
    path = rollouts_path(tmp_path, 1)
    write_rollouts(path, [tree, chain, other])

    first, second = pairs_of_rollouts([path], 0.0, 99, pairs_of_branches)
    assert first.gap == pytest.approx(0.75 - (1.0 + 0.0 + 0.5) / 3)
    assert (first.chosen.tokens, first.rejected.tokens) == ((1, 2, 8), (1, 2, 3))
    assert second.gap == pytest.approx(1.0 - (0.0 + 0.5) / 2)
    assert second.chosen == PairSide((1, 2, 3, 4, 5, 6), (False,) * 4 + (True,) * 2)
    assert second.rejected == PairSide((1, 2, 3, 4, 7), (False,) * 4 + (True,))
    assert second.source == "step-000001/a/step of 4 tokens"
    assert pairs_of_rollouts([path], 0.5, 99, pairs_of_branches) == [second]
    assert pairs_of_rollouts([path], 0.0, 5, pairs_of_branches)[-1].gap == pytest.approx(first.gap)


def test_a_step_of_an_agent_follows_the_tokens_of_its_row_only(tmp_path):
    """Two rollouts of two rows each: the second row was sampled after its own prompt, not after the first row."""

    def rows(last, agent):
        action = Segment("action", (3,), logprobs=(-1.0,), versions=(0,))
        second = (Segment("prompt", (5,), 1, -1, agent), replace(action, tokens=(last,), turn=1, agent=agent))
        return (Segment("prompt", (1, 2)), action, *second)

    for agent, rewards in (
        ("policy", ({}, {})),
        ("judge", ({"policy": 0.5, "judge": 1.0}, {"policy": 0.5, "judge": 0})),
    ):
        best, worst = (
            rollout(i, 1.0 - i, segments=rows(6 + i, agent), shared_reward=True, agent_rewards=rewards[i])
            for i in range(2)
        )
        path = rollouts_path(tmp_path, 1)
        write_rollouts(path, [best, worst])
        (pair,) = pairs_of_rollouts([path], 0.0, 99, pairs_of_branches)
        assert (pair.chosen.tokens, pair.rejected.tokens, pair.gap) == ((5, 6), (5, 7), 1.0)


def test_others_are_the_prompt_with_the_answers_to_another_prompt():
    one = PreferencePair("1", 1, PairSide((1, 2, 3), (False, True, True)), PairSide((1, 4), (False, True)))
    same = PreferencePair("2", 1, PairSide((1, 5), (False, True)), PairSide((1, 6), (False, True)))
    other = PreferencePair(
        "3", 1, PairSide((7, 8, 9), (False, False, True)), PairSide((7, 8, 5, 5), (False, False, True, True))
    )
    found = with_mismatched([one, same, other], max_tokens=3)
    assert found[0].mismatched == (PairSide((1, 9), (False, True)), PairSide((1, 5, 5), (False, True, True)))
    assert found[2].mismatched == (PairSide((7, 8, 4), (False, False, True)),)
    assert with_mismatched([one, same], max_tokens=9)[0].mismatched == ()


def test_each_epoch_visits_every_pair_once_in_seeded_order():
    laps = [[i for step in range(first, first + 3) for i in batch_of_step(step, 6, 2, 7)] for first in (1, 4)]
    assert [sorted(lap) for lap in laps] == [list(range(6))] * 2
    assert laps[0] != laps[1]
    assert batch_of_step(1, 6, 2, 7) != batch_of_step(1, 6, 2, 8)
    assert sorted(batch_of_step(2, 3, 16, 0)) == [0, 1, 2]
    assert [num_steps(PreferenceConfig(epochs=2, batch_size=b), 10) for b in (4, 16)] == [5, 2]


@pytest.fixture(scope="module")
def session(source, tmp_path_factory):
    recipe = make_recipe(tmp_path_factory.mktemp("session"))
    return open_session(load_config(recipe, ["--model.path", model_words(source)[1]]))


def moved(session):
    """A copy of the model a little way off, so that no log-ratio is 0."""
    model = AutoModelForCausalLM.from_pretrained(session.config.model.path)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return model


def step_of(model, pairs, settings, running=None):
    optimizer = Optimizer(model, OptimizerSettings(learning_rate=1e-3, total_steps=1, max_grad_norm=1e9))
    return preference_step(LogprobScorer(model), optimizer, pairs, settings, running or RunningMean())


@pytest.mark.parametrize(
    "loss", ["dpo", "kto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("simpo", "ipo"))]
)
def test_step_loss_is_independent_of_microbatches(session, source, loss):
    pairs = pairs_of_rollouts(sorted((source / "rollouts").glob("*.gz")), 0.0, 320)[:5]
    pairs = with_reference(with_mismatched(pairs, 320), LogprobScorer(session.model), 4096)
    beta = 0.3
    whole, cut = (
        step_of(moved(session), pairs, PreferenceConfig(loss=loss, beta=beta, microbatch_tokens=tokens))
        for tokens in (10**6, 1)
    )
    for name, value in whole.items():
        assert value == pytest.approx(cut[name], abs=2e-4, rel=2e-3), name
    assert whole["optim/grad_norm"] > 0
    assert whole["loss/total"] == pytest.approx(by_hand(loss, moved(session), session.model, pairs, beta), rel=1e-3)


def test_kto_takes_the_mean_over_labelled_dialogues(session, source):
    pairs = pairs_of_rollouts(sorted((source / "rollouts").glob("*.gz")), 0.0, 320)[:3]
    sides = [replace(pairs[0], rejected=NO_SIDE), replace(pairs[1], chosen=NO_SIDE), pairs[2]]
    given = with_reference(with_mismatched(sides, 320), LogprobScorer(session.model), 4096)
    assert [len(pair.mismatched) for pair in given] == [1, 2, 1]
    whole, cut = (
        step_of(moved(session), given, PreferenceConfig(loss="kto", beta=0.3, microbatch_tokens=tokens))
        for tokens in (10**6, 1)
    )
    for name, value in whole.items():
        assert value == pytest.approx(cut[name], abs=2e-4, rel=2e-3), name
    model, reference = moved(session), session.model

    def gain(side: PairSide) -> float:
        return sums(model, side)[0] - sums(reference, side)[0]

    others = [gain(side) for pair in given for side in pair.mismatched]
    z = max(0.0, sum(others) / len(others))
    good = [1 - 1 / (1 + math.exp(-0.3 * (gain(given[i].chosen) - z))) for i in (0, 2)]
    bad = [1 - 1 / (1 + math.exp(-0.3 * (z - gain(given[i].rejected)))) for i in (1, 2)]
    assert whole["loss/total"] == pytest.approx((good[0] + bad[0] + (good[1] + bad[1]) / 2) / 3, rel=1e-3)
    margins = (gain(given[0].chosen) - z, z - gain(given[1].rejected), gain(given[2].chosen) - gain(given[2].rejected))
    assert whole["preference/margin"] == pytest.approx(sum(margins) / 3, rel=1e-3)
    means = [total / num for total, num in (sums(model, given[i].chosen) for i in (0, 2))]
    assert whole["preference/chosen_logprob"] == pytest.approx(sum(means) / 2, rel=1e-3)


def test_kto_trains_on_a_file_without_pairs(source, tmp_path):
    file = tmp_path / "labelled.jsonl"
    ask, say = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "4"}
    lines = [
        {"prompt": [ask], "completion": [say], "label": True},
        {"prompt": "And now?", "completion": "5", "label": False},
        {"messages": [ask, say, {**ask, "content": "Why?"}, {**say, "content": "6"}], "label": False},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = (make_recipe(tmp_path), *model_words(source), *TINY, "--preference.data", file)
    assert "preference.loss = kto or bco" in refused("preference", *words)
    folder = tmp_path / "run"
    said = ludus("preference", *words, "--preference.loss", "kto", "--run.dir", folder)
    assert said.code == 0, said
    pairs = load_pairs(folder / "pairs.jsonl.gz")
    assert [(bool(p.chosen.tokens), bool(p.rejected.tokens)) for p in pairs] == [
        (True, False), (False, True), (False, True)
    ]  # fmt: skip
    assert all(len(side.reference) == sum(side.trains) for pair in pairs for side in pair.all_sides)
    assert all(len(pair.mismatched) == 1 for pair in pairs)
    said = ludus("preference", *words, "--preference.loss", "bco", "--run.dir", tmp_path / "bco")
    assert said.code == 0, said
    rows = read_metrics(tmp_path / "bco" / "metrics.jsonl")
    assert [math.isfinite(row.metrics["loss/total"]) for row in rows] == [True]


def test_bco_takes_the_mean_over_labelled_dialogues(session, source):
    pairs = pairs_of_rollouts(sorted((source / "rollouts").glob("*.gz")), 0.0, 320)[:3]
    sides = [replace(pairs[0], rejected=NO_SIDE), replace(pairs[1], chosen=NO_SIDE), pairs[2]]
    given = with_reference(sides, LogprobScorer(session.model), 4096)
    found = step_of(moved(session), given, PreferenceConfig(loss="bco", beta=0.3))
    model = moved(session)
    signed = [[(1, pairs[0].chosen)], [(-1, pairs[1].rejected)], [(1, pairs[2].chosen), (-1, pairs[2].rejected)]]
    rewards = [
        [(sign, 0.3 * (sums(model, side)[0] - sums(session.model, side)[0])) for sign, side in own] for own in signed
    ]
    flat = [q for own in rewards for _, q in own]
    delta = sum(flat) / len(flat)
    each = [sum(math.log1p(math.exp(sign * (delta - q))) for sign, q in own) / len(own) for own in rewards]
    assert found["loss/total"] == pytest.approx(sum(each) / 3, rel=1e-3)
    levels = [sum(sign * q for sign, q in own) - sum(sign for sign, _ in own) * delta for own in rewards]
    assert found["preference/margin"] == pytest.approx(sum(levels) / 3 / 0.3, rel=1e-2, abs=1e-4)


def test_every_preference_loss_reads_its_settings():
    assert set(losses.PREFERENCES) == set(get_args(PreferenceLoss))
    one = torch.ones(1, 1, dtype=torch.bool)
    given = [torch.tensor([[value]], dtype=torch.float64) for value in (-1.0, -2.0, -2.0, -1.5)]
    inputs = (dict(zip(losses.PairInputs.__annotations__, (*given, one, one), strict=True)), torch.tensor(0.2))
    for loss in get_args(PreferenceLoss):
        smoothing = {"label_smoothing": 0.1} if loss in SMOOTHED else {}
        found = [
            float(pair_losses(*inputs, PreferenceConfig(loss=loss, beta=beta, **smoothing))) for beta in (0.3, 0.6)
        ]
        assert found[0] != found[1], loss
        if smoothing:
            more = PreferenceConfig(loss=loss, beta=0.3, label_smoothing=0.2)
            assert float(pair_losses(*inputs, more)) != found[0], loss
    taus = [PreferenceConfig(loss="discopop", tau=tau) for tau in (None, 0.05, 1.0)]
    default, same, other = (float(pair_losses(*inputs, settings)) for settings in taus)
    assert default == same != other


@pytest.mark.parametrize("loss", ["bco", "bco_pair"])
def test_bco_compares_with_the_mean_of_all_rewards_so_far(session, source, loss):
    """Two steps without movement: `delta` is the mean over both batches, whatever the microbatches."""
    pairs = pairs_of_rollouts(sorted((source / "rollouts").glob("*.gz")), 0.0, 320)
    pairs = with_reference(pairs, LogprobScorer(session.model), 4096)
    beta = 0.3
    running = RunningMean()
    for part in (pairs[:1], pairs[1:]):
        settings = PreferenceConfig(loss=loss, beta=beta, microbatch_tokens=1)
        found = step_of(moved(session), part, settings, running)
    model = moved(session)
    rewards = [
        tuple(beta * (sums(model, side)[0] - sums(session.model, side)[0]) for side in (p.chosen, p.rejected))
        for p in pairs
    ]
    delta = sum(map(sum, rewards)) / (2 * len(rewards))
    assert found["preference/bco_delta"] == pytest.approx(delta, rel=1e-3)
    both = [math.log1p(math.exp(delta - c)) + math.log1p(math.exp(r - delta)) for c, r in rewards[1:]]
    expected = sum(both) / len(both) / (2 if loss == "bco" else 1)
    assert found["loss/total"] == pytest.approx(expected, rel=1e-3)
    assert RunningMean.from_json(running.to_json()) == running


def sums(model, side: PairSide) -> tuple[float, int]:
    """Log-probability of what trains, by a plain forward pass of one row; and the number of tokens."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([side.tokens])).logits[0]
    scores = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(side.tokens[1:])[:, None])[:, 0]
    kept = torch.tensor(side.trains[1:])
    return float(scores[kept].sum()), int(kept.sum())


def by_hand(loss: str, model, reference, pairs: list[PreferencePair], beta: float) -> float:
    """The loss with one token for each side that carries its sum."""
    one = torch.ones(1, 1, dtype=torch.bool)

    def tensor(value: float) -> torch.Tensor:
        return torch.tensor([[value]])

    total = 0.0
    baseline = sum(sums(model, a)[0] - sums(reference, a)[0] for p in pairs for a in p.mismatched)
    baseline = max(0.0, baseline / sum(len(p.mismatched) for p in pairs))
    for pair in pairs:
        (c, n_c), (r, n_r) = sums(model, pair.chosen), sums(model, pair.rejected)
        (ref_c, _), (ref_r, _) = sums(reference, pair.chosen), sums(reference, pair.rejected)
        if loss in ("simpo", "ipo"):
            c, ref_c, r, ref_r = c / n_c, ref_c / n_c, r / n_r, ref_r / n_r
        chosen = {"chosen_logprobs": tensor(c), "rejected_logprobs": tensor(r)}
        masks = {"chosen_mask": one, "rejected_mask": one}
        refs = {"ref_chosen_logprobs": tensor(ref_c), "ref_rejected_logprobs": tensor(ref_r)}
        if loss == "simpo":
            total += float(losses.simpo(**chosen, **masks, beta=beta, gamma=1.0))
        elif loss == "kto":
            total += float(
                losses.kto(
                    logprobs=torch.tensor([[c], [r]]),
                    ref_logprobs=torch.tensor([[ref_c], [ref_r]]),
                    mask=torch.ones(2, 1, dtype=torch.bool),
                    desirable=torch.tensor([True, False]),
                    baseline=baseline,
                    beta=beta,
                ).mean()
            )
        else:
            total += float({"dpo": losses.dpo, "ipo": losses.ipo}[loss](**chosen, **masks, **refs, beta=beta))
    return total / len(pairs)


def test_rejected_weight_of_kto_is_applied():
    """The chosen is 1 nat likelier than before, the rejected 0.5 less likely; beta 0.5."""
    one = torch.ones(1, 1, dtype=torch.bool)
    given = [torch.tensor([[value]]) for value in (-1.0, -2.0, -2.0, -1.5)]
    settings = PreferenceConfig(loss="kto", beta=0.5, undesirable_weight=3.0)
    pairs = dict(zip(losses.PairInputs.__annotations__, (*given, one, one), strict=True))
    found = pair_losses(pairs, torch.tensor(0.2), settings)
    chosen, rejected = (1 - 1 / (1 + math.exp(-x)) for x in (0.4, 0.35))
    assert found.item() == pytest.approx((chosen + 3 * rejected) / 2, rel=1e-5)


IDLE = {
    "preference.min_reward_gap": ("--preference.min_reward_gap", "0.5", "--preference.data", "x"),
    "preference.tasks and samples": ("--preference.tasks", "6", "--preference.run", "x"),
    "samples": ("--preference.samples", "6", "--preference.data", "x"),
    "preference.undesirable_weight": ("--preference.undesirable_weight", "2"),
    "preference.tau": ("--preference.tau", "0.1"),
    "preference.label_smoothing": ("--preference.loss", "hinge", "--preference.label_smoothing", "0.1"),
    "mislabelled pairs": ("--preference.loss", "robust"),
    "reward_model.min_reward_gap": ("--reward_model.min_reward_gap", "0.5", "--reward_model.data", "x"),
}


@pytest.mark.parametrize(("said", "words"), IDLE.items(), ids=IDLE)
def test_unread_preference_setting_is_rejected(said, words):
    with pytest.raises(ConfigError, match=said):
        load_config(None, words)


def test_pairs_of_a_run_are_stored_with_reference_logprobs(trained, source, session):
    pairs = load_pairs(trained / "pairs.jsonl.gz")
    assert len(pairs) == len(pairs_of_rollouts(sorted((source / "rollouts").glob("*.gz")), 0.0, 320)) >= 4
    for side in pairs[0].all_sides:
        assert len(side.reference) == sum(side.trains)
        assert sum(side.reference) == pytest.approx(sums(session.model, side)[0], abs=1e-3)


def test_training_prefers_chosen_responses_and_saves_a_model(trained, source):
    rows = [row.metrics for row in read_metrics(trained / "metrics.jsonl")]
    assert len(rows) == 4
    assert rows[0]["loss/total"] == pytest.approx(0.6931, abs=1e-3)
    assert rows[-1]["loss/total"] < rows[0]["loss/total"]
    assert rows[-1]["preference/accuracy"] > 0.5
    model = AutoModelForCausalLM.from_pretrained(trained / "checkpoints" / "step-000004")
    start = AutoModelForCausalLM.from_pretrained(model_words(source)[1])
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    said = ludus("show", trained)
    assert "loss dpo" in said.out
    assert "margin of chosen over rejected" in said.out


def test_a_run_that_is_cut_and_resumed_equals_the_uninterrupted_one(trained, source, tmp_path):
    cut = tmp_path / "run"
    assert train(source, cut, "--preference.steps", "2").code == 0
    before = set(lasting_files(cut))
    said = ludus("preference", "--resume", cut, "--preference.steps", "4")
    assert said.code == 0, said
    assert lasting_files(cut) == lasting_files(trained)
    assert before != set(lasting_files(trained))
    again = ludus("preference", "--resume", cut)
    assert "complete" in again.out


def test_simpo_loads_no_reference_and_kto_logs_its_baseline(source, tmp_path):
    for loss in ("simpo", "kto"):
        assert train(source, tmp_path / loss, "--preference.loss", loss, "--preference.steps", "1").code == 0
    assert not any(
        side.reference for pair in load_pairs(tmp_path / "simpo" / "pairs.jsonl.gz") for side in pair.all_sides
    )
    (row,) = read_metrics(tmp_path / "kto" / "metrics.jsonl")
    assert row.metrics["preference/kto_baseline"] >= 0


def test_pairs_of_a_file_train_only_after_the_prompt(source, tmp_path):
    file = tmp_path / "pairs.jsonl"
    turn = {"role": "assistant", "content": "4"}
    prompt = [{"role": "user", "content": "What?"}, turn, {"role": "user", "content": "And now?"}]
    line = {"prompt": prompt, "chosen": turn, "rejected": [{"role": "assistant", "content": "5"}]}
    file.write_text(json.dumps(line) + "\n")
    folder = tmp_path / "run"
    words = (*model_words(source), *TINY, "--run.dir", folder, "--preference.data", file)
    said = ludus("preference", make_recipe(tmp_path), *words)
    assert said.code == 0, said
    (pair,) = load_pairs(folder / "pairs.jsonl.gz")
    session = open_session(load_config(folder / "config.toml"))
    trained = [t for t, kept in zip(pair.chosen.tokens, pair.chosen.trains, strict=True) if kept]
    assert session.tokenizer.decode(trained).startswith("4")
    assert session.tokenizer.decode(pair.chosen.tokens).count("4") == 2


OWN = ("--preference.tasks", "6", "--preference.samples", "4")
"""Attempts that the model samples where no file and no run is named."""


@pytest.mark.slow
def test_without_a_file_or_a_run_the_model_samples_its_own_pairs(tiny_run, tmp_path):
    words = ("--model", cold_start(tiny_run), *TINY, *OWN, "--env.settings.well_formed_weight", "0.2")
    folders = [tmp_path / name for name in ("whole", "again")]
    for folder, steps in zip(folders, (2, 1), strict=True):
        given = (*words, "--preference.steps", steps, "--preference.checkpoint_every", 1)
        said = ludus("preference", make_recipe(tmp_path), *given, "--run.dir", folder)
        assert said.code == 0, said
    file = rollouts_path(folders[0], 0)
    records = list(read_rollouts(file))
    assert len(records) == 24
    assert len({record.group for record in records}) == 6
    pairs = load_pairs(folders[0] / "pairs.jsonl.gz")
    expected = pairs_of_rollouts([file], 0.0, 320)
    assert [(p.source, p.chosen.tokens, p.rejected.tokens) for p in pairs] == [
        (p.source, p.chosen.tokens, p.rejected.tokens) for p in expected
    ]
    trained = [record for record in records if record.outcome is RolloutOutcome.TRAINED]
    assert len(trained) >= 2 * len(pairs) > 0
    (folders[1] / "pairs.jsonl.gz").unlink()  # as if killed before they were written
    shutil.rmtree(folders[1] / "checkpoints")
    assert ludus("preference", "--resume", folders[1], "--preference.steps", 2).code == 0
    assert lasting_files(folders[1]) == lasting_files(folders[0])


@pytest.mark.slow
def test_bad_input_is_reported_in_one_sentence_and_nothing_is_written(source, tiny_run, tmp_path, trained):
    recipe, folder = make_recipe(tmp_path), tmp_path / "run"
    base = ("preference", recipe, *model_words(source), "--run.dir", folder)
    assert "no rollouts" in refused(*base, "--run", trained)
    assert "is not a run folder" in refused(*base, "--run", tmp_path)
    assert "No task has two attempts" in refused(*base, "--preference.min_reward_gap", "100", *OWN)
    assert "are mutually exclusive" in refused(*base, "--run", source, "--preference.data", "x")
    assert "different rewards" in refused(*base, "--run", source, "--preference.min_reward_gap", "100")
    assert "preference.gamma" in refused(*base, "--run", source, "--preference.gamma", "1")
    assert "ludus sft" in refused("preference", recipe, "--run", source, "--model.from_scratch", "true")
    foreign = ("preference", "search", "--run", source, "--run.dir", folder)
    assert "a different vocabulary" in refused(*foreign)
    assert not folder.exists()
    assert "preference.loss" in refused("preference", "--resume", trained, "--preference.loss", "ipo")
    assert "preference.steps is 3, but 4 steps" in refused("preference", "--resume", trained, "--preference.steps", "3")
    assert f"ludus preference --resume {trained}" in refused("train", "--resume", trained)


@pytest.mark.slow
def test_pairs_of_a_tree_search_train_against_the_logged_behaviour(tmp_path):
    words = ("--preference.search.simulations", 8, "--preference.search.alpha", "1", "--preference.tasks", 6)
    words += ("--env.check", "false", "--run.threads", 1, "--preference.batch_size", 4)
    folders = [tmp_path / name for name in ("whole", "cut")]
    for folder, steps in zip(folders, (3, 1), strict=True):
        given = (*words, "--preference.steps", steps, "--preference.checkpoint_every", 1)
        said = ludus("preference", "guess", *given, "--run.dir", folder)
        assert said.code == 0, said
    assert ludus("preference", "--resume", folders[1], "--preference.steps", 3).code == 0
    assert lasting_files(folders[1]) == lasting_files(folders[0])
    records = list(read_rollouts(rollouts_path(folders[0], 0)))
    assert len(records) == 6
    assert all(len(record.trajectory.leaves) > 1 for record in records)
    logged = {
        (tuple(t for j in row[: row.index(i) + 1] for t in one.segments[j].tokens), one.segments[i].logprobs)
        for one in (record.trajectory for record in records)
        for row in one.rows
        for i in row
        if one.segments[i].kind == "action"
    }
    pairs = load_pairs(folders[0] / "pairs.jsonl.gz")
    assert pairs
    assert all(pair.gap > 0.2 for pair in pairs)
    assert all((side.tokens, side.reference) in logged for pair in pairs for side in pair.sides)
    first, *later = (row.metrics for row in read_metrics(folders[0] / "metrics.jsonl"))
    assert first["preference/margin"] == pytest.approx(0, abs=1e-4)  # the policy is its own reference
    assert first["search/simulations"] == sum(len(record.trajectory.leaves) for record in records)
    assert "search/simulations" not in later[0]
