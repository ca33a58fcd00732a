"""The entropy bonus that ends at a target."""

import pytest

from ludus.algorithms.spec.resolve import algorithm_of
from ludus.config.load import load_config
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.training.rl.build import train
from ludus.training.rl.validate import check_settings
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, RecordingReporter, config


def test_a_target_without_a_coefficient_is_refused():
    settings = load_config("guess", ["--algorithm.entropy_target", "0.1"])
    assert algorithm_of(settings).entropy_target == 0.1
    with pytest.raises(ConfigError, match=r"algorithm\.entropy_target has no effect"):
        check_settings(settings, build_world(settings.env, settings.rollout))


@pytest.mark.slow
def test_the_coefficient_is_proportional_to_the_gap_below_the_target(tmp_path):
    changes = {
        "algorithm__entropy_coef": "0.5",
        "algorithm__entropy_target": "0.2",
        "algorithm__filter_zero_variance": "false",
        "evaluation__tasks_before": "0",
    }
    settings = config(tmp_path, **(SMALLEST | changes))
    with lock_run(new_run(settings, "search", "rl")):
        train(open_session(settings), RunFolder(tmp_path), reporter := RecordingReporter())
    trained = [metrics for _, metrics in reporter.steps if "loss/total" in metrics]
    assert trained
    for metrics in trained:
        expected = 0.5 * max(0.0, 1 - metrics["policy/sampled_entropy"] / 0.2)
        assert metrics["entropy/coef"] == pytest.approx(expected)
        bonus = metrics["loss/policy"] - metrics["loss/total"]
        assert bonus == pytest.approx(expected * metrics["policy/entropy"], rel=1e-4)
