"""Judge parts against the verifier, and answers without a test run."""

from dataclasses import replace

import pytest

from ludus.config.load import load_config
from ludus.config.schema import DiagnosticsConfig
from ludus.diagnostics.metrics import configured_metrics
from ludus.errors import ConfigError
from ludus.types import StopReason, Trajectory
from tests.diagnostics.test_behavior_metrics import call, episode, says


def scored(**rewards):
    return Trajectory("t", 0, (), (), StopReason.ANSWERED, rewards=rewards)


def test_judge_agreement_is_averaged_over_the_episodes_it_scored():
    episodes = [
        scored(right=1.0, reward_model=0.9),
        scored(right=0.0, reward_model=0.6),
        scored(right=0.0, reward_model=-0.5),
        scored(right=1.0),
        replace(scored(right=1.0, reward_model=0.0), stop_reason=StopReason.FAILED),
    ]
    found = configured_metrics(episodes, DiagnosticsConfig(), "right")
    assert found == {"judge/reward_model/agreement": pytest.approx(1 - (0.1 + 0.6 + 0.0) / 3)}
    assert configured_metrics(episodes, DiagnosticsConfig(judges=[]), "right") == {}


def test_answers_without_a_matching_test_call_count_as_untested():
    answer = call("submit", '{"answer": "x"}')
    tested = episode(says("", call("shell", '{"command": "python -m pytest -q"}')), says("", answer))
    listed = episode(says("", call("shell", '{"command": "ls tests"}')), says("", answer))
    read = episode(says("", call("read_file", '{"path": "pytest.ini"}')), says("", answer))
    cut = replace(read, stop_reason=StopReason.MAX_TURNS)
    settings = DiagnosticsConfig(test_calls={"shell": "pytest|unittest"})
    assert configured_metrics([tested, listed, read, cut], settings, "right") == {
        "tools/untested": pytest.approx(2 / 3)
    }
    assert configured_metrics([tested, listed], DiagnosticsConfig(test_calls={"shell": ""}), "right") == {
        "tools/untested": 0.0
    }
    assert configured_metrics([cut], settings, "right") == {"tools/untested": 0.0}


def test_invalid_regular_expression_raises_config_error():
    with pytest.raises(ConfigError, match="not a regular expression"):
        load_config("code", ["--run.diagnostics.test_calls.shell", "(pytest"])
    assert load_config("code").run.diagnostics.test_calls == {"run_tests": ""}
