"""Shaping parts: 1 if the final answer is at most eight words, and the same with the number as an option."""

from ludus.rewards.extract import final_answer
from ludus.rewards.registry import RegisteredReward


def short_answer(task, trajectory):
    return float(len(final_answer(trajectory).split()) <= 8)


def make_brief(words=8):
    if words < 1:
        raise ValueError(f"words must be at least 1, not {words}")

    def brief(task, trajectory):
        return float(len(final_answer(trajectory).split()) <= words)

    return brief


brief = RegisteredReward(make_brief)
