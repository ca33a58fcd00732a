"""`ludus doctor RUN` on a run with planted faults, one at a time, and on one without."""

import random
import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files

import pytest

from ludus.config.load import load_config
from ludus.config.settings import list_settings
from ludus.diagnostics.alarms import rules
from ludus.errors import UserError
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan
from ludus.evaluation.run_findings import RunData, examine_run
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.types import Segment, StopReason, ToolOutcome, ToolStatus, Trajectory
from metric_rows import healthy, unsolved, with_end
from tiny_run import copy_run, ludus

SETTINGS = {setting.key for setting in list_settings()}


def record(step, task, sample, solved, length, **changes):
    action = Segment("action", tuple(range(length)), logprobs=(-0.5,) * length, versions=(0,) * length)
    parts = changes.pop("parts", {"exact_match": float(solved), "well_formed": float(sample % 3 > 0)})
    trajectory = Trajectory(
        task,
        sample,
        (Segment("prompt", (1, 2, sample)), action),
        ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}),
        changes.pop("stop", StopReason.ANSWERED),
        rewards=parts,
        reward=changes.pop("reward", parts["exact_match"] + 0.1 * parts.get("well_formed", 0.0)),
    )
    fields = {"outcome": RolloutOutcome.TRAINED, "reason": "trained", "advantage": solved - 0.5}
    return RolloutRecord(step, task, trajectory=trajectory, **fields | changes)


def records(change=lambda solved, length: {}, split="train", num_tasks=30):
    """Groups of 8; half of the attempts are solved, whatever their length."""
    draw, found = random.Random(0), []
    for step in (39, 40):
        for task in range(num_tasks):
            for sample in range(8):
                solved, length = (sample + task) % 2, draw.randrange(20, 60)
                found.append(record(step, f"{split}:{step}-{task}", sample, solved, length, **change(solved, length)))
    return found


def evaluation(step, successes, split="test", temperature=1.0):
    tasks = tuple(f"{split}:{n}" for n in range(len(successes)))
    plan = EvaluationPlan(split, len(tasks), 1, temperature, 0, step)
    return Evaluation(plan, tasks, tuple(successes), ("f",) * len(tasks), {}, 0)


RISING = [evaluation(0, [0] * 60 + [1] * 40), evaluation(40, [0] * 20 + [1] * 80)]
CONFIG = load_config("search")
HEALTHY = RunData(CONFIG, healthy(), records(), RISING)


def changed(section, **settings):
    part = getattr(CONFIG, section).model_copy(update=settings)
    return CONFIG.model_copy(update={section: part})


def everywhere(rows, **metrics):
    return [row | {name.replace("__", "/"): value for name, value in metrics.items()} for row in rows]


def dropped(solved, length):
    return {"outcome": RolloutOutcome.DROPPED, "reason": "filter"} if length % 8 else {}


def constant(one):
    return replace(one, trajectory=replace(one.trajectory, rewards=one.trajectory.rewards | {"polite": 1.0}))


def with_failing_tool(one):
    outcome = ToolOutcome("call_0_0", "search", ToolStatus.RAISED, "Error: connection refused.\nin line 3")
    return replace(one, trajectory=replace(one.trajectory, outcomes=(outcome,)))


PLANTED = {
    "the mask includes observations": ({"config": changed("training", mask_observations=False)}, "fault", "loss mask"),
    "the sign of the advantage": (
        {"records": records(lambda solved, length: {"advantage": 0.5 - solved})},
        "fault",
        "advantages",
    ),
    "stale weights": ({"rows": with_end(2, sync__probe_gap=0.3)}, "fault", "weight sync"),
    "the temperature is not applied": (
        {"rows": everywhere(healthy(), policy__sampled_entropy=0.02)},
        "fault",
        "sampling",
    ),
    "top_p is not recorded": ({"rows": everywhere(healthy(), policy__sampled_entropy=1.5)}, "fault", "sampling"),
    "equal seeds": (
        {"records": [record(40, f"train:{n}", 0, 1, 30) for n in range(30) for _ in range(8)]},
        "warn",
        "sampling",
    ),
    "the reward is always 0": ({"rows": with_end(5, reward__mean=0.0, reward__std=0.0)}, "warn", "alarm zero_reward"),
    "training on the test split": ({"records": records(split="test")}, "fault", "held-out"),
    "evaluation on training tasks": (
        {"evaluations": [evaluation(0, [0, 1] * 5, "train:39-1"), replace(RISING[0], task_ids=("train:39-1",) * 100)]},
        "fault",
        "held-out",
    ),
    "a filter leaves one of a group": ({"records": records(dropped)}, "warn", "groups"),
    "the clip never acts": ({"rows": everywhere(healthy(), policy__ratio_max=1.3)}, "note", "alarm inert_clip"),
    "the critic does not learn": (
        {"rows": everywhere(healthy(), critic__explained_variance=-0.2)},
        "warn",
        "alarm critic",
    ),
    "truncated episodes are rewarded": (
        {"records": records(lambda solved, length: {"stop": StopReason.TRUNCATED, "reward": 1.0} if solved else {})},
        "fault",
        "reward",
    ),
    "a tool always fails": ({"rows": with_end(3, tools__search__error_rate=1.0)}, "warn", "alarm dead_tool"),
    "the agent fails": ({"rows": everywhere(healthy(), episode__stop__agent_failed=0.9)}, "fault", "agent"),
    "a judge likes length": (
        {"records": records(lambda solved, length: {"reward": solved + length / 10})},
        "warn",
        "reward",
    ),
    "shaping outweighs the outcome": (
        {"records": records(lambda solved, length: {"reward": solved + 3.0 * (length % 2)})},
        "warn",
        "reward",
    ),
    "a reward part is constant": ({"records": [constant(one) for one in records()]}, "note", "reward"),
    "the learning rate is 0": ({"rows": everywhere(healthy(), optim__learning_rate=0.0)}, "fault", "learner"),
    "frozen weights": ({"rows": everywhere(healthy(), policy__kl_reference=0.0)}, "fault", "learner"),
    "the gradient is always clipped": ({"rows": everywhere(healthy(), optim__grad_norm=40.0)}, "note", "learner"),
    "tasks are too hard": ({"rows": everywhere(healthy(), groups__solve_none=0.95)}, "warn", "groups"),
    "tasks are too easy": ({"rows": everywhere(healthy(), groups__solve_all=0.95)}, "warn", "groups"),
    "few tasks": ({"records": records(num_tasks=4)}, "note", "groups"),
    "failures of the engine": (
        {"rows": everywhere(healthy(), ledger__started=100.0, ledger__failed=20.0, ledger__trained=80.0)},
        "warn",
        "failures",
    ),
    "prompts do not fit": ({"rows": everywhere(healthy(), episode__stop__prompt_too_long=0.3)}, "warn", "failures"),
    "nothing is trained": (
        {"rows": everywhere(healthy(), ledger__started=100.0, ledger__trained=0.0)},
        "warn",
        "failures",
    ),
    "overfitting": ({"evaluations": [RISING[0], evaluation(40, [0] * 55 + [1] * 45)]}, "warn", "held-out"),
    "held-out success falls": ({"evaluations": [RISING[1], evaluation(50, [0] * 60 + [1] * 40)]}, "warn", "held-out"),
    "hallucinated tools": ({"rows": with_end(3, tools__status__unknown_tool=0.4)}, "warn", "alarm tool_hallucination"),
    "turns are cut off": (
        {"rows": everywhere(healthy(), episode__stop__truncated=0.9, episode__stop__max_tokens=0.0)},
        "fault",
        "limits",
    ),
    "a tool raises": ({"records": [with_failing_tool(one) for one in records()]}, "fault", "tools"),
    "cold sampling": (
        {
            "records": [record(40, f"train:{n}", 0, 1, 30) for n in range(30) for _ in range(8)],
            "config": changed("rollout", temperature=0.01),
        },
        "fault",
        "temperature",
    ),
    "one update destroys the policy": (
        {"rows": with_end(12, success__mean=0.0, reward__mean=0.0)},
        "fault",
        "collapse",
    ),
    "a rewarded trick replaces the task": ({"rows": with_end(12, success__mean=0.0)}, "fault", "collapse"),
    "the expected answers are wrong": (
        {
            "rows": everywhere(healthy(), success__mean=0.0, reward__mean=0.0, episode__stop__answered=1.0),
            "records": records(lambda solved, length: {"parts": {"exact_match": 0.0, "f1": 0.4}}),
        },
        "fault",
        "verifier",
    ),
    "longer answers without success": (
        {"rows": unsolved(with_end(5, response_length__mean=500.0), 0.3)},
        "warn",
        "alarm length_explosion",
    ),
}
"""Changes of the healthy run, the severity and the topic of the finding, by fault."""


@cache
def planted_findings(fault):
    change, *_ = PLANTED[fault]
    return examine_run(replace(HEALTHY, **change))


def test_gap_of_rounding_in_bfloat16_is_no_fault():
    rows = with_end(2, sync__probe_gap=0.3)
    half = replace(HEALTHY, rows=rows, config=changed("model", dtype="bfloat16"))
    assert any("weight sync" in str(one) for one in examine_run(replace(HEALTHY, rows=rows)))
    assert not any("weight sync" in str(one) for one in examine_run(half))


def test_a_healthy_run_has_no_finding():
    assert examine_run(HEALTHY) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_reported_with_severity_and_topic(fault):
    _, severity, topic = PLANTED[fault]
    found = planted_findings(fault)
    assert (severity, topic) in [(one.severity, one.topic) for one in found]
    ranks = [(bool(one.follows_from), ["fault", "warn", "note"].index(one.severity)) for one in found]
    assert ranks == sorted(ranks)


def test_findings_that_a_fault_explains_come_last_and_name_it():
    change, *_ = PLANTED["turns are cut off"]
    found = examine_run(replace(HEALTHY, **change, evaluations=[]))
    assert found[0].topic == "limits"
    assert "rollout.max_tokens_per_turn = " in found[0].text
    assert {one.follows_from for one in found[1:]} == {"limits"}


def test_explained_topics_are_topics_of_findings_and_alarms():
    texts = tomllib.loads((files("ludus.evaluation") / "findings.toml").read_text())
    known = {rule["topic"] for rule in texts.values()} | {f"alarm {name}" for name in rules()}
    assert {topic for rule in texts.values() for topic in rule.get("explains", ())} <= known


def test_the_error_of_a_failing_tool_is_quoted():
    found = planted_findings("a tool raises")
    assert found[0].text == "All 480 calls of search fail, most often with: Error: connection refused"


def test_a_fall_of_success_with_constant_reward_names_the_reward():
    (fall,) = (one for one in planted_findings("a rewarded trick replaces the task") if one.topic == "collapse")
    assert "games a part of the reward" in fall.remedy
    rows = [row | {"reward/trick": 0.1 + 0.9 * (row["success/mean"] == 0)} for row in with_end(12, success__mean=0.0)]
    records = [replace(r, trajectory=replace(r.trajectory, rewards={"trick": 1.0})) for r in HEALTHY.records]
    found = examine_run(replace(HEALTHY, rows=rows, records=records))
    assert "its part trick rose from 0.1 to 1" in next(one.text for one in found if one.topic == "collapse")
    (fall,) = (one for one in planted_findings("one update destroys the policy") if one.topic == "collapse")
    assert "Lower training.learning_rate" in fall.remedy


def test_entropies_are_compared_on_the_same_steps():
    rows = [row | {"policy/sampled_entropy": 3.0} for row in healthy()]
    for row in rows[1:]:
        del row["policy/entropy"]
    rows[0]["policy/sampled_entropy"] = rows[0]["policy/entropy"]
    assert "sampling" not in {one.topic for one in examine_run(replace(HEALTHY, rows=rows))}


def test_remedies_name_settings_that_exist():
    remedies = [one.remedy for fault in PLANTED for one in planted_findings(fault)]
    sections = {key.partition(".")[0] for key in SETTINGS}
    words = {word.strip("().,;:") for remedy in remedies for word in remedy.split()}
    named = {word for word in words if "." in word and word.partition(".")[0] in sections}
    assert named - {"log.txt"} <= SETTINGS


def test_examining_a_run_without_finished_steps_raises_error():
    with pytest.raises(UserError, match="no finished step"):
        examine_run(replace(HEALTHY, rows=[]))


def test_doctor_command_reads_a_run_folder(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    said = ludus("doctor", run)
    assert "Read 2 steps," in " ".join(said.out.split())
    (run / "config.toml").write_text(
        (run / "config.toml").read_text().replace("mask_observations = true", "mask_observations = false")
    )
    said = ludus("doctor", run)
    assert said.code == 1
    assert said.out.startswith("fault  loss mask: Observations are in the loss")
