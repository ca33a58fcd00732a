"""Pipelines: each stage starts from the checkpoint of the last one; a second start resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.cli.training.pipeline import stage_config
from ludus.config import load_config
from ludus.config.pipeline import load_pipeline
from ludus.errors import LearnerError
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts
from ludus.training.preference import train
from ludus.training.run.run_dir import RunFolder, kind_of
from small_runs import lasting_files
from tests.rollouts.test_store import RECORD
from tiny_run import ludus, make_recipe, refused

STAGES = """
[[stage]]
kind = "sft"
recipe = "{recipe}"
settings.model.from_scratch = true
settings.sft.steps = 150

[[stage]]
kind = "rft"
recipe = "{recipe}"
[stage.settings]
rft.rounds = 1
rft.tasks_per_round = 6
rft.samples = 4

[[stage]]
kind = "preference"
recipe = "{recipe}"
settings.preference = {{batch_size = 2, checkpoint_every = 1, steps = 3}}

[[stage]]
kind = "rl"
recipe = "{recipe}"
settings.training.steps = 1
settings.env.settings.well_formed_weight = 0.2
"""
WORDS = ("--evaluation.temperatures", "[0.0]")


def pipeline(folder: Path, text: str = STAGES) -> Path:
    path = folder / "stages.toml"
    path.write_text(text.format(recipe=make_recipe(folder)))
    return path


@pytest.mark.fault
def test_failed_pipeline_resumes_at_its_failed_stage_and_completes(tmp_path, monkeypatch):
    file, folder = pipeline(tmp_path), tmp_path / "run"
    command = ("pipeline", file, "--folder", folder, *WORDS)
    steps = []
    plain = train.preference_step

    def breaks_at_the_second(*given):
        steps.append(given)
        if len(steps) == 2:
            raise LearnerError("The loss is inf.")
        return plain(*given)

    monkeypatch.setattr(train, "preference_step", breaks_at_the_second)
    said = ludus(*command)
    assert said.code == 5
    assert f"ludus pipeline {file} --folder {folder} --evaluation.temperatures '[0.0]'" in said.err
    done = {name: lasting_files(folder / name) for name in ("01-sft", "02-rft")}
    assert not (folder / "04-rl").exists()

    said = ludus(*command)
    assert said.code == 0, said
    assert len(steps) == 4
    assert "Stage 4 of 4: rl" in said.out
    assert f"The pipeline is complete: {folder / '04-rl' / 'checkpoints' / 'step-000001'}" in said.out
    assert {name: lasting_files(folder / name) for name in done} == done
    check_chain(folder)

    before = lasting_files(folder)
    again = ludus(*command)
    assert again.code == 0, again
    assert lasting_files(folder) == before

    changed = refused(*command, "--sft.learning_rate", "1e-3")
    assert "Stage 1 was started with other settings" in changed
    assert "sft.learning_rate = 0.01 (not 0.001)" in changed
    assert "Resume the pipeline with" not in changed
    fewer = pipeline(tmp_path, STAGES.partition('[[stage]]\nkind = "rl"')[0])
    assert "holds 04-rl, which is not a stage of" in refused("pipeline", fewer, "--folder", folder)
    assert lasting_files(folder) == before


def check_chain(folder: Path) -> None:
    """Each stage is a run of its kind that began with the last checkpoint of the one before."""
    names = ("01-sft", "02-rft", "03-preference", "04-rl")
    ends = ("step-000150", "step-000001", "step-000003")
    configs = [load_config(folder / name / "config.toml") for name in names]
    assert [kind_of(RunFolder(folder / name)) for name in names] == [name[3:] for name in names]
    assert configs[0].model.from_scratch
    for config, name, end in zip(configs[1:], names, ends, strict=False):
        assert config.model.path == str(folder / name / "checkpoints" / end)
        assert not config.model.from_scratch
    assert configs[2].preference.run == str(folder / "02-rft")
    assert configs[3].env.settings == {"well_formed_weight": 0.2}


PLAYS_ON = (
    "reward-model",
    'settings.reward_model = {{kind = "process", rollouts = 1, data = "{folder}/attempts.jsonl.gz"}}',
)


@pytest.mark.parametrize(("kind", "setting"), [("rl", ""), ("rft", ""), ("preference", ""), PLAYS_ON])
def test_unavailable_sandbox_of_a_later_stage_raises_before_the_first_stage(tmp_path, kind, setting):
    words = ("--sandbox.backend", "piston", "--sandbox.url", "http://127.0.0.1:9")
    file = tmp_path / "stages.toml"
    first = stage("sft", "settings.model.from_scratch = true")
    write_rollouts(tmp_path / "attempts.jsonl.gz", [RECORD])
    file.write_text((first + stage(kind, setting)).format(recipe="code", folder=tmp_path))
    said = refused("pipeline", file, "--folder", tmp_path / "run", *words, code=4)
    assert "The world 'code' runs programs, but its sandbox does not work." in said
    assert not (tmp_path / "run").exists()


OWN_PAIRS = """
[[stage]]
kind = "sft"
recipe = "{recipe}"
settings.model.from_scratch = true
settings.sft.steps = 30

[[stage]]
kind = "preference"
recipe = "{recipe}"
[stage.settings]
preference = {{batch_size = 2, tasks = 6, samples = 4}}
env.settings.well_formed_weight = 0.2

[[stage]]
kind = "rl"
recipe = "{recipe}"
settings.training.steps = 1
"""


@pytest.mark.slow
def test_preference_stage_after_sft_samples_its_own_rollouts(tmp_path):
    file, folder = pipeline(tmp_path, OWN_PAIRS), tmp_path / "run"
    said = ludus("pipeline", file, "--folder", folder, "--evaluation.tasks", "2", *WORDS)
    assert said.code == 0, said
    model = load_config(folder / "02-preference" / "config.toml").model
    assert model.path == str(folder / "01-sft" / "checkpoints" / "step-000030")
    sampled = list(read_rollouts(rollouts_path(folder / "02-preference", 0)))
    assert len(sampled) == 24
    assert (folder / "03-rl" / "checkpoints" / "step-000001").is_dir()


def test_reward_model_stage_uses_previous_rollouts_and_scores_the_next_stage(tmp_path):
    kinds = ("rft", "reward-model", "rl")
    stages = load_pipeline(pipeline(tmp_path, "".join(stage(kind) for kind in kinds)))
    for number, kind in enumerate(kinds, start=1):
        (tmp_path / f"{number:02d}-{kind}" / "checkpoints" / "step-000001").mkdir(parents=True)
    _, judge, rl = (stage_config(one, tmp_path) for one in stages)
    policy = str(tmp_path / "01-rft" / "checkpoints" / "step-000001")
    assert judge.model.path == rl.model.path == policy
    assert judge.reward_model.run == str(tmp_path / "01-rft")
    assert judge.rewards.model is None
    assert rl.rewards.model == str(tmp_path / "02-reward-model")


def stage(kind: str, *more: str) -> str:
    return "\n".join(["[[stage]]", f'kind = "{kind}"', 'recipe = "{recipe}"', *more, ""])


SFT = stage("sft", "settings.model.from_scratch = true")
BAD = {
    "has no stages": "",
    "is not TOML": "[[stage",
    "folder is not a key of a pipeline": 'folder = "x"\n' + stage("rl"),
    "Stage 1 has the kind 'ppo', but it must be one of sft, rft, preference, reward-model, rl": stage("ppo"),
    "Stage 2 has no recipe": stage("rl") + '[[stage]]\nkind = "rl"\n',
    "unknown key recipie; did you mean recipe?": '[[stage]]\nkind = "rl"\nrecipie = "search"\n',
    "settings that are not a table": stage("rl", "settings = 3"),
    "Stage 2 sets model.path": stage("rl") + stage("rl", 'settings.model.path = "x"'),
    "Stage 2 (rl): training.step": stage("rl") + stage("rl", "settings.training.step = 3"),
    "Stage 1 (reward-model) has no training data": stage("reward-model"),
    "Stage 2 (rl): tis and dppo correct the same gap": SFT
    + stage("rl", 'settings.algorithm = {{preset = "dppo", correction = "tis"}}'),
    "Stage 2 (rl): The loss distill needs a teacher": SFT + stage("rl", 'settings.algorithm.preset = "distill"'),
    "Stage 2 (rl): rewards.caps names 'speed'": SFT + stage("rl", "settings.rewards.caps.speed = 0.5"),
    "Stage 2 (rl): experts.jsonl does not exist": SFT
    + stage("rl", 'settings = {{algorithm.preset = "mixed_policy", experts.path = "experts.jsonl"}}'),
    "Stage 2 (sft): none.jsonl does not exist": SFT + stage("sft", 'settings.sft.data = "none.jsonl"'),
    "Stage 2 (rft): A round needs 9999 tasks": SFT + stage("rft", "settings.rft.tasks_per_round = 9999"),
    "Stage 2 (preference): none.jsonl does not exist": SFT
    + stage("preference", 'settings.preference.data = "none.jsonl"'),
    "Stage 2 (preference): nowhere is not a run folder": SFT
    + stage("preference", 'settings.preference.run = "nowhere"'),
    "Stage 2 (preference): run.trackers =": SFT
    + stage("preference", 'settings = {{preference.data = "{recipe}", run.trackers = ["paper"]}}'),
    "tiny.toml, line 2, is not a rollout": SFT
    + stage("reward-model", 'settings.reward_model = {{kind = "pointwise", data = "{recipe}"}}'),
}


@pytest.mark.parametrize(("said", "text"), BAD.items(), ids=BAD)
def test_pipeline_file_errors_are_reported_before_any_stage_runs(tmp_path, said, text):
    folder = tmp_path / "run"
    assert said in refused("pipeline", pipeline(tmp_path, text), "--folder", folder)
    assert not folder.exists()


def test_an_unknown_setting_is_reported_with_its_file(tmp_path):
    file = pipeline(tmp_path, stage("rl", "settings.training.step = 3"))
    assert f"and {file}" in refused("pipeline", file, "--folder", tmp_path / "run")


def test_unrelated_folder_and_missing_pipeline_file_are_rejected(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    assert "is not the folder of a pipeline" in refused("pipeline", pipeline(tmp_path), "--folder", tmp_path / "there")
    assert "cannot be read" in refused("pipeline", tmp_path / "none.toml")


def test_example_pipeline_has_valid_stages_and_settings():
    stages = load_pipeline(Path(__file__).parents[2] / "examples" / "pipeline.toml")
    assert [stage.name for stage in stages] == ["01-rft", "02-preference", "03-rl"]
    configs = [load_config(stage.recipe, stage.settings) for stage in stages]
    assert configs[2].algorithm.preset == "dr_grpo"


@pytest.mark.parametrize(("name", "levels"), [("pretrained", [1, 2]), ("pretrained_harder", [1, 2, 3])])
def test_the_pipeline_of_a_pretrained_model_is_valid(name, levels):
    stages = load_pipeline(Path(__file__).parents[2] / "examples" / f"{name}.toml")
    assert [stage.kind for stage in stages] == ["sft", "rl"]
    configs = [load_config(stage.recipe, stage.settings) for stage in stages]
    assert [config.env.settings["levels"] for config in configs] == [levels, levels]
