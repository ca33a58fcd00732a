"""Small runs of the real recipe: token-exact, reproducible, with a correct ledger, resumable."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ludus.cli.main import main
from ludus.config import Config, load_config
from ludus.diagnostics.trackers import read_metrics
from ludus.engines.embedded.scheduler import BatchScheduler
from ludus.engines.models.loading import load_model
from ludus.errors import LearnerError, SyncError, UserError
from ludus.evaluation.evaluate import load_evaluation
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan, engine_scheduler
from ludus.training.rl.build import train
from ludus.training.rl.validate import config_warnings
from ludus.training.run.checkpoint import checkpoint_path
from ludus.training.run.preflight import model_path
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import make_engine, open_session
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files, words


def run(folder: Path, **changes: str) -> RecordingReporter:
    reporter = RecordingReporter()
    settings = config(folder, **changes)
    made = new_run(settings, "search", "rl")
    with lock_run(made):
        train(open_session(settings), made, reporter)
    return reporter


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder)
    return folder


def test_run_folder_contains_the_documented_files(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"config.toml", "run.json", "metrics.jsonl", "timings.jsonl", "rollouts", "evaluations"} <= names
    manifest = json.loads((finished / "run.json").read_text())
    assert manifest["packages"]["torch"] == torch.__version__
    assert [row.step for row in read_metrics(finished / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == ["step-000002", "step-000004"]


def test_from_pretrained_loads_a_trained_checkpoint(finished):
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(finished / "checkpoints", 4))
    start = load_model(model_path(config(finished)))
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(moved)


def test_the_ledger_adds_up_at_every_step_and_agrees_with_the_rollouts(finished):
    for row in read_metrics(finished / "metrics.jsonl"):
        parts = [row.metrics[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row.metrics["ledger/started"] == sum(parts) == 12
        records = list(read_rollouts(rollouts_path(finished, row.step)))
        assert len(records) == 12
        trained = [record for record in records if record.outcome == "trained"]
        assert len(trained) == row.metrics["ledger/trained"] == row.metrics.get("batch/trained_rows", 0)
        assert row.metrics["staleness/age_0"] == (row.metrics["ledger/trained"] > 0)


def test_recorded_logprobs_match_a_fresh_forward_and_ids_match_the_engine(tmp_path, capsys):
    session = open_session(config(tmp_path))
    engine = make_engine(session)
    sampled: dict[str, list[tuple[int, ...]]] = {}
    inner = engine.generate_batch

    async def recording(requests):
        completions = await inner(requests)
        for request, completion in zip(requests, completions, strict=True):
            sampled.setdefault(request.episode, []).append(completion.tokens)
        return completions

    engine.generate_batch = recording
    tasks = session.world.tasks("train")[:6]
    requests = [RolloutRequest(RolloutKey(1, task.id, i), task) for task in tasks for i in range(4)]
    rollout = session.config.rollout
    scheduler = engine_scheduler(
        session.world, engine, session.renderer, rollout, SamplingPlan("test", 1.0, 0), Ledger()
    )
    episodes = asyncio.run(scheduler.run(requests))
    asyncio.run(engine.close())
    recorded = [[s.tokens for s in e.trajectory.segments if s.kind == "action"] for e in episodes]
    assert sorted(map(tuple, recorded)) == sorted(map(tuple, sampled.values()))
    gaps = [logprob_gap(session.model, e.trajectory) for e in episodes]
    with capsys.disabled():
        print(f"\nlargest |recorded - fresh| log-probability of {len(gaps)} rollouts: {max(gaps):.2e}")
    assert max(gaps) < 1e-4
    assert max(e.trajectory.num_turns for e in episodes) > 2


@torch.no_grad()
def logprob_gap(model, trajectory) -> float:
    ids = torch.tensor([trajectory.token_ids])
    logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    return max(
        abs(float(logprobs[t - 1, ids[0, t]]) - trajectory.behavior_logprobs[t])
        for t in range(1, ids.shape[1])
        if trajectory.action_mask[t]
    )


@pytest.mark.fault
def test_the_same_seed_writes_the_same_bytes_if_the_cache_is_released(finished, tmp_path, monkeypatch):
    given_up: list[int] = []
    give_up = BatchScheduler.sleep
    monkeypatch.setattr(BatchScheduler, "sleep", lambda core: given_up.append(core.version) or give_up(core))
    run(tmp_path / "again", engine__sleep="true")
    assert given_up == [0, 1, 2, 3]
    first, second = lasting_files(finished), lasting_files(tmp_path / "again")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.scale
def test_rewards_on_a_thread_and_in_a_process_write_the_same_bytes(finished, tmp_path):
    run(tmp_path / "here", rollout__reward_processes="0")
    first, second = lasting_files(finished), lasting_files(tmp_path / "here")
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.scale
def test_a_small_cache_evicts_and_returns_the_same_bytes(finished, tmp_path):
    run(tmp_path / "tight", engine__kv_cache_tokens="1")
    first, second = lasting_files(finished), lasting_files(tmp_path / "tight")
    assert [name for name in first if first[name] != second[name]] == []

    def total(folder, name):
        return sum(row.metrics[name] for row in read_metrics(folder / "timings.jsonl"))

    assert total(finished, "engine/evicted_pages") == 0
    assert total(tmp_path / "tight", "engine/evicted_pages") > 0
    assert total(tmp_path / "tight", "engine/requests_waiting") > total(finished, "engine/requests_waiting")


@pytest.mark.slow
def test_reporter_receives_every_phase_of_a_run(tmp_path):
    phases = run(tmp_path / "run", training__steps="2").phases
    about = [name for name in phases if name.startswith("step 2")]
    assert about[:2] == ["step 2: episodes", "step 2: training"]


@pytest.mark.slow
def test_entropy_collapse_alarm_is_raised_once_it_persists(tmp_path):
    few = SMALLEST | {"training__steps": "5", "evaluation__tasks": "1"}
    cold = {"rollout__temperature": "0.1", "algorithm__filter_zero_variance": "false"}
    told = [text for text in run(tmp_path / "run", **few, **cold).alarms if "policy/entropy" in text]
    assert len(told) == 1
    assert "below 0.02 in each of the last 5 steps" in told[0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()]
    assert (5, "entropy_collapse", "warn") in [(one["step"], one["alarm"], one["action"]) for one in lines]


@pytest.mark.slow
@pytest.mark.parametrize(("action", "end"), [("pause", "paused after step 1"), ("stop", "stopped after step 1")])
def test_an_alarm_can_end_a_run(tmp_path, action, end):
    greedy = SMALLEST | {"rollout__temperature": "0.01", "algorithm__filter_zero_variance": "false"}
    with pytest.raises(LearnerError, match=rf"Alarm equal_rewards: .* Run {end}") as caught:
        run(tmp_path / "run", **greedy, run__alarms__actions=f'{{equal_rewards = "{action}"}}')
    assert ("ludus train --resume" in str(caught.value)) == (action == "pause")
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()


def test_timings_report_engine_activity(finished):
    for row in read_metrics(finished / "timings.jsonl"):
        found = row.metrics
        assert 0.5 < found["engine/cache_hit_rate"] < 1
        assert 0 < found["engine/schedule_share"] < 1
        assert found["engine/requests_running"] > 1
        assert found["engine/decode_tokens_per_s"] > 0
        assert found["episode/model_s"] > found["episode/tools_s"] > 0
        assert found["episode/scoring_s"] * 48 > found["scoring/total_s"] > found["scoring/slowest_s"] > 0
        assert 0 < found["scoring/busy"] < 1


@pytest.mark.fault
def test_different_seeds_produce_different_rollouts(finished, tmp_path):
    run(tmp_path / "other", run__seed="1", training__steps="2")
    tokens = [
        [record.trajectory.token_ids for record in read_rollouts(rollouts_path(folder, 1))]
        for folder in (finished, tmp_path / "other")
    ]
    assert tokens[0] != tokens[1]


@pytest.mark.fault
def test_a_run_cut_in_the_middle_and_resumed_equals_the_uninterrupted_one(finished, tmp_path):
    folder = tmp_path / "cut"

    settings = config(folder)
    with lock_run(new_run(settings, "search", "rl")), pytest.raises(RunInterrupted):
        train(open_session(settings), RunFolder(folder), InterruptingReporter(3))
    assert main(["train", "--resume", str(folder)]) == 0
    first, second = lasting_files(finished), lasting_files(folder)
    assert [name for name in first if first[name] != second.get(name)] == []
    assert first.keys() == second.keys()


@pytest.mark.fault
def test_a_finished_run_is_extended_by_resuming_with_more_steps(finished, tmp_path):
    longer, extended = tmp_path / "longer", tmp_path / "extended"
    run(longer, training__steps="6")
    shutil.copytree(finished, extended)
    assert main(["train", "--resume", str(extended), "--training.steps", "6"]) == 0
    final = checkpoint_path(Path("checkpoints"), 6) / "model.safetensors"
    assert (longer / final).read_bytes() == (extended / final).read_bytes()
    assert (longer / "metrics.jsonl").read_bytes() == (extended / "metrics.jsonl").read_bytes()


@pytest.mark.fault
def test_extended_run_does_not_repeat_the_critic_warmup(tmp_path):
    """Ten steps have a warm-up of one step, twenty would have two: in the second one the policy trains."""
    folder, changes = tmp_path / "vapo", SMALLEST | {"algorithm__preset": "vapo"}
    settings = config(folder, **changes | {"training__steps": "10"})
    made = new_run(settings, "search", "rl")
    with lock_run(made), pytest.raises(RunInterrupted):
        train(open_session(settings), made, InterruptingReporter(2))
    settings = config(folder, **changes | {"training__steps": "20"})
    with lock_run(RunFolder(folder)), pytest.raises(RunInterrupted):
        train(open_session(settings), RunFolder(folder), InterruptingReporter(3))
    assert json.loads((folder / "checkpoints/step-000001/trainer/state.json").read_text())["warmup_steps"] == 1
    assert "optim/learning_rate" in read_metrics(folder / "metrics.jsonl")[1].metrics


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ([], 0),
        (["--rollout.top_p", "0.9"], 1),
        (["--rollout.top_k", "5"], 1),
        (["--rollout.min_p", "0.1"], 1),
        (["--rollout.guided_tools", "true"], 1),
        (["--rollout.min_p", "0.1", "--training.mask_observations", "false"], 2),
    ],
)
def test_changed_training_semantics_are_announced(settings, found):
    said = config_warnings(load_config("search", settings))
    assert len(said) == found
    assert any("truncated distribution" in text for text in said) == (settings[:1] != [])


def test_settings_of_another_mode_of_training_are_announced():
    given = ["--staleness.max_staleness", "4", "--staleness.replay.share", "0.2", "--staleness.min_ess", "0.5"]
    for mode, told in (("sync", True), ("one_step", True), ("async", False)):
        said = config_warnings(load_config("search", [*given, "--training.mode", mode]))
        for key in ("max_staleness = 4", "replay = "):
            assert any(f"staleness.{key}" in text for text in said) == told
        assert not any("min_ess" in text for text in said)


@pytest.mark.slow
def test_observations_in_the_loss_are_announced_and_change_the_gradient(finished, tmp_path):
    reporter = run(tmp_path / "unmasked", training__mask_observations="false", training__steps="1")
    assert any("observations are in the loss" in text for text in reporter.alarms)
    masked = read_metrics(finished / "metrics.jsonl")[0].metrics
    unmasked = reporter.steps[0][1]
    assert unmasked["reward/mean"] == masked["reward/mean"]
    assert unmasked["batch/trained_rows"] == masked["batch/trained_rows"]
    assert unmasked["batch/trained_tokens"] > masked["batch/trained_tokens"]
    assert unmasked["optim/grad_norm"] != masked["optim/grad_norm"]


@pytest.mark.slow
def test_groups_of_one_train_if_the_advantage_compares_no_attempts(tmp_path):
    changes = {"algorithm__preset": "reinforce", "algorithm__group_size": "1", "training__steps": "1"}
    reporter = run(tmp_path / "alone", **changes)
    ((_, metrics),) = reporter.steps
    assert metrics["ledger/trained"] == metrics["ledger/started"] > 0
    assert metrics["groups/zero_variance"] == 0
    assert not any("equal" in text for text in reporter.alarms)


@pytest.mark.slow
def test_rejected_trajectories_count_in_the_dropped_fraction(tmp_path):
    changes = {"algorithm__correction": "reject_sequence", "algorithm__options__correction__low": "1.5"}
    ((_, metrics),) = run(tmp_path / "rejected", training__steps="1", **changes).steps
    assert metrics["ledger/trained"] == 0
    assert metrics["is/mask_frac"] == 1.0


@pytest.mark.slow
def test_lora_trains_only_the_adapters(tmp_path):
    folder = tmp_path / "lora"
    reporter = run(folder, training__steps="2", model__lora__rank="4")
    assert reporter.steps[-1][1]["policy/kl_reference"] >= 0
    adapter = checkpoint_path(folder / "checkpoints", 2) / "adapter_model.safetensors"
    assert adapter.is_file()
    names = json.loads(adapter.with_name("adapter_config.json").read_text())["target_modules"]
    assert names == sorted(names)
    assert len(names) > 1
    assert main(["train", "--resume", str(folder), "--training.steps", "3"]) == 0


def test_a_training_score_is_reproduced_by_the_evaluation_command(finished):
    before = load_evaluation(finished / "evaluations" / "step-000004-test-greedy.json")
    out = finished.parent / "again"
    assert main(["eval", "--run", str(finished), "--out", str(out)]) == 0
    (path,) = out.rglob("step-000004-test-greedy.json")
    assert load_evaluation(path).successes == before.successes


def test_folder_in_use_or_not_empty_is_rejected_unchanged(finished, capsys):
    before = lasting_files(finished)
    assert main(["train", "search", *words(finished)]) == 2
    assert "not empty" in capsys.readouterr().err
    with lock_run(RunFolder(finished)):
        assert main(["train", "--resume", str(finished)]) == 2
    assert "in use" in capsys.readouterr().err
    assert lasting_files(finished) == before


@pytest.mark.slow
def test_bfloat16_run_passes_its_weight_checks(tmp_path):
    """The engine and the learner round differently: the tolerance for float32 stops this run."""
    (_, metrics), *_ = run(tmp_path / "low", training__steps="1", model__dtype="bfloat16").steps
    assert 1e-3 < metrics["sync/probe_gap"] < 0.5
    with pytest.raises(SyncError, match="disagree on the probe"):
        run(tmp_path / "strict", model__dtype="bfloat16", training__sync_tolerance="1e-3")


def test_without_a_model_the_packaged_one_is_named():
    with pytest.raises(UserError, match="no cold start is packaged") as caught:
        model_path(Config.model_validate({"env": {"name": "examples/stock.py"}}))
    assert Path(caught.value.hint.rpartition(" ")[2], "config.json").is_file()
