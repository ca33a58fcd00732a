"""The algorithm pages: defaults equal those of the code, and every part is listed."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from generators import algorithm_tables

from algorithm_parts import CLIPPING_LOSSES, FUNCTIONS, LOSSES
from ludus.algorithms import advantages, corrections, kl, losses
from ludus.algorithms.advantages import ADVANTAGES as ADVANTAGE_SPECS
from ludus.algorithms.algorithm import KL_OPTIONS, TERM_OPTIONS
from ludus.algorithms.corrections import CORRECTIONS as CORRECTION_SPECS
from ludus.algorithms.losses import LOSSES as LOSS_SPECS
from ludus.algorithms.spec.resolve import PRESETS
from ludus.errors import ConfigError
from tiny_run import ludus

ROOT = Path(__file__).parents[2]
UNDERSTAND = ROOT / "docs" / "understand"
PAGES = (UNDERSTAND / "algorithms.md", *sorted((UNDERSTAND / "algorithms").glob("*.md")))
PAGE = "\n".join(page.read_text("utf-8") for page in PAGES)


SPECS = {"advantage": ADVANTAGE_SPECS, "loss": LOSS_SPECS, "correction": CORRECTION_SPECS}


def test_every_default_is_allowed_and_every_option_has_help():
    tables = [spec.options for specs in SPECS.values() for spec in specs.values()]
    for options in (*tables, KL_OPTIONS, TERM_OPTIONS):
        for name, option in options.items():
            option.check(name, option.default)
            assert option.help
    assert all(spec.help for specs in SPECS.values() for spec in specs.values())


def test_invalid_option_value_raises_config_error():
    with pytest.raises(ConfigError, match="from 0 to 1"):
        ADVANTAGE_SPECS["gae"].options["gamma"].check("algorithm.options.advantage.gamma", 1.5)
    with pytest.raises(ConfigError, match="Choose from: tv, kl"):
        LOSS_SPECS["dppo"].options["divergence"].check("algorithm.options.loss.divergence", "js")
    with pytest.raises(ConfigError, match="is not a number"):
        LOSS_SPECS["dppo"].options["bound"].check("algorithm.options.loss.bound", "much")


@pytest.mark.parametrize("part", ["advantage", "loss", "correction"])
def test_option_defaults_match_function_signatures(part):
    functions = {"advantage": FUNCTIONS, "loss": vars(losses), "correction": vars(corrections)}[part]
    chosen = {"clip_cov": losses.select_clip_cov, "kl_cov": losses.select_kl_cov}
    compared = 0
    for name, spec in SPECS[part].items():
        options = {key: option.default for key, option in spec.options.items()}
        if name not in functions:
            continue
        for one in (functions[name], chosen.get(name, functions[name])):
            parameters = inspect.signature(one).parameters
            for option in options.keys() & parameters.keys():
                if parameters[option].default is inspect.Parameter.empty:
                    continue
                default = options[option]
                same = default if isinstance(default, str) else pytest.approx(default)
                assert parameters[option].default == same, (name, option)
                compared += 1
    assert compared > 1


def test_algorithms_command_prints_numeric_option_values():
    lines = {name: ludus("algorithms", name).out for name in PRESETS}
    assert not [name for name, text in lines.items() if "default" in text]
    assert "algorithm.options.loss.bound = 0.2" in lines["dppo"]
    assert "algorithm.options.loss.divergence = tv" in lines["dppo"]
    assert "algorithm.options.advantage.lam = 1" in lines["ppo"]
    assert "algorithm.options.advantage.gamma = 1" in lines["ppo"]
    assert "algorithm.options.loss.entropy_bound = 0.693147" in lines["gtpo"]


def test_documentation_pages_match_generated_tables():
    pages = algorithm_tables.pages()
    stale = [file.name for file, text in pages.items() if file.read_text("utf-8") != text]
    assert stale == [], "run make docs"
    assert len(pages) >= 9


def test_every_marked_table_is_generated_and_covers_every_part():
    names = {name for page in PAGES for _, name, _ in algorithm_tables.MARKED.findall(page.read_text("utf-8"))}
    assert {name if name in algorithm_tables.TABLES else name.split()[0] for name in names} <= set(
        algorithm_tables.TABLES
    )
    for name in (*PRESETS, *ADVANTAGE_SPECS, *LOSS_SPECS, *CORRECTION_SPECS, *KL_OPTIONS, *TERM_OPTIONS):
        assert f"| `{name}` |" in PAGE, name


def test_table_lists_rollout_policy_and_passes_per_step():
    found = {name: (algorithm_tables.policy(one), algorithm_tables.passes(one)) for name, one in PRESETS.items()}
    for name, (policy, _) in found.items():
        loss = PRESETS[name].loss
        expected = {"reinforce": "on", "dppo": "off", "mixed_policy": "near, experts off"}.get(loss, "near")
        assert policy == expected, name
    costs = {
        "grpo": "1",
        "reinforce_pp": "2 + reference",
        "optimal_token_baseline": "3",
        "gtpo": "2",
        "kl_cov": "2",
        "search_r1": "2 + reference + critic",
        "remax": "1 + a greedy episode per task",
        "distill": "1 + teacher",
        "sdpo": "1 + self-teacher",
    }
    assert {name: found[name][1] for name in costs} == costs


def test_stale_table_is_regenerated_from_the_specs():
    text = "a\n<!-- begin table: kl options -->\nold\n<!-- end table -->\nb\n"
    made = algorithm_tables.filled(text)
    assert "old" not in made
    assert "| `granularity` | token |" in made
    assert algorithm_tables.filled(made) == made


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("advantages dr_grpo", "no module 'dr_grpo' declares such a part; there are: gae, group_relative"),
        ("losses group_relative", "no module 'group_relative'"),
        ("options gpro", "'gpro' is not an advantage, loss or correction"),
        ("advantage gae", "there are the tables presets, advantages"),
    ],
)
def test_a_marker_with_an_unknown_name_is_refused(marker, words):
    with pytest.raises(ValueError, match=f"begin table: {marker} -->: {words}"):
        algorithm_tables.filled(f"<!-- begin table: {marker} -->\n<!-- end table -->")


FORMULAS = {
    "gspo": "s_i = exp((1/n_i) sum_t (lp - old))",
    "gspo_token": "sg(s_i) exp(lp - sg(lp))",
    "gmpo": "min(g d, g clip(d, -eps_low, eps_high))",
    "cispo": "-sg(clip(ratio, 1 - eps_low, 1 + eps_high)) A lp",
    "sapo": "-A (4/tau) sigmoid(tau (ratio - 1))",
    "dppo": "|exp(lp) - exp(beh)|",
    "gtpo": "-w ratio A",
    "clip_cov": "(old - mean old) (A - mean A)",
    "kl_cov": "coef |lp - old|",
    "step_gae": "A_k = delta_k + gamma lam A_{k+1}",
    "turn_gae": "A_t = gamma_token V_{t+1} - V_t + gamma_token lam_token A_{t+1}",
    "turn_grpo": "w_turn norm_g(r[.,k])_i + w_outcome norm_g(r)_i",
    "turn_return": "R[i,k] = sum_{j>=k} gamma^(j-k) r[i,j]",
    "ppo_clip": "-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)",
    "gpg": "N/M (r_i - mean_g)",
    "optimal_token_baseline": "R_t - sum_j W_jt R_jt / sum_j W_jt",
    "ppo_sequence": "s_i = exp(sum_t (lp - old))",
    "opo": "sum_j n_j r_j / sum_j n_j",
    "maxrl": "(r_i - mean_g) / mean_g",
    "pass_at_k": "1 - C(G_neg, k)/C(G, k)",
    "best_of_group": "max - second max",
    "remax": "r_i - r(greedy)",
    "sdpo": "(1 - weight) ppo_clip + weight min(ratio, ratio_cap) JSD",
    "rae": "b = decay b + (1 - decay) r",
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_page_has_the_formula(name):
    assert FORMULAS[name] in " ".join(PAGE.split())


N, L = 3, 4
BATCH = {
    "logprobs": -torch.rand(N, L, generator=torch.Generator().manual_seed(0)),
    "old_logprobs": -torch.rand(N, L, generator=torch.Generator().manual_seed(1)),
    "advantages": torch.linspace(-1, 1, N * L).view(N, L),
    "mask": torch.ones(N, L, dtype=torch.bool),
}
MORE = {
    "dppo": {"behavior_logprobs": BATCH["old_logprobs"]},
    "distill": {"teacher_logprobs": BATCH["old_logprobs"]},
    "gtpo": {"weights": torch.ones(N, L)},
    "clip_cov": {"chosen": torch.zeros(N, L, dtype=torch.bool)},
    "kl_cov": {"chosen": torch.zeros(N, L, dtype=torch.bool)},
    "sdpo": {"teacher_kl": torch.rand(N, L), "weight": 0.5},
    "sdft": {"teacher_kl": torch.rand(N, L)},
    "mixed_policy": {"expert": torch.zeros(N, dtype=torch.bool)},
}


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "distill_full"])
def test_every_policy_loss_accepts_the_same_arguments(name):
    clip = {"eps_low": 0.2, "eps_high": 0.2} if name in CLIPPING_LOSSES else {}
    given = getattr(losses, name)(**BATCH, **clip, **MORE.get(name, {}))
    assert given.shape in ((N, L), (N,))
    assert torch.isfinite(given).all()


def test_unread_optional_arguments_do_not_change_the_loss():
    for name, unread in (("reinforce", "old_logprobs"), ("dppo", "old_logprobs"), ("distill", "advantages")):
        function, more = getattr(losses, name), MORE.get(name, {})
        without = {key: value for key, value in BATCH.items() if key != unread}
        assert torch.equal(function(**without, **more), function(**BATCH, **more))


def test_common_algorithm_names_are_available_in_their_modules():
    for name in ("sft", "dpo", "simpo", "ipo", "kto", "value_loss", "echo", "positive_nll"):
        assert callable(getattr(losses, name))
    for name in FUNCTIONS:
        assert callable(getattr(advantages, name))
    for name in ("k1", "k2", "k3", "abs", "k3_k2grad", "full_reverse", "full_forward"):
        assert callable(vars(kl)[name])
