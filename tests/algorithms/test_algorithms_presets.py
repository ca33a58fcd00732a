"""Presets and the validation of algorithm settings, without torch."""

import subprocess
import sys
import warnings
from dataclasses import fields

import pytest
import torch

from ludus.algorithms import algorithm
from ludus.algorithms.advantages import ADVANTAGES as ADVANTAGE_SPECS
from ludus.algorithms.algorithm import AdvantageSpec, Algorithm, Need, declared_in, modules_of, publish
from ludus.algorithms.corrections import CORRECTIONS as CORRECTION_SPECS
from ludus.algorithms.kl import FULL_KL_NAMES, FULL_KLS
from ludus.algorithms.losses import LOSSES as LOSS_SPECS
from ludus.algorithms.spec.resolve import PRESETS, algorithm_of, check_binary_rewards, resolve
from ludus.algorithms.tensors import Outcomes, TokenBatch
from ludus.config.load import load_config
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.config.sections.rewards import RewardsConfig
from ludus.errors import ConfigError
from ludus.rewards.base import Reward


def refused(**settings):
    with pytest.raises(ConfigError) as caught:
        resolve(AlgorithmConfig(**settings))
    return caught.value


def test_full_distribution_kl_names_match_implementations():
    assert set(FULL_KL_NAMES) == set(FULL_KLS)
    assert len(FULL_KL_NAMES) == len(FULL_KLS)


@pytest.mark.parametrize("spec", [*ADVANTAGE_SPECS.values(), *LOSS_SPECS.values(), *CORRECTION_SPECS.values()])
def test_every_required_parameter_of_a_part_is_passed(spec):
    record = Outcomes if spec.name in ADVANTAGE_SPECS else TokenBatch
    known = {*spec.options, *spec.reads, *(field.name for field in fields(record)), *algorithm.SETTING_PARAMETERS}
    for name in ("function", "cut", "choose", "finish"):
        function = getattr(spec, name, None)
        required = algorithm.parameters_of(function).values() if function else ()
        missing = {p.name for p in required if p.default is p.empty} - known
        allowed = {"choose": {"covariance", "seed"}, "finish": {"advantages"}}
        assert missing <= allowed.get(name, set())


def test_checking_a_configuration_loads_no_torch():
    code = "import sys, ludus.algorithms.spec.resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_preset_resolves_to_itself():
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert resolve(AlgorithmConfig(preset=name)) == preset


def test_every_setting_reaches_the_algorithm():
    settings = {
        "group_size": 4,
        "advantage": "reinforce_pp_baseline",
        "loss": "ppo_clip",
        "aggregation": "constant",
        "clip_low": 0.11,
        "clip_high": 0.12,
        "dual_clip": 3.0,
        "opsm_delta": 1e-4,
        "kl": "k2",
        "kl_coef": 0.05,
        "kl_placement": "advantage",
        "correction": "tis",
        "tis_cap": 1.5,
        "filter_zero_variance": True,
        "max_resample_rounds": 2,
        "variance_filter": "top_p",
        "top_variance_fraction": 0.5,
        "greso": True,
        "overlong_mask": True,
        "std_ddof": 0,
        "entropy_coef": 0.01,
        "entropy_target": 0.2,
        "overlong_buffer": 0.3,
        "overlong_measure": "action_tokens",
        "overlong_length": 99,
    }
    assert set(settings) == set(AlgorithmConfig.model_fields) - {"preset", "options"}
    resolved = resolve(AlgorithmConfig(preset="rloo", **settings))
    assert resolved == Algorithm(
        name="rloo", summary=PRESETS["rloo"].summary, source=PRESETS["rloo"].source, **settings
    )
    assert {f.name for f in fields(Algorithm)} == set(settings) | {
        *("name", "summary", "source", "options", "minibatches")
    }


def test_numbers_of_a_part_reach_the_algorithm():
    options = {"loss": {"bound": 0.3, "divergence": "kl"}}
    assert resolve(AlgorithmConfig(preset="dppo", options=options)).options.loss == options["loss"]
    kept = resolve(AlgorithmConfig(preset="pass_at_k"))
    assert kept.options.advantage == {"k": 4}
    assert resolve(AlgorithmConfig(preset="pass_at_k", advantage="grpo")).options.advantage == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"options": {"loss": {"bound": 0.1}}}, "loss.bound is not an option of the loss ppo_clip"),
        ({"preset": "dppo", "options": {"loss": {"bond": 0.1}}}, "'bound'"),
        ({"preset": "dppo", "options": {"loss": {"divergence": "js"}}}, "divergence = 'js'"),
        ({"preset": "dppo", "options": {"loss": {"bound": "wide"}}}, "bound = 'wide' is not a number"),
        ({"preset": "dppo", "correction": "tis"}, "twice"),
        ({"preset": "gspo", "correction": "tis"}, "one term per trajectory"),
        ({"preset": "kl_cov", "clip_low": 0.1}, "clip_low"),
        ({"preset": "gspo", "dual_clip": 3.0}, "no second clip"),
    ],
)
def test_unknown_option_or_inapplicable_setting_is_rejected(settings, words):
    error = refused(**settings)
    assert words in f"{error} {error.hint}"


def options(part, **given):
    return {"options": {part: given}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preset": "ppo"} | options("advantage", lam=7), "advantage.lam is 7, but must be from 0 to 1."),
        ({"preset": "ppo"} | options("advantage", gamma=-3), "gamma is -3, but must be from 0 to 1."),
        ({"preset": "ppo"} | options("advantage", whiten=0.5), "must be a whole number from 0 to 1."),
        ({"preset": "vapo"} | options("advantage", alpha=0), "alpha is 0, but must be above 0."),
        ({"preset": "pass_at_k"} | options("advantage", k=2.5), "k is 2.5, but must be a whole number"),
        ({"preset": "pass_at_k"} | options("advantage", k=0), "k is 0, but must be a whole number from 1 on."),
        ({"preset": "pass_at_k"} | options("advantage", k=9), "k is 9, but must be at most algorithm.group_"),
        ({"preset": "pass_at_k", "group_size": 3}, "k is 4, but must be at most algorithm.group_size, which"),
        ({"preset": "rae"} | options("advantage", decay=5), "decay is 5"),
        ({"preset": "prime"} | options("advantage", beta=-1), "beta is -1"),
        (options("advantage", std_floor=-1), "std_floor is -1, but must be from 0 on."),
        ({"preset": "sapo"} | options("loss", tau_pos=0), "loss.tau_pos is 0, but must be above 0."),
        ({"preset": "kl_cov"} | options("loss", share=0), "share is 0, but must be above 0 and at most 1."),
        ({"preset": "clip_cov"} | options("loss", share=2), "share is 2"),
        ({"preset": "clip_cov"} | options("loss", low=9), "loss.low is 9, but must be at most high, which is 5."),
        ({"preset": "mixed_policy"} | options("loss", gamma=0), "loss.gamma is 0, but must be above 0."),
        ({"preset": "dppo"} | options("loss", bound=-1), "bound is -1"),
        ({"preset": "gtpo"} | options("loss", amplify=-2), "amplify is -2"),
        ({"correction": "icepop"} | options("correction", low=3, high=1), "low is 3, but must be at most high"),
        ({"correction": "reject_sequence"} | options("correction", low=3), "at most high, which is 2."),
        ({"correction": "decoupled"} | options("correction", cap=-2), "cap is -2, but must be above 0."),
    ],
)
def test_out_of_bounds_option_is_rejected_with_its_bounds(settings, words):
    error = refused(**settings)
    assert error.message.startswith("algorithm.options.")
    assert words in error.message


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "ppo"} | options("advantage", lam=1, gamma=0, whiten=0),
        {"preset": "pass_at_k", "group_size": 4},
        {"preset": "clip_cov"} | options("loss", share=1, low=-2, high=-1),
        {"correction": "icepop"} | options("correction", low=0, high=0.5),
    ],
)
def test_option_value_at_its_bound_is_accepted(settings):
    assert resolve(AlgorithmConfig(**settings)).options


def test_gspo_accepts_a_trajectory_level_correction():
    options = {"correction": {"level": "geometric"}}
    assert resolve(AlgorithmConfig(preset="gspo", correction="tis", options=options)).correction == "tis"


def test_setting_of_false_or_zero_overrides_the_preset():
    resolved = resolve(AlgorithmConfig(preset="dapo", filter_zero_variance=False, max_resample_rounds=0, clip_low=0.0))
    assert (resolved.filter_zero_variance, resolved.max_resample_rounds, resolved.clip_low) == (False, 0, 0.0)
    assert resolve(AlgorithmConfig(preset="grpo_paper", kl="k2", kl_coef=0.0)).kl_coef == 0.0


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("preset", "drgrpo", "dr_grpo"),
        ("advantage", "rlo", "rloo"),
        ("loss", "ppo-clip", "ppo_clip"),
        ("aggregation", "token-mean", "token_mean"),
        ("kl", "k3k2grad", "k3_k2grad"),
        ("correction", "TIS", "tis"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(key, value, nearest):
    error = refused(**{key: value})
    assert f"algorithm.{key} = {value!r}" in error.message
    assert "Did you mean" in error.hint
    assert nearest in error.hint.split("?")[0]


def test_unknown_name_without_a_near_match_lists_all_names():
    for value in ("", "banana"):
        assert refused(loss=value).hint.startswith("Choose from: ppo_clip")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss": "reinforce", "clip_high": 0.3}, "clip_high = 0.3 would have no effect"),
        ({"preset": "rloo", "dual_clip": 3.0}, "dual_clip = 3.0 would have no effect"),
        ({"preset": "dr_grpo", "std_ddof": 0}, "std_ddof = 0 would have no effect"),
        ({"tis_cap": 3.0}, "tis_cap = 3.0 would have no effect"),
        ({"kl": "k2"}, "kl = k2 would have no effect"),
        ({"kl_placement": "reward"}, "kl_placement = reward would have no effect"),
        ({"preset": "gspo", "aggregation": "token_mean"}, "aggregation = token_mean would have no effect"),
        ({"loss": "gmpo", "aggregation": "constant"}, "aggregation = constant would have no effect"),
        ({"preset": "distill", "advantage": "grpo"}, "advantage = grpo would have no effect"),
        ({"preset": "distill", "overlong_buffer": 0.2}, "overlong_buffer = 0.2 would have no effect"),
        ({"preset": "distill", "kl_coef": 0.1, "kl_placement": "reward"}, "kl_placement = reward would have no effect"),
        ({"preset": "best_of_group", "clip_low": 0.1}, "clip_low = 0.1 would have no effect"),
        ({"preset": "best_of_group", "dual_clip": 3.0}, "dual_clip = 3.0 would have no effect"),
        ({"preset": "pass_at_k", "kl_coef": 0.1, "kl_placement": "reward"}, "'reward' adds to them"),
        ({"preset": "pass_at_k", "overlong_buffer": 0.1}, "overlong_buffer adds to them"),
        ({"preset": "rloo", "max_resample_rounds": 2}, "max_resample_rounds = 2 replaces groups"),
        ({"preset": "dapo", "filter_zero_variance": False}, "max_resample_rounds = 3 replaces groups"),
        ({"preset": "distill", "filter_zero_variance": True}, "distill reads a teacher and no reward"),
        ({"preset": "distill", "top_variance_fraction": 0.5}, "distill reads a teacher and no reward"),
        ({"preset": "distill", "variance_filter": "top_p"}, "distill reads a teacher and no reward"),
        ({"preset": "distill", "greso": True}, "distill reads a teacher and no reward"),
        ({"preset": "grpo", "overlong_measure": "sequence"}, "overlong_buffer is 0"),
        ({"preset": "grpo", "overlong_length": 5}, "overlong_buffer is 0"),
    ],
)
def test_contradictions_are_refused(settings, named):
    error = refused(**settings)
    assert named in error.message
    assert error.hint


def test_kl_in_the_loss_is_compatible_with_a_teacher():
    assert resolve(AlgorithmConfig(preset="distill", kl_coef=0.1)).kl_coef == 0.1


RAISED = ["--algorithm.kl_coef", "0", "--kl_control.kind", "linear", "--kl_control.end", "0.1"]
"""A KL term that is 0 in the first step and comes with the next ones."""


def test_scheduled_kl_coefficient_obeys_the_same_rules():
    with pytest.warns(UserWarning, match="regularises nothing"):
        algorithm_of(load_config(None, [*RAISED, "--algorithm.kl", "k1"]))
    words = [*RAISED, "--algorithm.preset", "pass_at_k", "--algorithm.kl_placement", "reward"]
    with pytest.raises(ConfigError, match="'reward' adds to them"):
        algorithm_of(load_config(None, words))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert algorithm_of(load_config(None, RAISED)).kl_coef == 0


@pytest.mark.parametrize(
    ("words", "correction"),
    [
        ("--algorithm.preset distill", "tis"),
        ("--algorithm.preset distill --algorithm.loss distill_full", "none"),
        ("--algorithm.preset dppo", "none"),
    ],
)
def test_async_mode_selects_a_correction_for_losses_with_learner_ratio(words, correction):
    """The ratio of distill is to the weights at the start of the step; distill_full has none."""
    config = load_config(None, [*words.split(), "--training.mode", "async"])
    assert algorithm_of(config).correction == correction


@pytest.mark.parametrize("preset", ["ppo", "remax", "reinforce", "reinforce_pp", "rae", "coderl", "distill"])
def test_group_size_one_is_accepted_without_group_relative_advantage(preset):
    assert resolve(AlgorithmConfig(preset=preset, group_size=1)).group_size == 1
    for filters in ({"filter_zero_variance": True}, {"top_variance_fraction": 0.5}, {"greso": True}):
        assert next(iter(filters)) in refused(preset=preset, group_size=1, **filters).message


@pytest.mark.parametrize("preset", ["grpo", "rloo", "best_of_group", "gigpo", "prime", "mixed_policy", "opo"])
def test_group_size_one_is_rejected_for_group_relative_advantage(preset):
    error = refused(preset=preset, group_size=1)
    assert error.message.startswith("algorithm.group_size is 1, but must be at least 2")
    assert f"the advantage {PRESETS[preset].advantage} compares" in error.message


FOUND = Reward("found", lambda task, trajectory: 0.0, outcome=True)
FORM = Reward("form", lambda task, trajectory: 0.0, weight=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "the part form has the weight 0.1"),
        ({"weights": {"form": 0.0}, "weights_end": {"form": 0.2}}, "the part form has the weight 0.2"),
        ({"weights": {"form": 0.0, "found": 2.0}}, "the part found has the weight 2"),
        ({"weights": {"form": 0.0}, "length": {"kind": "linear"}}, "rewards.length.kind = 'linear'"),
        ({"weights": {"form": 0.0}, "normalise_by": "world"}, "rewards.normalise_by = 'world'"),
        ({"weights": {"form": 0.0}, "aggregation": "pareto"}, "rewards.aggregation = 'pareto'"),
        ({"weights": {"form": 0.0}, "model": "some"}, "rewards.model = 'some'"),
    ],
)
def test_non_binary_rewards_are_rejected_for_pass_at_k(settings, words):
    one, rewards = resolve(AlgorithmConfig(preset="pass_at_k")), RewardsConfig(**settings)
    with pytest.raises(ConfigError) as caught:
        check_binary_rewards(one, rewards, (FOUND, FORM))
    assert words in caught.value.message
    assert caught.value.hint
    check_binary_rewards(resolve(AlgorithmConfig()), rewards, (FOUND, FORM))
    check_binary_rewards(one, RewardsConfig(weights={"form": 0.0}), (FOUND, FORM))


def test_k1_kl_warns_only_when_placed_in_the_loss():
    with pytest.warns(UserWarning, match="regularises nothing"):
        resolve(AlgorithmConfig(kl="k1", kl_coef=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(AlgorithmConfig(kl="k1", kl_coef=0.1, kl_placement="reward"))
        resolve(AlgorithmConfig(preset="grpo_paper"))


MINE = '''
"""A part in one file."""

from ludus.algorithms.algorithm import AdvantageSpec, Need, Option, OptionBounds


@AdvantageSpec(help="doubled", needs={Need.GROUP}, options={"factor": Option("x", OptionBounds(1, is_integer=True))})
def mine(*, rewards, mask, factor=2):
    return factor * rewards[:, None] * mask


def helper():
    """Not a part."""
'''


def test_a_file_in_the_folder_is_a_new_advantage(tmp_path, monkeypatch):
    (tmp_path / "new_parts").mkdir()
    (tmp_path / "new_parts" / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    modules = modules_of("new_parts", [str(tmp_path / "new_parts")])
    found = declared_in(AdvantageSpec, modules)
    assert list(found) == ["mine"]
    assert found["mine"].options["factor"].default == 2
    assert found["mine"].has(Need.GROUP)
    assert publish("new_parts", modules) == ["helper", "mine"]
    import new_parts

    assert new_parts.mine is found["mine"].function


def test_plugin_advantage_accepts_whole_batch_but_rejects_unknown_parameters(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def whole(outcomes, algorithm):\n    return 0 * outcomes.mask\n\n\ndef odd(rewards, colour): ...\n"
    )
    outcomes = Outcomes(torch.ones(2), torch.zeros(2, dtype=torch.long), torch.ones(2, 3))
    chosen = resolve(AlgorithmConfig(advantage=f"{file}:whole"))
    assert chosen.compute("advantage", outcomes).tolist() == [[0.0] * 3] * 2
    with pytest.raises(ConfigError, match="parameter 'colour'"):
        resolve(AlgorithmConfig(advantage=f"{file}:odd"))
    with pytest.raises(ConfigError, match="not a function"):
        resolve(AlgorithmConfig(advantage=f"{file}:__name__"))
