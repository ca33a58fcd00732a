"""Rewards without labels that are computed from the attempts at a task: votes, confidence and metacognition.

Those that need the policy's logits (`self_certainty`, `entropy`) are computed by the learner.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

from ludus.rewards.exact_match import normalise
from ludus.rewards.extract import short_answers
from ludus.types import Message, ToolStatus, Trajectory

NUM_STAGES = 4
"""Parts of equal length into which `confidence_stages` divides an attempt of one turn."""
_NUMBER = re.compile(r"-?\d{1,30}(?:[./]\d{1,30})?")
_TERM = re.compile(r"\d+|[^\W\d_]{4,}")
"""Numbers, and words of four letters or more."""


def answer_key(text: str) -> str:
    """Return the form in which answers are compared: extracted, normalized, and numbers as fractions.

    Empty for a text without an answer, or with several that differ.
    """
    keys = {_as_fraction(normalise(answer)) for answer in short_answers(text)}
    return keys.pop() if len(keys) == 1 else ""


def _as_fraction(text: str) -> str:
    try:
        return str(Fraction(text)) if _NUMBER.fullmatch(text) else text
    except ZeroDivisionError:
        return text


def majority_label(keys: Sequence[str]) -> str:
    """Return the most frequent key, the earliest one of several; empty keys do not vote (TTRL, arXiv:2504.16084)."""
    votes = Counter(key for key in keys if key)
    return votes.most_common(1)[0][0] if votes else ""


def majority(attempts: Sequence[Trajectory], votes: Sequence[bool]) -> list[float]:
    """Return for each attempt at one task 1 if its answer is the majority label, else 0.

    `votes` marks the attempts whose answers are counted. All values are 0 if no attempt has an answer.
    """
    keys = [answer_key(attempt.answer) for attempt in attempts]
    label = majority_label([key for key, counts in zip(keys, votes, strict=True) if counts])
    return [float(bool(label) and key == label) for key in keys]


def confidence_stages(attempt: Trajectory) -> list[float]:
    """Return the mean probability of the sampled tokens in each turn; for one turn, in each quarter of its tokens.

    The probabilities are those that the engine reported.
    """
    turns = [segment.logprobs for segment in attempt.segments if segment.kind == "action" and segment.logprobs]
    if len(turns) == 1:
        size = len(turns[0])
        bounds = [round(i * size / NUM_STAGES) for i in range(NUM_STAGES + 1)]
        turns = [turns[0][a:b] for a, b in pairwise(bounds) if a < b]
    return [math.fsum(map(math.exp, turn)) / len(turn) for turn in turns]


def confidence_gain(attempt: Trajectory) -> float:
    """Return the confidence of the last stage minus that of the first, in [-1, 1]; 0 for fewer than two stages.

    Progressive confidence shaping (arXiv:2605.24396) takes the trajectory of confidence as a process reward, since
    confidence before the work is done is a local optimum of training on outcomes alone. The formula of the paper was
    not available: this is the sum of the rises from stage to stage, built from that description.
    """
    stages = confidence_stages(attempt)
    return stages[-1] - stages[0] if stages else 0.0


def coverage(attempt: Trajectory) -> float:
    """Return the share of the terms of the question that the policy uses, 1 if the question has none.

    Terms are the numbers and the words of four letters or more in the user's messages before the first reply.
    """
    messages = attempt.messages
    first = next((i for i, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
    asked = _terms(one["content"] for one in messages[:first] if one["role"] == "user")
    written = _terms(_own_text(one) for one in messages[first:] if one["role"] == "assistant")
    return len(asked & written) / len(asked) if asked else 1.0


def _own_text(message: Message) -> str:
    arguments = (call["function"]["arguments"] for call in message.get("tool_calls") or ())
    return " ".join((message.get("reasoning_content", ""), message["content"], *arguments))


def _terms(texts: Iterable[str]) -> set[str]:
    return {term for text in texts for term in _TERM.findall(text.casefold())}


def regulation(attempt: Trajectory) -> float:
    """Return the share of failed calls that are not followed by the same call; 1 without a failed call."""
    statuses = {outcome.call_id: outcome.status for outcome in attempt.call_outcomes}
    calls = [call for message in attempt.messages for call in message.get("tool_calls") or ()]
    repeated = [
        before["function"] == after["function"]
        for before, after in pairwise(calls)
        if statuses.get(before["id"]) is not ToolStatus.OK
    ]
    return 1 - sum(repeated) / len(repeated) if repeated else 1.0


def metacognition(attempt: Trajectory, correctness: float) -> float:
    """Return the mean of `coverage`, `regulation` and `correctness`, in [0, 1].

    Metacognition as a reward (arXiv:2605.23384) has the components knowledge coverage, regulation and correctness. The
    formulas of the paper were not available: these are built from that list. `correctness` is a vote, not a label.
    """
    return (coverage(attempt) + regulation(attempt) + correctness) / 3
