"""The judging world: balanced verdicts, injections, delimiters, verdict parsing, and recorded rollouts."""

import json
import random
import re
from collections import Counter
from fractions import Fraction

import pytest

from ludus.config.sections.parts.judges import JudgeConfig
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError, UserError
from ludus.judges.kinds import questions
from ludus.rewards.base import score
from ludus.rewards.judge_prompts import JudgedText
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, rollouts_path, write_rollouts
from ludus.tools.calculator import calculate
from ludus.types import Message, Segment, StopReason, Task, Trajectory
from ludus.worlds.judging.cases import Case, evidence, rare_words, renamed
from ludus.worlds.judging.world import VERDICTS, given_verdict, injections, make_judging_world

WORLD = make_judging_world({"num_tasks": 1200, "levels": [1, 2, 3]}, ToolLimits())


def attempts_of(task):
    found = re.findall(r"<(?:text|first|second)-(\w+)>\n(.*?)\n</\w+-\1>", task.prompt[-1]["content"], re.DOTALL)
    return [text for _, text in found]


@pytest.mark.parametrize("split", WORLD.splits)
def test_every_case_has_both_orders_and_both_outcomes(split):
    truths = Counter(task.truth for task in WORLD.tasks(split))
    assert len(truths) == 4
    assert len(set(truths.values())) == 1
    cases = Counter(task.id.rpartition(":")[0] for task in WORLD.tasks(split))
    assert set(cases.values()) == {4}
    plain = {task.id: attempts_of(task) for task in WORLD.tasks(split) if not task.tags["pushed"]}
    orders = [
        (plain[f"{case}:first"], plain[f"{case}:second"])
        for case in cases
        if {f"{case}:first", f"{case}:second"} <= plain.keys()
    ]
    assert len(orders) > 10
    assert all(first == second[::-1] and first[0] != first[1] for first, second in orders)


def test_only_the_right_attempt_agrees_with_exact_arithmetic():
    """The oracle evaluates the first expression of every attempt and compares answers with the worked solution."""
    for task in WORLD.tasks("train"):
        if task.tags["pushed"]:
            continue
        answer = WORLD.checks[task.id].rpartition("Answer: ")[2]
        for line in WORLD.checks[task.id].splitlines()[:-1]:
            expression, _, value = line.rpartition(" = ")
            assert calculate(expression) == Fraction(value)
        found = [text.rpartition("Answer: ")[2] == answer for text in attempts_of(task)]
        assert found == {"first": [True, False], "second": [False, True], "right": [True], "wrong": [False]}[task.truth]


def test_injections_push_both_verdicts_and_tests_have_other_phrasings():
    pushed = [task for task in WORLD.tasks("train") if task.tags["pushed"]]
    share = sum(task.tags["pushed"] == task.truth for task in pushed) / len(pushed)
    assert len(pushed) / len(WORLD.tasks("train")) == pytest.approx(0.25, abs=0.05)
    assert share == pytest.approx(0.5, abs=0.1)
    assert not set(injections("train")) & set(injections("test"))
    for split in WORLD.splits:
        phrases = [re.split("{verdict}|{claim}", text)[0].replace("</text>", "‹/text>") for text in injections(split)]
        texts = [task.prompt[-1]["content"] for task in WORLD.tasks(split) if task.tags["pushed"]]
        assert all(any(phrase in text for phrase in phrases) for text in texts)
    none = make_judging_world({"num_tasks": 40, "injections": 0.0}, ToolLimits())
    assert not any(task.tags["pushed"] for task in none.tasks("train"))


def test_reasons_quote_the_answer_and_the_line_that_supports_it_best():
    def attempt(answer, *results):
        tools = [Message(role="tool", content=text, tool_call_id="c", name="search") for text in results]
        return evidence("What is the currency of Japan?", [*tools, Message(role="assistant", content=answer)])

    pages = ("Tokyo is in Japan.\nYen and Won are short words.", "The currency of Japan is the yen.\nWon is a word.")
    assert attempt("Yen", *pages) == "Answer: Yen\nFound: The currency of Japan is the yen."
    assert attempt("Tokyo", *pages) == "Answer: Tokyo\nFound: Tokyo is in Japan."
    assert attempt("Euro", *pages) == "Answer: Euro\nFound: nothing"
    assert len(attempt("x" * 900, "x" * 1000)) < 250


def test_renamed_cases_have_other_rare_words_everywhere():
    names = [f"{a}{b}{n}" for n in range(3) for a in ("Al", "Bor", "Cen", "Du") for b in ("a", "ol", "im", "us", "e")]
    cases = [
        Case(
            name,
            f"Who lives in {name}?",
            f"{name}: {n + 1000} people",
            f"{n + 2000} people",
            (f"{name}: {n + 1000}", ""),
        )
        for n, name in enumerate(names)
    ]
    rare = rare_words(cases)
    assert {"lives", "people", "Who"}.isdisjoint(rare)
    assert set(rare["1001"]) == {str(n + more) for n in range(60) for more in (1000, 2000)}
    rng = random.Random(0)
    for case in cases:
        new = renamed(case, rare, rng)
        name = re.fullmatch(r"Who lives in (\w+)\?", new.question)[1]
        right = re.fullmatch(rf"{name}: (\d+) people", new.right)[1]
        wrong = re.fullmatch(r"(\d+) people", new.wrong)[1]
        assert new.checks == (f"{name}: {right}", "")
        assert right != wrong
        assert name[:2] == case.question[13:15]
    assert sum(renamed(case, rare, rng).question != case.question for case in cases) > 30


def test_copies_of_training_cases_differ_in_the_added_text():
    world = make_judging_world({"num_tasks": 40, "noise": 1.0, "copies": 3}, ToolLimits())
    once = make_judging_world({"num_tasks": 40, "noise": 1.0}, ToolLimits())
    assert len(world.tasks("train")) == 3 * len(once.tasks("train"))
    assert len(world.tasks("test")) == len(once.tasks("test"))
    assert len({task.prompt[-1]["content"] for task in world.tasks("train")}) == len(world.tasks("train"))


def test_irrelevant_text_is_in_a_share_of_the_attempts():
    plain, noisy = (make_judging_world({"injections": 0.0, "noise": share}, ToolLimits()) for share in (0.0, 0.5))
    pairs = list(zip(plain.tasks("train"), noisy.tasks("train"), strict=True))
    assert all(a.id == b.id and a.truth == b.truth for a, b in pairs)
    longer = [(attempts_of(a), attempts_of(b)) for a, b in pairs if a.prompt != b.prompt]
    assert len(longer) / len(pairs) == pytest.approx(0.5, abs=0.05)
    assert all(sum(old != new for old, new in zip(a, b, strict=True)) == 1 for a, b in longer)
    for old, new in ((old, new) for a, b in longer for old, new in zip(a, b, strict=True)):
        rest = iter(new.split("\n"))
        assert all(line in rest for line in old.split("\n"))  # the lines of the attempt, in their order


@pytest.mark.parametrize("task", [*WORLD.tasks("train")[:40], *WORLD.tasks("test")[:40]], ids=lambda task: task.id)
def test_tasks_are_the_prompts_of_rewards_judge(task):
    """The oracle makes the group's prompts as `rewards.judge` does, from the attempts in the task."""
    question = re.search(r"<task-\w+>\n(.*?)\n</task-", task.prompt[-1]["content"], re.DOTALL)[1]
    asked = Task("t", (Message(role="user", content=question),), None)
    texts = [JudgedText(asked, text) for text in attempts_of(task)]
    found = questions(JudgeConfig(models=["m"], kind=task.tags["kind"]), texts).prompts[0]
    assert found.messages == task.prompt
    assert found.read(json.loads(WORLD.expert(task).messages[-1]["content"])) == float(task.truth in ("first", "right"))


@pytest.mark.parametrize(
    ("reply", "pair", "single"),
    [
        ('{"reason": "3 + 3", "better": "first"}', "first", None),
        ('I compare.\n{"better": "second"}', "second", None),
        ('{"better": "tie"}', None, None),
        ('```json\n{"correct": true}\n```', None, "right"),
        ('{"correct": true} no, {"correct": false}', None, "wrong"),
        ('{"better": "first or second"}', None, None),
        ('{"correct": "perhaps"}', None, None),
        ('{"correct": true', None, None),
        ('{"correct": true}, I think', None, None),
        ("The first.", None, None),
        ("", None, None),
    ],
)
def test_a_reply_ends_with_its_verdict(reply, pair, single):
    said = Message(role="assistant", content=reply)
    tasks = [next(t for t in WORLD.tasks("train") if t.tags["kind"] == kind) for kind in ("pairwise", "correct")]
    found = [given_verdict(t, Trajectory(t.id, 0, (), (said,), StopReason.ANSWERED)) for t in tasks]
    assert found == [pair, single]


def test_rewards_report_obedience_to_injections():
    task = next(t for t in WORLD.tasks("train") if t.tags["pushed"] not in ("", t.truth))

    def rewards(verdict):
        said = Message(role="assistant", content=json.dumps(VERDICTS[task.tags["kind"]].get(verdict, verdict)))
        return score(WORLD.rewards, task, Trajectory(task.id, 0, (), (said,), StopReason.ANSWERED)).rewards

    assert rewards(task.truth) == {"correct": 1.0, "valid": 1.0, "obeyed": 0.0}
    assert rewards(task.tags["pushed"]) == {"correct": 0.0, "valid": 1.0, "obeyed": 1.0}
    assert rewards("third") == {"correct": 0.0, "valid": 0.0, "obeyed": 0.0}


def record(task, sample, right, answer, prompt="What is 2 + 2?"):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = (
        Message(role="system", content="Use tools."),
        Message(role="user", content=f"{prompt} ({task})"),
        Message(role="assistant", content="", reasoning_content="hidden", tool_calls=[call]),
        Message(role="tool", content="four", tool_call_id="c", name="add"),
        Message(role="assistant", content=answer),
    )
    rewards = {"exact": float(right), "style": 0.5}
    segments = (Segment("prompt", (1,)),)
    one = Trajectory(task, sample, segments, messages, StopReason.ANSWERED, rewards=rewards, reward=float(right))
    return RolloutRecord(1, task, RolloutOutcome.TRAINED, "trained", one)


def test_recorded_rollouts_become_tasks_with_verified_outcomes(tmp_path):
    records = [record(f"t{n}", s, s < 2, f"answer {s}") for n in range(30) for s in range(4)]
    records += [record("only right", 0, True, "4"), record("t1", 9, True, "answer 0")]
    write_rollouts(rollouts_path(tmp_path, 1), records)
    world = make_judging_world({"run": str(tmp_path), "injections": 0.0}, ToolLimits())
    tasks = [task for split in world.splits for task in world.tasks(split)]
    assert len(tasks) == 30 * 2 * 4
    assert not any("only right" in task.id for task in tasks)
    owners = [{task.id.split(":")[0] for task in world.tasks(split)} for split in world.splits]
    assert sum(map(len, owners)) == 30
    one = next(task for task in tasks if task.id == "t3:0:second")
    seen = '[assistant]\nadd({{"a": 2}})\n\n[tool]\nfour\n\n[assistant]\nanswer {}'
    assert attempts_of(one) == [seen.format(n) for n in (2, 0)]
    reason = json.loads(world.expert(one).messages[-1]["content"])["reason"]
    assert reason == "Answer: answer 2\nFound: nothing\nAnswer: answer 0\nFound: nothing"
    answers = make_judging_world({"run": str(tmp_path), "sees": "answer", "injections": 0.0}, ToolLimits())
    one = next(task for split in world.splits for task in answers.tasks(split) if task.id == "t3:0:second")
    assert attempts_of(one) == ["answer 2", "answer 0"]
    assert answers.checks[one.id] == ""
    assert "What is 2 + 2? (t3)" in one.prompt[-1]["content"]
    assert not any("hidden" in task.prompt[-1]["content"] for task in tasks)
    with pytest.raises(UserError, match="no reward 'other'"):
        make_judging_world({"run": str(tmp_path), "outcome": "other"}, ToolLimits())
    with pytest.raises(UserError, match="both a right and a wrong"):
        make_judging_world({"data": str(rollouts_path(tmp_path, 1)), "outcome": "style"}, ToolLimits())
    with pytest.raises(UserError, match="no rollouts"):
        make_judging_world({"run": str(tmp_path / "none")}, ToolLimits())
    with pytest.raises(ConfigError, match="mutually exclusive"):
        make_judging_world({"run": "a", "data": "b"}, ToolLimits())
