"""The command line as a whole: help, settings as options, error messages, a quick start."""

import gc
import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from ludus.__main__ import COLLECT_AFTER, LONG_COMMANDS
from ludus.__main__ import main as start
from ludus.cli import main as cli_main
from ludus.cli.arguments import split_settings
from ludus.cli.command import list_commands
from ludus.cli.evaluate.probe import KINDS
from ludus.cli.ui.help_text import wrapped
from ludus.cli.ui.terminal import print_text
from ludus.config.settings import find
from ludus.sandbox import BACKENDS, SandboxSettings
from tiny_run import copy_run, ludus, make_recipe, refused

COMMANDS = list(list_commands().values())

LIGHT = """
import sys
from ludus.cli.main import main
for line in sys.stdin.read().splitlines():
    try:
        main(line.split())
    except SystemExit:
        pass
    loaded = sorted({"torch", "transformers"} & set(sys.modules))
    if loaded:
        sys.exit(f"{line} imports {loaded}")
"""


def run_light(*lines):
    """Run command lines in one fresh process; the first that imports torch ends it."""
    return subprocess.run(
        [sys.executable, "-c", LIGHT], input="\n".join(lines), capture_output=True, text=True, timeout=60
    )


def test_read_only_commands_do_not_import_torch(tiny_run):
    evaluations = sorted((tiny_run / "evaluations").glob("*test-greedy.json"))
    done = run_light(
        "--help",
        *(f"{command.name} --help" for command in COMMANDS),
        "recipes",
        "config search",
        "config --keys",
        f"show {tiny_run}",
        f"rewards replay {tiny_run}",
        f"compare {evaluations[0]} {evaluations[1]}",
    )
    assert done.returncode == 0, done.stderr
    assert "ludus: " not in done.stderr


def test_a_command_that_trains_or_evaluates_prints_a_line_before_the_imports(monkeypatch, capfd):
    assert set(LONG_COMMANDS) == {
        "eval",
        "probe",
        *(command.name for command in COMMANDS if command.target.startswith("training")),
    }
    printed = []
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(cli_main, "main", lambda: printed.append(capfd.readouterr().err))
    for words in (["train", "search"], ["train", "--help"], ["recipes"]):
        monkeypatch.setattr(sys, "argv", ["ludus", *words])
        start()
    assert printed == ["Reading the settings ...\n", "", ""]


def test_garbage_collections_are_rare_from_the_start(monkeypatch):
    given = []
    monkeypatch.setattr(gc, "set_threshold", given.append)
    monkeypatch.setattr(cli_main, "main", lambda: given.append("started"))
    monkeypatch.setattr(sys, "argv", ["ludus", "recipes"])
    start()
    assert given == [COLLECT_AFTER, "started"]


@pytest.mark.parametrize("given", [None, "0"])
def test_large_tensors_get_huge_pages_unless_the_environment_says_otherwise(given, monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", given or "")
    if given is None:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    found = []
    monkeypatch.setattr(cli_main, "_dispatch", lambda _: found.append(os.environ["THP_MEM_ALLOC_ENABLE"]) or 0)
    assert cli_main.main([]) == 0
    assert found == [given or "1"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_command_has_help_with_its_example(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    said = ludus(command.name, "--help")
    assert said.code == 0
    assert f"example: {command.example}" in said.out
    assert "To come" not in said.out
    assert f"ludus {command.name}" in command.example


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
@pytest.mark.parametrize("width", [60, 80])
def test_help_is_wrapped_to_the_terminal(command, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    wide = ludus(command.name, "--help").out
    monkeypatch.setenv("COLUMNS", str(width))
    said = ludus(command.name, "--help").out
    assert [line for line in said.splitlines() if len(line) > width] == []
    description = wide.split("\n\n", 1)[1].split()
    assert said.split("\n\n", 1)[1].split() == description


def test_choices_and_defaults_of_options_are_those_of_the_code():
    def argument(command, name):
        return next(one for one in list_commands()[command].arguments if one["name"] == name)

    assert argument("sandbox", "--backend")["choices"] == list(BACKENDS)
    assert argument("sandbox", "--image")["default"] == SandboxSettings().image
    assert argument("doctor", "--api")["choices"] == list(find("engine.api").choices)
    assert argument("train", "--cluster")["choices"] == list(find("cluster.kind").choices)
    assert argument("probe", "kind")["help"] == ", ".join(KINDS)


def test_the_help_of_ludus_lists_every_command():
    said = ludus("--help")
    assert said.code == 0
    listed = " ".join(said.out.split())
    assert all(f" {command.name} {command.summary} " in listed for command in COMMANDS)


def test_a_module_starts_the_same_command_line():
    done = subprocess.run([sys.executable, "-m", "ludus", "recipes"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "search" in done.stdout


@pytest.mark.parametrize(
    ("line", "words", "settings"),
    [
        ("train search --a.b 1", "train search", "--a.b 1"),
        ("train --a.b 1 search", "train search", "--a.b 1"),
        ("train --resume R --training.steps 80", "train --resume R", "--training.steps 80"),
        ("train --a.b=1 search", "train search", "--a.b=1"),
        ("train --algorithm.kl_coef -1 search", "train search", "--algorithm.kl_coef -1"),
        ("sft --model.from_scratch search", "sft search", "--model.from_scratch"),
        ("sft --model.from_scratch false search", "sft search", "--model.from_scratch false"),
        ("train search --a.b --from-scratch", "train search --from-scratch", "--a.b"),
        ("eval search --model ./m.x --out=a/b.c", "eval search --model ./m.x --out=a/b.c", ""),
    ],
)
def test_settings_are_distinguished_from_arguments(line, words, settings):
    assert split_settings(line.split()) == (words.split(), settings.split())


@pytest.mark.slow
def test_resume_applies_settings_given_after_the_run_folder(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    said = ludus("train", "--resume", run, "--training.steps", "3")
    assert said.code == 0, said
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert "fine-tuning" not in said.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train",), "Name a recipe"),
        (("train", "serch"), "Unknown recipe \"serch\". Did you mean 'search'? Known: archive, code"),
        (("train", "nope.toml"), "The file nope.toml does not exist. Check the path; `ludus recipes` lists the"),
        (("train", "search.toml"), 'To use the recipe of that name, write "search".'),
        (("train", "search", "--training.step", "3"), "the nearest is training.steps"),
        (("train", "search", "--group_size", "3"), "As a setting, write --algorithm.group_size."),
        (("train", "--resume", "/no/run"), "/no/run"),
        (("sft", "--resume", "/no/run"), "/no/run"),
        (("train", "search", "--model", "/no/model"), "/no/model"),
        (("recipes", "--training.steps", "3"), "`ludus recipes` has no argument --training.steps"),
        (("compare", "a", "b", "--x.y"), "`ludus compare` has no argument --x.y"),
    ],
)
def test_bad_input_is_one_sentence(words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(*words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train search --task 3", "write --exploration.interleave.task"),
        ("train search --rolout.x 3", "the nearest section is rollout, and rollout has rollout.temp"),
        ("train --lr 3 search", "--lr. Of the settings the nearest are training.learning_rate and"),
        ("doctor --fixx", "`ludus doctor` has no option --fixx. See `ludus doctor --help`."),
        ("train search --modle m", "`ludus train` has no option --modle. Did you mean '--model'?"),
        ("sft search --from_scrach", "Did you mean '--from-scratch'?"),
        ("train search --steps 3", "write --training.steps or --kl_control.steps or --sft.steps"),
        ("sft search --steps 3", "write --sft.steps or --kl_control.steps"),
        ("config --keys trianing", "Unknown section 'trianing'. The nearest section is training, and training has"),
        ("train search --mode async", "mean '--model'? As a setting, write --training.mode."),
        ("eval --rn runs/x", "`ludus eval` has no option --rn. Did you mean '--run'?"),
        ("show runs/x --token", "`ludus show` has no option --token. Did you mean '--tokens'?"),
        ("train search --algorithm dapo", 'section of settings such as algorithm.preset = "dapo".'),
        ("train search --algorithm.preset dappo", "Did you mean 'dapo' or 'dppo'? Choose from: grpo"),
    ],
)
def test_what_is_misspelt_gets_what_is_nearest(line, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(*line.split())


def test_an_unknown_command_names_those_there_are():
    assert "Unknown command 'trian'. Did you mean `ludus train`? " in refused("trian")
    assert "Did you mean" not in refused("banana")
    assert "eval" in refused("--training.steps", "3", "banana")


def test_without_a_command_the_help_is_printed():
    said = ludus()
    assert (said.code, said.err) == (0, "")
    assert said.out == ludus("--help").out


def test_a_recipe_of_ones_own_is_a_file(tmp_path):
    said = ludus("config", make_recipe(tmp_path), "--training.steps", "7")
    assert said.code == 0
    assert "\nsteps = 7\n" in said.out


def test_errors_wrap_at_spaces_on_a_terminal_and_are_one_line_in_a_file(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = "ludus: the folder /a/path/that/is/longer/than/a/line is missing.\nName another one."
    terminal, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert wrapped(text, file) == text
    lines = wrapped(text, terminal).splitlines()
    assert lines == ["ludus: the folder", "/a/path/that/is/longer/than/a/line", "is missing.", "Name another one."]


def test_indented_prose_keeps_its_indentation_on_a_terminal():
    written = io.StringIO()
    text = "a.setting = 1\n    A sentence that is longer.\nwarn   A sentence that is longer."
    print_text(Console(file=written, width=24, force_terminal=True), text)
    lines = [line.rstrip() for line in written.getvalue().splitlines()]
    prose = ["    A sentence that is", "    longer.", "warn   A sentence that", "       is longer."]
    assert lines == ["a.setting = 1", *prose]


def test_a_reader_that_closes_the_pipe_ends_a_command_without_a_traceback():
    code = "import sys; from ludus.cli.main import main; sys.exit(main(['config', '--keys']))"
    reader, writer = os.pipe()
    os.close(reader)
    made = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (made.returncode, made.stderr) == (141, b"")


def test_a_world_file_that_does_not_exist_is_named(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[env]\nname = "nowhere.py"\n')
    assert "nowhere.py of env.name does not exist" in refused("train", file)
