"""Invalid input: one clear error message, exit code 2, no traceback, and no file overwritten."""

from __future__ import annotations

import re
import resource
import subprocess
import sys

import pytest

from ludus.cli.main import main
from ludus.config.sections.model import ModelInitConfig
from ludus.engines.models.loading import build_tiny, load_tokenizer, save_model
from ludus.training.run.preflight import model_path
from small_runs import SMALLEST, config, words
from tiny_run import WORLD


def refused(capsys, *arguments: str) -> str:
    """The sentence with which a command line is refused."""
    assert main(list(arguments)) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    announced = re.match(r"(.* \.\.\.\n)*(?=ludus: )", said)
    assert announced, said
    return said[announced.end() :]


def test_misspelled_setting_suggests_the_closest_name(tmp_path, capsys):
    said = refused(capsys, "train", "search", *words(tmp_path / "r"), "--algorithm.group_sise", "16")
    assert "algorithm.group_size" in said
    assert not (tmp_path / "r").exists()


def test_a_group_of_one_is_refused_with_the_reason(tmp_path, capsys):
    said = refused(capsys, "train", "search", *words(tmp_path / "r", algorithm__group_size="1"))
    assert "algorithm.group_size" in said
    assert "at least 2" in said


@pytest.mark.parametrize("path", ["/nowhere/model", "./missing", "nobody/no-such-model"])
def test_a_missing_model_is_refused_before_anything_is_written(tmp_path, capsys, path):
    said = refused(capsys, "train", "search", *words(tmp_path / "r"), "--model", path)
    assert path in said
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_engine_sleep_is_rejected_for_async_or_remote_engine(tmp_path, capsys):
    asked = words(tmp_path / "r", engine__sleep="true")
    assert "sync" in refused(capsys, "train", "search", *asked, "--training.mode", "async")
    assert "embedded" in refused(capsys, "train", "search", *asked, "--engine.url", "http://127.0.0.1:9")


def test_a_request_limit_below_the_concurrency_is_rejected(tmp_path, capsys):
    asked = words(tmp_path / "r", engine__max_requests="15")
    assert "below the 16 concurrent requests" in refused(capsys, "train", "search", *asked)
    streams = words(tmp_path / "r", engine__max_requests="31", training__mode="async")  # and evaluates beside
    assert "below the 32 concurrent requests" in refused(capsys, "train", "search", *streams)
    assert "ludus serve --max-requests" in refused(
        capsys, "train", "search", *asked, "--engine.url", "http://127.0.0.1:9"
    )


def test_a_split_that_does_not_exist_is_refused(tmp_path, capsys):
    settings = words(tmp_path / "r", evaluation__splits='["tset"]')
    assert "test" in refused(capsys, "train", "search", *settings)


def test_an_unknown_recipe_world_tracker_preset_is_refused(tmp_path, capsys):
    assert "search" in refused(capsys, "train", "serach")
    for key, value, near in (
        ("env__name", "serch", "search"),
        ("run__trackers", '["jsnl"]', "jsonl"),
        ("algorithm__preset", "gpro", "grpo"),
    ):
        folder = tmp_path / key
        assert near in refused(capsys, "train", "search", *words(folder, **{key: value}))


@pytest.mark.scale
def test_a_checkpoint_of_another_architecture_is_refused_on_resume(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["train", "search", *words(folder, training__steps="2")]) == 0
    other = tmp_path / "other"
    tokenizer = load_tokenizer(model_path(config(tmp_path / "x")))
    save_model(build_tiny(ModelInitConfig(num_layers=2), tokenizer, seed=0), tokenizer, other)
    before = {p: p.read_bytes() for p in folder.rglob("*.safetensors")}
    capsys.readouterr()
    assert "model.path" in refused(capsys, "train", "--resume", str(folder), "--model.path", str(other))
    settings = folder / "config.toml"
    settings.write_text(settings.read_text("utf-8").replace("[model]", f'[model]\npath = "{other}"', 1))
    shown = refused(capsys, "train", "--resume", str(folder), "--training.steps", "3")
    assert "has a different architecture: model.layers.2.input_layernorm.weight is (128,) there and not in" in shown
    save_model(build_tiny(ModelInitConfig(hidden_size=64), tokenizer, seed=0), tokenizer, other)
    shown = refused(capsys, "train", "--resume", str(folder), "--training.steps", "3")
    size = len(tokenizer)
    assert f"model.embed_tokens.weight is ({size}, 128) there and ({size}, 64) in the model" in shown
    assert before == {p: p.read_bytes() for p in folder.rglob("*.safetensors")}


def test_resume_rejects_folder_without_run_config(tmp_path, capsys):
    assert "config.toml" in refused(capsys, "train", "--resume", str(tmp_path))


@pytest.mark.fault
def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_before_intact(tmp_path):
    folder = tmp_path / "run"
    settings = words(folder, **SMALLEST)
    assert main(["train", "search", *settings]) == 0
    before = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.safetensors")}

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    again = subprocess.run(
        [sys.executable, "-m", "ludus", "train", "--resume", str(folder), "--training.steps", "3"],
        preexec_fn=little_room,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 2, again.stderr
    assert "Traceback" not in again.stderr
    assert "could not be written" in again.stderr or "cannot be written" in again.stderr
    after = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.safetensors")}
    assert after == before
    assert not list((folder / "checkpoints").glob(".step-*"))


def test_unreachable_engine_server_shows_serve_command_and_removes_run_folder(tmp_path, capsys):
    folder, model = tmp_path / "run", model_path(config(tmp_path / "x"))
    assert main(["train", "search", *words(folder, engine__url="http://127.0.0.1:9")]) == 3
    first, last = capsys.readouterr().err.splitlines()[-2:]
    assert first.endswith(f"Start it first: ludus serve {model} --port 9 --control")
    assert last == f"The run had not started: its folder {folder} was removed."
    assert list(tmp_path.iterdir()) == []


def test_world_infrastructure_failure_exits_with_code_4_and_its_message(tmp_path, capsys):
    world = tmp_path / "broken.py"
    world.write_text(
        "from ludus.envs.tool_world import ToolWorld\n"
        "from ludus.rewards.exact_match import ExpectedAnswers, exact_match\n"
        "from ludus.rewards.base import Reward\n"
        "from ludus.types import Message, Task\n"
        "class Broken(ToolWorld):\n"
        "    def environment(self, task):\n"
        "        raise OSError('the shop is closed')\n"
        "def make_world(settings, limits):\n"
        "    asked = (Message(role='user', content='q'),)\n"
        "    tasks = [Task(str(i), asked, ExpectedAnswers(('a',))) for i in range(50)]\n"
        "    lists = {name: tasks for name in ('train', 'validation', 'test')}\n"
        "    return Broken('broken', lists, (), (Reward('right', exact_match, outcome=True),), limits)\n"
    )
    cold = model_path(config(tmp_path / "x"))
    settings = words(tmp_path / "r", env__name=str(world), evaluation__splits='["test"]', model__path=cold)
    assert main(["train", "search", *settings]) == 4
    said = capsys.readouterr().err
    resume = f"Resume the run with: ludus train --resume {tmp_path / 'r'}\n"
    way_on = f"OSError: the shop is closed ({world}, line 7)\n{resume}"
    assert said.endswith(way_on)
    assert (tmp_path / "r" / "log.txt").read_text().endswith(way_on)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("def look(item: str)", "def look(item)", "line {look}: TypeError: tool look: parameter 'item' needs a"),
        ("def look(item: str) -> str:", "def look(item: str) -> str", "line {look}: expected ':'."),
        ("    weight = settings", "    weight = 1 / 0\n    weight = settings", "ZeroDivisionError: division by zero"),
        ('f"{split}:{name}"', 'f"{split}"', "Two tasks of the split 'test' share the id 'test'."),
        ('{"split": split,', '{"split": 3,', "The tag 'split' of the task 'test:"),
        ("opening(name), ExpectedAnswers", "name, ExpectedAnswers", "of the split 'test' is not a tuple of messages."),
        ("    return ToolWorld(", "    ToolWorld(", "mine.py: make_world returned None."),
        ('Task(f"{split}:{name}"', 'Task(name[0] if split == "train" else name', "'train' share"),
    ],
)
def test_a_world_file_with_a_mistake_is_one_sentence(tmp_path, capsys, old, new, expected):
    source = WORLD.read_text().replace(old, new)
    assert source != WORLD.read_text()
    world = tmp_path / "mine.py"
    world.write_text(source)
    number = next(i for i, line in enumerate(source.splitlines(), start=1) if "def look" in line)
    cold = model_path(config(tmp_path / "x"))
    words = ["--env.name", str(world), "--run.dir", str(tmp_path / "r"), "--evaluation.tasks", "4"]
    words += ["--model.path", cold, "--evaluation.tasks_during", "4", "--training.prompts_per_step", "4"]
    words += ["--evaluation.splits", '["test"]']
    said = refused(capsys, "train", "search", *words)
    assert any(expected.replace("{look}", str(n)) in said for n in (number, number - 1))
    assert not (tmp_path / "r").exists()


def test_missing_model_without_network_prints_one_line_error(capsys, monkeypatch):
    from huggingface_hub import HfApi

    def offline(*arguments, **options):
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", offline)
    said = refused(capsys, "train", "search", "--model", "nobody/none")
    assert said == (
        "ludus: The folder 'nobody/none' does not exist, and the model hub cannot be reached: "
        "Name or service not known. Check the path or the network.\n"
    )


@pytest.mark.parametrize("setting", ["engine.plugin", "run.trackers", "run.metrics"])
@pytest.mark.parametrize("name", ["absent.py:mine", "{folder}/mine.py:absent", "{folder}/mine.py:NUMBER"])
def test_a_plug_in_is_checked_by_config_as_by_train(tmp_path, capsys, setting, name):
    (tmp_path / "mine.py").write_text("NUMBER = 3\n", encoding="utf-8")
    name = name.format(folder=tmp_path)
    value = name if setting == "engine.plugin" else f'["{name}"]'
    shown = refused(capsys, "config", "search", f"--{setting}", value)
    assert setting in shown
    assert refused(capsys, "train", "search", *words(tmp_path / "r"), f"--{setting}", value) == shown
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("installed", [False, True])
def test_engine_plugin_error_reports_file_and_line(tmp_path, capsys, monkeypatch, installed):
    file = tmp_path / "ludus_test_engine.py"
    file.write_text(
        "from ludus.training.run.session import local_engine\n\n\n"
        "def mine(session):\n"
        "    async def generate(request):\n"
        "        raise RuntimeError('no GPU is free')\n\n"
        "    engine = local_engine(session)\n"
        "    engine.generate = generate\n"
        "    return engine\n",
        encoding="utf-8",
    )
    package = tmp_path / "ludus_test_engine-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: ludus-test-engine\nVersion: 1\n", "utf-8")
    (package / "entry_points.txt").write_text("[ludus.engines]\nmine = ludus_test_engine:mine\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    name = "mine" if installed else f"{file}:mine"
    shown = refused(capsys, "train", "search", *words(tmp_path / "r", **SMALLEST), "--engine.plugin", name)
    assert f"{file}, line 6: RuntimeError: no GPU is free" in shown
    assert "ludus train --resume" in shown


def test_metric_plugin_returning_existing_metric_name_is_rejected(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def mine(groups):\n    return {'reward/mean': 1.0}\n", encoding="utf-8")
    name = f"{tmp_path / 'mine.py'}:mine"
    shown = refused(capsys, "train", "search", *words(tmp_path / "r", **SMALLEST), "--run.metrics", f'["{name}"]')
    assert f"run.metrics = {name} returned names that are taken (reward/mean); expected names of new metrics" in shown


@pytest.mark.parametrize(
    ("command", "setting", "value"),
    [("train", "splits", '["nowhere"]'), ("train", "split_during", "nowhere"), ("eval", "splits", '["nowhere"]')],
)
def test_unknown_split_error_names_the_setting(tmp_path, capsys, command, setting, value):
    shown = refused(capsys, command, "search", *words(tmp_path / "r"), f"--evaluation.{setting}", value)
    assert f"evaluation.{setting}: The world 'search' has no split 'nowhere'" in shown
