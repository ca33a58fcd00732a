"""Settings: accepted values in files and on the command line, and error messages."""

import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.config import Config, config_from_toml, list_settings, load_config, to_toml
from ludus.config.sections import model
from ludus.config.sections.model import LoraConfig, ModelConfig
from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.config.settings import NAME, find
from ludus.envs.settings import read_settings
from ludus.errors import ConfigError
from ludus.recipes import list_recipes, recipe_folder
from ludus.worlds.search.world import SearchSettings

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path for path in ROOT.glob("src/ludus/recipes/**/*.toml") if path.name != "recipe.toml")


def refusal(*words, source=None):
    """The lines of the error that this command line gets."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, words)
    return caught.value.message.splitlines()


def from_file(tmp_path, text, *words):
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, words)


def test_load_config_without_source_or_arguments_returns_the_defaults():
    assert load_config(None, []) == Config()


def test_values_are_converted_to_the_type_of_their_setting():
    config = load_config(
        None,
        [
            *("--algorithm.group_size", "16"),
            "--training.learning_rate=1e-4",
            *("--rollout.top_p", ".5"),
            *("--run.save_rollouts", "false"),
            *("--run.trackers", '["jsonl", "tensorboard"]'),
            *("--run.dir", "2026"),
            *("--evaluation.split_during", "true"),
            *("--training.sync_tolerance", "1"),
            *("--algorithm.std_ddof", "0"),
            *("--model.lora.target_modules", '["q_proj"]'),
            "--model.from_scratch",
        ],
    )
    assert config.algorithm.group_size == 16
    assert config.training.learning_rate == 1e-4
    assert config.rollout.top_p == 0.5
    assert config.run.save_rollouts is False
    assert config.run.trackers == ["jsonl", "tensorboard"]
    assert config.run.dir == "2026"
    assert config.evaluation.split_during == "true"
    assert isinstance(config.training.sync_tolerance, float)
    assert config.algorithm.std_ddof == 0
    assert config.model.lora == LoraConfig(target_modules=["q_proj"])
    assert config.model.from_scratch is True


def test_value_may_contain_an_equals_sign_or_start_with_a_dash():
    config = load_config(None, ["--run.dir", "a=b", "--env.settings.shift=-3", "--env.name=x=--y"])
    assert (config.run.dir, config.env.settings, config.env.name) == ("a=b", {"shift": -3}, "x=--y")


def test_a_text_in_toml_quotes_is_unquoted():
    assert load_config(None, ["--run.dir", '"none"']).run.dir == "none"


def test_newline_in_a_value_does_not_inject_a_second_setting():
    assert load_config(None, ["--run.dir", '"a"\nb = 1']).run.dir == '"a"\nb = 1'


def test_command_line_overrides_the_file_and_later_arguments_override_earlier_ones(tmp_path):
    text = "[training]\nsteps = 3\nepochs = 2\n"
    config = from_file(tmp_path, text, "--training.steps", "4", "--training.steps", "5")
    assert (config.training.steps, config.training.epochs) == (5, 2)


def test_table_value_is_merged_into_the_existing_table(tmp_path):
    text = "[training]\nsteps = 3\n[env.settings.size]\na = 1\nb = 2\n"
    config = from_file(tmp_path, text, "--training", "{epochs = 2}", "--env.settings", "{size = {b = 5}}")
    assert (config.training.steps, config.training.epochs) == (3, 2)
    assert config.env.settings == {"size": {"a": 1, "b": 5}}


def test_none_unsets_the_value_of_the_file(tmp_path):
    text = '[model]\npath = "x"\n[model.lora]\nrank = 4\n[rewards.weights]\nk = 1.0\n'
    config = from_file(tmp_path, text, "--model.path", "none", "--model.lora=none", "--rewards.weights.k", "none")
    assert config == Config()


def test_none_selects_the_world_choice_named_none_or_the_setting_default(tmp_path):
    text = '[env]\nname = "search"\n[env.settings]\nk = 3\n'
    words = ("--env.settings.access", "none", "--env.settings.k", "none")
    given = from_file(tmp_path, text, *words).env.settings
    settings = read_settings(SearchSettings, given)
    assert settings.access == "none"
    assert settings.k == SearchSettings().k != 3


def test_none_is_a_value_where_the_setting_lists_it_as_choice():
    """Otherwise `correction none` would keep a preset's correction in silence."""
    assert load_config(None, ["--algorithm.correction", "none"]).algorithm.correction == "none"
    assert "none" in find("algorithm.correction").choices


def test_free_keys_accept_any_toml_value_or_text():
    words = ["--env.settings.documents", "40", "--env.settings.size.deep", "[1, 2]", "--env.settings.t", "plain"]
    assert load_config(None, words).env.settings == {"documents": 40, "size": {"deep": [1, 2]}, "t": "plain"}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("algorithm.group_sise", "algorithm.group_size"),
        ("algoritm.group_size", "algorithm.group_size"),
        ("training.group_size", "algorithm.group_size"),
        ("algorithm.group-size", "algorithm.group_size"),
        ("algorithm.kl_beta", "algorithm.kl_coef"),
        ("model.lora.rnk", "model.lora.rank"),
        ("lora.rank", "model.lora.rank"),
        ("training.lr", "training.learning_rate"),
        ("sft.lr", "sft.learning_rate"),
        ("rolout.temperature", "rollout.temperature"),
        ("evaluation.temprature", "evaluation.temperatures"),
        ("seed", "run.seed"),
        ("env.max_turns", "rollout.max_turns"),
        ("env.setings.documents", "env.settings.documents"),
    ],
)
def test_unknown_key_error_names_the_nearest_key(tmp_path, wrong, right):
    expected = f"{wrong} (= 7) is not a setting; the nearest is {right}."
    assert refusal(f"--{wrong}", "7") == [expected]
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, f"{wrong} = 7\n")
    assert caught.value.message == expected


def test_unknown_key_without_a_near_match_lists_its_section_keys():
    (line,) = refusal("--env.corpus", "3")
    assert "env.rendering" in line
    assert "go under env.settings" in line
    for far in ("model.rope_theta", "eval.n", "training.precision"):
        assert "the nearest" not in refusal(f"--{far}", "3")[0]
    (line,) = refusal("--zzz", "3")
    assert "the sections are model, env, rollout" in line


def test_every_key_of_an_unknown_section_is_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, "[trainer]\nsteps = 3\nepochs = 2\n")
    assert caught.value.message.splitlines() == [
        "trainer.steps (= 3) is not a setting; the nearest is training.steps.",
        "trainer.epochs (= 2) is not a setting; the nearest is training.epochs.",
    ]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("algorithm.group_size", "0", "at least 1"),
        ("algorithm.dual_clip", "1", "above 1"),
        ("rollout.top_p", "1.5", "at most 1"),
        ("training.beta1", "1", "below 1"),
        ("training.learning_rate", "inf", "a finite number"),
        ("algorithm.clip_high", "nan", "a finite number"),
        ("rollout.max_turns", "2.5", "a whole number"),
        ("rollout.max_turns", "true", "a whole number"),
        ("rollout.max_turns", '"3"', "a whole number"),
        ("rollout.temperature", '"hot"', "a number"),
        ("run.save_rollouts", '"yes"', "true or false"),
        ("run.save_rollouts", "1", "true or false"),
        ("env.rendering", '"chta"', 'one of "chat", "tags", "code"'),
        ("algorithm.std_ddof", "2", "one of 0, 1 or none"),
        ("run.trackers", '"jsonl"', 'a list of text such as ["a", "b"]'),
        ("run.trackers", "[1]", 'a list of text such as ["a", "b"]'),
        ("evaluation.temperatures", '[0.5, "x"]', "a list of numbers such as [0.0, 1.0]"),
        ("evaluation.temperatures", '"warm"', "a list of numbers such as [0.0, 1.0]"),
        ("model.lora", "3", "a table or none"),
    ],
)
def test_invalid_value_error_states_the_expected_values(tmp_path, key, value, expected):
    sentence = f"{key} is {value}, but must be {expected}"
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, f"{key} = {value}\n")
    assert caught.value.message.startswith(sentence)
    assert refusal(f"--{key}", value)[0].startswith(sentence)


def test_invalid_value_of_a_union_setting_is_reported_once():
    (line,) = refusal("--model.lora.target_modules", "[1, 2]")
    assert line.startswith("model.lora.target_modules is [1, 2], but must be a list of text")
    assert line.endswith('or "all-linear".')


def test_a_text_setting_in_a_file_must_be_text(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.dir is 3, but must be text or none\."):
        from_file(tmp_path, "[run]\ndir = 3\n")


def test_a_value_for_a_whole_section_is_refused():
    (line,) = refusal("--algorithm", "grpo")
    assert line.endswith('"grpo", but must be a section of settings such as algorithm.preset = "grpo".')


def test_a_long_value_is_cut_in_the_message():
    (line,) = refusal("--run.trackers", "x" * 500)
    assert "xxx..." in line
    assert len(line) < 200


def test_invalid_command_line_arguments_raise_config_error():
    assert refusal("foo") == ['"foo" does not name a setting; write --section.key value.']
    assert refusal("--run.dir") == ["run.dir needs a value (text or none): write --run.dir VALUE."]
    assert refusal("--training.steps", "--model.from_scratch") == [
        "training.steps needs a value (a whole number): write --training.steps VALUE."
    ]
    assert refusal("--training.steps.x", "1")[0].startswith("training.steps.x (= 1) is not a setting")


def test_all_errors_are_listed_one_per_line(tmp_path):
    with pytest.raises(ConfigError) as caught:
        from_file(
            tmp_path, "[rollout]\ntop_p = 2.0\nturns = 3\n", *("--algorithm.group_sise", "4", "--training.steps", "0")
        )
    lines = caught.value.message.splitlines()
    starts = ["algorithm.group_sise (= 4)", "rollout.top_p is 2.0", "rollout.turns (= 3)", "training.steps is 0"]
    assert [next(s for s in starts if line.startswith(s)) for line in lines] == starts
    assert caught.value.hint == f"The settings come from {tmp_path / 'mine.toml'} and the command line."


def test_errors_in_a_packaged_recipe_name_the_recipe_not_its_file():
    with pytest.raises(ConfigError) as caught:
        load_config("search", ["--training.steps", "0"])
    assert caught.value.hint == "The settings come from the recipe search and the command line."


def test_settings_that_contradict_each_other_are_refused():
    assert refusal("--rollout.max_tokens_per_turn", "900") == [
        "rollout.max_tokens_per_turn (900) must be below rollout.max_seq_len (768)."
    ]
    streams = ("--training.mode", "async", "--rollout.concurrency", "128")
    assert refusal(*streams, "--staleness.max_concurrent_rollouts", "129") == [
        "staleness.max_concurrent_rollouts (129) must not be above rollout.concurrency (128)."
    ]
    assert refusal("--model.init.hidden_size", "130") == [
        "model.init.hidden_size (130) must be an even multiple of model.init.num_heads (4)."
    ]
    assert refusal("--model.init.num_kv_heads", "3") == [
        "model.init.num_heads (4) must be a multiple of model.init.num_kv_heads (3)."
    ]
    (line,) = refusal("--model.path", "x", "--model.from_scratch")
    assert line.startswith('model.path ("x") and model.from_scratch (true) are mutually exclusive')


@pytest.mark.parametrize(
    ("text", "place"),
    [("[run]\nseed == 3\n", "line 2, column 7"), ("[run]\nseed = 3\n[run]\n", "line 3, column"), ("x", "line 1")],
)
def test_a_syntax_error_names_file_and_line(tmp_path, text, place):
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, text)
    assert caught.value.message.startswith(f"{tmp_path / 'mine.toml'}, {place}")


def test_near_names_are_suggested_for_missing_recipes_but_not_missing_files(tmp_path):
    with pytest.raises(ConfigError, match=r'Unknown recipe "serch"') as caught:
        load_config("serch", [])
    assert "search" in caught.value.hint
    with pytest.raises(ConfigError, match=r"serch\.toml does not exist") as caught:
        load_config(tmp_path / "serch.toml", [])
    assert caught.value.hint == "Check the path; `ludus recipes` lists the recipes."


def test_folder_or_non_utf8_config_file_raises_config_error(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path, [])
    (tmp_path / "latin.toml").write_bytes(b'[run]\ndir = "\xe9"\n')
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_config(tmp_path / "latin.toml", [])


def test_a_recipe_is_found_by_name():
    assert load_config("search", []) == load_config(recipe_folder("search") / "config.toml", [])
    assert load_config("search", []).env.name == "search"
    recipes = {recipe.name: recipe for recipe in list_recipes()}
    assert recipes["search"].config.is_file()
    assert recipes["search"].title


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_is_valid(path):
    config = load_config(path, [])
    assert config_from_toml(to_toml(config)) == config


TEXT = st.text(st.characters(codec="utf-8")).filter(
    lambda text: not os.path.exists(text)
)  # existing paths become absolute
FREE = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=30, derandomize=True, database=None, deadline=None)
@given(
    free=st.dictionaries(st.text(st.characters(codec="utf-8")), FREE, max_size=4),
    path=st.none() | st.text(st.characters(codec="utf-8")).map("/{}".format),  # relative ones become absolute
    temperature=st.floats(0, 1e300),
    lora=st.none() | st.builds(LoraConfig, rank=st.integers(1, 10**20)),
)
def test_a_resolved_configuration_reads_back_equal(free, path, temperature, lora):
    config = Config(
        model=ModelConfig(path=path, lora=lora),
        env=EnvConfig(settings=free),
        rollout=RolloutConfig(temperature=temperature),
    )
    assert config_from_toml(to_toml(config)) == config


def test_resolved_toml_contains_every_setting_in_order():
    text = to_toml(load_config(None, ["--model.lora", "{}"]))
    tables = tomllib.loads(text)
    for setting in list_settings():
        if NAME in setting.key.split("."):  # a table of the user's own
            continue
        value = tables
        for name in setting.key.split("."):
            value = value.get(name)
        assert value == setting.default or setting.key == "model.lora", setting.key
        assert setting.key.rpartition(".")[2] in text
    assert text.index("[model]") < text.index("[algorithm]") < text.index("[run]")


def test_value_not_representable_in_toml_raises_error_naming_its_key():
    with pytest.raises(ConfigError, match=r"env\.settings\.k cannot be written"):
        to_toml(Config(env=EnvConfig(settings={"k": [None]})))


def test_every_setting_that_may_be_none_is_none_by_default():
    """A text without the key means None; with another default it would not read back."""
    assert [s.key for s in list_settings() if type(None) in s.accepts and s.default is not None] == []


def test_find_returns_default_type_bounds_and_doc_of_a_setting():
    setting = find("algorithm.group_size")
    assert (setting.default, setting.type_text, setting.bounds) == (8, "a whole number", "at least 1")
    assert setting.doc.startswith("Trajectories per task (G);")
    assert "algorithm.group_size" in [s.key for s in list_settings()]
    assert find("model.lora.rank").default == 16


def test_documented_bounds_match_the_enforced_bounds():
    """Each bounded number is refused just outside of what its words say."""
    checked = 0
    for setting in list_settings():
        for bound in filter(None, setting.bounds.split(" and ")):
            *_, number = bound.split()
            step = 1 if int in setting.accepts else 1e-6
            outside = float(number) + step * (bound.startswith(("at most", "below")) or -1)
            text = str(int(outside)) if int in setting.accepts else repr(outside)
            assert any(
                line.startswith(f"{setting.key} is {text}, but must be {bound}")
                for line in refusal(f"--{setting.key}={text}")
            )
            checked += 1
    assert checked > 40


def test_config_modules_do_not_import_heavy_libraries():
    code = (
        "import sys, ludus.types, ludus.errors, ludus.recipes, ludus.config, ludus.config.schema,"
        " ludus.algorithms.spec.resolve\n"
        "ludus.config.load_config('search', ['--training.steps', '1'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'peft'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_infinity_and_large_integers_round_trip_in_free_keys():
    config = load_config(None, ["--env.settings.far", "inf", "--env.settings.big", str(2**70)])
    assert config.env.settings == {"far": math.inf, "big": 2**70}
    assert config_from_toml(to_toml(config)) == config


def test_docs_of_every_setting_with_default_none_explain_an_unset_value():
    explained = re.compile(r"\b(if|leave it) unset\b|\bunset (for|with)\b", re.IGNORECASE)
    missing = [s.key for s in list_settings() if s.default is None and not explained.search(" ".join(s.doc.split()))]
    assert missing == []


@pytest.mark.parametrize("recipe", ["code", "functions", "guess", "math", "mixed", "search", "sql", "terminal"])
def test_recipes_with_generated_tasks_evaluate_at_least_1000_tasks(recipe):
    config = load_config(recipe, [])
    assert config.evaluation.tasks >= 1_000
    assert config.env.settings.get("num_held_out", 1_000) >= 1_000


def test_world_file_is_a_source_with_the_default_settings():
    config = load_config("examples/stock.py:make_world", ["--training.steps", "3"])
    assert config.env.name == f"{Path('examples/stock.py').absolute()}:make_world"
    assert config.training.steps == 3
    assert config.rollout == RolloutConfig()


@pytest.mark.parametrize(
    ("flags", "gpu", "expected"),
    [("avx512f amx_bf16 amx_tile", False, True), ("avx512f avx512_bf16", False, False), ("sse2", True, True)],
)
def test_auto_dtype_is_bfloat16_if_the_machine_multiplies_matrices_in_it(flags, gpu, expected, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n", encoding="utf-8")
    if gpu:
        (tmp_path / "nvidia0").touch()
    assert model.multiplies_bfloat16(tmp_path / "cpuinfo", tmp_path / "nvidia0") is expected
    assert not model.multiplies_bfloat16(tmp_path / "none", tmp_path / "none")
    without_gpu = expected and not gpu
    assert model.multiplies_bfloat16(tmp_path / "cpuinfo", tmp_path / "nvidia0", on_gpu=False) is without_gpu
    monkeypatch.setattr(model, "multiplies_bfloat16", lambda on_gpu: expected if on_gpu else without_gpu)
    on_cpu = load_config(None, ["--model.dtype", "auto", "--model.device", "cpu"])
    assert on_cpu.model.dtype == ("bfloat16" if without_gpu else "float32")
    config = load_config(None, ["--model.dtype", "auto"])
    assert config.model.dtype == ("bfloat16" if expected else "float32")
    assert "auto" not in to_toml(config).split("dtype")[1].split("\n")[0]
