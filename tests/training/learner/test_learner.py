"""The learner: partition-invariant, masked, and with ratio exactly 1 for an unchanged policy."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ludus.algorithms.algorithm import Algorithm, PartOptions
from ludus.algorithms.spec.resolve import PRESETS
from ludus.errors import LearnerError
from ludus.training.batches.rows import Row, microbatches, row_of_trajectory
from ludus.training.learner.learner import CachedLogprobs, Learner, LearnerSettings, choose_tokens
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.types import Segment, StopReason, Trajectory

VOCAB = 61


def tiny_model(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def random_rows(num=9, seed=0):
    """Ragged rows with observations in the middle and random behaviour log-probabilities."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num):
        segments = [Segment("prompt", tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))))]
        for turn in range(rng.randint(1, 3)):
            action = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))
            logprobs = tuple(-4 * rng.random() for _ in action)
            segments.append(Segment("action", action, turn, logprobs=logprobs, versions=(0,) * len(action)))
            seen = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 8)))
            segments.append(Segment("observation", seen, turn))
        trajectory = Trajectory("t", 0, tuple(segments), (), StopReason.ANSWERED)
        rows.append(row_of_trajectory(trajectory, rng.uniform(-2, 2)))
    return rows


def learner(model, algorithm=None, settings=None, scorers=None):
    optimizer = Optimizer(model, OptimizerSettings(learning_rate=1e-3, total_steps=10))
    return Learner(
        LogprobScorer(model), optimizer, algorithm or PRESETS["grpo"], settings or LearnerSettings(), scorers or {}
    )


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def largest_difference(left, right):
    return max(float((left[name] - right[name]).detach().abs().max()) for name in left)


def test_metrics_of_several_updates_aggregate_over_all_tokens():
    """Without a learning rate they are the ones of a single update: maxima stay, means are over tokens."""
    found = []
    for minibatches in (1, 4):
        one = learner(tiny_model(), WITH_ALL_TERMS, LearnerSettings(minibatches=minibatches))
        one.scorers["reference"] = LogprobScorer(tiny_model(seed=1))
        one.optimizer = Optimizer(one.scorer.model, OptimizerSettings(learning_rate=1e-30, total_steps=10))
        found.append(one.train(random_rows(), seed=3))
    whole, parts = found
    assert parts["batch/trained_rows"] == whole["batch/trained_rows"] / 4
    names = [name for name in whole if name.startswith(("policy/", "mismatch/", "is/"))]
    assert {"mismatch/logprob_diff_max", "policy/ratio_max", "policy/entropy", "mismatch/kl"} < set(names)
    for name in names:
        assert parts[name] == pytest.approx(whole[name], rel=1e-12), name


WITH_ALL_TERMS = Algorithm(name="all", summary="", source="", kl_coef=0.05, entropy_coef=0.0, correction="tis")


@pytest.mark.parametrize("algorithm", [PRESETS["grpo"], PRESETS["grpo_paper"], PRESETS["dr_grpo"], WITH_ALL_TERMS])
def test_the_gradient_does_not_depend_on_the_partition(algorithm):
    model, rows = tiny_model(), random_rows()
    reference = {"reference": LogprobScorer(tiny_model(seed=1))}
    proximal = [torch.rand(len(row.tokens), dtype=torch.float64).log() for row in rows]
    longest = max(len(row.tokens) for row in rows)
    whole = learner(model, algorithm, LearnerSettings(microbatch_tokens=10**6), reference)
    expected_statistics, tokens = whole.gradient(rows, CachedLogprobs(proximal))
    expected = gradients(model)
    assert tokens == sum(sum(row.trains) for row in rows)
    for size in (1, 2, 3, 7):
        settings = LearnerSettings(microbatch_tokens=size * longest)
        order = list(range(len(rows)))
        random.Random(size).shuffle(order)
        part = learner(model, algorithm, settings, reference)
        statistics, _ = part.gradient([rows[i] for i in order], CachedLogprobs([proximal[i] for i in order]))
        assert largest_difference(expected, gradients(model)) < 1e-10
        assert statistics.loss == pytest.approx(expected_statistics.loss, abs=1e-10)


@pytest.mark.parametrize("shared", [True, False])
def test_microbatches_hold_every_row_once_within_the_budget(shared):
    rows = random_rows(20)
    parts = microbatches(rows, 64, torch.device("cpu"), torch.float64, shared=shared)
    assert sorted(i for part in parts for i in part.index) == list(range(20))
    for part in parts:
        real = sum(len(rows[i].tokens) for i in part.index)
        assert (real if shared else part.tokens.numel()) <= 64 or len(part.index) == 1
        for place, i in enumerate(part.index):
            length = len(rows[i].tokens)
            assert part.tokens[place, :length].tolist() == list(rows[i].tokens)
            assert not part.trains[place, length:].any()


def test_unchanged_policy_has_ratio_one_and_zero_kl():
    model, rows = tiny_model(torch.float32), random_rows()
    scorers = {"reference": LogprobScorer(copy.deepcopy(model))}
    statistics, _ = learner(model, scorers=scorers).gradient(rows)
    assert statistics.clip.ratio_max == 1.0
    assert statistics.clip.ratio_mean == 1.0
    assert statistics.kl_sum == 0.0


def test_tokens_outside_actions_do_not_affect_the_gradient():
    """Changing what stands after the last action changes nothing; so does a change of unscored targets."""
    model, rows = tiny_model(), random_rows()
    learner(model).gradient(rows)
    expected = gradients(model)
    tail = [
        Row(
            (*row.tokens, 7, 8),
            (*row.trains, False, False),
            (*row.sampled, False, False),
            (*row.behavior, 0.0, 0.0),
            (*row.advantages, 9.0, 9.0),
        )
        for row in rows
    ]
    learner(model).gradient(tail)
    assert largest_difference(expected, gradients(model)) < 1e-12


def test_unmasked_observations_are_trained_on_if_set():
    segments = (
        Segment("prompt", (1, 2)),
        Segment("action", (3,), 0, logprobs=(-1.0,), versions=(0,)),
        Segment("observation", (4, 5), 0),
    )
    trajectory = Trajectory("t", 0, segments, (), StopReason.ANSWERED)
    assert row_of_trajectory(trajectory, 1.0).trains == (False, False, True, False, False)
    unmasked = row_of_trajectory(trajectory, 1.0, mask_observations=False)
    assert unmasked.trains == (False, False, True, True, True)
    assert unmasked.sampled == (False, False, True, False, False)
    model = tiny_model()
    _, tokens = learner(model).gradient([unmasked])
    assert tokens == 3


def test_scorer_logprobs_and_entropy_equal_those_from_full_logits():
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    ).double()
    for model in (tiny_model(), llama):
        scorer = LogprobScorer(model, temperature=0.7)
        tokens = torch.randint(0, VOCAB, (3, 12))
        asked = torch.rand(3, 12) < 0.5
        logprobs, entropy = (t.detach() for t in scorer.score(tokens, asked, "value"))
        full = (model(input_ids=tokens).logits.detach() / 0.7).log_softmax(-1)
        for row, column in asked.nonzero().tolist():
            if column == 0:
                assert logprobs[row, column] == 0
                continue
            expected = full[row, column - 1, tokens[row, column]]
            assert abs(float(logprobs[row, column] - expected)) < 1e-10
            spread = -(full[row, column - 1].exp() * full[row, column - 1]).sum()
            assert abs(float(entropy[row, column] - spread)) < 1e-10
        assert float(logprobs[~asked].abs().sum()) == 0


def test_entropy_bonus_gradient_increases_entropy():
    rows, model = random_rows(), tiny_model()
    plain, _ = learner(model).gradient(rows)
    without = gradients(model)
    model.zero_grad()
    learner(model, replace(PRESETS["grpo"], entropy_coef=0.5)).gradient(rows)
    pushed = {name: gradient - without[name] for name, gradient in gradients(model).items()}
    step = 1e-2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= step * pushed[name]
    after, _ = learner(model).gradient(rows)
    expected = step * sum(float(gradient.square().sum()) for gradient in pushed.values()) / 0.5
    assert (after.entropy_sum - plain.entropy_sum) / plain.clip.tokens == pytest.approx(expected, rel=0.02)


def test_several_minibatches_keep_the_first_weights_as_the_proximal_policy():
    model = tiny_model()
    settings = LearnerSettings(epochs=2, minibatches=2)
    metrics = learner(model, settings=settings).train(random_rows(), seed=0)
    assert metrics["policy/ratio_max"] > 1.0
    assert metrics["batch/trained_rows"] == 4.5


def test_training_on_no_rows_leaves_weights_unchanged():
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    assert learner(model).train([], seed=0) == {}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_non_finite_gradient_raises_and_leaves_weights_unchanged():
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    row = random_rows(1)[0]
    wild = Row(row.tokens, row.trains, row.sampled, row.behavior, tuple(float("inf") * t for t in row.trains))
    with pytest.raises((LearnerError, ValueError)):
        learner(model).train([wild], seed=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_restored_optimizer_continues_bitwise_identically():
    rows = random_rows()
    model = tiny_model()
    straight = learner(model)
    for step in range(4):
        straight.train(rows, seed=step)
    other = tiny_model()
    first = learner(other)
    for step in range(2):
        first.train(rows, seed=step)
    state = {name: tensor.clone() for name, tensor in first.optimizer.state_dict().items()}
    second = learner(other)
    second.optimizer.load_state_dict(state, 2)
    for step in range(2, 4):
        second.train(rows, seed=step)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name]), name


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [0.5, 1.0, 1.0, 1.0]), ("linear", [0.5, 1.0, 1.0, 0.5]), ("cosine", [0.5, 1.0, 1.0, 0.5])],
)
def test_learning_rate_follows_the_schedule(schedule, rates):
    settings = OptimizerSettings(learning_rate=1.0, total_steps=4, warmup_steps=2, schedule=schedule)
    assert [settings.learning_rate_at(step) for step in range(4)] == pytest.approx(rates)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_chosen_by_a_loss_do_not_depend_on_row_order(name, seed):
    rows = random_rows(24, seed)
    rows += rows[:3]  # the same attempt twice: only what it earned can tell them apart
    options = {"share": 0.1} | ({"low": -9.0, "high": 9.0} if name == "clip_cov" else {})
    algorithm = replace(PRESETS[name], options=PartOptions(loss=options))
    proximal = [torch.tensor(row.behavior, dtype=torch.float64) for row in rows]
    chosen = choose_tokens(rows, proximal, algorithm, seed)
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    moved = choose_tokens([rows[i] for i in order], [proximal[i] for i in order], algorithm, seed)
    assert sum(int(c.sum()) for c in chosen) > 5
    assert [c.tolist() for c in moved] != [c.tolist() for c in chosen]
    found, expected = (
        sorted((r.tokens, r.advantages, c.tolist()) for r, c in zip(given, marks, strict=True))
        for given, marks in (([rows[i] for i in order], moved), (rows, chosen))
    )
    assert found == expected
