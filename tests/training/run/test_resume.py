"""Resuming: changes that would corrupt a run are refused before any file changes, with a suggestion."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ludus.config import load_config
from ludus.config.toml import to_toml
from ludus.errors import EngineError, UserError
from ludus.evaluation.evaluate import load_evaluation
from ludus.training.collection import rollout_collector
from ludus.training.resume import check_resume, describe_resume
from ludus.training.rl.build import check_reference_digests, reference_digests
from ludus.training.run.run_dir import RunFolder
from ludus.training.run.session import open_session
from small_runs import lasting_files
from tiny_run import WORLD, cold_start, copy_run, ludus, make_recipe, refused


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its log and its lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("log.txt", "lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def sft_run(tmp_path_factory) -> Path:
    """A fine-tuning run of the tiny world in tags."""
    folder = tmp_path_factory.mktemp("sft")
    world = folder / "tagged.py"
    source = WORLD.read_text().replace("look", "search").replace("item", "query").replace(".querys()", ".items()")
    world.write_text(source)
    words = ("--env.name", world, "--env.rendering", "tags", "--sft.steps", "2", "--run.dir", folder / "run")
    said = ludus("sft", make_recipe(folder), "--from-scratch", *words)
    assert said.code == 0, said
    return folder / "run"


MADE_ONCE = [
    ("preference", "preference.pairs", "steps"),
    ("preference", "preference.run", "other"),
    ("preference", "preference.samples", "3"),
    ("preference", "rollout.max_seq_len", "99"),
    ("reward-model", "reward_model.rollouts", "2"),
    ("reward-model", "reward_model.held_out", "0.5"),
    ("reward-model", "rollout.temperature", "0.5"),
]


@pytest.mark.parametrize(("kind", "key", "value"), MADE_ONCE)
def test_inputs_of_stored_pairs_and_examples_cannot_change_on_resume(tmp_path, kind, key, value):
    kept = ("--reward_model.kind", "process")
    (tmp_path / "config.toml").write_text(to_toml(load_config(make_recipe(tmp_path), kept)))
    asked = load_config(tmp_path / "config.toml", [f"--{key}", value])
    with pytest.raises(UserError, match=key):
        check_resume(RunFolder(tmp_path), asked, kind)


@pytest.mark.parametrize("words", [("--training.steps", "1"), ("--model.dtype", "float64")])
def test_rejected_resume_changes_nothing(tiny_run, tmp_path, words):
    run = copy_run(tiny_run, tmp_path)
    before = contents(run)
    refused("train", "--resume", run, *words)
    assert contents(run) == before


@pytest.mark.slow
def test_resume_reports_its_first_step(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_collector.RolloutCollector, "sample", interrupted)
    run = copy_run(tiny_run, tmp_path)
    shelf = run / "checkpoints"
    more = ("train", "--resume", run, "--training.steps", "3")
    assert f"Resumes at step 3, from {shelf / 'step-000002'}.\n" in ludus(*more).out
    shutil.rmtree(shelf / "step-000002")
    again = "This step is repeated."
    assert f"Resumes at step 2, from {shelf / 'step-000001'}. {again}\n" in ludus(*more).out


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], "Starts at step 1: no checkpoint yet. Steps 1 to 2 are repeated."),
        ([2], "Resumes after the last step, 2, from {}: only evaluation is left."),
    ],
)
def test_resume_step_without_a_checkpoint_or_after_the_last(tiny_run, tmp_path, steps, said):
    folder = RunFolder(copy_run(tiny_run, tmp_path))
    for path in folder.checkpoints.iterdir():
        if int(path.name.partition("-")[2]) not in steps:
            shutil.rmtree(path)
    assert describe_resume(folder, folder.load_config(), "rl") == said.format(folder.checkpoints / "step-000002")


async def interrupted(*arguments, **options):
    raise KeyboardInterrupt


def test_fewer_steps_than_are_done_are_refused(tiny_run, sft_run):
    said = refused("train", "--resume", tiny_run, "--training.steps", "1")
    assert "training.steps is 1, but 2 steps of the run" in said
    assert "sft.steps is 1, but 2 steps of the run" in refused("sft", "--resume", sft_run, "--sft.steps", "1")


def test_resume_with_another_kind_of_run_names_the_right_command(tiny_run, sft_run, tmp_path):
    rl_copy, sft_copy = copy_run(tiny_run, tmp_path / "a"), copy_run(sft_run, tmp_path / "b")
    before = contents(rl_copy), contents(sft_copy)
    assert f"ludus sft --resume {sft_copy}" in refused("train", "--resume", sft_copy)
    assert f"ludus train --resume {rl_copy}" in refused("sft", "--resume", rl_copy)
    assert (contents(rl_copy), contents(sft_copy)) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.path", "/elsewhere"),
        ("model.lora.rank", "4"),
        ("env.rendering", "tags"),
        ("env.settings.well_formed_weight", "0.2"),
        ("run.seed", "1"),
        ("sft.steps", "40"),
    ],
)
def test_settings_fixed_by_a_run_cannot_be_overridden(tiny_run, tmp_path, key, value):
    run = copy_run(tiny_run, tmp_path)
    before = (run / "config.toml").read_bytes()
    extra = ("--model.from_scratch", "false") if key == "model.path" else ()
    said = refused("train", "--resume", run, "--training.steps", "3", *extra, f"--{key}", value)
    assert key.removesuffix(".rank").removesuffix(".well_formed_weight") in said
    assert "or start a new run with it" in said
    assert (run / "config.toml").read_bytes() == before


@pytest.mark.slow
def test_resume_with_other_evaluation_tasks_reports_common_examples(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    words = ("--training.steps", "3", "--evaluation.tasks", "3", "--evaluation.temperatures", "[0.0]")
    said = ludus("train", "--resume", run, *words)
    assert said.code == 0, said
    text = " ".join(said.out.split())
    assert "8 tasks were evaluated before training (evaluation.tasks_before), 3 after it." in text
    assert "evaluation.tasks 8 -> 3" in text
    after = load_evaluation(run / "evaluations" / "step-000003-test-greedy.json")
    assert len(after.task_ids) == 3
    names = [task_id.removeprefix("test:") for task_id in after.task_ids]
    asked = [line for line in said.out.splitlines() if line.startswith("[prompt] What does ")]
    assert len(asked) >= 3
    assert all(line.split()[3] in names for line in asked)
    assert load_config(run / "config.toml").evaluation.tasks == 3


def test_resume_of_a_complete_run_reports_it_and_changes_nothing(tiny_run, sft_run, tmp_path):
    run, tuned = copy_run(tiny_run, tmp_path / "a"), copy_run(sft_run, tmp_path / "b")
    before = contents(run), contents(tuned)
    said = ludus("train", "--resume", run)
    assert said.code == 0
    assert "The run is complete: all 2 steps are done and evaluated." in said.out
    assert f"ludus train --resume {run} --training.steps 4" in said.out
    said = ludus("sft", "--resume", tuned)
    assert said.code == 0
    assert "The fine-tuning is complete: all 2 steps are done." in said.out
    assert f"ludus sft --resume {tuned} --sft.steps 4" in said.out
    assert (contents(run), contents(tuned)) == before


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (EngineError("The engine is gone.", "Look."), 3)],
    ids=["interrupt", "error"],
)
def test_fatal_error_inside_a_run_names_the_resume_command(tiny_run, tmp_path, monkeypatch, error, code):
    async def end(*arguments, **options):
        raise error

    run = copy_run(tiny_run, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(rollout_collector.RolloutCollector, "sample", end)
        said = ludus("train", "--resume", run, "--training.steps", "3")
    assert said.code == code
    assert "Traceback" not in said.err
    command = f"ludus train --resume {run}"
    *before, last = said.err.rstrip().splitlines()
    assert last.endswith(f"Resume the run with: {command}")
    assert code == 130 or before[-1] == "ludus: The engine is gone. Look."
    if code == 130:  # the printed command is the same for both
        assert ludus(*shlex.split(command)[1:]).code == 0
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_printed_command_for_a_fine_tuned_checkpoint_includes_its_world(sft_run, tmp_path, monkeypatch):
    said = ludus("sft", "--resume", sft_run)
    (line,) = (line for line in said.out.splitlines() if "ludus train" in line)
    command = shlex.split(line[line.index("ludus train") :])
    assert command[command.index("--env.rendering") + 1] == "tags"
    monkeypatch.chdir(tmp_path)
    words = ("--training.steps", "1", "--evaluation.temperatures", "[0.0]", "--run.dir", tmp_path / "used")
    assert ludus(*command[1:], *words).code == 0
    assert load_config(tmp_path / "used" / "config.toml").env.rendering == "tags"
    assert json.loads((tmp_path / "used" / "run.json").read_text())["kind"] == "rl"


def test_fine_tuning_resumes_with_more_steps(sft_run, tmp_path):
    run = copy_run(sft_run, tmp_path)
    said = ludus("sft", "--resume", run, "--sft.steps", "3")
    assert said.code == 0, said
    assert (run / "checkpoints" / "step-000003" / "model.safetensors").is_file()
    assert load_config(run / "config.toml").sft.steps == 3


def shifted(weights: Path) -> bytes:
    """Move one number of a file of weights; gives what was there."""
    before, tensors = weights.read_bytes(), load_file(weights)
    next(iter(tensors.values())).view(-1)[0] += 0.5
    save_file(tensors, weights, metadata={"format": "pt"})
    return before


CHANGED = {
    "reference": ("--algorithm.kl_coef", "0.1"),
    "adapters": ("--model.lora.rank", "2", "--algorithm.kl_coef", "0", "--training.report_kl", "false"),
    "teacher": ("--algorithm.preset", "distill", "--training.report_kl", "false"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reference", *(pytest.param(k, marks=pytest.mark.fault) for k in [*CHANGED][1:])])
def test_resume_fails_if_reference_base_or_teacher_changed(kind, tiny_run, tmp_path):
    model = Path(shutil.copytree(cold_start(tiny_run), tmp_path / "model"))
    begin = cold_start(tiny_run) if kind == "teacher" else model
    words = (*CHANGED[kind], *(("--teacher.path", model) if kind == "teacher" else ()))
    run = tmp_path / "run"
    few = ("--training.steps", "1", "--evaluation.tasks", "1", "--evaluation.temperatures", "[0.0]")
    given = (make_recipe(tmp_path), "--model", begin, "--run.dir", run, *few, "--evaluation.every", "9")
    said = ludus("train", *given, *words)
    assert said.code == 0, said
    before, plain = lasting_files(run), shifted(model / "model.safetensors")
    error = refused("train", "--resume", run, "--training.steps", "2")
    assert f"The {'teacher' if kind == 'teacher' else 'model that the run started with'} ({model})" in error
    assert "has changed" in error
    assert lasting_files(run) == before
    (model / "model.safetensors").write_bytes(plain)
    assert ludus("train", "--resume", run, "--training.steps", "2").code == 0


def test_unused_reference_model_may_change(tiny_run, tmp_path):
    model = Path(shutil.copytree(cold_start(tiny_run), tmp_path / "model"))
    session = open_session(load_config(make_recipe(tmp_path), ["--model.path", str(model)]))
    assert reference_digests(session, {}) == {}
    check_reference_digests({"start": "another"}, {}, session)
    check_reference_digests({}, {"start": "of an earlier version, which kept none"}, session)
