"""The KL coefficient over a run: schedules, controllers and the guard, and whole runs that resume."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch

from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.kl import KLState, kl_controller
from ludus.algorithms.objective import Normalizer, objective
from ludus.algorithms.spec.resolve import PRESETS, resolve
from ludus.algorithms.tensors import TokenBatch
from ludus.cli.main import main
from ludus.config.schema import Config
from ludus.errors import ConfigError, LearnerError
from ludus.training.rl.build import train
from ludus.training.run.run_dir import RunFolder, list_checkpoints, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files

HELD = SMALLEST | {
    "algorithm__advantage": "raw",
    "algorithm__filter_zero_variance": "false",
    "algorithm__kl_coef": "0.5",
    "training__learning_rate": "1e-3",
    "training__steps": "3",
    "kl_control__kind": "adaptive",
    "kl_control__target": "1e-6",
    "kl_control__horizon": "8",
    "kl_control__guard_factor": "1000000",
    "evaluation__tasks": "1",
}


def control(kl_coef=0.5, steps=10, **settings):
    given = Config.model_validate(
        {"algorithm": {"kl_coef": kl_coef}, "training": {"steps": steps}, "kl_control": settings}
    )
    return kl_controller(given, resolve(given.algorithm).kl_coef)


def test_a_schedule_follows_the_training_steps():
    line = control(kind="linear")
    assert [line.coef(step) for step in (1, 6, 11, 99)] == [0.5, 0.25, 0.0, 0.0]
    wave = control(kind="cosine", end=0.1, steps=4)
    wave = replace(wave, rule=replace(wave.rule, num_steps=4))
    assert [wave.coef(step) for step in (1, 3, 5)] == pytest.approx([0.5, 0.3, 0.1])
    assert control().coef(7) == 0.5
    assert not control(kl_coef=0.0).is_active


def test_controllers_answer_the_kl_and_come_back_from_a_checkpoint():
    one = control(kind="adaptive", target=0.01, horizon=100).update(1.0, 50)
    assert one.coef(2) == pytest.approx(0.5 * 1.1)
    pid = control(kind="pid", target=0.01, kp=1.0, ki=2.0, kd=4.0).update(0.02, 8).update(0.05, 8)
    assert pid.coef(3) == pytest.approx(0.5 + 0.04 + 2 * 0.05 + 4 * 0.03)
    for used, fresh in (
        (one, control(kind="adaptive", target=0.01, horizon=100)),
        (pid, control(kind="pid", target=0.01, kp=1.0, ki=2.0, kd=4.0)),
    ):
        stored = KLState(**json.loads(json.dumps(asdict(used.state))))
        assert fresh.restored(stored) == used
        assert fresh.restored(replace(stored, base=0.4)) == fresh


def test_the_guard_adapts_unless_an_expected_value_is_set():
    free = control(guard_factor=2.0, guard_warmup=6)
    for _ in range(6):
        assert free.pause_reason(9.0) == ""
        free = free.update(0.01, 8)
    assert free.pause_reason(0.35) == ""  # step 1 alone is older than the window, whose middle is step 5
    said = free.pause_reason(0.5)
    assert "0.108 nats per token over the last steps, more than 2 times the expected 0.05" in said
    stored = KLState(**json.loads(json.dumps(asdict(free.state))))
    assert control(guard_factor=2.0, guard_warmup=6).restored(stored) == free
    assert control(guard_factor=2.0).update(0.01, 8).pause_reason(9.0) == ""
    told = control(guard_factor=2.0, guard_expected=0.5)
    assert told.pause_reason(0.9) == ""
    assert told.update(0.9, 8).pause_reason(1.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "adaptive", "target": 0.1, "kl_coef": 0.0}, "algorithm.kl_coef is 0"),
        ({"kind": "adaptive"}, "needs a target"),
        ({"target": 0.1}, 'kl_control.target = 0.1 would have no effect: kl_control.kind is "constant"'),
        ({"kind": "pid", "target": 0.1}, "no gain"),
        ({"kind": "pid", "target": 0.1, "kp": 1.0, "max_coef": 0.1}, "above kl_control.max_coef"),
        ({"kind": "linear", "kl_coef": 0.0}, "stay constant"),
        ({"kind": "linear", "horizon": 3.0}, "kl_control.horizon"),
        ({"guard_expected": 0.1}, "kl_control.guard_factor is 0"),
        ({"guard_factor": 2.0, "guard_expected": 0.1, "guard_decay": 0.5}, "guard_expected is constant"),
        ({"guard_factor": 2.0, "guard_expected": 0.1, "guard_warmup": 5}, "guard_expected is constant"),
    ],
)
def test_unread_reward_settings_are_rejected(settings, words):
    with pytest.raises(ConfigError) as caught:
        control(**settings)
    assert words in caught.value.message
    assert caught.value.hint


def test_a_kl_in_the_loss_may_add_up_over_the_trajectory():
    generator = torch.Generator().manual_seed(0)
    own, ref = -torch.rand(2, 3, 5, dtype=torch.float64, generator=generator)
    own.requires_grad_(True)
    mask = torch.tensor([[1, 1, 1, 0, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    batch = TokenBatch(own, own.detach(), own.detach(), torch.zeros(3, 5).double(), mask, ref)
    options = PartOptions(kl={"granularity": "trajectory"})
    algorithm = replace(PRESETS["grpo"], kl="k2", kl_coef=0.3, options=options)
    loss, _ = objective(batch, algorithm, Normalizer.of(mask))
    (found,) = torch.autograd.grad(loss, own)
    torch.testing.assert_close(found, 0.3 * (own - ref).detach() * mask / 2, atol=1e-12, rtol=0)


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_unread_granularity_is_rejected(placement):
    given = {"kl_coef": 0.1 if placement == "reward" else None, "options": {"kl": {"granularity": "trajectory"}}}
    placed = {"kl_placement": placement} if placement == "reward" else {}
    settings = Config.model_validate({"algorithm": given | placed}).algorithm
    with pytest.raises(ConfigError, match="granularity"):
        resolve(settings)


def run(folder, reporter=None, **changes):
    reporter = reporter or RecordingReporter()
    settings = config(folder, **(HELD | changes))
    with lock_run(new_run(settings, "search", "rl")):
        train(open_session(settings), RunFolder(folder), reporter)
    return [metrics for _, metrics in reporter.steps]


@pytest.mark.slow
def test_reward_penalty_has_a_reference_model_even_if_kl_is_not_reported(tmp_path):
    given = {key: value for key, value in HELD.items() if not key.startswith("kl_control")}
    settings = config(tmp_path, **(given | {"training__report_kl": "false", "training__steps": "1"}))
    with lock_run(new_run(settings, "search", "rl")):
        train(open_session(settings), RunFolder(tmp_path), reporter := RecordingReporter())
    assert "policy/kl_reference" in reporter.steps[0][1]


@pytest.mark.fault
def test_a_run_with_a_controller_that_is_cut_and_resumed_equals_the_uninterrupted_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = run(whole)
    assert steps[0]["kl/coef"] == steps[0]["policy/kl_reference"] + 0.5
    for before, after in pairwise(steps):
        error = min(max(before["policy/kl_reference"] / 1e-6 - 1, -0.2), 0.2)
        assert after["kl/coef"] == before["kl/coef"] * (1 + error * before["ledger/trained"] / 8)
        term = after["kl/coef"] * after["policy/kl_reference"]
        assert term > 0
        assert after["loss/total"] == pytest.approx(after["loss/policy"] + term, abs=1e-7)

    with pytest.raises(RunInterrupted):
        run(cut, InterruptingReporter(3))
    assert main(["train", "--resume", str(cut)]) == 0
    first, second = lasting_files(whole), lasting_files(cut)
    state = next(name for name in first if name.endswith("step-000002/trainer/state.json"))
    assert json.loads(first[state])["kl"]["coef"] != 0.5
    assert [name for name in first if first[name] != second.get(name)] == []


@pytest.mark.fault
def test_the_guard_pauses_a_run_behind_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    guard = {"kl_control__guard_factor": "2", "kl_control__guard_expected": "1e-7"}
    held = {"kl_control__kind": "linear", "training__checkpoint_every": "9"} | guard
    given = {
        key: value for key, value in (HELD | held).items() if key not in ("kl_control__target", "kl_control__horizon")
    }
    settings = config(folder, **given)
    with lock_run(new_run(settings, "search", "rl")), pytest.raises(LearnerError, match="paused after step 2"):
        train(open_session(settings), RunFolder(folder), RecordingReporter())
    assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [2]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    freed = ["--kl_control.guard_factor", "0", "--kl_control.guard_expected", "none"]
    assert main(["train", "--resume", str(folder), *freed]) == 0
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
