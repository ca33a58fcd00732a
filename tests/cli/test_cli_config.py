"""`ludus recipes` and `ludus config`."""

import tomllib
from pathlib import Path

from ludus.algorithms.spec.resolve import resolve
from ludus.cli.arguments import model_settings
from ludus.cli.ui.progress import use_command
from ludus.config import config_from_toml, list_settings, load_config
from ludus.config.schema import RunConfig
from ludus.config.settings import find
from ludus.diagnostics.trackers import TRACKERS
from ludus.recipes import list_recipes, recipe_folder
from ludus.training.run.run_dir import new_run
from tiny_run import ludus, refused


def test_recipes_are_listed_with_their_titles():
    said = ludus("recipes")
    assert said.code == 0
    for recipe in list_recipes():
        assert recipe.name in said.out
        assert recipe.title.removeprefix(f"{recipe.name}: ").split()[0] in said.out


def test_config_command_output_equals_the_loaded_configuration():
    said = ludus("config", "search", "--algorithm.preset", "dapo", "--training.learning_rate", "1e-5")
    wanted = load_config("search", ["--algorithm.preset", "dapo", "--training.learning_rate", "1e-5"])
    assert config_from_toml(said.out) == wanted
    assert wanted.training.learning_rate == 1e-5


def test_model_option_disables_from_scratch(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[env]\nname = "guess"\n[model]\nfrom_scratch = true\n')
    model = config_from_toml(ludus("config", file, "--model", "some/model").out).model
    assert (model.path, model.from_scratch) == ("some/model", False)
    said = ludus("config", "guess", "--model", "some/model")
    model = config_from_toml(said.out).model
    assert (model.path, model.from_scratch) == ("some/model", False)
    sft = config_from_toml(said.out).sft
    assert (sft.learning_rate, sft.warmup_steps, sft.steps) == (1e-4, 10, 200)
    said = ludus("config", "guess", "--model", "some/model", "--sft.steps", "7")
    assert config_from_toml(said.out).sft.steps == 7
    search = load_config("search", model_settings("some/model", "search"))
    assert search.env.settings == {"instructions": "full"}
    assert search.rollout.max_seq_len > load_config("search").rollout.max_seq_len


def test_pretrained_model_settings_apply_to_recipes_but_not_scratch_checkpoints(tmp_path):
    for recipe in list_recipes():
        config = load_config(recipe.name, model_settings("some/model", recipe.name))
        assert config.sft.learning_rate == 1e-4
        assert config.model.path == "some/model"
    shipped = recipe_folder("search") / "cold_start"
    template = (shipped / "chat_template.jinja").read_text("utf-8")
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "chat_template.jinja").write_text(template)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "chat_template.jinja").write_text(template.replace("assistant", "model"))
    folders = {"shipped": shipped, "copied": tmp_path / "copied", "given": tmp_path / "given"}
    pretrained = {name for name, path in folders.items() if "--sft.steps" in model_settings(str(path), "search")}
    assert pretrained == {"given"}
    assert model_settings("some/model", "own.toml") == model_settings("some/model")
    for command in ("train", "sft", "eval"):
        assert "folder './nowhere' does not exist" in refused(command, "guess", "--model", "./nowhere")


def test_train_command_after_sft_keeps_rollout_limits_and_env_settings(tmp_path):
    words = ["--rollout.max_seq_len", "700", "--env.settings.k", "3", "--sft.steps", "7"]
    config = load_config("search", words)
    folder = new_run(
        config.model_copy(update={"run": RunConfig(dir=str(tmp_path / "run"))}), "search-sft", "sft", "search"
    )
    command = use_command(folder, config, Path("made"))
    assert command == "ludus train search --model made --env.settings.k 3 --rollout.max_seq_len 700"
    assert load_config("search", command.split()[5:]).rollout == config.rollout


def test_config_command_prints_resolved_algorithm_as_comments():
    words = ("--algorithm.preset", "dapo", "--algorithm.clip_high", "0.5")
    lines = ludus("config", "search", *words).out.splitlines()
    algorithm = resolve(load_config("search", words).algorithm)
    assert f"# algorithm as resolved: dapo ({algorithm.source})" in lines
    assert "#   clip_high = 0.5   (setting)" in lines
    assert f"#   max_resample_rounds = {algorithm.max_resample_rounds}   (from the preset)" in lines
    assert "#   dual_clip = none   (from the preset)" in lines


def test_a_contradiction_in_the_algorithm_is_refused():
    said = refused("config", "search", "--algorithm.preset", "rloo", "--algorithm.clip_low", "0.1")
    assert "algorithm.clip_low" in said


def test_config_keys_lists_every_setting_with_default_and_description():
    said = ludus("config", "--keys")
    lines = said.out.splitlines()
    assert [line.split(" = ")[0] for line in lines if not line.startswith(" ")] == [
        setting.key for setting in list_settings()
    ]
    assert "model.path = none   # text or none" in lines
    assert "training.steps = 40   # a whole number, at least 1" in lines
    after = lines[lines.index("rollout.max_turns = 6   # a whole number, at least 1") + 1]
    assert after == "    Assistant turns per episode."
    assert len(lines) == 2 * len(list_settings())  # a description is one line, which a terminal wraps


def test_keys_of_one_section():
    lines = ludus("config", "--keys", "model.init").out.splitlines()
    assert all(line.startswith(("model.init.", "    ")) for line in lines)
    assert len(lines) > 5
    assert "Unknown section 'modl'" in refused("config", "--keys", "modl")


def test_config_keys_of_a_recipe_show_values_and_defaults():
    lines = ludus("config", "search", "--keys", "--training.prompts_per_step", "5").out.splitlines()
    assert "training.prompts_per_step = 5   # a whole number, at least 1; the default is 12" in lines
    assert "evaluation.samples = 1   # a whole number, at least 1" in lines
    adapters = ludus("config", "--keys", "model", "--model.lora.rank", "4").out
    assert "model.lora.rank = 4   # a whole number, at least 1; the default is 16" in adapters


def test_every_setting_has_documentation_and_help_mentions_keys_option():
    assert [setting.key for setting in list_settings() if not setting.doc] == []
    assert "`ludus algorithms`" in find("algorithm.preset").doc
    assert all(name in find("run.trackers").doc for name in TRACKERS)
    assert "ludus config search --keys" in ludus("config", "--help").out


def test_config_command_prints_the_configuration_of_a_run_folder(tiny_run):
    said = ludus("config", tiny_run)
    written = tomllib.loads((tiny_run / "config.toml").read_text())
    assert tomllib.loads(said.out) == written


def test_without_a_recipe_the_defaults_are_printed():
    assert config_from_toml(ludus("config").out) == load_config(None)
