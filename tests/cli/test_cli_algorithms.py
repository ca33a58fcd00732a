"""`ludus algorithms`: a line with source per preset, and the details of one."""

from ludus.algorithms.spec.resolve import PRESETS
from tiny_run import ludus, refused


def test_every_preset_is_listed():
    said = ludus("algorithms")
    assert said.code == 0
    for name in PRESETS:
        assert f" {name} " in said.out


def test_the_parts_that_no_preset_has_are_listed():
    said = ludus("algorithms")
    assert "--algorithm.advantage: vtrace, retrace, siblings" in said.out
    assert "--algorithm.correction: tis, icepop, decoupled, reject_sequence, m2po" in said.out
    assert "--algorithm.loss: distill_full" in said.out
    assert "k3_k2grad, full_reverse, full_forward" in said.out


def test_algorithms_command_shows_options_of_one_preset():
    said = ludus("algorithms", "dppo")
    assert said.code == 0
    assert "arXiv:2602.04879" in said.out
    assert "algorithm.loss = dppo" in said.out
    assert "algorithm.options.loss.bound = 0.2 (from 0 on)" in said.out
    assert "algorithm.options.loss.divergence = tv: " in said.out
    assert "advantage.k = 4 (a whole number from 1 on)" in ludus("algorithms", "pass_at_k").out
    assert "advantage.lam = 1 (from 0 to 1)" in ludus("algorithms", "ppo").out
    assert "loss.share = 0.0002 (above 0 and at most 1)" in ludus("algorithms", "kl_cov").out


def test_algorithms_command_shows_the_setting_for_a_part():
    said = ludus("algorithms", "tis").out
    assert "tis is a part of presets: --algorithm.correction tis" in said
    assert "algorithm.options.correction." in said
    assert "--algorithm.advantage vtrace" in ludus("algorithms", "vtrace").out


def test_algorithms_command_shows_values_in_command_line_syntax():
    said = ludus("algorithms", "ppo").out
    assert "= false" in said
    assert "False" not in said


def test_unknown_algorithm_suggests_the_closest_name():
    assert "'gspo'" in refused("algorithms", "gspoo")
