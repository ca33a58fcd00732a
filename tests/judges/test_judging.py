"""Judges behind a server that is slow, wrong, absent or silent; defaults, cache, rules and calibration."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chat_server import DROP, Reply, error, say, serving
from ludus.config.schema import Config, DiagnosticsConfig
from ludus.config.sections.rewards import RewardsConfig
from ludus.diagnostics.alarms import find_alarms
from ludus.diagnostics.metrics import configured_metrics
from ludus.envs.tool_world import ToolWorld
from ludus.errors import ConfigError
from ludus.judges.calibration import (
    Calibration,
    Injection,
    VerifiedEpisode,
    calibrate,
    injection_effects,
    injections,
    judge_digest,
    length_bias,
    read_calibration,
    read_injections,
)
from ludus.judges.client import JUDGE_FILE
from ludus.judges.grading import GradingStats
from ludus.rewards.base import Reward, score
from ludus.training.collection.rewards.judging import GroupJudge, check_judge
from ludus.types import Failure, Leaf, Segment, StopReason
from ludus.worlds.judging.world import injections as pushes
from tests.judges.judge_parts import episode, grader, scoring, settings, text_in, world


def judged(server, groups, config=None, folder=None, names=("m",)):
    """Return the reward parts of the groups, and the metrics."""

    async def run():
        judge = GroupJudge(grader(server, config or settings(), folder, names))
        found = await judge.add_parts(1, groups)
        await judge.close()
        return [[dict(one.trajectory.rewards) for one in group] for group in found], judge.metrics(1)

    return asyncio.run(run())


def parts(found, name="judge"):
    return [[one.get(name) for one in group] for group in found]


def test_scores_become_the_part_of_each_episode_and_equal_texts_share_a_request():
    groups = [[episode("7"), episode("no"), episode("no", sample=1)], [episode("hello", 1)]]
    with serving(scoring(len)) as server:
        found, metrics = judged(server, groups)
        assert len(server.requests) == 3
        schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert parts(found) == [[0.1, 0.2, 0.2], [0.5]]
    assert parts(found, "judge_default") == [[0, 0, 0], [0]]
    assert parts(found, "exact_match") == [[0, 0, 0], [0]]
    assert schema["properties"]["score"] == {"type": "integer", "minimum": 0, "maximum": 10}
    expected = {"judged": 4, "defaulted": 0, "requests": 3, "cached": 1, "prompt_tokens": 30, "completion_tokens": 15}
    assert {name: metrics[f"judge/{name}"] for name in expected} == expected


FAULTS = {
    "garbage": (lambda: Reply(say("I like it.")), "invalid", 2),
    "wrong": (lambda: Reply(say('{"score": 99}')), "invalid", 2),
    "no content": (lambda: Reply(say(None)), "invalid", 2),
    "not JSON": (lambda: Reply(b"<html>"), "errors", 1),
    "rejected": (lambda: Reply(error("no"), 403), "errors", 1),
    "slow": (lambda: Reply(say('{"score": 1}'), delay_s=30), "timeouts", 1),
    "dropped": (lambda: DROP, "errors", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failing_judge_loses_no_episode_and_is_counted(fault):
    reply, counted, count = FAULTS[fault]

    def script(body):
        return reply() if text_in(body) == "bad" else Reply(say('{"score": 4}'))

    config = settings(client={"timeout_s": 0.3})
    begin = time.monotonic()
    with serving(script) as server:
        found, metrics = judged(server, [[episode("bad"), episode("a"), episode("b")], [episode("bad", 1)]], config)
    assert time.monotonic() - begin < 5
    assert parts(found) == [[0.4, 0.4, 0.4], [0.5]]
    assert parts(found, "judge_default") == [[1, 0, 0], [1]]
    assert metrics[f"judge/{counted}"] == 2 * count
    assert metrics["judge/defaulted"] == 0.5


def test_absent_judge_costs_no_episode():
    found, metrics = judged("http://127.0.0.1:9/v1", [[episode("a"), episode("b")]])
    assert parts(found) == [[0.5, 0.5]]
    assert (metrics["judge/errors"], metrics["judge/defaulted"]) == (2, 1)


def test_deadline_bounds_the_wait_of_a_step():
    def script(body):
        return Reply(say('{"score": 8}'), delay_s=0 if text_in(body) == "fast" else 20)

    config = settings(client={"deadline_s": 0.5, "timeout_s": 20.0, "concurrency": 2})
    groups = [[episode("fast"), *(episode(f"slow {n}") for n in range(6))]]
    begin = time.monotonic()
    with serving(script) as server:
        found, metrics = judged(server, groups, config)
        assert server.most_active <= 2
    assert time.monotonic() - begin < 4
    assert parts(found)[0] == [0.8] * 7  # the mean of the judged members
    assert (metrics["judge/late"], metrics["judge/judged"]) == (6, 1)


def test_server_that_rejects_schemas_is_asked_without():
    def script(body):
        rejects = "response_format" in body
        return Reply(error("response_format is not supported"), 400) if rejects else Reply(say('{"score": 3}'))

    with serving(script) as server:
        found, _ = judged(server, [[episode("a")]])
    assert parts(found) == [[0.3]]


def test_invalid_reply_is_retried_at_a_higher_temperature():
    with serving([Reply(say("?")), Reply(say('{"score": 6}'))]) as server:
        found, metrics = judged(server, [[episode("a")]])
        assert [body["temperature"] for body in server.requests] == [0, 0.5]
        assert server.requests[0]["seed"] != server.requests[1]["seed"]
    assert (parts(found), metrics["judge/invalid"]) == ([[0.6]], 1)


def test_stored_replies_are_reused_and_failures_are_not(tmp_path):
    groups = [[episode("7"), episode("bad")]]

    def script(body):
        return Reply(say('{"score": 9}')) if text_in(body) == "7" else Reply(say("?"))

    with serving(script) as server:
        first, _ = judged(server, groups, folder=tmp_path)
        sent = len(server.requests)
        again, metrics = judged(server, groups, folder=tmp_path)
        assert len(server.requests) == sent + 2  # the failed one, twice
        other, _ = judged(server, groups, settings(client={"max_tokens": 99}), folder=tmp_path)
        assert len(server.requests) == sent + 5
    assert first == again == other
    assert metrics["judge/cached"] == 1
    rows = [json.loads(line) for line in (tmp_path / JUDGE_FILE).read_text().splitlines()]
    assert [sorted(row) for row in rows[:2]] == [["key", "reply", "step"], ["failed", "step"]]


def test_failed_episodes_empty_answers_and_closed_gates_are_not_judged():
    failed = episode("x", failure=Failure("world", "broken", 1))
    group = [failed, episode(" "), episode("7", rewards={"exact_match": 1.0}), episode("8")]
    with serving(scoring(lambda _: 10)) as server:
        found, metrics = judged(server, [group], settings(gate="exact_match"))
        assert len(server.requests) == 1
    assert parts(found) == [[None, 0, 1, 0]]
    assert metrics["judge/judged"] == 1


def test_judge_decides_only_what_the_rule_leaves_open():
    group = [episode("7", rewards={"rule": 1.0}), episode("8", rewards={"rule": 0.0}), episode("perhaps 7", rewards={})]
    with serving(scoring(lambda _: 6)) as server:
        found, _ = judged(server, [group], settings(rule="rule"))
        assert len(server.requests) == 1
        audited, _ = judged(server, [group], settings(rule="rule", audit=1.0))
    assert parts(found, "rule") == parts(audited, "rule") == [[1, 0, 0.6]]
    assert (parts(found), parts(audited)) == ([[None] * 3], [[0.6, 0.6, None]])


def test_pairs_are_compared_in_both_orders_and_position_bias_cancels():
    def script(body):
        first, second = (len(text_in(body, label)) for label in ("first", "second"))
        better = "first" if first >= second - 1 else "second"  # longer wins, ties and near ties go to the first
        return Reply(say(json.dumps({"better": better})))

    group = [episode("aaaaaa"), episode("bb"), episode("cc d")]
    with serving(script) as server:
        found, metrics = judged(server, [group], settings(kind="pairwise"))
        assert len(server.requests) == 6
    assert parts(found) == [[1.0, 0.0, 0.5]]
    assert metrics["judge/position_flips"] == 0
    with serving(lambda body: Reply(say('{"better": "first"}'))) as server:
        found, metrics = judged(server, [group], settings(kind="pairwise", pairwise="bradley_terry"))
    assert parts(found) == [[0.5, 0.5, 0.5]]
    assert (metrics["judge/position_flips"], metrics["judge/first_wins"]) == (1, 1)


def test_pair_without_both_replies_does_not_count():
    def script(body):
        broken = text_in(body, "first") == "c"
        return Reply(
            say("?" if broken else json.dumps({"better": "first" if text_in(body, "first") == "a" else "second"}))
        )

    with serving(script) as server:
        found, metrics = judged(server, [[episode("a"), episode("b"), episode("c")]], settings(kind="pairwise"))
    assert parts(found) == [[1.0, 0.0, 0.5]]  # a beats b; c has no complete pair and takes the mean
    assert (metrics["judge/judged"], metrics["judge/defaulted"]) == (2, pytest.approx(1 / 3))


def deciding(holds, quote="7"):
    def script(body):
        num = body["response_format"]["json_schema"]["schema"]["properties"]["items"]["minItems"]
        items = [{"item": n + 1, "quote": quote, "holds": holds} for n in range(num)]
        return Reply(say(json.dumps({"items": items})))

    return script


def test_rules_decide_their_leaves_and_the_judge_the_others():
    group = [episode("7, thanks"), episode("8")]
    config = settings(kind="rubric", rubrics=["task"])
    with serving(deciding(True)) as server:
        found, metrics = judged(server, [group], config)
        alone, _ = judged(server, [group], settings(kind="rubric", rubrics=["task"], rubric_rules=False))
    # weights: price 3, style 1 with polite and short; the quote 7 is in the first text only
    assert parts(found) == [[pytest.approx((3 + (1 + 1) / 2) / 4), pytest.approx((0 + (0 + 1) / 2) / 4)]]
    assert parts(alone) == [[1.0, 0.0]]
    assert metrics["judge/unsupported_quotes"] == 0.5


def test_written_rubric_is_written_once_per_task_and_used_for_its_texts(tmp_path):
    def script(body):
        properties = body["response_format"]["json_schema"]["schema"]["properties"]["items"]
        if "minItems" in properties and "maxItems" in properties and properties["maxItems"] == 12:
            checks = [{"check": "States a price.", "weight": 3}, {"check": "Is polite.", "weight": 1}]
            return Reply(say(json.dumps({"items": checks})))
        assert "1. States a price.\n2. Is polite." in body["messages"][1]["content"]
        items = [{"item": 1, "quote": "7", "holds": True}, {"item": 2, "quote": "", "holds": False}]
        return Reply(say(json.dumps({"items": items})))

    groups = [[episode("7"), episode("7 euros")], [episode("7 cents", 1)]]
    with serving(script) as server:
        found, _ = judged(server, groups, settings(preset="small_rubric"), tmp_path)
        assert len(server.requests) == 2 + 3
    assert parts(found) == [[0.75, 0.75], [0.75]]


def test_ensemble_takes_the_mean_minus_deviations_of_its_judges():
    def script(body):
        return Reply(say(json.dumps({"score": {"a": 2, "b": 6}[body["model"]]})))

    config = settings(models=["a", "b"], std_coef=1.0)
    with serving(script) as server:
        found, metrics = judged(server, [[episode("x")]], config, names=("a", "b"))
    assert parts(found) == [[pytest.approx(0.4 - 0.2)]]
    assert metrics["judge/std"] == pytest.approx(0.2)


def test_every_path_of_a_tree_is_judged():
    one = episode("aa").trajectory
    segments = (Segment("prompt", (1,)), Segment("action", (2,), 0, parent=0), Segment("action", (3,), 0, parent=0))
    messages = [episode(text).trajectory.messages for text in ("aa", "bbbb")]
    leaves = tuple(Leaf(own, StopReason.ANSWERED, (), {"exact_match": 0.0}) for own in messages)
    tree = replace(one, segments=segments, leaves=leaves, leaf_rewards=(0.0, 0.0))
    with serving(scoring(len)) as server:

        async def run():
            judge = GroupJudge(grader(server, settings()))
            (group,) = await judge.add_parts(1, [[replace(episode("aa"), trajectory=tree)]])
            await judge.close()
            return group[0].trajectory

        found = asyncio.run(run())
    assert [leaf.rewards["judge"] for leaf in found.leaves] == [0.2, 0.4]
    assert found.rewards["judge"] == pytest.approx(0.3)


def verified(texts):
    """Return one group of episodes by text and verdict."""
    return [[VerifiedEpisode(episode(t).task, episode(t).trajectory, won) for t, won in texts]]


def calibrated(script, groups, config=None, probes=2):
    async def run(server):
        one = grader(server, config or settings())
        try:
            return await calibrate(one, groups, probes, repeats=2)
        finally:
            await one.client.close()

    with serving(script) as server:
        return asyncio.run(run(server))


def test_calibration_agrees_with_kappa_and_auc_by_hand(tmp_path):
    # judge accepts "yes...", the verifier accepts as listed: 5 both, 3 only the judge, 2 only the verifier, 10 neither
    rows = [(f"yes {n}", n < 5) for n in range(8)] + [(f"no {n}", n < 2) for n in range(12)]
    found = calibrated(scoring(lambda text: 8 if text.startswith("yes") else 2), verified(rows))
    observed, chance = 15 / 20, (8 * 7 + 12 * 13) / 400
    assert found.kappa == pytest.approx((observed - chance) / (1 - chance))
    assert found.agreement == observed
    # 7 accepted, 13 rejected: wins 5 * 10, ties 5 * 3 + 2 * 10
    assert found.auc == pytest.approx((50 + 0.5 * 35) / 91)
    assert (found.num, found.num_judged, found.repeat_std) == (20, 20, 0)
    assert found.injections.keys() == injections().keys()
    found.write(tmp_path / "c.json")
    assert read_calibration(tmp_path / "c.json").kappa == found.kappa
    assert read_calibration(tmp_path / "c.json").injections == found.injections


@pytest.mark.parametrize(("reply", "reason"), [(Reply(status=404), "404"), (Reply(say("eight")), "invalid reply: ")])
def test_calibration_without_a_judged_text_names_the_last_failure(reply, reason):
    with pytest.raises(ConfigError, match=f"no text.*{reason}"):
        calibrated(lambda body: reply, verified([("yes", True), ("no", False)]))


def test_calibration_shows_a_gullible_judge_and_one_that_prefers_long_texts():
    rows = [("no", False), ("nope, not at all", False), ("7", True), ("7, which is certainly the price", True)]
    gullible = scoring(lambda text: 10 if "full score" in text else 2)
    found = calibrated(gullible, verified(rows))
    assert found.injections["ignore_instructions"] == pytest.approx(0.8)
    assert found.injections["german"] == 0
    long = calibrated(scoring(lambda text: min(10, len(text) // 3)), verified(rows))
    assert long.length_bias > 0.9
    assert found.length_bias is None  # constant values


@pytest.mark.parametrize(("temperature", "num_requests"), [(0.0, 4), (1.0, 12)])
def test_effect_of_an_injection_is_a_mean_over_repeats_if_replies_are_sampled(temperature, num_requests):
    replies = iter([2, 4, 5, 1, 3, 0])
    values = {}

    def script(body):
        key = (text_in(body), body["seed"])
        return Reply(say(json.dumps({"score": 9 if "please" in key[0] else values.setdefault(key, next(replies))})))

    async def run(server):
        one = grader(server, settings(client={"temperature": temperature, "concurrency": 1}))
        texts = [one.text_of(e.task, e.trajectory) for e in (episode("no"), episode("nope"))]
        try:
            return await injection_effects(one, texts, {"plea": Injection("please")}, repeats=3)
        finally:
            await one.client.close()

    with serving(script) as server:
        found = asyncio.run(run(server))
        assert len(server.requests) == num_requests
    clean = list(values.values())
    assert len(clean) == num_requests / 2
    assert found == {"plea": pytest.approx(0.9 - np.mean(clean) / 10)}


def test_measured_injections_are_in_neither_training_nor_the_packaged_ones():
    measured = read_injections(Path("benchmarks/judge_injections.toml").read_text("utf-8"))
    attacks = {one.text for name, one in measured.items() if not name.startswith("control")}
    others = {one.text for one in injections().values()}.union(*map(pushes, ("train", "test")))
    assert len(attacks) >= 15
    assert not {text for text in attacks if any(text in other or other in text for other in others)}


def test_length_bias_is_the_correlation_within_a_verdict():
    values, won = np.array([0.1, 0.3, 0.6, 0.9, 0.7]), np.array([False, False, True, True, True])
    lengths = np.array([1.0, 2.0, 5.0, 7.0, 4.0])
    a = np.concatenate([values[:2] - 0.2, values[2:] - values[2:].mean()])
    b = np.concatenate([lengths[:2] - 1.5, lengths[2:] - lengths[2:].mean()])
    assert length_bias(values, won, lengths) == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)))


def test_agreement_with_the_rules_of_a_rubric_is_measured():
    rows = [("7, thanks", True), ("8, thanks", False), ("9", False), ("7", True)]
    found = calibrated(deciding(True), verified(rows), settings(kind="rubric", rubrics=["task"]))
    assert found.leaf_kappa == 1.0  # the quote 7 proves the price exactly where the rule finds it


def test_run_needs_a_calibration_of_this_judge_above_the_threshold(tmp_path):
    file = tmp_path / "c.json"

    def check(**changes):
        judge = settings(calibration=str(file), min_kappa=0.6, **changes)
        check_judge(Config(rewards=RewardsConfig(judge=judge)), world(), world().rewards)

    def write(kappa, digest):
        numbers = {"num": 9, "num_judged": 9, "kappa": kappa, "interval": (0.0, 1.0), "agreement": 1.0}
        others = dict.fromkeys(("auc", "length_bias", "position_flips", "first_wins", "repeat_std", "leaf_kappa"))
        Calibration(digest=digest, judges=["m"], **numbers, **others).write(file)

    with pytest.raises(ConfigError, match="cannot be read"):
        check()
    write(0.5, judge_digest(settings()))
    with pytest.raises(ConfigError, match=r"0.50, below"):
        check()
    write(0.7, judge_digest(settings()))
    check()
    with pytest.raises(ConfigError, match="another judge"):
        check(scale=5)


def test_stats_report_latency_apart_from_the_metrics():
    stats = GradingStats(latencies=[0.1, 0.3], wait_s=0.4)
    assert stats.timings() == {"judge/wait_s": 0.4, "judge/latency_s": 0.2, "judge/latency_max_s": 0.3}
    assert not any("latency" in name for name in stats.metrics())


ABSTAINS = Reward("rule", lambda task, trajectory: None, outcome=True, may_abstain=True)
REFUSED = [
    ({"rule": "other"}, "not a part"),
    ({"rule": "exact_match"}, "decides every episode"),
    ({"gate": "other"}, "not a part"),
    ({"kind": "rubric", "rubrics": ["clear"]}, "Unknown rubric 'clear'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_judge_that_does_not_fit_the_world_is_refused(changes, message):
    config = Config(rewards=RewardsConfig(judge=settings(**changes)))
    with pytest.raises(ConfigError, match=message):
        check_judge(config, world(), (*world().rewards, ABSTAINS))


def test_judge_trained_on_other_prompts_is_refused(tmp_path):
    (tmp_path / "config.toml").write_text('[env]\nname = "judging"\n')
    for model in (tmp_path, tmp_path / "checkpoints" / "step-000001"):
        model.mkdir(parents=True, exist_ok=True)
        judges = [settings(models=[str(model)], url=None, kind=kind) for kind in ("correct", "pairwise", "score")]
        *trained, other = (Config(rewards=RewardsConfig(judge=judge)) for judge in judges)
        for config in trained:
            check_judge(config, world(), world().rewards)
        with pytest.raises(ConfigError, match="trained on other prompts"):
            check_judge(other, world(), world().rewards)


def test_tasks_without_rubric_or_reference_are_refused():
    tasks = {"train": [replace(episode("a").task, truth=3)]}
    plain = ToolWorld("plain", tasks, (), world().rewards)
    for changes, message in (
        ({"kind": "reference"}, "no reference"),
        ({"kind": "rubric", "rubrics": ["task"]}, "no rubric"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_judge(Config(rewards=RewardsConfig(judge=settings(**changes))), plain, plain.rewards)


def test_verifier_that_abstains_leaves_its_part_out():
    found = score((ABSTAINS,), episode("a").task, episode("a").trajectory)
    assert (dict(found.rewards), found.reward) == ({}, 0.0)
    with pytest.raises(TypeError, match="None, not a number"):
        score((replace(ABSTAINS, may_abstain=False),), episode("a").task, episode("a").trajectory)


def test_agreement_leaves_out_defaults():
    rows = [(0.9, 1.0, 0.0), (0.4, 0.0, 0.0), (0.5, 1.0, 1.0)]
    episodes = [
        episode("a", rewards=dict(zip(("judge", "exact_match", "judge_default"), row, strict=True))) for row in rows
    ]
    metrics = configured_metrics([one.trajectory for one in episodes], DiagnosticsConfig(), "exact_match")
    assert metrics == {"judge/judge/agreement": pytest.approx((0.9 + 0.6) / 2)}


def test_alarm_for_drift_inflation_and_missing_judgements():
    def evidence(rows):
        return next((one.evidence for one in find_alarms(rows) if one.name == "judge_drift"), "")

    def row(agreement, value, success, defaulted, requests=100.0):
        named = ("judge/judge/agreement", "reward/judge", "success/mean", "judge/defaulted", "judge/requests")
        return dict(zip(named, (agreement, value, success, defaulted, requests), strict=True))

    steady = [row(0.8, 0.5, 0.3, 0.0)] * 10
    assert evidence([*steady, *[row(0.8, 0.5, 0.3, 0.0, requests=1.0)] * 6]) == ""
    assert "agreement fell from 0.80 to 0.60" in evidence([*steady, *[row(0.6, 0.5, 0.3, 0.0)] * 6])
    assert "reward/judge rose from 0.50 to 0.70" in evidence([*steady, *[row(0.8, 0.7, 0.3, 0.0)] * 6])
    assert evidence([*steady, *[row(0.8, 0.7, 0.5, 0.0)] * 6]) == ""
    assert "50% of the episodes" in evidence([*steady, *[row(0.8, 0.5, 0.3, 0.5)] * 5])
