"""Many kinds of faulty verifiers, each found by its row of the check."""

import asyncio
import re

import pytest

from ludus.envs.tool_world import Dialogue, ToolWorld
from ludus.evaluation.env_audit import CheckPlan, CheckReport, check_world, run_agents, sample_tasks
from ludus.evaluation.scripted_agents import TEXTS, blind_agents
from ludus.evaluation.verifier_report import (
    VerdictShare,
    errors_row,
    near_misses,
    perturbed,
    rewritten,
    scorecard,
    wrong_answers_row,
)
from ludus.rewards.base import Reward
from ludus.rewards.exact_match import ExpectedAnswers, exact_match, normalise
from ludus.types import Message, Task

TRUTHS = ("ant hill", "bumble bee", "5 kg", "dogfish", "eels", "12 hours", "gnat", "hen house")
PLAN = CheckPlan(num_tasks=12)


def made_tasks(num=12):
    return [
        Task(
            f"t{i}",
            (Message(role="user", content=f"Riddle {i}: which thing is number {7 * i} of the shelf?"),),
            TRUTHS[i % len(TRUTHS)] if i < len(TRUTHS) else f"{TRUTHS[i % len(TRUTHS)]} {100 + i}",
        )
        for i in range(num)
    ]


class ExpertWorld(ToolWorld):
    def expert(self, task):
        return Dialogue((*task.prompt, Message(role="assistant", content=str(task.truth))), ())


def planted(verdict, kind=ExpertWorld):
    """A world whose verifier pays for the right answer, and for what `verdict` says."""
    reward = lambda task, t: float(verdict(task, t.answer))  # noqa: E731
    return kind("planted", {"train": made_tasks()}, (), (Reward("right", reward, outcome=True),))


def right(task, text):
    return normalise(text) == normalise(task.truth)


def failing(world):
    report = check_world(world, PLAN)
    rows = asyncio.run(scorecard(report, PLAN))
    agents = {row.agent.name for row in report.rows if row.mark == "fail"}
    return agents | {row.name for row in rows if row.mark == "fail"}, [row.why for row in rows if row.mark == "fail"]


def prompt_words(task):
    return set(re.findall(r"\w+", task.prompt[-1]["content"].casefold()))


BAD = {
    "pays for 'success'": (lambda task, text: "success" in text.casefold(), "claims"),
    "pays for 'passed'": (lambda task, text: "passed" in text, "claims"),
    "pays for 'done' alone": (lambda task, text: text.strip(". ").casefold() == "done", "idle"),
    "pays for 'verified' alone": (lambda task, text: text.strip() == "verified", "claims"),
    "pays for 'correct'": (lambda task, text: bool(re.search(r"\bcorrect\b", text)), "claims"),
    "pays for a long text": (lambda task, text: len(text) > 400, "long text"),
    "pays for very many words": (lambda task, text: len(text.split()) > 2500, "long text"),
    "pays for a sentence": (lambda task, text: len(text.split()) > 12, "long text"),
    "pays for the prompt's keywords": (
        lambda task, text: text != task.prompt[-1]["content"] and prompt_words(task) <= set(text.split()),
        "keywords",
    ),
    "pays for an empty box": (lambda task, text: "\\boxed{" in text, "empty forms"),
    "pays for answer tags": (lambda task, text: "<answer>" in text, "empty forms"),
    "pays for JSON": (lambda task, text: text.startswith("```json"), "empty forms"),
    "pays for thinking": (lambda task, text: text.startswith("<think>"), "empty forms"),
    "pays for a refusal": (lambda task, text: "cannot" in text, "refusals"),
    "pays for not knowing": (lambda task, text: "don't know" in text, "refusals"),
    "pays for every option": (lambda task, text: {"A", "B", "C", "D"} <= set(re.findall(r"\w+", text)), "every option"),
    "pays for every number": (lambda task, text: "17" in text.split(), "every option"),
    "pays for a question": (lambda task, text: text.endswith("?"), "constant question"),
    "pays for the invisible": (lambda task, text: bool(text) and not text.isprintable(), "invisible answer"),
    "pays for a combining mark": (lambda task, text: text == "\u0301", "invisible answer"),
    "pays for what says it did": (lambda task, text: "done what you asked" in text, "constant answer"),
    "pays for the answer denied": (lambda task, text: task.truth in text, "wrong answers near the truth"),
    "pays for half a word": (lambda task, text: len(text) > 2 and text in task.truth, "wrong answers near the truth"),
    "looks away from numbers": (
        lambda task, text: re.sub(r"\d+|not ", "", text) == re.sub(r"\d+", "", task.truth),
        "wrong answers near the truth",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_faulty_verifier_fails_its_dedicated_check_row(name):
    pays, row = BAD[name]
    world = planted(lambda task, text: right(task, text) or pays(task, text))
    tasks = sample_tasks(world, PLAN)
    agents = [agent for agent in blind_agents(tasks, 0) if agent.name == row]
    rows = asyncio.run(run_agents(world, tasks, agents, PLAN))
    report = CheckReport(world, tasks, rows, {})
    if agents:
        assert [one.mark for one in rows] == ["fail"]
        assert f"The agent {row} (" in report.problems[0]
    else:
        _, spoilt = asyncio.run(perturbed(report, PLAN))
        assert wrong_answers_row(spoilt).mark == "fail"
    assert all(right(task, task.truth) for task in tasks)


def test_verifier_rejecting_other_spellings_of_the_answer_is_detected():
    found, said = failing(planted(lambda task, text: text == task.truth))
    assert found == {"rewritten answers"}
    assert re.search(r"rejects \d+ of \d+ correct answers in other case", said[0])


def test_report_counts_false_negatives_and_false_positives():
    row = errors_row(VerdictShare(3, 4), VerdictShare(15, 16), VerdictShare(1, 40))
    assert row.found == "false negatives 2 of 20 [2.8%, 30.1%]; false positives 1 of 40 [0.4%, 12.9%]"


class ParaphrasingWorld(ExpertWorld):
    def paraphrases(self, task):
        return (f"It is {task.truth}.", f"the answer: {task.truth}")


@pytest.mark.slow
def test_verifier_fails_if_it_rejects_all_paraphrases_and_passes_otherwise():
    found, said = failing(planted(right, ParaphrasingWorld))
    assert (found, said) == (
        {"paraphrases"},
        ["The verifier rejects 24 of 24 correct paraphrased answers or alternative solutions."],
    )
    lenient = planted(lambda task, text: right(task, re.sub(r"^(It is|the answer:) ", "", text)), ParaphrasingWorld)
    assert failing(lenient) == (set(), [])


@pytest.mark.slow
def test_a_sound_verifier_passes_every_row():
    assert failing(planted(right)) == (set(), [])
    tasks = [Task(t.id, t.prompt, ExpectedAnswers((t.truth,))) for t in made_tasks()]
    world = ToolWorld("sound", {"train": tasks}, (), (Reward("right", exact_match, outcome=True),))
    assert failing(world) == (set(), [])


@pytest.mark.slow
def test_unstable_verdict_fails_the_check():
    import itertools

    counter = itertools.count()
    found, _ = failing(planted(lambda task, text: right(task, text) and next(counter) % 2 == 0))
    assert {"stability, graded again", "oracle"} & found


def test_correct_answers_yield_rewritten_variants_and_near_misses():
    task = made_tasks()[2]
    assert task.truth == "5 kg"
    assert {"5 KG", "5\u00a0kg", "  5 kg "} <= set(rewritten("5 kg"))
    assert {"not 5 kg", "6 kg", "5 g"} <= set(near_misses(task, "5 kg"))
    accepted = Task("t", task.prompt, ExpectedAnswers(("5 kg", "6 kg")))
    assert "6 kg" not in near_misses(accepted, "5 kg")
    assert all(len(texts) == len(set(texts)) for _, texts in TEXTS.values())
    assert VerdictShare(0, 0).value == 0
