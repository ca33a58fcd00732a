"""Planted copies of evaluation tasks are found in training texts, and templates are not."""

import pytest

from ludus.evaluation.analysis.contamination import (
    NamedText,
    NgramIndex,
    SourceOverlap,
    dialogue_text,
    nearest_tasks,
    task_text,
)
from ludus.evaluation.stats import rates_difference, wilson
from ludus.types import Message, Task

LETTERS = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
)
FRAME = "Answer the following question as briefly as you can and do not explain your answer to anybody:"


def question(number):
    words = [f"{letter}{number}" for letter in LETTERS]
    return f"{FRAME} {' '.join(words)}?"


QUESTIONS = [question(number) for number in range(40)]


def overlap(texts, training, n=8):
    found = SourceOverlap(NgramIndex(texts, n))
    for number, text in enumerate(training):
        found.add(NamedText(f"text {number}", text))
    return found


def test_overlap_finds_a_planted_copy_but_not_a_shared_template():
    training = [question(100), f"Once: {QUESTIONS[7].upper()} And more.", question(101)]
    found = overlap(QUESTIONS, training)
    shares = found.shares
    assert shares[7] == 1.0
    assert sum(shares) == 1.0
    assert found.examples[7] == "text 1"
    assert found.examples.count("") == 39


def test_overlap_of_partial_quote_is_fractional_and_of_reordering_zero():
    part = " ".join(f"{letter}3" for letter in LETTERS[:9])
    shares = overlap(QUESTIONS, [part]).shares
    assert shares[3] == pytest.approx(2 / 14)  # 2 of the 14 passages of 8 words that contain a word of the question
    mixed = " ".join(f"{letter}3" for letter in reversed(LETTERS))
    assert sum(overlap(QUESTIONS, [mixed]).shares) == 0


def test_short_tasks_match_as_a_whole_and_template_tasks_are_unchecked():
    found = overlap(["What is 3 + 4?", "What is 5 + 4?", "", question(1)], ["... what is 3 4 and", "What is 5"], n=13)
    assert found.shares == [1.0, 0.0, 0.0, 0.0]
    assert found.index.sizes.tolist()[:3] == [1, 1, 0]
    assert NgramIndex(["same words"] * 3, 8).sizes.tolist() == [0, 0, 0]


def test_duplicate_training_texts_do_not_increase_the_overlap_share():
    assert overlap(QUESTIONS, [QUESTIONS[0], QUESTIONS[0]]).shares[0] == 1.0


def test_nearest_training_task_shares_the_most_ngrams():
    index = NgramIndex(["a b c d e f", "u v w x"], 3)
    training = [NamedText("far", "a b c z z z z z"), NamedText("near", "a b c d e q"), NamedText("none", "x y")]
    assert nearest_tasks(index, training) == [(3 / 5, "near"), (0.0, "")]


def test_task_texts_include_the_answer_and_omit_system_messages():
    prompt = (Message(role="system", content="Be brief."), Message(role="user", content="How many?"))
    assert task_text(Task("t", prompt, "seven")).split() == ["How", "many?", "seven"]
    assert dialogue_text(prompt).strip() == "How many?"


def test_rates_difference_matches_the_published_newcombe_example():
    # Newcombe (1998), table II, example (a): 56/70 - 48/80 = 0.2 [0.0524, 0.3339]
    change, interval = rates_difference((48 / 80, wilson(48, 80)), (56 / 70, wilson(56, 70)))
    assert (change, interval.low, interval.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
