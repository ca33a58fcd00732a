"""Runs killed with SIGKILL at random times and resumed end as if uninterrupted."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ludus.diagnostics.trackers import read_metrics
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.run.checkpoint import checkpoint_path
from small_runs import lasting_files, start, words
from tiny_run import cold_start, make_recipe, with_unlike_rewards

NUM_KILLS = 20
SHELVES = ("checkpoints/.step-*.tmp", "*/checkpoints/.step-*.tmp")
"""Checkpoints that are being written: those of a run, and of a pipeline's stages."""
RUN = {"training__steps": "8", "training__checkpoint_every": "1"}


def finish(*arguments: str) -> float:
    """Run to the end; gives the seconds it took."""
    begin = time.perf_counter()
    process = start(*arguments)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0, error.decode()
    return time.perf_counter() - begin


def kill_after(process: subprocess.Popen[bytes], folder: Path, rng: random.Random, seconds: float) -> str:
    """Kill at a random moment; every other time at the next moment when a checkpoint is being written."""
    deadline = time.perf_counter() + rng.uniform(0.2, 1.0) * seconds
    wait_for_checkpoint = rng.random() < 0.5
    while process.poll() is None:
        writing = wait_for_checkpoint and any(map(any, (folder.glob(shelf) for shelf in SHELVES)))
        if writing or (not wait_for_checkpoint and time.perf_counter() > deadline):
            process.send_signal(signal.SIGKILL)
            process.wait()
            return "checkpoint" if writing else "elsewhere"
        time.sleep(0.001)
    return "finished"


@pytest.mark.fault
def test_killed_twenty_times_and_resumed_a_run_equals_the_uninterrupted_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    seconds = finish("train", "search", *words(whole, **RUN))
    expected = lasting_files(whole)
    rng = random.Random(0)
    moments: list[str] = []
    round_ = 0
    while len(moments) < NUM_KILLS:
        folder = cut / str(round_)
        arguments = ("train", "search", *words(folder, **RUN))
        for _ in range(NUM_KILLS):
            moment = kill_after(start(*arguments), folder, rng, seconds)
            if moment == "finished":
                break
            moments.append(moment)
            started = (folder / "config.toml").is_file() and (folder / "run.json").is_file()
            arguments = ("train", "--resume", str(folder)) if started else arguments
        else:
            finish(*arguments)
        found = lasting_files(folder)
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []
        round_ += 1
    assert moments.count("checkpoint") >= 3


@pytest.mark.fault
def test_an_asynchronous_run_killed_again_and_again_ends_with_every_step_and_no_episode_twice(tiny_run, tmp_path):
    folder, rng = tmp_path / "run", random.Random(7)
    given = (make_recipe(tmp_path), "--model", cold_start(tiny_run), "--run.dir", folder)
    settings = "--training.mode async --training.steps 12 --evaluation.every 99 --training.checkpoint_every 1"
    arguments = ("train", *map(str, given), *settings.split())
    begin = time.perf_counter()
    whole = start(*(str(tmp_path / "whole") if word == str(folder) else word for word in arguments))
    assert whole.wait(timeout=600) == 0
    seconds, kills = time.perf_counter() - begin, 0
    for _ in range(NUM_KILLS):
        ended = kill_after(start(*arguments), folder, rng, seconds) == "finished"
        kills += not ended
        if (folder / "run.json").is_file() and (folder / "config.toml").is_file():
            arguments = ("train", "--resume", str(folder))
        if ended:
            break
    else:
        finish(*arguments)
    assert kills
    every = [(step, r) for step in range(1, 13) for r in read_rollouts(rollouts_path(folder, step))]
    assert len({record.key for _, record in every}) == len(every)
    for step, record in every:
        assert all(0 <= step - 1 - v <= 2 for s in record.trajectory.segments for v in s.versions)
    assert [row.step for row in read_metrics(folder / "metrics.jsonl")] == list(range(1, 13))
    for row in read_metrics(folder / "metrics.jsonl"):
        ended_as = [row.metrics[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row.metrics["ledger/started"] == sum(ended_as)


def equals_the_uninterrupted(command: str, given: tuple[str, ...], folder: Path, seed: int) -> None:
    """Run `ludus COMMAND GIVEN` whole, and again with three kills: all lasting bytes are the same."""
    option = "--folder" if command == "pipeline" else "--run.dir"
    whole = folder / "whole"
    seconds = finish(command, *given, option, str(whole))
    expected, rng = lasting_files(whole), random.Random(seed)
    kills = rounds = 0
    while kills < 3:
        cut = folder / f"cut-{rounds}"
        arguments = (command, *given, option, str(cut))
        ended = False
        while kills < 3 and not ended:
            ended = kill_after(start(*arguments), cut, rng, 0.6 * seconds) == "finished"
            kills += not ended
            if (cut / "run.json").is_file() and (cut / "config.toml").is_file():
                arguments = (command, "--resume", str(cut))
        if not ended:
            finish(*arguments)
        found = lasting_files(cut)
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []
        rounds += 1
        assert rounds < 6, "the runs end before they are killed"


@pytest.mark.fault
def test_sft_killed_and_resumed_equals_the_uninterrupted_one(tmp_path):
    settings = {"sft__steps": "12", "sft__checkpoint_every": "3", "sft__batch_size": "4"}
    equals_the_uninterrupted("sft", ("search", *words(tmp_path, **settings)), tmp_path, 1)


STAGES = {
    "train": "--algorithm.preset ppo --training.steps 8",
    "preference": "--preference.batch_size 2 --preference.checkpoint_every 1 --preference.epochs 4",
    "reward-model": "--reward_model.batch_size 2 --reward_model.checkpoint_every 1 --reward_model.epochs 4",
    "rft": "--rft.rounds 3 --rft.tasks_per_round 6 --rft.samples 3 --rft.batch_size 4",
}


@pytest.mark.fault
@pytest.mark.parametrize("command", STAGES)
def test_other_stages_killed_and_resumed_equal_the_uninterrupted_one(command, tiny_run, tmp_path):
    """RL with a critic, preference training, a reward model, rejection sampling."""
    given = (make_recipe(tmp_path), "--model", cold_start(tiny_run), *STAGES[command].split())
    if command in ("preference", "reward-model"):
        given += ("--run", with_unlike_rewards(tiny_run, tmp_path / "source"))
    equals_the_uninterrupted(command, tuple(map(str, given)), tmp_path, 2)


@pytest.mark.fault
def test_preference_training_on_own_samples_resumes_to_the_same_bytes_after_kills(tiny_run, tmp_path):
    settings = "--preference.batch_size 1 --preference.checkpoint_every 1 --preference.samples 6"
    given = (make_recipe(tmp_path), "--model", cold_start(tiny_run), *settings.split(), *SHAPED.split())
    equals_the_uninterrupted("preference", tuple(map(str, given)), tmp_path, 3)


SHAPED = "--env.settings.well_formed_weight 0.4 --rollout.temperature 0.8"
"""Rewards that differ, of a model that hardly solves anything."""
REMEMBERED = {
    "prime": "--algorithm.preset prime --algorithm.filter_zero_variance false",
    "vapo": "--algorithm.preset vapo --critic.warmup_steps 2",
    "value head": "--algorithm.preset ppo --critic.model head",
    "kl controller": "--algorithm.kl_coef 0.1 --kl_control.kind adaptive --kl_control.target 1e-4"
    " --kl_control.horizon 20 --algorithm.filter_zero_variance false",
    "kl pid": "--algorithm.kl_coef 0.1 --kl_control.kind pid --kl_control.target 1e-4 --kl_control.kp 1"
    " --kl_control.ki 1 --kl_control.kd 1 --algorithm.filter_zero_variance false",
    "reward moments": "--rewards.normalise_by family --algorithm.filter_zero_variance false",
    "roles": "--algorithm.preset rae",
    "greso": "--algorithm.greso true",
    "adapters and reference": "--model.lora.rank 2 --algorithm.kl_coef 0.1 --algorithm.filter_zero_variance false",
}
KEPT = {
    "kl controller": "kl",
    "kl pid": "kl",
    "reward moments": "reward_moments",
    "roles": "algorithm_state",
    "greso": "algorithm_state",
}
"""What of `trainer/state.json` tells that there was something to remember."""


@pytest.mark.fault
@pytest.mark.parametrize("what", REMEMBERED)
def test_trainer_state_survives_kills(what, tiny_run, tmp_path):
    """Models that train beside the policy, the control of the KL, moments, averages, streaks."""
    settings = f"--training.steps 6 --evaluation.every 99 {SHAPED} {REMEMBERED[what]}"
    given = (make_recipe(tmp_path), "--model", cold_start(tiny_run), *settings.split())
    equals_the_uninterrupted("train", tuple(map(str, given)), tmp_path, 4)
    if what in KEPT:
        assert len({state_of(tmp_path / "whole", step)[KEPT[what]] for step in (5, 6)}) == 2


def state_of(run: Path, step: int) -> dict[str, str]:
    """What the checkpoint of a step remembers, by name, as text."""
    file = checkpoint_path(run / "checkpoints", step) / "trainer" / "state.json"
    return {name: json.dumps(value) for name, value in json.loads(file.read_text()).items()}


PIPELINE = """
[[stage]]
kind = "sft"
recipe = "{recipe}"
settings.model.from_scratch = true
settings.sft = {{ steps = 40, checkpoint_every = 10 }}

[[stage]]
kind = "preference"
recipe = "{recipe}"
settings.preference = {{ batch_size = 2, checkpoint_every = 1, tasks = 8, samples = 6 }}

[[stage]]
kind = "rl"
recipe = "{recipe}"
settings.training.steps = 3
"""


@pytest.mark.fault
def test_a_pipeline_killed_and_started_again_equals_the_uninterrupted_one(tmp_path):
    file = tmp_path / "stages.toml"
    file.write_text(PIPELINE.format(recipe=make_recipe(tmp_path)))
    equals_the_uninterrupted("pipeline", (str(file), *SHAPED.split()), tmp_path, 5)
