"""ReasonMaxxer: the loss against loops, the examples, and a run that resumes bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ludus.algorithms import losses
from ludus.config.load import load_config
from ludus.config.sections.stages import PreferenceConfig
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.training.learner.logprobs import LogprobScorer, model_precision
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.preference.forks import forks_step, nearest_to_half, pairs_of_rewards
from ludus.training.preference.pairs import with_reference
from ludus.training.run.run_dir import RunFolder, list_checkpoints
from small_runs import lasting_files
from tests.training.credit.test_credit import trajectory
from tests.training.learner.test_full_kl import whole_logits
from tests.training.learner.test_learner import tiny_model
from tiny_run import cold_start, ludus, make_recipe, with_unlike_rewards


def record(task, sample, reward):
    one = replace(trajectory(sample, reward), task_id=task)
    return RolloutRecord(1, task, RolloutOutcome.TRAINED, "trained", one, None)


def test_loss_equals_the_formula_and_microbatches_add_up():
    generator = torch.Generator().manual_seed(0)
    given = {
        "logprobs": -torch.rand(4, 6, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(4, 6, generator=generator, dtype=torch.float64),
        "base_kl": torch.rand(4, 6, generator=generator, dtype=torch.float64),
        "decisions": torch.rand(4, 6, generator=generator) < 0.3,
        "mask": torch.rand(4, 6, generator=generator) < 0.7,
    }
    policy, kl = [], []
    for i in range(4):
        for t in range(6):
            if given["mask"][i, t] and given["decisions"][i, t]:
                policy.append(-float(given["advantages"][i, t] * given["logprobs"][i, t]))
            elif given["mask"][i, t]:
                kl.append(float(given["base_kl"][i, t]))
    expected = sum(policy) / len(policy) + 0.2 * sum(kl) / len(kl)
    assert float(losses.forks(**given)) == pytest.approx(expected, abs=1e-12)
    counts = (len(policy), len(kl))
    parts = [losses.forks(**{k: v[i : i + 1] for k, v in given.items()}, counts=counts) for i in range(4)]
    assert float(sum(parts)) == pytest.approx(expected, abs=1e-12)


def test_examples_have_standardised_rewards_of_the_groups_nearest_to_one_half():
    records = [record("even", i, reward) for i, reward in enumerate((1.0, 0.0, 1.0, 0.0))]
    records += [record("rare", i, reward) for i, reward in enumerate((1.0, 0.0, 0.0, 0.0))]
    records += [record("never", i, 0.0) for i in range(4)]
    pairs = pairs_of_rewards("step-1", records, 0.0, 1_000)
    assert [pair.gap for pair in pairs[:4]] == [1.0, -1.0, 1.0, -1.0]
    assert [pair.gap for pair in pairs[4:]] == pytest.approx([3**0.5] + [-(3**-0.5)] * 3)
    assert [bool(pair.chosen.tokens) for pair in pairs[:2]] == [True, False]
    assert {pair.source.split("/")[1] for pair in nearest_to_half(pairs, 1)} == {"even"}
    assert nearest_to_half(pairs, 9) == pairs


@pytest.mark.parametrize("budget", [16384, 8])
def test_step_has_the_gradient_of_the_formula(budget):
    model, base = tiny_model(), tiny_model(seed=1)
    records = [record("t", i, reward) for i, reward in enumerate((1.0, 0.0, 0.0, 0.0))]
    pairs = with_reference(pairs_of_rewards("s", records, 0.0, 1_000), LogprobScorer(base), 4096, entropies=True)
    values = sorted(value for pair in pairs for value in pair.sides[0].reference)
    limit = (values[len(values) // 2] + values[len(values) // 2 + 1]) / 2
    settings = PreferenceConfig(
        loss="forks", microbatch_tokens=budget, forks={"entropy": limit, "advantage_clip": 1.0, "kl_coef": 0.2}
    )
    policy, others, numbers = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), [0, 0]
    with model_precision(model):
        for pair in pairs:
            row = pair.sides[0].row
            own, theirs = whole_logits(model, row).log_softmax(-1), whole_logits(base, row).detach().log_softmax(-1)
            chosen = [token for token, trains in zip(row.tokens, row.trains, strict=True) if trains]
            for t, token in enumerate(chosen):
                if -(theirs[t].exp() * theirs[t]).sum() > limit:
                    policy, numbers[0] = policy - max(-1.0, min(1.0, pair.gap)) * own[t, token], numbers[0] + 1
                else:
                    others = others + (theirs[t].exp() * (theirs[t] - own[t])).sum()
                    numbers[1] += 1
        (policy / numbers[0] + 0.2 * others / numbers[1]).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    steps = []
    optimizer = Optimizer(model, OptimizerSettings(learning_rate=1e-9, total_steps=10))
    optimizer.step = lambda: steps.append([p.grad.clone() for p in model.parameters()]) or 0.0
    with model_precision(model):
        metrics = forks_step(LogprobScorer(model), LogprobScorer(base), optimizer, pairs, settings)
    assert metrics["forks/decisions"] == numbers[0] / sum(numbers)
    assert max(float((a - b).abs().max()) for a, b in zip(steps[0], wanted, strict=True)) < 1e-10


@pytest.mark.parametrize("words", ["--preference.forks.groups 3", "--preference.loss forks --preference.beta 0.2"])
def test_settings_of_other_losses_are_refused(words):
    with pytest.raises(Exception, match="forks"):
        load_config(None, words.split())


@pytest.mark.slow
def test_run_on_rollouts_resumes_bit_for_bit(tiny_run, tmp_path):
    rollouts = with_unlike_rewards(tiny_run, tmp_path / "rollouts")
    words = ["--preference.loss", "forks", "--preference.epochs", "2", "--preference.batch_size", "4"]
    words += ["--preference.checkpoint_every", "1", "--preference.keep_checkpoints", "9"]
    words += ["--preference.forks.entropy", "0.5"]
    begin = (make_recipe(tmp_path), "--model", cold_start(tiny_run), "--run", rollouts)
    assert ludus("preference", *begin, *words, "--run.dir", tmp_path / "whole").code == 0
    total = len(list_checkpoints(RunFolder(tmp_path / "whole").checkpoints))
    assert ludus("preference", *begin, *words, "--run.dir", tmp_path / "cut", "--preference.steps", "2").code == 0
    said = ludus("preference", "--resume", tmp_path / "cut", "--preference.steps", total)
    assert said.code == 0, said
    one, other = lasting_files(tmp_path / "whole"), lasting_files(tmp_path / "cut")
    assert [name for name in one if one[name] != other.get(name)] == []
