"""Memory: the check before step 1, smaller microbatches after out-of-memory errors, activation checkpointing."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.sections.model import LoraConfig
from ludus.errors import LearnerError
from ludus.training.learner.learner import LearnerSettings, out_of_memory
from ludus.training.learner.logprobs import LogprobScorer, model_precision
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.rl import memory_check as dry_runs
from ludus.training.rl.build import train
from ludus.training.rl.memory_check import check_memory, dry_run, longest_rows
from ludus.training.run.run_dir import lock_run, new_run
from ludus.training.run.session import add_lora, open_session
from small_runs import SMALLEST, RecordingReporter, config, lasting_files
from tests.training.batches.test_forest import families, in_double
from tests.training.learner.test_learner import gradients, largest_difference, learner, random_rows, tiny_model
from tiny_run import make_recipe, refused

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
]


def short_of_memory(one, most, error):
    """The learner, whose passes over more than `most` tokens fail; the very first one does not."""
    score, sizes = one.scorer.score, []

    def failing(tokens, asked, entropy="none"):
        sizes.append(tokens.numel())
        if tokens.numel() > most and len(sizes) > 1:
            raise error
        return score(tokens, asked, entropy)

    one.scorer.score = failing
    return sizes


@pytest.mark.parametrize("error", ERRORS)
def test_update_is_retried_with_smaller_microbatches_on_oom(error, caplog):
    rows = random_rows(12)
    small, large = tiny_model(), tiny_model()
    expected = learner(small, settings=LearnerSettings(microbatch_tokens=40)).train(rows, seed=0)
    one = learner(large, settings=LearnerSettings(microbatch_tokens=160))
    sizes = short_of_memory(one, 80, error)
    with caplog.at_level(logging.WARNING):
        metrics = one.train(rows, seed=0)
    assert max(sizes) > 80 >= max(sizes[-3:])
    assert one.budget.tokens <= 80
    assert "training.microbatch_tokens" in caplog.text
    assert "activation_checkpointing" in caplog.text
    assert largest_difference(*(dict(m.named_parameters()) for m in (small, large))) < 1e-10
    assert metrics == pytest.approx(expected, abs=1e-10)


def test_scoring_pass_is_retried_with_smaller_microbatches_on_oom():
    rows = random_rows(12)
    plain, short = (learner(tiny_model(), settings=LearnerSettings(microbatch_tokens=160)) for _ in range(2))
    sizes = short_of_memory(short, 80, ERRORS[0])
    for expected, found in zip(plain.score(rows), short.score(rows), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert max(sizes) > 80


def test_oversized_row_raises_and_leaves_weights_unchanged():
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    one = learner(model, settings=LearnerSettings(microbatch_tokens=160))
    short_of_memory(one, 4, ERRORS[0])
    with pytest.raises(LearnerError, match=r"One row of \d+ tokens does not fit.*activation_checkpointing"):
        one.train(random_rows(12), seed=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_oom_is_not_caught_if_disabled_nor_other_errors():
    one = learner(tiny_model(), settings=LearnerSettings(microbatch_tokens=160, halve_on_oom=False))
    short_of_memory(one, 80, ERRORS[0])
    with pytest.raises(torch.OutOfMemoryError):
        one.train(random_rows(12), seed=0)
    assert not out_of_memory(RuntimeError("shape mismatch"))
    one = learner(tiny_model(), settings=LearnerSettings(microbatch_tokens=160))
    short_of_memory(one, 80, RuntimeError("shape mismatch"))
    with pytest.raises(RuntimeError, match="shape"):
        one.train(random_rows(12), seed=0)


@pytest.mark.parametrize("preset", ["grpo", "clip_cov"])
def test_dry_run_uses_the_largest_microbatch_and_leaves_state_unchanged(preset):
    model = tiny_model()
    one = learner(model, PRESETS[preset], LearnerSettings(microbatch_tokens=100))
    before, random_state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    score, shapes = one.scorer.score, []
    one.scorer.score = lambda t, a, e="none": shapes.append((tuple(t.shape), int(a.sum()))) or score(t, a, e)
    estimate = dry_run(one, 30)
    assert shapes == [((3, 30), 87)]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(random_state, torch.random.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert one.optimizer.state_dict() == {}
    bytes_ = sum(p.numel() * 8 for p in model.parameters())
    assert (estimate.weights, estimate.gradients, estimate.moments) == (bytes_, bytes_, 2 * bytes_)
    assert estimate.tokens == 90
    assert estimate.available > estimate.total > 4 * bytes_
    one.train(random_rows(), seed=0)
    assert dry_run(one, 200).moments == 0
    assert shapes[-1] == ((1, 200), 199)


def test_rows_of_a_dry_run_share_no_prefix():
    rows = longest_rows(5, 40, 61)
    scorer = LogprobScorer(tiny_model())
    forest, _ = scorer._pack_prefixes(torch.tensor([r.tokens for r in rows]), (torch.arange(5), torch.full((5,), 39)))
    assert forest.shape == (5,)
    assert len({row.tokens[:8] for row in rows}) == 5


_MEASURE = """
import torch
from ludus.training.rl.memory_check import dry_run
from ludus.training.learner.learner import LearnerSettings
from tests.training.learner.test_learner import learner, tiny_model
torch.ones(2**28).sum()  # an older peak of 1 GiB, which is not the dry run's
one = learner(tiny_model(torch.float32), settings=LearnerSettings(microbatch_tokens=16384))
print(dry_run(one, 512).activations)
"""


@pytest.mark.scale
def test_dry_run_measures_activation_memory():
    command = [sys.executable, "-c", _MEASURE]  # a process of its own has no freed memory to take again
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert 20 * 2**20 < int(said.stdout) < 600 * 2**20


@pytest.mark.parametrize(
    "words",
    [["sft", "--sft.steps", "1"], ["train", "--algorithm.preset", "ppo", "--training.learner.dry_run", "never"]],
)
@pytest.mark.parametrize("error", ERRORS)
def test_stage_out_of_memory_error_suggests_settings_to_change(words, error, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise error

    monkeypatch.setattr(Optimizer, "step", full)
    stage, *more = words
    begun = (stage, make_recipe(tmp_path), "--from-scratch", "--run.dir", tmp_path / "run", *more)
    said = refused(*begun, "--training.learner.halve_on_oom", "false", code=LearnerError.exit_code)
    assert f"Out of memory: {str(error).splitlines()[0]}" in said
    assert "Lower microbatch_tokens" in said
    assert "Resume the run with:" in said or "was removed" in said


def test_dry_run_with_too_little_memory_raises_with_the_estimate(monkeypatch):
    one = learner(tiny_model())
    monkeypatch.setattr(dry_runs, "_available", lambda device: 2**20)
    with pytest.raises(LearnerError, match=r"Not enough memory.*of 0\.00 GiB: weights.*microbatch_tokens"):
        dry_run(one, 30)
    short_of_memory(one, 0, ERRORS[0])
    with pytest.raises(LearnerError):
        [dry_run(one, 30) for _ in range(2)]
    assert all(p.grad is None for p in one.scorer.model.parameters())


def test_dry_run_on_the_cpu_is_off_by_default(tmp_path):
    one = learner(tiny_model(), settings=LearnerSettings(microbatch_tokens=64))
    assert check_memory(config(tmp_path), one) is None
    asked = config(tmp_path, training__learner__dry_run="always", rollout__max_seq_len="70")
    assert check_memory(asked, one).tokens == 70


@pytest.mark.fault
def test_dry_run_does_not_change_the_run(tmp_path, caplog):
    found = []
    for word in ("never", "always"):
        settings = config(
            tmp_path / word,
            **(SMALLEST | {"training__steps": "1"}),
            training__learner__dry_run=word,
            training__microbatch_tokens="800",
            algorithm__entropy_coef="0.01",
        )
        made = new_run(settings, "search", "rl")
        with lock_run(made), caplog.at_level(logging.INFO):
            train(open_session(settings), made, RecordingReporter())
        found.append(lasting_files(made.path))
    assert caplog.text.count("dry run: the longest microbatch (640 tokens)") == 1
    assert found[0] == found[1]


def kept_bytes(scorer, rows):
    """Gradients, and the bytes that autograd keeps for the backward pass, inputs of layers included."""
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    width = max(len(row.tokens) for row in rows)
    tokens = torch.tensor([(*row.tokens, *[0] * (width - len(row.tokens))) for row in rows])
    asked = torch.tensor([(*row.trains, *[False] * (width - len(row.tokens))) for row in rows])
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, model_precision(scorer.model):
        scores = scorer.score(tokens, asked, "gradient")
    torch.autograd.backward(scores.logprobs.sum() + scores.entropy.square().sum())
    found = {n: p.grad.clone() for n, p in scorer.model.named_parameters() if p.grad is not None}
    scorer.model.zero_grad(set_to_none=True)
    inputs = tokens.numel() * scorer.model.get_input_embeddings().weight.shape[1] * 8
    return found, sum(kept.values()) + (inputs * len(scorer._layers))


def models():
    found = {name: model for name, model in families().items() if name in ("qwen3", "experts", "gemma2")}
    lora = add_lora(copy.deepcopy(found["qwen3"]), LoraConfig(rank=4))
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1), std=0.1)
    return found | {"lora": lora}


@pytest.mark.parametrize("name", ["qwen3", "experts", "gemma2", "lora"])
def test_activation_checkpointing_is_exact_and_stores_fewer_bytes(name):
    if name == "lora":
        pytest.importorskip("peft")
    model = in_double(models()[name])
    rows = [replace(row, tokens=tuple(t % 53 for t in row.tokens)) for row in random_rows(8)]
    expected, much = kept_bytes(LogprobScorer(model), rows)
    found, little = kept_bytes(LogprobScorer(model, recompute=True), rows)
    assert found.keys() == expected.keys()
    assert len(found) > 8
    assert largest_difference(found, expected) < 1e-10
    assert little < 0.6 * much


def test_activation_checkpointing_does_not_enable_dropout():
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model = GPT2LMHeadModel(shape).eval()
    assert model.config.resid_pdrop > 0
    rows = random_rows(4)
    plain = learner(model)
    plain.gradient(rows)
    expected = gradients(model)
    one = learner(model)
    one.scorer = LogprobScorer(model, recompute=True)
    one.gradient(rows)
    assert largest_difference(expected, gradients(model)) < 1e-6
    assert not any(module.training for module in model.modules())


def test_activation_checkpointing_yields_the_same_weights_after_several_updates():
    results = []
    for recompute in (False, True):
        model = tiny_model()
        one = learner(model, settings=LearnerSettings(epochs=2, minibatches=2))
        one.scorer = LogprobScorer(model, recompute=recompute)
        one.optimizer = Optimizer(model, OptimizerSettings(learning_rate=1e-3, total_steps=10))
        one.train(random_rows(), seed=1)
        results.append({name: p.detach() for name, p in model.named_parameters()})
    assert largest_difference(*results) < 1e-10


@pytest.mark.scale
@pytest.mark.parametrize("kl", ["", "kl-"])
def test_chunked_logits_reduce_peak_memory_fivefold_at_large_vocabulary(kl):
    """4 sequences of 512 tokens and a vocabulary of 150,000, each way in a process of its own.

    With and without the full KL to a second model.
    """
    script = Path(__file__).parents[3] / "benchmarks" / "learner.py"
    peaks = {}
    for way in ("chunks", "whole"):
        command = [sys.executable, str(script), "--memory-of", kl + way]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
        peaks[way] = float(said.stdout.split()[-1])
    assert peaks["whole"] > 4 * 512 * 150_000 * 4 / 2**20
    assert peaks["chunks"] <= peaks["whole"] / 5
