"""Expressions that would never finish or would crash the process get a verdict, from any thread."""

from __future__ import annotations

import threading
from fractions import Fraction

import pytest
import sympy

from ludus.rewards.math import math_verify, worker
from ludus.rewards.math.math_verify import Expression, is_equal
from ludus.rewards.math.notation import ExpressionNode

ENDLESS = [
    ("10**10**10", "7"),
    ("9^{9^{9^{9}}}", "7"),
    (r"(10^{12})! - (10^{12})!", "0"),
    (r"2^{10^{9}} - 2^{10^{9}-1}", "5"),
    (r"\sum_{n=1}^{10^{12}} n^{n}", "7"),
    (r"(x+1)^{3000}(x+y+z)^{2000}", "x^2"),
]


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(math_verify, "CPU_S", 0.4)


@pytest.mark.parametrize(("answer", "gold"), ENDLESS)
def test_answer_that_cannot_be_evaluated_is_wrong(answer, gold, hasty):
    assert not is_equal(answer, Expression(gold))


def test_answer_after_a_worker_process_crash_is_judged(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(math_verify, "CPU_S", 0.05)
        assert not is_equal(r"10^{10^{10}}", Expression("8"))
    assert is_equal(r"\sqrt{16}/2", Expression("2"))
    assert not is_equal(r"\sqrt{16}/2", Expression("3"))


def test_concurrent_threads_receive_their_own_verdicts():
    found = {}

    def judge(number):
        found[number] = [is_equal(f"{number}/{d}", Expression(rf"\frac{{{2 * number}}}{{{2 * d}}}")) for d in (7, 11)]

    threads = [threading.Thread(target=judge, args=(number,)) for number in (3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {3: [True, True], 4: [True, True], 5: [True, True]}


def test_invalid_gold_answer_raises_error():
    with pytest.raises(ValueError, match="gold answer"):
        is_equal("1", Expression("(" * 40 + ")" * 40))


def test_expressions_without_variables_have_no_ratio():
    one, two = (ExpressionNode("number", value=Fraction(digit)) for digit in (1, 2))
    assert worker.judge("ratio", one, two) == 0


def test_power_is_bounded_by_the_bits_of_its_result():
    two = sympy.Integer(2)  # two bits
    assert worker._power(two, sympy.Integer(worker.MAX_BITS // 2)) == two ** (worker.MAX_BITS // 2)
    with pytest.raises(worker.ExpressionRejected, match="beyond the bounds"):
        worker._power(two, sympy.Integer(worker.MAX_BITS // 2 + 1))
