"""Each alarm on a history that is made to show it, on histories just inside its bounds, and on healthy ones."""

import json
import math
import re
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from ludus.config.load import load_config
from ludus.config.settings import list_settings
from ludus.diagnostics.alarms import Alarm, find_alarms, rules, send_alarm
from ludus.diagnostics.history import MetricsHistory
from ludus.errors import ConfigError
from metric_rows import healthy, unsolved, with_end

SETTINGS = {setting.key for setting in list_settings()}


def evaluated(*pairs, margin=0.0):
    """A run with one evaluation a step: training reward and held-out success, with the half-width of its interval."""
    name = "eval/validation/sampled"
    return [
        {"reward/mean": reward, f"{name}/success": rate, f"{name}/low": rate - margin, f"{name}/high": rate + margin}
        for reward, rate in pairs
    ]


def proxy(score, solved, num=40):
    """A run of `num` steps with the mean of a reward model's part and the success as functions of the step."""
    return [
        row | {"reward/reward_model": score(n), "success/mean": solved(n), "reward/right": solved(n)}
        for n, row in enumerate(healthy()[:1] * num)
    ]


SHOWN = {
    "non_finite": with_end(1, optim__grad_norm=math.nan),
    "echo_trap": with_end(10, groups__reward_std=0.02),
    "echo_trap_early": with_end(5, groups__reward_std=0.1, policy__entropy=0.1),
    "held_out_zero": evaluated((0.3, 0.2), *[(0.3, 0.0)] * 5),
    "held_out_drop": evaluated((0.3, 0.8), (0.3, 0.65), (0.3, 0.62)),
    "zero_reward": with_end(5, reward__mean=0.0, reward__std=0.0),
    "equal_rewards": with_end(1, groups__zero_variance=1.0),
    "few_differences": with_end(10, groups__zero_variance=0.85),
    "starved_tasks": with_end(5, tasks__starved=0.6),
    "conflict_tokens": with_end(5, groups__conflict_tokens=0.85),
    "uniform_failure": with_end(5, success__mean=0.0, reward__right=0.0),
    "success_drop": with_end(3, success__mean=0.2),
    "entropy_collapse": with_end(5, policy__entropy=0.015),
    "template_collapse": with_end(3, collapse__mutual_information=0.09, collapse__chance=0.1),
    "exploration_ended": with_end(5, groups__low_entropy=0.6),
    "entropy_explosion": with_end(3, policy__entropy=2.0),
    "kl_jump": with_end(2, policy__kl_reference=0.5),
    "kl_rate": [{"policy/kl_reference": 0.05 * step} for step in range(4)],
    "gradient_spike": with_end(2, optim__grad_norm=9.0),
    "length_explosion": unsolved(with_end(5, response_length__mean=400.0), 0.3),
    "agent_failures": with_end(1, episode__stop__agent_failed=0.6),
    "truncation": with_end(1, episode__stop__truncated=0.3, episode__stop__max_tokens=0.3),
    "repetition": with_end(3, text__repeated=0.6),
    "tool_loops": with_end(3, tools__repeated=0.4),
    "tool_hallucination": with_end(3, tools__status__unknown_tool=0.2),
    "tool_errors": with_end(1, tools__error_rate=0.6, tools__status__timed_out=0.4),
    "episodes_of_errors": with_end(1, episode__stop__tool_errors=0.51),
    "dead_tool": with_end(3, tools__search__error_rate=1.0),
    "tool_overuse": unsolved(with_end(5, tools__calls_per_episode=6.0), 0.3),
    "tool_starvation": with_end(5, tools__calls_per_episode=0.1),
    "unused_results": with_end(5, tools__unused_results=0.9),
    "few_strategies": with_end(5, tools__sequences=1.0),
    "parroting": with_end(3, text__copied=0.7),
    "language_mixing": with_end(3, text__foreign_script=0.2),
    "shaping_only": unsolved([row | {"reward/format": n / 40} for n, row in enumerate(healthy())], 0.3),
    "judge_drift": with_end(5, judge__reward_model__agreement=0.6),
    "over_optimization": proxy(lambda n: 0.5 + n / 300, lambda n: 0.6 - n / 200),
    "majority_collapse": [
        row | {"majority/ratio": min(1.0, 0.4 + n / 40), "majority/label_accuracy": 0.5 + 0.015 * (n % 2)}
        for n, row in enumerate(healthy())
    ],
    "constraint_saturated": with_end(5, constraint__saturated=1.0),
    "untested_answers": with_end(5, tools__untested=0.6),
    "reward_hacking": evaluated((0.3, 0.3), (0.5, 0.5), (0.7, 0.35), (0.8, 0.3)),
    "mismatch": with_end(1, mismatch__logprob_diff=0.051),
    "mismatch_by_length": [row | {"mismatch/logprob_diff/<=1024": 0.04} for row in healthy()],
    "mismatch_by_probability": [row | {"mismatch/by_probability/<=0.01": 0.11} for row in healthy()],
    "gradient_on_few_tokens": with_end(3, optim__top_token_share=0.6),
    "inert_clip": [row | {"policy/ratio_max": 1.2} for row in healthy()],
    "zero_gradient": with_end(3, loss__total=0.0, optim__grad_norm=0.0),
    "critic": with_end(10, critic__explained_variance=-0.1),
    "long_episodes": unsolved([row | {"turns/mean": 14.0} for row in healthy()], 0.2),
}
"""A history by the alarm that it shows."""

TOGETHER = {
    "echo_trap": {"echo_trap_early", "few_differences"},
    "entropy_collapse": {"echo_trap_early"},
    "uniform_failure": {"success_drop"},
    "held_out_zero": {"held_out_drop"},
    "reward_hacking": {"held_out_drop"},
}


def names(history, actions=None):
    return [alarm.name for alarm in find_alarms(history, actions or {})]


def test_every_alarm_rule_has_a_triggering_test_history():
    assert SHOWN.keys() == rules().keys()


@pytest.mark.parametrize("name", SHOWN)
def test_triggering_history_raises_its_alarm_and_only_expected_others(name):
    found = names(SHOWN[name])
    assert name in found
    assert set(found) - {name} <= TOGETHER.get(name, set())


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_raises_no_alarm_at_any_step(seed):
    rows = healthy(seed=seed)
    assert [names(rows[: n + 1]) for n in range(len(rows))] == [[]] * len(rows)


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{}] * 30,
        [{"loss": 0.0}] * 30,
        with_end(9, groups__reward_std=0.02),
        with_end(4, reward__mean=0.0, reward__std=0.0),
        with_end(1, groups__zero_variance=0.99),
        proxy(lambda n: 0.5 + n / 300, lambda n: 0.6 + n / 200),
        proxy(lambda n: 0.5 - n / 300, lambda n: 0.6 - n / 200),
        proxy(lambda n: 0.5 + n / 300, lambda n: 0.6 - n / 800),
        [{k: v for k, v in row.items() if "judge/" not in k} for row in SHOWN["over_optimization"]],
        proxy(lambda n: 0.5 + n / 2000, lambda n: 0.6 - n / 200),
        proxy(lambda n: 0.5 + n / 60, lambda n: 0.6 - n / 60, num=19),
        with_end(1, mismatch__logprob_diff=0.05),
        with_end(1, mismatch__logprob_diff=0.7, staleness__mean=0.5),
        with_end(1, tools__error_rate=0.5),
        with_end(1, episode__stop__tool_errors=0.5),
        with_end(1, episode__stop__truncated=0.25, episode__stop__max_tokens=0.25),
        with_end(5, policy__entropy=0.2, groups__low_entropy=0.49),
        with_end(5, tasks__starved=0.5),
        with_end(5, groups__conflict_tokens=0.8),
        with_end(3, optim__top_token_share=0.5),
        [row | {"mismatch/by_probability/<=0.01": 0.1} for row in healthy()],
        [row | {"mismatch/by_probability/<=0.01": 0.2, "mismatch/logprob_diff": 0.045} for row in healthy()],
        with_end(5, tools__untested=0.5),
        with_end(5, judge__reward_model__agreement=0.66),
        with_end(4, policy__entropy=0.015),
        with_end(1, groups__zero_variance=1.0, distill__reverse_kl=0.1),
        with_end(1, groups__zero_variance=1.0, experts__trained=1.0),
        with_end(3, collapse__mutual_information=0.1, collapse__chance=0.1),
        with_end(2, collapse__mutual_information=0.09, collapse__chance=0.1),
        with_end(3, collapse__mutual_information=0.09, collapse__chance=0.5),
        evaluated((0.3, 0.2), *[(0.3, 0.0)] * 4, margin=0.15),
        evaluated((0.3, 0.8), (0.3, 0.65), (0.3, 0.71)),
        evaluated((0.3, 0.8), (0.3, 0.62), (0.3, 0.62), margin=0.13),
        [{"policy/kl_reference": 0.019 * step} for step in range(4)],
        [{"policy/kl_reference": 0.5} for _ in range(21)],
        evaluated((0.3, 0.3), (0.5, 0.5), (0.7, 0.41), (0.8, 0.41)),
        [row | {"groups/count": 1.0} for row in with_end(3, success__mean=0.2)],
    ],
)
def test_history_just_within_the_bounds_raises_no_alarm(history):
    assert names(history) == []


def test_reward_hacking_needs_a_rise_of_the_reward_and_disjoint_intervals():
    assert names(evaluated((0.5, 0.5), (0.5, 0.3), (0.5, 0.3))) == ["held_out_drop"]
    assert names(evaluated((0.3, 0.3), (0.5, 0.5), (0.7, 0.35), (0.8, 0.3), margin=0.08)) == ["held_out_drop"]


def text_of(name, history):
    return next(alarm.text for alarm in find_alarms(history) if alarm.name == name)


def test_alarm_texts_contain_the_measured_numbers():
    assert "is 0.015 nats per token, below 0.02 in each of the last 5 steps" in text_of(
        "entropy_collapse", SHOWN["entropy_collapse"]
    )
    kinds = {"tools/error_rate": 0.9, "tools/status/raised": 0.3, "tools/status/malformed": 0.6}
    assert "most often malformed (60% of all calls)" in text_of("tool_errors", [kinds])
    easy = with_end(1, groups__zero_variance=1.0, groups__solve_all=1.0)
    assert "the tasks are too easy (all solved). " in text_of("equal_rewards", easy)
    hard = with_end(1, groups__zero_variance=1.0, groups__solve_all=0.0, groups__solve_none=1.0)
    assert "the tasks are too hard (none solved). " in text_of("equal_rewards", hard)
    mixed = with_end(1, groups__zero_variance=1.0, groups__solve_all=0.5, groups__solve_none=0.5)
    assert "too easy (all solved) or too hard (none solved). " in text_of("equal_rewards", mixed)


def test_few_differences_counts_a_step_without_any_and_means_over_all():
    rows = with_end(10, groups__zero_variance=0.9)
    rows[-5] |= {"groups/zero_variance": 1.0}
    assert "91% of the groups of the last 10 steps" in text_of("few_differences", rows)


@pytest.mark.parametrize(
    ("name", "metric"), [("equal_rewards", "distill/reverse_kl"), ("long_episodes", "reward/turns")]
)
def test_other_sources_of_the_loss_prevent_an_alarm_also_with_the_value_0(name, metric):
    assert name in names(SHOWN[name])
    assert name not in names([*SHOWN[name][:-1], SHOWN[name][-1] | {metric: 0.0}])


@pytest.mark.parametrize("reason", ["truncated", "max_tokens"])
def test_truncation_alarm_needs_only_one_of_its_two_metrics(reason):
    assert names([{f"episode/stop/{reason}": 0.6}]) == ["truncation"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tools__calls_per_episode": 0.0}, "the model calls no tool"),
        ({"episode__stop__max_tokens": 0.62}, "most episodes are cut off"),
        ({}, "the model solves no task"),
    ],
)
def test_zero_reward_alarm_names_a_likely_cause_and_suggests_sft(change, words):
    text = text_of("zero_reward", with_end(5, reward__mean=0.0, reward__std=0.0, **change))
    assert words in text
    assert "ludus sft RECIPE --model MODEL" in text


def test_template_collapse_compares_with_the_first_measurements():
    fallen = with_end(3, collapse__mutual_information=0.09, collapse__chance=0.1)
    assert "fell from 0.4 to 0.09" in text_of("template_collapse", fallen)
    assert names(fallen[-10:]) == []


def test_step_without_training_neither_resets_nor_triggers_entropy_collapse():
    def rows(*values):
        return [{} if value is None else {"policy/entropy": value} for value in values]

    assert names(rows(0.019, 0.018, None, 0.017, 0.016, 0.015)) == ["entropy_collapse"]
    assert names(rows(0.019, 0.018, 0.017, 0.016, 0.015, None)) == []
    assert names(rows(0.019, 0.018, 0.02, 0.016, 0.015)) == []


def test_bounded_history_raises_the_same_alarms_as_the_full_one():
    """A run of 400 steps whose first success is late, and that fails uniformly at its end."""
    rows = unsolved(healthy(), 0.0) * 3 + healthy() * 6 + unsolved(healthy(), 0.0)
    history = MetricsHistory()
    for number, row in enumerate(rows, start=1):
        history.append(row)
        if len(history.rows) < number and number % 3 == 0:
            assert names(history.rows) == names(rows[:number])
    assert "uniform_failure" in names(history.rows)
    assert len(history.rows) < 220
    assert MetricsHistory(rows).rows == history.rows


def test_configured_actions_override_the_default_alarm_actions():
    history = SHOWN["tool_errors"]
    assert names(history, {"tool_errors": "off"}) == []
    (alarm,) = find_alarms(history, {"tool_errors": "pause"})
    assert alarm.rule.action == "pause"


def test_unknown_alarm_action_raises_error_listing_valid_actions():
    with pytest.raises(ConfigError, match=r'equal_rewards is "pauze", but must be one of .*\'pause\''):
        load_config("search", ["--run.alarms.actions.equal_rewards", "pauze"])


def test_remedies_name_settings_that_exist():
    for name, rule in rules().items():
        assert rule.remedy.endswith(".")
        for word in rule.remedy.replace("(", " ").replace(")", " ").split():
            key = word.strip(",.;")
            section, dot, _ = key.partition(".")
            if dot and "/" not in key and section in {setting.partition(".")[0] for setting in SETTINGS}:
                assert key in SETTINGS, f"{name}: {key}"


def test_webhook_receives_the_alarm_and_a_failed_request_is_logged(caplog):
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.handle_request, daemon=True).start()
    alarm = Alarm("tool_errors", "60% of the calls", rules()["tool_errors"])
    url = f"http://127.0.0.1:{server.server_port}"
    send_alarm(url, "run-1", 7, alarm).join(10)
    (body,) = received
    assert (body["run"], body["step"], body["alarm"], body["action"]) == ("run-1", 7, "tool_errors", "warn")
    server.server_close()
    send_alarm(url, "run-1", 8, alarm).join(10)
    assert "the webhook of the alarm tool_errors failed" in caplog.text


def test_every_alarm_was_raised_by_a_trained_run_with_a_planted_fault():
    page = (Path(__file__).parents[2] / "docs/experiments/alarm_table.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \| \w+ \| \d+ \|", page, re.MULTILINE)) == set(rules())
