"""`--quick`, the evaluation before training, and the start of recipes in `ludus recipes`."""

import json
import tomllib
from pathlib import Path

import pytest

from ludus.config.load import load_config
from ludus.config.pipeline import quick_cuts
from ludus.evaluation.evaluate import load_evaluation, plans, plans_before
from ludus.recipes import list_recipes
from ludus.training.run.preflight import model_path
from tiny_run import cold_start, ludus, make_recipe, refused

KINDS = ("rl", "sft", "rft", "preference", "reward-model")


@pytest.mark.parametrize("kind", KINDS)
def test_quick_cuts_of_every_recipe_are_valid_and_idempotent(kind):
    for recipe in list_recipes():
        config = load_config(recipe.name)
        words = [word for cut in quick_cuts(kind, config, ()) for word in cut.words]
        assert quick_cuts(kind, load_config(recipe.name, words), ()) == []


def test_quick_does_not_lower_settings_given_on_the_command_line():
    config = load_config("search", words := ["--training.steps", "90", "--evaluation", "{tasks = 700}"])
    keys = [cut.key for cut in quick_cuts("rl", config, words)]
    assert keys == ["training.prompts_per_step", "evaluation.tasks_before", "evaluation.tasks_during"]
    assert not [cut for cut in quick_cuts("rl", config, ()) if cut.key.startswith("sft.")]
    assert "sft.steps" in [
        cut.key for cut in quick_cuts("rl", load_config("guess", ["--model.from_scratch", "true"]), ())
    ]
    assert quick_cuts("preference", config, ())[0].old is None


@pytest.mark.slow
def test_quick_run_reports_its_cuts_and_evaluates_fewer_tasks_before_training(tiny_run, tmp_path):
    words = ("--quick", "--training.steps", 1, "--evaluation.tasks_before", 2, "--run.dir", tmp_path / "run")
    said = ludus("train", make_recipe(tmp_path), "--model", cold_start(tiny_run), *words)
    assert said.code == 0, said
    assert "Quick: nothing to lower" in said.out  # this recipe is below the table
    results = [load_evaluation(file) for file in sorted((tmp_path / "run/evaluations").glob("*-test-greedy.json"))]
    assert [len(result.task_ids) for result in results] == [2, 8]
    assert "2 tasks were evaluated before training (evaluation.tasks_before), 8 after it." in " ".join(said.out.split())


def test_every_training_command_accepts_quick_and_prints_one_line_of_cuts(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for command in ("train", "rft"):
        said = ludus(command, "search", "--quick", "--run.dir", tmp_path / "full", "--evaluation.tasks", 40)
        assert said.code == 2
        line = " ".join(said.out.split())
        assert line.startswith("Quick: ")
        assert "evaluation.tasks_during 96 -> 16" in line
        assert "evaluation.tasks 1000" not in line
    file = tmp_path / "p.toml"
    file.write_text('[[stage]]\nkind = "sft"\nrecipe = "guess"\n[[stage]]\nkind = "rl"\nrecipe = "guess"\n')
    said = ludus("pipeline", file, "--quick", "--folder", tmp_path / "p", "--run.trackers", "['no']")
    assert "Stage 1 (sft). Quick: sft.steps 2400 -> 200" in said.out
    assert "--quick" in refused("train", "--resume", tmp_path / "full", "--quick")


def test_zero_tasks_before_training_skip_the_evaluation():
    config = load_config("search", ["--evaluation.tasks_before", "0"])
    assert plans_before(config) == []
    assert [plan.num_tasks for plan in plans_before(load_config("search"))] == [64] * 4
    assert plans_before(load_config("search", ["--evaluation.tasks", "9"])) == plans(
        load_config("search", ["--evaluation.tasks", "9"]), 0
    )


def test_recipes_command_shows_start_time_and_learning_results():
    said = " ".join(ludus("recipes").out.split())
    assert "after 13 s" in said
    assert "needs a GPU" in said
    assert "memory" in said
    for recipe in list_recipes():
        learns = tomllib.loads((recipe.folder / "recipe.toml").read_text())["learns"]
        assert ("%" in learns) != learns.startswith("not measured")
        assert (recipe.starts_s is None) == bool(recipe.needs)
        assert recipe.starts_s is None or recipe.starts_s <= 30
        assert recipe.cold_start.is_dir() == (recipe.starts_s is not None)
        assert not load_config(recipe.config).model.from_scratch


def test_shipped_cold_start_matches_the_model_shape_of_its_recipe():
    for recipe in list_recipes():
        if not recipe.cold_start.is_dir():
            continue
        config = load_config(recipe.config)
        assert Path(model_path(config)) == recipe.cold_start
        shape = json.loads((recipe.cold_start / "config.json").read_text())
        assert shape["max_position_embeddings"] == config.model.init.context_tokens >= config.rollout.max_seq_len
        assert (shape["hidden_size"], shape["num_hidden_layers"]) == (
            config.model.init.hidden_size,
            config.model.init.num_layers,
        )


def test_shipped_cold_starts_are_at_most_60_megabytes():
    files = {file for recipe in list_recipes() for file in recipe.cold_start.rglob("*") if file.is_file()}
    assert 0 < sum(file.stat().st_size for file in files) <= 60e6
