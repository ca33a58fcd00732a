"""A shaping part: 1 if the final answer is at most eight words."""

from ludus.rewards.extract import final_answer


def short_answer(task, trajectory):
    return float(len(final_answer(trajectory).split()) <= 8)
